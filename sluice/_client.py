"""The synchronous client of a Sluice server, `Sluice`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import httpx

from ._core import (
    Call,
    Deadline,
    Settings,
    Timeouts,
    assign_call,
    chat_call,
    check_event_stream,
    completion_call,
    explain_call,
    logs_call,
    metrics_call,
    parse,
    policy_call,
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
from ._stream import OpenResponse, Stream
from ._transport import Transport
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


class Sluice(Transport):
    """A client for one Sluice server. It may be shared between threads. Close it, or use it in a `with` block.

    Args:
        base_url: root of the server, with or without `/v1`. Default: SLUICE_BASE_URL, else http://127.0.0.1:8000.
        api_key: sent as a bearer token. Default: SLUICE_API_KEY, else none.
        model: used where a call names none. Default: the model that is served.
        timeouts: see `Timeouts`.
        admin_key: sent instead for the calls of administration (`policies`, `set_policies`, `explain`, `scaling`,
            `scale`). Default: SLUICE_ADMIN_KEY, else what a server on this machine has in its key file. The file is
            not read with an `http_client` of your own.
        retry: see `RetryPolicy`. Only connection failures, 429 and 503 are retried, never a stream that has begun.
        http_client: your own `httpx.Client`, for proxies, certificates or limits; you close it yourself.

    Every call raises subclasses of `SluiceError`: ConnectionFailedError, RequestTimeoutError, InvalidResponseError, and
    by HTTP status BadRequestError, AuthenticationError, NotFoundError, RateLimitedError, UnavailableError, ServerError.
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
        http_client: httpx.Client | None = None,
    ) -> None:
        # A client of the caller's may send everything through a proxy, which would see the key.
        settings = Settings.resolve(
            base_url, api_key, model, timeouts, retry, admin_key, reads_key_file=http_client is None
        )
        super().__init__(settings, http_client)

    @overload
    def chat(
        self,
        messages: str | Sequence[MessageLike],
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion: ...
    @overload
    def chat(
        self, messages: str | Sequence[MessageLike], *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Stream[ChatChunk]: ...
    def chat(
        self, messages: str | Sequence[MessageLike], *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletion | Stream[ChatChunk]:
        """Returns the model's answer to a conversation, when it is complete. A plain string is one user message.

        `ChatOptions` and `RequestOptions` list the options, e.g. `max_tokens`, `temperature`, `slo=SLO(ttft_ms=200)`.
        With `stream=True` the call is `stream_chat`.
        """
        if stream:
            return self.stream_chat(messages, **options)
        call = chat_call(messages, options, self._settings, stream=False)
        return parse(self._answer(call), ChatCompletion, with_request_id=True)

    def stream_chat(
        self, messages: str | Sequence[MessageLike], **options: Unpack[ChatOptions]
    ) -> Stream[ChatChunk]:
        """Returns the answer token by token, as a `Stream`.

        The request is sent when the stream is entered or first iterated.
        """
        return Stream(
            partial(self._event_stream, chat_call(messages, options, self._settings, stream=True)), ChatChunk
        )

    @overload
    def completions(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
    ) -> Completion: ...
    @overload
    def completions(
        self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> Stream[CompletionChunk]: ...
    def completions(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[CompletionOptions]
    ) -> Completion | Stream[CompletionChunk]:
        """Returns the continuation of a prompt, or of several, without a chat template; prompts are texts or token ids.

        With `stream=True` the call is `stream_completions`.
        """
        if stream:
            return self.stream_completions(prompt, **options)
        call = completion_call(prompt, options, self._settings, stream=False)
        return parse(self._answer(call), Completion, with_request_id=True)

    def stream_completions(
        self,
        prompt: Prompt,
        **options: Unpack[CompletionOptions],
    ) -> Stream[CompletionChunk]:
        """Returns the continuation token by token, as a `Stream`."""
        call = completion_call(prompt, options, self._settings, stream=True)
        return Stream(partial(self._event_stream, call), CompletionChunk)

    def models(self) -> list[Model]:
        """Returns the served models."""
        return parse(self._answer(Call("GET", "/v1/models")), ModelList).data

    def version(self) -> Version:
        """Returns the server's version and transport."""
        return parse(self._answer(Call("GET", "/version")), Version)

    def status(self) -> Status:
        """Returns engines, router and requests in flight, as the server sees them now."""
        return parse(self._answer(status_call(self._settings)), Status)

    def policies(self) -> Policies:
        """Returns the routing policies in use, and those that can be chosen.

        This call needs an admin key, as `set_policies`, `explain`, `scaling`, `scale`, `assign`, `logs` and `set_logs`
        do.
        """
        return parse(self._answer(policy_call(self._settings)), Policies)

    def set_policies(
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
        """Changes the policies that decide, and returns them. The change lasts until the router restarts.

        A policy or limit that is None stays as it is; `dispatch` has limits of the dispatcher by name, and `flow` is
        the policy that orders KV transfers, where they are scheduled. `admission` is the policy that refuses requests
        which would miss their objectives, and `fairness` the one that shares the service out among tenants. Raises
        BadRequestError that says what is allowed; nothing is changed then.
        """
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
        return parse(self._answer(call), Policies)

    def scaling(self) -> Scaling:
        """Returns what the autoscaler sees, wants and orders. Raises NotFoundError where the server has none."""
        return parse(self._answer(scaling_call(self._settings)), Scaling)

    def scale(
        self,
        counts: Mapping[str, int] | None = None,
        *,
        auto: bool = False,
        plan: bool = False,
        bounds: Mapping[str, Mapping[str, int]] | None = None,
    ) -> Scaling:
        """Has these numbers of replicas serve, by group, until `auto` gives them back to the policy.

        `bounds` has groups keep between `min` and `max` replicas from now on, `warm` to `warm_max` of which wait ready:
        {"decode": {"max": 6, "warm": 1}}. Groups and bounds that are not named stay. With `plan` nothing is changed,
        and the answer shows the plan that this order would make (without an order: the policy's). Raises
        BadRequestError that says what is allowed, and NotFoundError where the server has no autoscaler.
        """
        return parse(self._answer(scale_call(self._settings, counts, auto, plan, bounds)), Scaling)

    def logs(self) -> Logs:
        """Returns the levels of the router's log lines, by logger."""
        return parse(self._answer(logs_call(self._settings)), Logs)

    def set_logs(
        self, level: str | None = None, *, logger: str | None = None, access: bool | None = None
    ) -> Logs:
        """Changes the log lines of router, ingresses, engines and autoscaler until they end.

        `level` (DEBUG, INFO, WARNING or ERROR) is the least one of all lines, or of those of one `logger`, such as
        actors.router. With `access` each ingress writes a line for each request. Raises BadRequestError that says what
        is allowed.
        """
        return parse(self._answer(set_logs_call(self._settings, level, logger, access)), Logs)

    def assign(self, engine: str, *, role: str | None = None, duty: str | None = None) -> Assigned:
        """Orders one engine to serve a `role` (prefill, decode, colocated), or to be `active` or `warm`.

        A warm engine gets no requests, and ends what it has. Raises NotFoundError for an unknown
        engine, and BadRequestError where an autoscaler decides, or no engine that decodes would be left.
        """
        return parse(self._answer(assign_call(self._settings, engine, role, duty)), Assigned)

    def explain(self, request_id: str) -> Explanation:
        """Returns the decisions made for a request, with their reasons.

        `request_id` is the answer's `id` or its x-request-id.
        """
        return parse(self._answer(explain_call(self._settings, request_id)), Explanation)

    def metrics(self) -> Metrics:
        """Returns one scrape of the server's Prometheus metrics."""
        return parse_metrics(self._answer(metrics_call(self._settings)).text())

    def health(self) -> Health:
        """Returns whether the server is live and ready.

        A server that is not ready is an answer here, not an error. Raises ConnectionFailedError without a server.
        """
        live, _ = self._probe("live")
        ready, detail = self._probe("ready")
        return Health(live=live, ready=ready, detail=detail)

    def _probe(self, which: Literal["live", "ready"]) -> tuple[bool, str | None]:
        try:
            self._answer(Call("GET", f"/health/{which}", retry=False))
        except UnavailableError as error:
            return False, error.message
        return True, None

    def _event_stream(self, call: Call) -> OpenResponse:
        opened = self._open(call, Deadline(call.total_s(self._settings)))
        try:
            check_event_stream(call, opened.response.headers)
        except SluiceError:
            opened.close()
            raise
        return opened
