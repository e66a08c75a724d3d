"""The part of both clients that needs no I/O: settings, calls, deadlines, and the reading of answers and failures."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from ._admin_key import LOOPBACK_HOSTS, key_of_this_machine
from ._errors import (
    ConfigurationError,
    ConnectionFailedError,
    InvalidResponseError,
    RequestTimeoutError,
    SluiceError,
    error_from_response,
)
from ._options import ChatOptions, CompletionOptions, MessageLike, chat_body, completion_body
from ._retry import RetryPolicy
from ._version import __version__

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
LOOPBACK = tuple(f"all://[{host}]" if ":" in host else f"all://{host}" for host in LOOPBACK_HOSTS)
"""URL patterns for which the environment's proxies are not used: for a proxy, loopback would be its own machine."""
LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
"""Limits of the connection pool. Each stream holds a connection; with httpx's 100, stream 101 would wait silently."""
ResultT = TypeVar("ResultT", bound=BaseModel)


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds; None means no limit.

    `connect_s` limits the opening of a connection. `read_s` limits the time between two pieces of an answer; an answer
    that is not streamed begins when it is complete, so the limit covers its whole computation. `total_s` limits one
    call with its retries, and a stream to its end.
    """

    connect_s: float | None = 5.0
    read_s: float | None = 300.0
    total_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("connect_s", "read_s", "total_s"):
            check_limit(f"Timeouts: {name}", getattr(self, name))


def check_limit(name: str, value: float | None) -> None:
    """Raises ValueError unless `value` is None or a finite number of seconds above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be None or a finite number of seconds above 0, got {value!r}")


@dataclass(frozen=True)
class Settings:
    """A client's resolved configuration."""

    base_url: str
    api_key: str | None = field(repr=False)
    model: str | None
    timeouts: Timeouts
    retry: RetryPolicy
    admin_key: str | None = field(default=None, repr=False)
    reads_key_file: bool = False
    """Whether the key file of a server on this machine is read where `admin_key` is None."""

    @classmethod
    def resolve(
        cls,
        base_url: str | None,
        api_key: str | None,
        model: str | None,
        timeouts: Timeouts | None,
        retry: RetryPolicy | None,
        admin_key: str | None = None,
        reads_key_file: bool = False,
    ) -> Settings:
        """Returns the settings, with None replaced by the environment's value or the default.

        The variables are SLUICE_BASE_URL, SLUICE_API_KEY and SLUICE_ADMIN_KEY. Raises ConfigurationError for a URL or a
        key that cannot be used.
        """
        given = base_url or os.environ.get("SLUICE_BASE_URL") or DEFAULT_BASE_URL
        key = key_of("API", api_key, "SLUICE_API_KEY")
        admin = key_of("admin", admin_key, "SLUICE_ADMIN_KEY")
        return cls(
            root_url(given),
            key,
            model,
            timeouts or Timeouts(),
            retry or RetryPolicy(),
            admin,
            reads_key_file,
        )

    def headers(self) -> dict[str, str]:
        """Returns the headers of every request."""
        headers = {"user-agent": f"sluice-python/{__version__}"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers


def key_of(what: str, given: str | None, variable: str) -> str | None:
    """Returns a given key, else the variable's. Raises ConfigurationError for one that no header can carry."""
    key = given or os.environ.get(variable) or None
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigurationError(
            f"the {what} key has characters that no HTTP header can carry; check {variable}"
        )
    return key


def root_url(given: str) -> str:
    """Returns the server's root; a trailing `/v1`, as OpenAI's client wants it, is accepted and removed.

    Raises ConfigurationError for anything but an http or https URL.
    """
    try:
        url = httpx.URL(given)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"the base URL {given!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigurationError(
            f"the base URL {given!r} must look like {DEFAULT_BASE_URL} (http:// or https://)"
        )
    return given.rstrip("/").removesuffix("/v1").rstrip("/")


class Deadline:
    """The end of a call's total time. With `total_s` None it never comes."""

    def __init__(self, total_s: float | None) -> None:
        self.total_s = total_s
        self._end_s = math.inf if total_s is None else time.monotonic() + total_s

    def remaining_s(self) -> float | None:
        """Returns the seconds left, 0 after the end, or None without a limit."""
        return None if self.total_s is None else max(0.0, self._end_s - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._end_s

    def error(self) -> RequestTimeoutError:
        """Returns the error to raise when the time is over."""
        return RequestTimeoutError(
            f"the call did not end within its total of {self.total_s:g} s", phase="total"
        )

    def httpx_timeout(self, timeouts: Timeouts) -> httpx.Timeout:
        """Returns the limits of one attempt. Raises RequestTimeoutError if the time is over before it starts."""
        remaining_s = self.remaining_s()
        if remaining_s is not None and remaining_s <= 0.0:
            raise self.error()
        read_s = _least(timeouts.read_s, remaining_s)
        connect_s = _least(timeouts.connect_s, remaining_s)
        return httpx.Timeout(read_s, connect=connect_s, pool=_least(timeouts.read_s, remaining_s))


def _least(limit_s: float | None, remaining_s: float | None) -> float | None:
    limits = [value for value in (limit_s, remaining_s) if value is not None]
    return min(limits) if limits else None


@dataclass(frozen=True)
class Call:
    """One HTTP request, before it is bound to a client. `retry` False asks for a single attempt."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    retry: bool = True

    @property
    def idempotent(self) -> bool:
        """Whether a repeat changes nothing, whatever became of the first attempt."""
        return self.method == "GET"

    def request_args(self, settings: Settings) -> dict[str, Any]:
        """Returns the keyword arguments for httpx's `build_request`."""
        headers = {**settings.headers(), **self.headers}
        if self.body is not None:
            headers["content-type"] = "application/json"
        return {
            "method": self.method,
            "url": settings.base_url + self.path,
            "content": self.body,
            "headers": headers,
        }

    def total_s(self, settings: Settings) -> float | None:
        """Returns the call's own limit in seconds, else the client's, or None without a limit."""
        return settings.timeouts.total_s if self.timeout_s is None else self.timeout_s


def chat_call(messages: Any, options: ChatOptions, settings: Settings, *, stream: bool) -> Call:
    """Returns the call of POST /v1/chat/completions; `messages` is `str | Sequence[MessageLike]`."""
    typed: str | list[MessageLike] = messages if isinstance(messages, str) else list(messages)
    body = chat_body(typed, options, model=settings.model, stream=stream)
    return _post("/v1/chat/completions", body, options, stream=stream)


def completion_call(prompt: Any, options: CompletionOptions, settings: Settings, *, stream: bool) -> Call:
    """Returns the call of POST /v1/completions; `prompt` is a `Prompt`."""
    body = completion_body(prompt, options, model=settings.model, stream=stream)
    return _post("/v1/completions", body, options, stream=stream)


def _post(path: str, body: bytes, options: ChatOptions | CompletionOptions, *, stream: bool) -> Call:
    timeout_s = options.get("timeout_s")
    check_limit("timeout_s", timeout_s)
    headers = {"accept": "text/event-stream" if stream else "application/json"}
    if (migrate := options.get("migrate")) is not None:
        headers["x-sluice-migrate"] = "on" if migrate else "off"
    server_timeout_s = options.get("server_timeout_s")
    check_limit("server_timeout_s", server_timeout_s)
    if server_timeout_s is not None:
        headers["x-sluice-timeout-s"] = repr(float(server_timeout_s))
    headers.update({name.lower(): value for name, value in (options.get("extra_headers") or {}).items()})
    return Call("POST", path, body=body, headers=headers, timeout_s=timeout_s)


def policy_call(settings: Settings) -> Call:
    """Returns the call that gets the policies."""
    return Call("GET", "/sluice/admin/policy", headers=admin_headers(settings))


def set_policy_call(settings: Settings, *chosen: Any) -> Call:
    """Returns the call that changes policies; `chosen` are the arguments of `policy_body`. Raises as that does."""
    return Call("PUT", "/sluice/admin/policy", body=policy_body(*chosen), headers=admin_headers(settings))


def policy_body(
    prefill: str | None,
    decode: str | None,
    prefill_params: Mapping[str, Any] | None,
    decode_params: Mapping[str, Any] | None,
    dispatch: Mapping[str, Any] | None,
    flow: str | None = None,
    flow_params: Mapping[str, Any] | None = None,
    admission: str | None = None,
    admission_params: Mapping[str, Any] | None = None,
    fairness: str | None = None,
    fairness_params: Mapping[str, Any] | None = None,
) -> bytes:
    """Returns a change of policies as JSON. Raises ValueError for parameters without a policy, or no change."""
    body: dict[str, Any] = {}
    chosen = (
        ("prefill", prefill, prefill_params),
        ("decode", decode, decode_params),
        ("flow", flow, flow_params),
        ("admission", admission, admission_params),
        ("fairness", fairness, fairness_params),
    )
    for stage, name, params in chosen:
        if name is not None:
            body[stage] = {"name": name, "params": dict(params or {})}
        elif params:
            raise ValueError(
                f"{stage}_params need {stage}=NAME: parameters that are not given take their defaults"
            )
    if dispatch:
        body["dispatch"] = dict(dispatch)
    if not body:
        raise ValueError("nothing to change: give prefill, decode, admission, fairness, flow or dispatch")
    return json.dumps(body).encode()


def scaling_call(settings: Settings) -> Call:
    """Returns the call that gets the autoscaler's state."""
    return Call("GET", "/sluice/admin/scale", headers=admin_headers(settings))


def scale_call(
    settings: Settings,
    counts: Mapping[str, int] | None,
    auto: bool,
    plan: bool,
    bounds: Mapping[str, Mapping[str, int]] | None = None,
) -> Call:
    """Returns the call that sets numbers of replicas, gives them back to the policy or sets bounds, or with `plan`
    shows what would follow. Raises ValueError for more than one of them, or for none.
    """
    body = scale_body(counts, auto, plan, bounds)
    return Call("PUT", "/sluice/admin/scale", body=body, headers=admin_headers(settings))


def scale_body(
    counts: Mapping[str, int] | None,
    auto: bool,
    plan: bool,
    bounds: Mapping[str, Mapping[str, int]] | None,
) -> bytes:
    """Returns an order to the autoscaler as JSON. Raises ValueError as `scale_call` does."""
    body: dict[str, Any] = {}
    if counts:
        body["counts"] = dict(counts)
    if auto:
        body["mode"] = "auto"
    if bounds:
        body["bounds"] = {group: dict(own) for group, own in bounds.items()}
    if len(body) > 1:
        raise ValueError("counts, auto and bounds exclude each other")
    if not body and not plan:
        raise ValueError(
            "nothing to change: give counts, bounds or auto=True, or plan=True to see the policy's plan"
        )
    if plan:
        body["plan"] = True
    return json.dumps(body).encode()


def logs_call(settings: Settings) -> Call:
    """Returns the call that gets the levels of log lines."""
    return Call("GET", "/sluice/admin/logs", headers=admin_headers(settings))


def set_logs_call(settings: Settings, level: str | None, logger: str | None, access: bool | None) -> Call:
    """Returns the call that changes log lines. Raises ValueError for no change, or for a logger without a level."""
    if level is None and access is None:
        raise ValueError("nothing to change: give level or access")
    if logger is not None and level is None:
        raise ValueError("logger needs level: access lines are all on or all off")
    asked = {"level": level, "logger": logger, "access": access}
    body = {name: value for name, value in asked.items() if value is not None}
    return Call("PUT", "/sluice/admin/logs", body=json.dumps(body).encode(), headers=admin_headers(settings))


def assign_call(settings: Settings, engine: str, role: str | None, duty: str | None) -> Call:
    """Returns the call that orders one engine to serve a role with a duty. Raises ValueError without both."""
    path = f"/sluice/admin/engines/{quote(engine, safe='')}"
    return Call("PUT", path, body=assign_body(role, duty), headers=admin_headers(settings))


def assign_body(role: str | None, duty: str | None) -> bytes:
    """Returns an order to one engine as JSON. Raises ValueError without role and duty."""
    if role is None and duty is None:
        raise ValueError("nothing to change: give role, duty or both")
    body = {name: value for name, value in (("role", role), ("duty", duty)) if value is not None}
    return json.dumps(body).encode()


def explain_call(settings: Settings, request_id: str) -> Call:
    """Returns the call that gets the decisions made for a request."""
    return Call("GET", f"/sluice/admin/explain/{quote(request_id, safe='')}", headers=admin_headers(settings))


def admin_headers(settings: Settings) -> dict[str, str]:
    """Returns the header with the admin key, if one is given or lies in the key file of a server on this machine."""
    key = settings.admin_key
    if key is None and settings.reads_key_file:
        key = key_of_this_machine(settings.base_url)
    return {} if key is None else {"authorization": f"Bearer {key}"}


def status_call(settings: Settings) -> Call:
    """Returns the call that gets engines, router and requests."""
    return Call("GET", "/sluice/status", headers=_viewer_headers(settings))


def metrics_call(settings: Settings) -> Call:
    """Returns the call that scrapes the metrics."""
    return Call("GET", "/metrics", headers=_viewer_headers(settings))


def _viewer_headers(settings: Settings) -> dict[str, str]:
    """Returns the header with the admin key, for servers whose status needs one, where no API key is given: a viewer
    key is given as one.
    """
    return admin_headers(settings) if settings.api_key is None else {}


def retry_delay_s(
    error: SluiceError, attempt: int, call: Call, settings: Settings, deadline: Deadline, rng: random.Random
) -> float | None:
    """Returns the seconds to wait before the next attempt, or None if the error is to be raised.

    That is so if the call may not be repeated, or if no time is left for another attempt.
    """
    if not call.retry:
        return None
    delay_s = settings.retry.delay_s(error, attempt, rng, idempotent=call.idempotent)
    remaining_s = deadline.remaining_s()
    late = delay_s is not None and remaining_s is not None and delay_s >= remaining_s
    return None if late else delay_s


def failure(error: httpx.RequestError, call: Call, settings: Settings, deadline: Deadline) -> SluiceError:
    """Returns the typed error for a failed attempt; `retryable` only if the request cannot have reached the server."""
    if deadline.expired:
        return deadline.error()
    cause = str(error) or type(error).__name__
    limits = settings.timeouts
    if isinstance(error, httpx.ConnectTimeout):
        message = f"no connection to {settings.base_url} within {_limit(limits.connect_s)}"
        return RequestTimeoutError(message, phase="connect", retryable=True)
    if isinstance(error, httpx.PoolTimeout):
        message = "no free connection in this client's pool: close streams you no longer read"
        return RequestTimeoutError(message, phase="pool", retryable=True)
    if isinstance(error, httpx.ReadTimeout):
        message = f"{call.path}: nothing was received for {_limit(limits.read_s)}"
        return RequestTimeoutError(message, phase="read")
    if isinstance(error, httpx.WriteTimeout):
        return RequestTimeoutError(f"{call.path}: the request could not be sent in time", phase="write")
    if isinstance(error, httpx.ConnectError | httpx.ProxyError | httpx.UnsupportedProtocol):
        return ConnectionFailedError(f"cannot connect to {settings.base_url}: {cause}", retryable=True)
    if isinstance(error, httpx.DecodingError | httpx.TooManyRedirects):
        return InvalidResponseError(f"{call.path}: {cause}")
    return ConnectionFailedError(f"{call.path}: the connection broke before the answer was complete: {cause}")


def _limit(value_s: float | None) -> str:
    return "its limit" if value_s is None else f"{value_s:g} s"


@dataclass(frozen=True)
class Answer:
    """A complete response, whose body has been read."""

    call: Call
    status_code: int
    headers: httpx.Headers
    body: bytes

    def text(self) -> str:
        """Returns the body as text; bytes that are not UTF-8 become replacement characters."""
        return self.body.decode("utf-8", errors="replace")


def check_status(answer: Answer) -> Answer:
    """Returns the answer if it is 2xx, else raises the typed error."""
    if 200 <= answer.status_code < 300:
        return answer
    if 300 <= answer.status_code < 400:
        target = answer.headers.get("location", "elsewhere")
        raise InvalidResponseError(
            f"{answer.call.path}: the server redirects to {target}; set the base URL to it"
        )
    raise error_from_response(answer.status_code, answer.headers, answer.body)


def parse(answer: Answer, model: type[ResultT], *, with_request_id: bool = False) -> ResultT:
    """Returns the body as `model`. Raises InvalidResponseError, with the body's beginning, if it does not fit."""
    try:
        result = model.model_validate_json(answer.body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        message = f"{answer.call.path}: unexpected answer ({reason}): {answer.text()[:200]!r}"
        raise InvalidResponseError(message) from error
    return (
        result.model_copy(update={"request_id": answer.headers.get("x-request-id")})
        if with_request_id
        else result
    )


def check_event_stream(call: Call, headers: httpx.Headers) -> None:
    """Raises InvalidResponseError unless the response is an event stream."""
    content_type = headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "text/event-stream":
        raise InvalidResponseError(
            f"{call.path}: expected an event stream, got content type {content_type!r}"
        )
