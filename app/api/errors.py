"""The one exception of the HTTP API, and its JSON in OpenAI's shape.

{"error": {"message", "type", "param", "code"}} with `type` by status: 4xx invalid_request_error (429
rate_limit_error, for the limits of an API key their names), 5xx server_error. Messages say what to change or when to
come back.
"""

import math

import orjson

NOT_AGAIN = (b"x-should-retry", b"false")
"""OpenAI's header for a request that its client should not send again by itself. Without it OpenAI's own clients send a
request that failed with 429 or 5xx twice more.
"""


class ApiError(Exception):
    """An error that answers a request.

    `param` names the field at fault, `code` is a short machine-readable word, `retry_after_s` becomes Retry-After and
    `allow` (the methods that a path takes, for 405) becomes Allow. With `close` the connection ends after the answer.
    `kind` stands in place of the `type` that the status has, and `headers` are further ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allow: tuple[str, ...] = (),
        close: bool = False,
        kind: str | None = None,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow
        self.close = close
        self.kind = kind
        self.more_headers = headers or []

    def body(self) -> bytes:
        """Returns the error as a JSON object."""
        error = {
            "message": self.message,
            "type": self.kind or _type_of(self.status),
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})

    def event(self) -> bytes:
        """Returns the error as an SSE event for a stream that has begun; no `[DONE]` follows it."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers beside the content type; Retry-After is in whole seconds, rounded up."""
        headers = list(self.more_headers)
        if self.retry_after_s is not None and math.isfinite(self.retry_after_s):
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
        if self.allow:
            headers.append((b"allow", ", ".join(self.allow).encode()))
        if self.close:
            headers.append((b"connection", b"close"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def bad_request(message: str, param: str | None, code: str) -> ApiError:
    """Returns the 400 of a request that is wrong in itself and would fail again if it were sent unchanged."""
    return ApiError(400, message, param=param, code=code)


def draining(message: str) -> ApiError:
    """Returns the 503 of a replica that is being stopped. It ends the connection, so the next try goes elsewhere."""
    return ApiError(503, message, code="draining", retry_after_s=1.0, close=True)


def too_many_connections(limit: int, of_address: bool = False) -> ApiError:
    """Returns the 503 of a replica with as many connections as it takes, from anybody or from this client's address.
    The next try may reach another replica.
    """
    whose = "connections from your address" if of_address else "connections"
    message = f"This replica has {limit} {whose} already; try again later."
    return ApiError(503, message, code="too_many_connections", retry_after_s=1.0, close=True)


def host_not_allowed(host: str) -> ApiError:
    """Returns the 403 of a request that names another host than those by which this server answers."""
    message = (
        f"This server does not answer as {host[:100]!r}. If that is its name, list it in "
        "ingress.options.allowed_hosts, or have the proxy in front send an address as Host."
    )
    return ApiError(403, message, code="host_not_allowed", close=True)


def no_memory() -> ApiError:
    """Returns the 503 of a request for which this process got no memory."""
    return ApiError(
        503, "No memory for this request; try again later.", code="out_of_memory", retry_after_s=1.0
    )


def too_large(limit_bytes: int) -> ApiError:
    """Returns the 413 of a request whose body is longer than the server reads."""
    message = (
        f"The request body is larger than the {limit_bytes} bytes that this path takes; send a shorter one."
    )
    return ApiError(413, message, code="body_too_large")


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
