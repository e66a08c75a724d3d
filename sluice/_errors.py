"""The errors that the SDK raises, as one tree under `SluiceError`.

Each class says whether sending the same request again is safe (`retryable`) and what a person can do about it (`hint`).
All of them can be pickled, so that they cross process borders (multiprocessing, Ray) intact.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from typing import Any, Literal

_EXCERPT_CHARS = 500

_HINTS = {
    "admin_key": "set SLUICE_ADMIN_KEY (or admin_key=) to one of the server's admin keys; a key file on this machine is"
    " read without it, by the same user and for a server at 127.0.0.1 or localhost",
    "decision_not_found": "give the id of an answer (chatcmpl-...), its x-request-id header, or one of the ids above;"
    " decisions that the router has forgotten are in its journal, if router.journal.folder is set in its configuration",
    "priority_not_allowed": "ask for a priority within the ceiling, or have the ceiling of the key or server raised",
    "viewer_key": "set SLUICE_ADMIN_KEY (or admin_key=) to an admin key of the server, or SLUICE_API_KEY (or api_key=)"
    " to one of its viewer keys",
    "model_not_found": "`sluice models` lists the served models",
    "no_autoscaler": "set scaling.enabled in the server's configuration; see docs/scaling.md",
    "not_found": "SLUICE_BASE_URL (or base_url=) must be the root of a Sluice server, such as http://127.0.0.1:8000",
}
"""Hints by the server's `code`, where they are better than the hint for the status."""


class SluiceError(Exception):
    """Base of all errors of this package."""

    hint: str | None = None
    """Advice on the next step, in one sentence; None where the message already says it."""

    retryable: bool = False
    """True if the server certainly did no work for the request, so that sending it again is safe."""

    @property
    def request_id(self) -> str | None:
        """The server's `x-request-id`, where one was received; quote it when you report a problem."""
        return None


class ConfigurationError(SluiceError):
    """The client got, or the environment holds, a value that cannot work."""


class ConnectionFailedError(SluiceError):
    """The server could not be reached, or the connection broke before an answer arrived."""

    hint = "check that the server runs and that SLUICE_BASE_URL (or base_url=) points to it"

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class StreamInterruptedError(ConnectionFailedError):
    """A stream ended without its `[DONE]` mark: what was received is incomplete."""

    hint = "the answer is incomplete; send the request again if you need all of it"


class RequestTimeoutError(SluiceError):
    """A time limit of `Timeouts` passed; `phase` says which one."""

    hint = "raise the limit (Timeouts(...), timeout_s=, or --timeout), or see `sluice status` for a backlog"

    def __init__(
        self,
        message: str,
        *,
        phase: Literal["connect", "read", "write", "pool", "total"] = "total",
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.retryable = retryable


class InvalidResponseError(SluiceError):
    """The server's answer is not what its API promises (not JSON, a wrong shape, not an event stream)."""

    hint = "check that the base URL is a Sluice server and not a proxy's error page or another service"


@dataclass(frozen=True)
class ErrorDetail:
    """The content of a server's error answer.

    `status_code` is None for an error event inside a stream that had begun with 200.
    """

    message: str
    status_code: int | None = None
    type: str | None = None
    param: str | None = None
    code: str | None = None
    request_id: str | None = None
    retry_after_s: float | None = None


class ApiError(SluiceError):
    """The server answered with an error. Statuses without a subclass raise this class itself."""

    def __init__(self, detail: ErrorDetail) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = _HINTS.get(detail.code or "", type(self).hint)

    def __str__(self) -> str:
        detail = self.detail
        status = "stream error" if detail.status_code is None else str(detail.status_code)
        label = " ".join(part for part in (status, detail.code or detail.type) if part)
        where = f" (field: {detail.param})" if detail.param else ""
        request = f" [request {detail.request_id}]" if detail.request_id else ""
        return f"{label}: {detail.message}{where}{request}"

    @property
    def message(self) -> str:
        """The server's sentence, without status and request id."""
        return self.detail.message

    @property
    def status_code(self) -> int | None:
        """The HTTP status, or None for an error event inside a stream."""
        return self.detail.status_code

    @property
    def param(self) -> str | None:
        """The request field at fault, if the server named one."""
        return self.detail.param

    @property
    def reason(self) -> str | None:
        """The machine-readable reason: the error's `code`, else its `type`."""
        return self.detail.code or self.detail.type

    @property
    def retry_after_s(self) -> float | None:
        """The seconds that the server asks to wait before the next attempt, or None if it does not say."""
        return self.detail.retry_after_s

    @property
    def request_id(self) -> str | None:
        """The server's `x-request-id`, or None if none was received."""
        return self.detail.request_id


class BadRequestError(ApiError):
    """400, 413, 422 or another 4xx: the request itself is wrong; `param` names the field."""

    hint = "correct what the message names; the same request would fail again"


class AuthenticationError(ApiError):
    """401 or 403: the key is missing, unknown or not allowed to do this."""

    hint = "set SLUICE_API_KEY (or api_key=) to a valid key"


class NotFoundError(ApiError):
    """404: a model, a path, or a request to be explained is unknown; `reason` says which."""

    hint = "`sluice models` lists the served models; check the id, and SLUICE_BASE_URL too"


class RateLimitedError(ApiError):
    """429: a quota or the queue is used up; see `reason` and `retry_after_s`."""

    hint = "wait and send the request again, or send fewer at once"
    retryable = True


class UnavailableError(ApiError):
    """503: the server is overloaded, starting or draining; see `reason` and `retry_after_s`."""

    hint = "wait and send the request again; `sluice status` shows whether engines are ready"
    retryable = True


class ServerError(ApiError):
    """A 5xx other than 503: a fault on the server's side."""

    hint = "look for the request id in the server's log"


class EngineFailedError(ApiError):
    """An error event arrived inside a stream: the engine died or gave up after the answer had begun."""

    hint = "the answer is incomplete; send the request again if you need all of it"


def error_from_response(status_code: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """Returns the typed error for an HTTP error response (any status that is not 2xx)."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        payload: Any = json.loads(text)
    except (ValueError, RecursionError):
        payload = text[:_EXCERPT_CHARS]
    detail = _detail(
        payload,
        status_code=status_code,
        request_id=headers.get("x-request-id"),
        retry_after_s=parse_retry_after(headers.get("retry-after"), time.time()),
    )
    error = _class_of(status_code)(detail)
    # OpenAI's header, with which a server says of a request over a limit that it will never fit
    if headers.get("x-should-retry") == "false":
        error.retryable = False
    return error


def error_from_event(payload: Any, request_id: str | None) -> EngineFailedError:
    """Returns the typed error for an SSE event `{"error": ...}`, whose JSON is `payload`."""
    return EngineFailedError(_detail(payload, status_code=None, request_id=request_id, retry_after_s=None))


def parse_retry_after(value: str | None, now_s: float) -> float | None:
    """Returns the seconds in a Retry-After header (a number or an HTTP date; RFC 9110, 10.2.3), or None."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        date = parsedate_tz(value)
        if date is None:
            return None
        seconds = max(0.0, mktime_tz(date) - now_s)
    return seconds if math.isfinite(seconds) and seconds >= 0.0 else None


def _class_of(status_code: int) -> type[ApiError]:
    known: dict[int, type[ApiError]] = {
        401: AuthenticationError,
        403: AuthenticationError,
        404: NotFoundError,
        429: RateLimitedError,
        503: UnavailableError,
    }
    if status_code in known:
        return known[status_code]
    if 400 <= status_code < 500:
        return BadRequestError
    return ServerError if status_code >= 500 else ApiError


def _detail(
    payload: Any, *, status_code: int | None, request_id: str | None, retry_after_s: float | None
) -> ErrorDetail:
    """Returns the content of an error in OpenAI's shape, or in the shapes of proxies and other frameworks."""
    error: Any = payload
    if isinstance(payload, Mapping):
        error = payload.get("error") or payload.get("detail") or payload
    fields: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
    message = fields.get("message") if fields else error
    return ErrorDetail(
        message=message if isinstance(message, str) and message else _fallback(error, status_code),
        status_code=status_code,
        type=_text(fields.get("type")),
        param=_text(fields.get("param")),
        code=_text(fields.get("code")),
        request_id=request_id,
        retry_after_s=retry_after_s,
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _fallback(error: Any, status_code: int | None) -> str:
    if error:
        return json.dumps(error, default=str)[:_EXCERPT_CHARS]
    return (
        "the stream failed" if status_code is None else f"the server answered {status_code} without a message"
    )
