"""The fast HTTP/1.1 protocol: httptools reads, `dispatch` answers, and bytes go straight to the transport.

An ASGI server's own protocol costs a task and an event for each request and a coroutine for each chunk: 0.65 ms of CPU
for 16 tokens against 0.2 ms (docs/design.md). uvicorn's `Server` still runs the listener; of a protocol it needs only
the methods at the bottom.

The protocol keeps connections alive and answers pipelined requests in order. It limits headers and body, knows `Expect:
100-continue`, and cuts and reports a stream whose client leaves more than `slow_client_bytes` unread. A wish for
another protocol (`Upgrade`) is ignored, and trailers are dropped. After a refusal it keeps the connection for a while,
so that the client can read the refusal. A request has no timer of its own: the listener sweeps over all connections for
timeouts.

Memory before an answer begins is bounded. A connection is not read while a complete request waits on it, so it holds
one such request and the rest of one read (256 kB with uvloop). `RequestMemory` bounds the sum over all connections. A
large body of a request that would be refused whatever it holds is not read: `admit` looks at the head.

Memory after an answer has begun is bounded, too: by `slow_client_bytes` for a stream, and by `SharedBytes` for all that
clients have not read. A client may read as slowly as it likes within that.
"""

import asyncio
import logging
import select
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httptools

from actors.wire.tcp import queued_bytes
from app.api.errors import ApiError, host_not_allowed, no_memory, too_large
from app.ingress.http import crowd
from app.ingress.http.crowd import Crowd, Reason, address_of
from app.ingress.http.fast_reply import HttpReply, build_head
from app.ingress.http.head import ONCE, check_head, repeated_header, without_upgrade
from app.ingress.http.memory import SMALL_BYTES, RequestMemory, SharedBytes, most_body_bytes
from app.ingress.http.reply import GONE_DISCONNECTED, GONE_SLOW, Headers, Reply, Request

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 2**10

HEADER_BYTES = 32
"""Bytes that each header counts beside its name and value, as in HTTP/2 (RFC 9113, 6.5.2)."""

PART_BYTES = 64
"""Bytes that a part of a body takes beside its content: a bytes object (33), its place in a list (8), and rounding."""

WAITING_BYTES = 1024
"""Bytes of a waiting request beside its body. ASSUMPTION: `sys.getsizeof` of its objects adds up to some 700."""

HIGH_WATER_BYTES = 16 * 2**10
"""Unread bytes of a connection above which they are counted. ASSUMPTION: more than a client that keeps up ever has; all
connections below it together have 128 MB at most.
"""

LINGER_S = 5.0

_JSON: Headers = [(b"content-type", b"application/json")]

Dispatch = Callable[[Request, Reply], None]
Admit = Callable[[Request], None]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The things that the connections of one port share: limits, counts, and the checks of a head.

    Bodies have at most `max_body_bytes` on the paths that are `large`, and `SMALL_BYTES` on others (`most_body_bytes`).
    `unread` has the bytes that clients have not read. `observed` are the paths that are answered beyond the limits of
    `crowd`. `permits` says whether a Host may be answered. `admit` raises `ApiError` for a request, whose body has not
    come yet, that would be refused whatever it holds. `refused` counts a refusal by its reason.
    """

    max_body_bytes: int
    large: Collection[str]
    slow_client_bytes: int
    memory: RequestMemory
    unread: "SharedBytes[FastHttpProtocol]"
    crowd: Crowd
    observed: Collection[str]
    permits: Callable[[bytes], bool]
    admit: Admit
    refused: Callable[[str], None]


class FastHttpProtocol(asyncio.Protocol):
    """One client connection.

    The listener gives `dispatch` and `bounds`. uvicorn's `Server` adds the other arguments for each connection that it
    accepts.
    """

    def __init__(
        self,
        *,
        dispatch: Dispatch,
        bounds: Bounds,
        config: Any,
        server_state: Any,
        app_state: Any,
        _loop: Any = None,
    ) -> None:
        self._dispatch = dispatch
        self._bounds = bounds
        self._server = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[tuple[Request, HttpReply]] = deque()
        self._current: HttpReply | None = None
        self._waiting_bytes = 0
        self._held_bytes = 0  # as `_memory` counts them
        self._unread = False  # a request waits; no reading
        self._address: str | None = None
        self._crowded: Reason | None = None  # one of the spare connections
        self._paused = False
        self._closing = False  # no further request is read
        # whether the crowd knows that a request takes long to arrive
        self._gives_way = False
        self._closed = False
        self._sweeps = 0  # sweeps since the last change
        # unread at the last sweep, with what the kernel holds
        self._left_bytes = 0
        # the head is read again without its wish for another protocol
        self._upgrading = False
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._most_body_bytes = 0
        self._head_done = False
        self._in_request = False

    # ---------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        crowd = self._bounds.crowd
        address = address_of(transport.get_extra_info("peername"))
        crowded = crowd.enter(address)
        self.begin(transport, address, crowded)
        if crowded is not None and not crowd.has_spare(crowded, address):
            transport.abort()  # type: ignore[attr-defined]

    def begin(self, transport: asyncio.BaseTransport, address: str | None, crowded: Reason | None) -> None:
        """Takes a connection that `crowd` has counted under `address`, and that is beyond the limit `crowded`, if any.
        The end of the connection is counted here.
        """
        self.transport = transport  # type: ignore[assignment]
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)  # type: ignore[attr-defined]
        self._server.connections.add(self)
        self._address, self._crowded = address, crowded
        self._idles()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = self._closing = True
        self._server.connections.discard(self)
        self._bounds.crowd.works(self)
        self._bounds.crowd.leave(self._address)
        self._bounds.unread.hold(self, 0)
        self._let_go()
        current, self._current = self._current, None
        if current is not None:
            current.lost(GONE_DISCONNECTED)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return  # lingering: the client is still sending
        try:
            self._read(memoryview(data))
            if self._in_request or self._waiting or self._held_bytes:
                self._count_held()
                self._bounds.memory.check_held(self._held_bytes)
        except ApiError as error:
            self._let_go()
            self._read_on()
            self._refuse(error)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, MemoryError):
                self._let_go()
                cause = no_memory()
            refusal = (
                cause
                if isinstance(cause, ApiError)
                else ApiError(400, f"Not a valid HTTP/1.1 request: {error}.")
            )
            self._refuse(refusal)

    def _read(self, data: memoryview) -> None:
        """Parses what has come. The parser stops behind a head that wishes for another protocol and skips its body, so
        a new one goes on from there, after the same head without the wish.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                # the rest behind a CONNECT is for somebody else
                if not self._upgrading:
                    self._closing = True
                    self._count_held()
                    return
                self._upgrading = False
                data = data[stop.args[0] :]
                parser = self._parser
                head = without_upgrade(
                    parser.get_method(), self._url, parser.get_http_version(), self._headers
                )
                self._parser = httptools.HttpRequestParser(self)
                self._parser.feed_data(head)

    def pause_writing(self) -> None:
        self._paused = True
        self._count_unread()

    def resume_writing(self) -> None:
        self._paused = False
        self._bounds.unread.hold(self, 0)
        if self._current is not None:
            return
        if self._waiting:
            self._loop.call_soon(self._next)
        elif not (self._in_request or self._closing):
            self._idles()

    # ------------------------------------------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        self._reset()
        self._in_request = True
        self._sweeps = 0
        self._bounds.crowd.works(self)

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + HEADER_BYTES)
        if self._head_done:
            return  # a trailer; none has a meaning here
        name = name.lower()
        if name in ONCE and name in self._headers:
            raise repeated_header(name)
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._head_done = True
        check_head(self._parser.get_http_version(), self._headers)
        method = self._parser.get_method()
        if self._parser.should_upgrade() and method != b"CONNECT":
            self._upgrading = True
            return
        host = self._headers.get(b"host", b"")
        if not self._bounds.permits(host):
            self._bounds.refused("host")
            raise host_not_allowed(host.decode("ascii", "replace"))
        path = self._path()
        if self._crowded is not None and path not in self._bounds.observed:
            raise self._bounds.crowd.refusal(self._crowded)
        self._most_body_bytes = most_body_bytes(path, self._bounds.large, self._bounds.max_body_bytes)
        length = self._headers.get(b"content-length", b"")
        n_bytes = int(length) if length.isdigit() else None
        if n_bytes is not None:
            self._check_length(n_bytes)
        behind = self._current is not None or bool(self._waiting)
        expects = self._headers.get(b"expect", b"").lower() == b"100-continue"
        large = n_bytes > SMALL_BYTES if n_bytes is not None else b"transfer-encoding" in self._headers
        if (large or expects) and not behind:
            self._bounds.admit(Request(method.decode("ascii"), path, self._headers, b""))
        if expects and self._current is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._most_body_bytes:
            raise too_large(self._most_body_bytes)
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        if self._gives_way:
            self._gives_way = False
            self._bounds.crowd.works(self)
        # an earlier request ended it, or the head is read again
        if self._closing or self._upgrading:
            return
        version = self._parser.get_http_version()
        method = self._parser.get_method().decode("ascii")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        keep_alive = version != "1.0" and self._parser.should_keep_alive() and self._crowded is None
        request = Request(method, self._path(), self._headers, body, self._client)
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

    def _client(self) -> str:
        """Returns the address of the client; empty for one that has gone, or on a unix socket."""
        peer = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def _check_length(self, n_bytes: int) -> None:
        if n_bytes > self._most_body_bytes:
            raise too_large(self._most_body_bytes)
        self._bounds.memory.check_announced(n_bytes)

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
        self._bounds.memory.change(self._held_bytes, held)
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
            if self._paused:
                self._count_unread()

    def behind(self) -> bool:
        """Returns whether more output waits for the client than the `slow_client_bytes` that it may leave unread."""
        transport = self.transport
        return (
            self._paused
            and transport is not None
            and transport.get_write_buffer_size() > self._bounds.slow_client_bytes
        )

    def _count_unread(self) -> None:
        if self.transport is not None:
            self._bounds.unread.hold(self, self.transport.get_write_buffer_size())

    def cut(self, reason: str) -> None:
        """Drops the connection now; the owner of the current reply learns `reason`."""
        current, self._current = self._current, None
        self._bounds.unread.hold(self, 0)
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
        elif not self._in_request and not self._paused:
            self._idles()

    def _idles(self) -> None:
        """Lets the connection make way for another one, unless it is one of the spare ones, which end soon."""
        if self._crowded is None:
            self._bounds.crowd.idles(self, self.shutdown)

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
        except MemoryError:
            if reply.started:
                self.cut("out of memory")
            else:
                error = no_memory()
                reply.respond(error.status, [*_JSON, *error.headers()], error.body())
        except Exception:
            # the path is the client's text and may hold line breaks (%0d%0a)
            log.exception("%s %r failed", request.method, request.path)
            if reply.started:
                self.cut("internal error")
            else:
                reply.respond(500, _JSON, ApiError(500, "Internal error; see the server's log.").body())

    def _refuse(self, error: ApiError) -> None:
        """Answers a request that cannot be read, and lets the client finish sending before the connection ends.

        What comes behind the last request of a connection is no request, and has no answer.
        """
        ended, self._closing = self._closing, True
        self._reset()
        self._count_held()
        if ended or self._current is not None or self._waiting:
            return  # `finished` closes the connection
        body = error.body()
        headers = [*_JSON, *error.headers(), (b"content-length", b"%d" % len(body))]
        head = build_head(error.status, self.date_line(), headers, keep_alive=False)
        self.write(head + body)
        self._sweeps = 0
        log.info("refused a request: %r", error.message)

    # ------------------------------------------------------------------ what the listener and uvicorn's Server use

    def sweep(self, period_s: float, idle_s: float, request_s: float) -> None:
        """Closes a connection that idles, sends too slowly, reads nothing, or lingers after a refusal.

        The listener calls it every `period_s` seconds. Time is counted in calls, not by the clock, so that a client
        does not pay for a pause of this process.
        """
        if self.transport is None:
            return
        if self._current is not None or (self._waiting and not self._paused):
            self._sweep_behind(period_s, request_s)
            return
        # too few bytes to pause the writer would keep a closed transport open as well
        unread = self._paused or self.transport.get_write_buffer_size() > 0
        if unread and self._has_read():
            self._sweeps = 0
        slow = self._in_request or unread
        lingers = (self._closing and not unread) or self._crowded is not None
        limit_s = LINGER_S if lingers else request_s if slow else idle_s
        self._sweeps += 1  # the first sweep may come at once
        if (self._sweeps - 1) * period_s > limit_s:
            if self._in_request:
                self._bounds.refused("late")
                self._let_go()
            self.transport.abort() if unread else self.transport.close()
        elif slow and not unread and not lingers and (self._sweeps - 1) * period_s >= crowd.GIVES_WAY_S:
            self._gives_way = True
            self._bounds.crowd.still_arrives(self, self._address, self._make_way)

    def _make_way(self) -> None:
        """Drops the request that arrives, and the connection, for a new one."""
        self._closing = True
        self._let_go()
        if self.transport is not None:
            self.transport.abort()

    def _has_read(self) -> bool:
        """Returns whether the client has read some of its answer since the last sweep. What the kernel holds counts,
        since it frees our buffer in lumps of megabytes.
        """
        assert self.transport is not None
        if self._paused:
            self._count_unread()
        before = self._left_bytes
        self._left_bytes = self.transport.get_write_buffer_size() + queued_bytes(self.transport)
        return self._left_bytes < before

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
                self._bounds.refused("late")
                self._closing = True
                self._let_go()

    def shutdown(self) -> None:
        """Closes an idle connection now, and another one after its answer, because the server stops."""
        self._closing = True
        if self._current is None and not self._waiting and self.transport is not None:
            self.transport.close()


def cut_slow(connection: FastHttpProtocol) -> None:
    """Drops the connection that has the most unread bytes, because those of all connections are too many."""
    connection._bounds.refused("unread")
    connection.cut(GONE_SLOW)


def _has_left(transport: asyncio.Transport) -> bool:
    """Returns whether the peer has ended the connection; a transport that is not read does not notice."""
    peer = select.poll()
    peer.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(peer.poll(0))
