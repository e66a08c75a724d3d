"""The fast HTTP/1.1 protocol: httptools reads, `dispatch` answers, and bytes go straight to the transport.

An ASGI server's own protocol costs a task and an event for each request and a coroutine for each chunk: 0.65 ms of CPU
for 16 tokens against 0.2 ms (docs/design.md). uvicorn's `Server` still runs the listener; of a protocol it needs only
the methods at the bottom.

The protocol keeps connections alive and answers pipelined requests in order. It limits headers and body, knows `Expect:
100-continue`, and cuts and reports a stream whose client leaves more than `slow_client_bytes` unread. After a refusal
it keeps the connection for a while, so that the client can read the refusal. A request has no timer of its own: the
listener sweeps over all connections for timeouts.

Memory before an answer begins is bounded. A connection is not read while a complete request waits on it, so it holds
one such request and the rest of one read (256 kB with uvloop). `RequestMemory` bounds the sum over all connections.
"""

import asyncio
import logging
import select
from collections import deque
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import unquote

import httptools

from app.api.errors import ApiError, too_large, too_many_connections
from app.ingress.http.fast_reply import HttpReply, build_head
from app.ingress.http.memory import RequestMemory
from app.ingress.http.reply import GONE_DISCONNECTED, Headers, Reply, Request

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 2**10

HEADER_BYTES = 32
"""Bytes that each header counts beside its name and value, as in HTTP/2 (RFC 9113, 6.5.2)."""

PART_BYTES = 64
"""Bytes that a part of a body takes beside its content: a bytes object (33), its place in a list (8), and rounding."""

WAITING_BYTES = 1024
"""Bytes of a waiting request beside its body. ASSUMPTION: `sys.getsizeof` of its objects adds up to some 700."""

SPARE_CONNECTIONS = 64
"""Connections beyond `max_connections` that are answered: probes and scrapes as ever, others with a refusal."""

LINGER_S = 5.0

_JSON: Headers = [(b"content-type", b"application/json")]

Dispatch = Callable[[Request, Reply], None]


class FastHttpProtocol(asyncio.Protocol):
    """One client connection.

    The listener gives `dispatch`, `max_body_bytes`, `slow_client_bytes`, `memory`, `max_connections`, `observed` (the
    paths that are answered beyond them), and `refused`, which counts a refusal by its reason. uvicorn's `Server` adds
    the other arguments for each connection that it accepts.
    """

    def __init__(
        self,
        *,
        dispatch: Dispatch,
        max_body_bytes: int,
        slow_client_bytes: int,
        memory: RequestMemory,
        max_connections: int,
        observed: Collection[str],
        refused: Callable[[str], None],
        config: Any,
        server_state: Any,
        app_state: Any,
        _loop: Any = None,
    ) -> None:
        self._dispatch = dispatch
        self._max_body_bytes = max_body_bytes
        self._slow_client_bytes = slow_client_bytes
        self._memory = memory
        self._max_connections = max_connections
        self._observed = observed
        self._refused = refused
        self._server = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[tuple[Request, HttpReply]] = deque()
        self._current: HttpReply | None = None
        self._waiting_bytes = 0
        self._held_bytes = 0  # as `_memory` counts them
        self._unread = False  # a request waits; no reading
        self._crowded = False  # one of the spare connections
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
        connections = self._server.connections
        connections.add(self)
        more = len(connections) - self._max_connections
        self._crowded = more > 0
        if more > SPARE_CONNECTIONS:
            self._refused("connections")
            transport.abort()  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = self._closing = True
        self._server.connections.discard(self)
        self._let_go()
        current, self._current = self._current, None
        if current is not None:
            current.lost(GONE_DISCONNECTED)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return  # lingering: the client is still sending
        try:
            self._parser.feed_data(data)
            if self._in_request or self._waiting or self._held_bytes:
                self._count_held()
                self._memory.check_held(self._held_bytes)
        except ApiError as error:
            self._let_go()
            self._read_on()
            self._refuse(error)
        except httptools.HttpParserUpgrade:
            # The request is answered as an ordinary one; the rest of the connection is in a protocol unknown here.
            self._closing = True
            self._count_held()
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
        self._count_header(len(name) + len(value) + HEADER_BYTES)
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._crowded and self._path() not in self._observed:
            self._refused("connections")
            raise too_many_connections(self._max_connections)
        length = self._headers.get(b"content-length")
        if length is not None and length.isdigit():
            self._check_length(int(length))
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and self._current is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        if self._closing:
            return  # an earlier request ended it
        version = self._parser.get_http_version()
        method = self._parser.get_method().decode("ascii")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        keep_alive = version != "1.0" and self._parser.should_keep_alive() and not self._crowded
        request = Request(method, self._path(), self._headers, body, self._address)
        self._body = []
        reply = HttpReply(self, keep_alive, version != "1.0", method == "HEAD")
        if self._current is None and not self._waiting and not self._paused:
            self._run(request, reply)
        else:
            self._waiting.append((request, reply))
            self._waiting_bytes += WAITING_BYTES + len(body)
            if not self._unread and self.transport is not None:
                self._unread = True
                self.transport.pause_reading()

    def _address(self) -> str:
        """Returns the address of the client; empty for one that has gone, or on a unix socket."""
        peer = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def _check_length(self, n_bytes: int) -> None:
        if n_bytes > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        self._memory.check_announced(n_bytes)

    def _path(self) -> str:
        try:
            path = httptools.parse_url(self._url).path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):
            raise ApiError(400, "The request's URL is not valid.") from None
        return unquote(path) if "%" in path else path

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ApiError(431, f"The request's headers are longer than {MAX_HEADER_BYTES} bytes.")

    # ------------------------------------------------------------------------------- what has come and waits

    def _count_held(self) -> None:
        held = self._waiting_bytes
        if self._in_request:
            held += self._header_bytes + self._body_bytes + PART_BYTES * len(self._body)
        self._memory.change(self._held_bytes, held)
        self._held_bytes = held

    def _let_go(self) -> None:
        """Drops the requests that wait and the one that arrives."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._reset()
        self._count_held()

    def _read_on(self) -> None:
        if self._unread and self.transport is not None and not self.transport.is_closing():
            self._unread = False
            self.transport.resume_reading()

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
        self._let_go()
        if self.transport is not None:
            self.transport.abort()
        if current is not None:
            current.lost(reason)

    def finished(self, keep_alive: bool) -> None:
        """Marks the current answer as written, and goes on to the next request or closes the connection."""
        self._current = None
        self._server.total_requests += 1
        if not self._in_request:
            self._sweeps = 0
        if self._closed or self.transport is None:
            return
        if not keep_alive or (self._closing and not self._waiting):
            self._closing = True
            self._let_go()
            self.transport.close()
        elif self._waiting and not self._paused:  # an unread answer delays the next
            self._loop.call_soon(self._next)

    def date_line(self) -> bytes:
        return b"".join(b"%s: %s\r\n" % pair for pair in self._server.default_headers)

    def _next(self) -> None:
        if self._current is None and self._waiting and not self._closed and not self._paused:
            request, reply = self._waiting.popleft()
            self._waiting_bytes -= WAITING_BYTES + len(request.body)
            self._count_held()
            if not self._waiting:
                self._read_on()
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
        self._reset()
        self._count_held()
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
        if self.transport is None:
            return
        if self._current is not None or (self._waiting and not self._paused):
            self._sweep_behind(period_s, request_s)
            return
        slow = self._in_request or self._paused
        lingers = self._closing or self._crowded
        limit_s = LINGER_S if lingers else request_s if slow else idle_s
        self._sweeps += 1  # the first sweep may come at once
        if (self._sweeps - 1) * period_s > limit_s:
            if self._in_request:
                self._refused("late")
                self._let_go()
            self.transport.abort() if self._paused else self.transport.close()

    def _sweep_behind(self, period_s: float, request_s: float) -> None:
        """Looks at what is behind an answer under way: a client that has left, or a request that does not end.

        The answer goes on in the second case, and the connection ends with it.
        """
        assert self.transport is not None
        if self._unread:
            if not self.transport.is_closing() and _has_left(self.transport):
                self.transport.abort()
        elif self._in_request and not self._closing:
            self._sweeps += 1
            if (self._sweeps - 1) * period_s > request_s:
                self._refused("late")
                self._closing = True
                self._let_go()

    def shutdown(self) -> None:
        """Closes an idle connection now, and another one after its answer, because the server stops."""
        self._closing = True
        if self._current is None and not self._waiting and self.transport is not None:
            self.transport.close()


def _has_left(transport: asyncio.Transport) -> bool:
    """Returns whether the peer has ended the connection; a transport that is not read does not notice."""
    peer = select.poll()
    peer.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(peer.poll(0))
