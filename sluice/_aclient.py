"""The asynchronous client (asyncio), the twin of `Sluice` in `_client`, which documents the calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import httpx

from ._astream import AsyncOpenResponse, AsyncStream, within
from ._core import (
    LIMITS,
    LOOPBACK,
    Answer,
    Call,
    Deadline,
    Settings,
    Timeouts,
    assign_call,
    chat_call,
    check_event_stream,
    check_status,
    completion_call,
    explain_call,
    failure,
    logs_call,
    metrics_call,
    parse,
    policy_call,
    retry_delay_s,
    scale_call,
    scaling_call,
    set_logs_call,
    set_policy_call,
    status_call,
)
from ._errors import SluiceError, UnavailableError
from ._metrics import Metrics, parse_metrics
from ._options import ChatOptions, CompletionOptions, MessageLike, Prompt
from ._retry import RetryPolicy
from .types import (
    Assigned,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Explanation,
    Health,
    Logs,
    Model,
    ModelList,
    Policies,
    Scaling,
    Status,
    Version,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncSluice:
    """A client like `Sluice` whose calls are coroutines. It belongs to the event loop in which it is first used.

    Cancelling a call's task closes its connection, upon which the server cancels the request.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        admin_key: str | None = None,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        self._owns_http = http_client is None
        # A client of the caller's may send everything through a proxy, which would see the key.
        self._settings = Settings.resolve(
            base_url, api_key, model, timeouts, retry, admin_key, reads_key_file=self._owns_http
        )
        self._http = http_client or httpx.AsyncClient(mounts=dict.fromkeys(LOOPBACK), limits=LIMITS)
        self._rng = random.Random()

    @property
    def base_url(self) -> str:
        """The root URL of the server, without `/v1`."""
        return self._settings.base_url

    @overload
    async def chat(
        self,
        messages: str | Sequence[MessageLike],
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion: ...
    @overload
    async def chat(
        self, messages: str | Sequence[MessageLike], *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> AsyncStream[ChatChunk]: ...
    async def chat(
        self, messages: str | Sequence[MessageLike], *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletion | AsyncStream[ChatChunk]:
        """Returns the answer to a conversation; see `Sluice.chat`.

        With `stream=True` write `async with await client.chat(..., stream=True) as stream`.
        """
        if stream:
            return self.stream_chat(messages, **options)
        call = chat_call(messages, options, self._settings, stream=False)
        return parse(await self._answer(call), ChatCompletion, with_request_id=True)

    def stream_chat(
        self, messages: str | Sequence[MessageLike], **options: Unpack[ChatOptions]
    ) -> AsyncStream[ChatChunk]:
        """Returns the answer as a stream; see `Sluice.stream_chat`.

        It is no coroutine: write `async with client.stream_chat(...) as stream`.
        """
        call = chat_call(messages, options, self._settings, stream=True)
        return AsyncStream(partial(self._event_stream, call), ChatChunk)

    @overload
    async def completions(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
    ) -> Completion: ...
    @overload
    async def completions(
        self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> AsyncStream[CompletionChunk]: ...
    async def completions(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[CompletionOptions]
    ) -> Completion | AsyncStream[CompletionChunk]:
        """Returns the continuation of prompts; see `Sluice.completions`."""
        if stream:
            return self.stream_completions(prompt, **options)
        call = completion_call(prompt, options, self._settings, stream=False)
        return parse(await self._answer(call), Completion, with_request_id=True)

    def stream_completions(
        self,
        prompt: Prompt,
        **options: Unpack[CompletionOptions],
    ) -> AsyncStream[CompletionChunk]:
        """Returns the continuation as a stream; see `Sluice.stream_completions`.

        It is no coroutine: write `async with client.stream_completions(...) as stream`.
        """
        call = completion_call(prompt, options, self._settings, stream=True)
        return AsyncStream(partial(self._event_stream, call), CompletionChunk)

    async def models(self) -> list[Model]:
        """Returns the served models."""
        return parse(await self._answer(Call("GET", "/v1/models")), ModelList).data

    async def version(self) -> Version:
        """Returns the server's version and transport."""
        return parse(await self._answer(Call("GET", "/version")), Version)

    async def status(self) -> Status:
        """Returns engines, router and requests in flight, as the server sees them now."""
        return parse(await self._answer(status_call(self._settings)), Status)

    async def policies(self) -> Policies:
        """Returns the policies in use and those that can be chosen; see `Sluice.policies`."""
        return parse(await self._answer(policy_call(self._settings)), Policies)

    async def set_policies(
        self,
        *,
        prefill: str | None = None,
        decode: str | None = None,
        prefill_params: Mapping[str, Any] | None = None,
        decode_params: Mapping[str, Any] | None = None,
        dispatch: Mapping[str, Any] | None = None,
        flow: str | None = None,
        flow_params: Mapping[str, Any] | None = None,
        admission: str | None = None,
        admission_params: Mapping[str, Any] | None = None,
        fairness: str | None = None,
        fairness_params: Mapping[str, Any] | None = None,
    ) -> Policies:
        """Changes the policies in use and returns them; see `Sluice.set_policies`."""
        call = set_policy_call(
            self._settings,
            prefill,
            decode,
            prefill_params,
            decode_params,
            dispatch,
            flow,
            flow_params,
            admission,
            admission_params,
            fairness,
            fairness_params,
        )
        return parse(await self._answer(call), Policies)

    async def scaling(self) -> Scaling:
        """Returns what the autoscaler sees, wants and orders; see `Sluice.scaling`."""
        return parse(await self._answer(scaling_call(self._settings)), Scaling)

    async def scale(
        self,
        counts: Mapping[str, int] | None = None,
        *,
        auto: bool = False,
        plan: bool = False,
        bounds: Mapping[str, Mapping[str, int]] | None = None,
    ) -> Scaling:
        """Has these numbers of replicas serve, the policy decide, or these bounds rule; see `Sluice.scale`."""
        return parse(await self._answer(scale_call(self._settings, counts, auto, plan, bounds)), Scaling)

    async def logs(self) -> Logs:
        """Returns the levels of the router's log lines; see `Sluice.logs`."""
        return parse(await self._answer(logs_call(self._settings)), Logs)

    async def set_logs(
        self, level: str | None = None, *, logger: str | None = None, access: bool | None = None
    ) -> Logs:
        """Changes the log lines of all processes; see `Sluice.set_logs`."""
        return parse(await self._answer(set_logs_call(self._settings, level, logger, access)), Logs)

    async def assign(self, engine: str, *, role: str | None = None, duty: str | None = None) -> Assigned:
        """Orders one engine to serve a role, or to be active or warm; see `Sluice.assign`."""
        return parse(await self._answer(assign_call(self._settings, engine, role, duty)), Assigned)

    async def explain(self, request_id: str) -> Explanation:
        """Returns the decisions made for a request; see `Sluice.explain`."""
        return parse(await self._answer(explain_call(self._settings, request_id)), Explanation)

    async def metrics(self) -> Metrics:
        """Returns one scrape of the server's Prometheus metrics."""
        return parse_metrics((await self._answer(metrics_call(self._settings))).text())

    async def health(self) -> Health:
        """Returns whether the server is live and ready; see `Sluice.health`."""
        live, _ = await self._probe("live")
        ready, detail = await self._probe("ready")
        return Health(live=live, ready=ready, detail=detail)

    async def close(self) -> None:
        """Closes the connections, unless `http_client` was given. Streams that are still open break."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> AsyncSluice:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _probe(self, which: Literal["live", "ready"]) -> tuple[bool, str | None]:
        try:
            await self._answer(Call("GET", f"/health/{which}", retry=False))
        except UnavailableError as error:
            return False, error.message
        return True, None

    async def _answer(self, call: Call) -> Answer:
        """Sends the call, with retries, and returns the whole answer."""
        opened = await self._open(call, Deadline(call.total_s(self._settings)))
        return await self._read(call, opened)

    async def _event_stream(self, call: Call) -> AsyncOpenResponse:
        opened = await self._open(call, Deadline(call.total_s(self._settings)))
        try:
            check_event_stream(call, opened.response.headers)
        except SluiceError:
            await opened.response.aclose()
            raise
        return opened

    async def _open(self, call: Call, deadline: Deadline) -> AsyncOpenResponse:
        """Repeats attempts as the retry policy allows, until one is answered with 2xx. Its body is not read yet."""
        attempt = 0
        while True:
            try:
                return await self._attempt(call, deadline)
            except SluiceError as error:
                delay_s = retry_delay_s(error, attempt, call, self._settings, deadline, self._rng)
                if delay_s is None:
                    raise
            await asyncio.sleep(delay_s)
            attempt += 1

    async def _attempt(self, call: Call, deadline: Deadline) -> AsyncOpenResponse:
        timeout = deadline.httpx_timeout(self._settings.timeouts)
        request = self._http.build_request(**call.request_args(self._settings), timeout=timeout)
        try:
            response = await within(deadline, self._http.send(request, stream=True))
        except httpx.RequestError as error:
            raise failure(error, call, self._settings, deadline) from error
        report = partial(failure, call=call, settings=self._settings, deadline=deadline)
        opened = AsyncOpenResponse(response, deadline, report)
        if not response.is_success:
            check_status(await self._read(call, opened))
        return opened

    async def _read(self, call: Call, opened: AsyncOpenResponse) -> Answer:
        try:
            body = await within(opened.deadline, opened.response.aread())
        except httpx.RequestError as error:
            raise opened.failure(error) from error
        finally:
            await opened.response.aclose()
        return Answer(call, opened.response.status_code, opened.response.headers, body)
