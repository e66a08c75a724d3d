"""The fast HTTP/1.1 protocol: httptools reads, `dispatch` answers, and bytes go straight to the transport.

An ASGI server's own protocol costs a task and an event for each request and a coroutine for each chunk: 0.65 ms of CPU
for 16 tokens against 0.2 ms (docs/design.md). uvicorn's `Server` still runs the listener; of a protocol it needs only
the methods at the bottom.

The protocol keeps connections alive and answers pipelined requests in order. It limits headers and body, knows `Expect:
100-continue`, and cuts and reports a stream whose client leaves more than `slow_client_bytes` unread. After a refusal
it keeps the connection for a while, so that the client can read the refusal. A request has no timer of its own: the
listener sweeps over all connections for timeouts.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httptools

from app.api.errors import ApiError, too_large
from app.ingress.http.fast_reply import HttpReply, build_head
from app.ingress.http.reply import GONE_DISCONNECTED, Headers, Reply, Request

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 2**10
MAX_PIPELINED = 32
LINGER_S = 5.0

_JSON: Headers = [(b"content-type", b"application/json")]

Dispatch = Callable[[Request, Reply], None]


class FastHttpProtocol(asyncio.Protocol):
    """One client connection.

    The listener gives `dispatch`, `max_body_bytes` and `slow_client_bytes`; uvicorn's `Server` adds the other arguments
    for each connection that it accepts.
    """

    def __init__(
        self,
        *,
        dispatch: Dispatch,
        max_body_bytes: int,
        slow_client_bytes: int,
        config: Any,
        server_state: Any,
        app_state: Any,
        _loop: Any = None,
    ) -> None:
        self._dispatch = dispatch
        self._max_body_bytes = max_body_bytes
        self._slow_client_bytes = slow_client_bytes
        self._server = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[tuple[Request, HttpReply]] = deque()
        self._current: HttpReply | None = None
        self._paused = False
        self._closing = False  # no further request is read
        self._closed = False
        self._sweeps = 0  # sweeps since the last change
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._in_request = False

    # ---------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = self._closing = True
        self._server.connections.discard(self)
        self._waiting.clear()
        current, self._current = self._current, None
        if current is not None:
            current.lost(GONE_DISCONNECTED)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return  # lingering: the client is still sending
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request is answered as an ordinary one; the rest of the connection is in a protocol unknown here.
            self._closing = True
        except httptools.HttpParserError as error:
            cause = error.__context__
            refusal = (
                cause
                if isinstance(cause, ApiError)
                else ApiError(400, f"Not a valid HTTP/1.1 request: {error}.")
            )
            self._refuse(refusal)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._waiting and self._current is None:
            self._loop.call_soon(self._next)

    # ------------------------------------------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        self._reset()
        self._in_request = True
        self._sweeps = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        length = self._headers.get(b"content-length")
        if length is not None and length.isdigit() and int(length) > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and self._current is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        version = self._parser.get_http_version()
        method = self._parser.get_method().decode("ascii")
        try:
            path = httptools.parse_url(self._url).path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):
            raise ApiError(400, "The request's URL is not valid.") from None
        if "%" in path:
            path = unquote(path)
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        keep_alive = version != "1.0" and self._parser.should_keep_alive()
        request = Request(method, path, self._headers, body)
        self._body = []
        reply = HttpReply(self, keep_alive, version != "1.0", method == "HEAD")
        if self._current is None and not self._waiting and not self._paused:
            self._run(request, reply)
        else:
            self._waiting.append((request, reply))
            if len(self._waiting) >= MAX_PIPELINED and self.transport is not None:
                self.transport.pause_reading()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ApiError(431, f"The request's headers are longer than {MAX_HEADER_BYTES} bytes.")

    # --------------------------------------------------------------------------------------- what replies use

    def write(self, data: bytes) -> None:
        if not self._closed and self.transport is not None:
            self.transport.write(data)

    def behind(self) -> bool:
        """Returns whether more output waits for the client than the `slow_client_bytes` that it may leave unread."""
        transport = self.transport
        return (
            self._paused
            and transport is not None
            and transport.get_write_buffer_size() > self._slow_client_bytes
        )

    def cut(self, reason: str) -> None:
        """Drops the connection now; the owner of the current reply learns `reason`."""
        current, self._current = self._current, None
        self._waiting.clear()
        if self.transport is not None:
            self.transport.abort()
        if current is not None:
            current.lost(reason)

    def finished(self, keep_alive: bool) -> None:
        """Marks the current answer as written, and goes on to the next request or closes the connection."""
        self._current = None
        self._server.total_requests += 1
        self._sweeps = 0
        if self._closed or self.transport is None:
            return
        if not keep_alive or (self._closing and not self._waiting):
            self._closing = True
            self._waiting.clear()
            self.transport.close()
        elif self._waiting and not self._paused:  # an unread answer delays the next
            self._loop.call_soon(self._next)

    def date_line(self) -> bytes:
        return b"".join(b"%s: %s\r\n" % pair for pair in self._server.default_headers)

    def _next(self) -> None:
        if self._current is None and self._waiting and not self._closed and not self._paused:
            request, reply = self._waiting.popleft()
            if self.transport is not None and len(self._waiting) < MAX_PIPELINED:
                self.transport.resume_reading()
            self._run(request, reply)

    def _run(self, request: Request, reply: HttpReply) -> None:
        self._current = reply
        try:
            self._dispatch(request, reply)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            if reply.started:
                self.cut("internal error")
            else:
                reply.respond(500, _JSON, ApiError(500, "Internal error; see the server's log.").body())

    def _refuse(self, error: ApiError) -> None:
        """Answers a request that cannot be read, and lets the client finish sending before the connection ends."""
        self._closing = True
        if self._current is not None or self._waiting:
            return  # `finished` closes the connection
        body = error.body()
        headers = [*_JSON, *error.headers(), (b"content-length", b"%d" % len(body))]
        head = build_head(error.status, self.date_line(), headers, keep_alive=False)
        self.write(head + body)
        self._sweeps = 0
        log.info("refused a request: %s", error.message)

    # ------------------------------------------------------------------ what the listener and uvicorn's Server use

    def sweep(self, period_s: float, idle_s: float, request_s: float) -> None:
        """Closes a connection that idles, sends or reads too slowly, or lingers after a refusal.

        The listener calls it every `period_s` seconds. Time is counted in calls, not by the clock, so that a client
        does not pay for a pause of this process.
        """
        if self.transport is None or self._current is not None or (self._waiting and not self._paused):
            return
        slow = self._in_request or self._paused
        limit_s = LINGER_S if self._closing else request_s if slow else idle_s
        self._sweeps += 1  # the first sweep may come at once
        if (self._sweeps - 1) * period_s > limit_s:
            self.transport.abort() if self._paused else self.transport.close()

    def shutdown(self) -> None:
        """Closes an idle connection now, and another one after its answer, because the server stops."""
        self._closing = True
        if self._current is None and not self._waiting and self.transport is not None:
            self.transport.close()
