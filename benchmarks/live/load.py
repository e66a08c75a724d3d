"""A lean closed-loop load client with N connections, each of which sends the next request when its answer has ended.

It uses raw HTTP/1.1 on asyncio protocols (with uvloop where that is installed). It takes a few microseconds per token,
so on a small machine it takes little from the server that it measures; it also reports its own CPU time. Every answer
is checked for status 200, text, `finish_reason` "length" and [DONE]. Any other answer is a failure and adds no sample.
"""

import asyncio
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from benchmarks.live.http1 import BadResponse, ResponseParser
from benchmarks.live.sse import StreamReader

_T = TypeVar("_T")

# Seconds that unfinished requests have by default when the time is up.
GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """The load to send. `bodies` are used in turn; the run ends after `requests` requests or `max_s` seconds.

    Requests that are under way then have `grace_s` seconds to end; what has not ended is cut, which is a failure. With
    `heads`, each body is sent with further header lines, those at its index.
    """

    port: int
    path: str
    bodies: Sequence[bytes]
    concurrency: int
    requests: int
    max_s: float
    host: str = "127.0.0.1"
    grace_s: float = GRACE_S
    heads: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        if self.heads and len(self.heads) != len(self.bodies):
            raise ValueError(f"{len(self.heads)} heads for {len(self.bodies)} bodies: each body needs one")
        if self.concurrency < 1 or self.requests < 1 or not self.bodies or self.max_s <= 0:
            raise ValueError("a load needs bodies, and concurrency, requests and max_s above 0")


@dataclass(slots=True)
class LoadResult:
    """The result of a load. Its lists have seconds, one entry for each whole answer. `first_at_s` has the time of the
    first text by `time.perf_counter`.

    `stream_s` is the time from the first text to the finish. The caller, who knows the number of tokens, divides it by
    (tokens - 1) for TPOT.
    """

    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    first_at_s: list[float] = field(default_factory=list)
    stream_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    events: int = 0
    body_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    usage: dict[str, Any] | None = None

    @property
    def served(self) -> int:
        return len(self.e2e_s)


def drive(load: Load, stop: Callable[[], bool] = bool) -> LoadResult:
    """Runs the load on a new event loop and returns the result. Raises OSError when the server cannot be reached.

    `stop` is called before each request. Once it returns True no more are sent, and those already sent may end.
    """
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = run_fast(_run(load, stop))
    result.wall_s, result.client_cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return result


def run_fast(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs `main` as `asyncio.run` does, on uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def body_of(
    model: str, prompt: str, tokens: int, *, chat: bool, extra: Mapping[str, Any] | None = None
) -> bytes:
    """Returns the body of a streaming request for exactly `tokens` tokens at temperature 0."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    return json.dumps(body | dict(extra or {})).encode()


def request_bytes(host: str, port: int, path: str, body: bytes, head: Sequence[str] = ()) -> bytes:
    """Returns the bytes of the whole HTTP/1.1 request, with further header lines `head`."""
    lines = [f"POST {path} HTTP/1.1", f"host: {host}:{port}", "content-type: application/json", *head]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


class _Run:
    """The state that the connections share: the work that is left, and the result."""

    def __init__(self, load: Load, stop: Callable[[], bool]) -> None:
        self.load = load
        self._stop = stop
        self.result = LoadResult()
        heads = load.heads or [()] * len(load.bodies)
        self._requests = [
            request_bytes(load.host, load.port, load.path, body, head)
            for body, head in zip(load.bodies, heads, strict=True)
        ]
        self._taken = 0
        self._end_s = time.perf_counter() + load.max_s

    def take(self) -> bytes | None:
        """Returns the next request, or None when no more are to be sent."""
        if self._taken >= self.load.requests or time.perf_counter() >= self._end_s or self._stop():
            return None
        self._taken += 1
        return self._requests[(self._taken - 1) % len(self._requests)]


async def _run(load: Load, stop: Callable[[], bool]) -> LoadResult:
    run = _Run(load, stop)
    workers = [asyncio.ensure_future(_worker(run)) for _ in range(min(load.concurrency, load.requests))]
    done, late = await asyncio.wait(workers, timeout=load.max_s + load.grace_s)
    for worker in late:
        worker.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    run.result.failures["cut: not answered in time"] += len(late)
    run.result.failures += Counter()  # drops zeros
    for worker in done:
        worker.result()  # raises what a worker raised
    return run.result


async def _worker(run: _Run) -> None:
    loop = asyncio.get_running_loop()
    # A request is taken before connecting, so that no connection is opened for nothing.
    while (request := run.take()) is not None:
        connect = functools.partial(_Connection, run, request)
        transport, protocol = await loop.create_connection(connect, run.load.host, run.load.port)
        try:
            await protocol.closed
        finally:
            transport.abort()


class StreamConnection(asyncio.Protocol):
    """A kept-alive connection that reads one streamed answer after the other.

    Each answer, whole or not, ends in one call of `answered`, unless the connection was dropped. Times are those of
    `time.perf_counter`.
    """

    transport: asyncio.Transport

    def __init__(self, finish: str = "length") -> None:
        self._finish = finish
        self._parser = ResponseParser(self)
        self._reader: StreamReader | None = None  # None: no request under way
        self._status = 0
        self._bad_body = b""
        self._last = False  # the server closes after this answer
        self.body_bytes = 0
        self.sent_s = self.now_s = 0.0

    def answered(self, reader: StreamReader, problem: str | None, reusable: bool) -> None:
        """Notes that an answer has ended.

        `problem` says why it is not whole, or is None. With `reusable`, another request can be sent.
        """
        raise NotImplementedError

    def send(self, request: bytes) -> None:
        self._reader = StreamReader()
        self.sent_s = time.perf_counter()
        self.transport.write(request)

    def drop(self) -> None:
        """Ends the connection without a call of `answered` for its request."""
        self._reader = None
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.now_s = time.perf_counter()
        try:
            self._parser.feed(data)
        except ValueError as error:
            # A BadResponse, or an event that is no JSON.
            self._fail(f"{type(error).__name__}: {error}")
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            # This ends a body that lasts until the connection does.
            self._parser.eof()
        except BadResponse:
            pass  # counted below as the connection's end
        self._fail(f"connection ended: {exc or 'closed by the server'}")

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._bad_body = status, b""
        self._last = headers.get(b"connection", b"").lower() == b"close"

    def on_body(self, data: bytes) -> None:
        self.body_bytes += len(data)
        if self._status != 200:
            self._bad_body += data
        elif self._reader is not None:
            self._reader.feed(data, self.now_s)

    def on_end(self) -> None:
        reader, self._reader = self._reader, None
        if reader is None:
            raise BadResponse("an answer that nobody asked for")
        if self._status != 200:
            problem: str | None = f"status {self._status}: {self._bad_body[:200].decode(errors='replace')}"
        else:
            problem = reader.problem(self._finish)
        self.answered(reader, problem, not self._last)

    def _fail(self, reason: str) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self.answered(reader, reason, False)


class _Connection(StreamConnection):
    """A connection that sends the run's next request when an answer has ended.

    The worker opens another connection when the server closes this one.
    """

    def __init__(self, run: _Run, request: bytes) -> None:
        super().__init__()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run = run
        self._first = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(self._first)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(None)

    def answered(self, reader: StreamReader, problem: str | None, reusable: bool) -> None:
        result = self._run.result
        result.body_bytes += self.body_bytes
        self.body_bytes = 0
        if problem is not None:
            result.failures[problem] += 1
        else:
            assert reader.first_s is not None
            assert reader.finish_s is not None
            result.ttft_s.append(reader.first_s - self.sent_s)
            result.first_at_s.append(reader.first_s)
            result.stream_s.append(reader.finish_s - reader.first_s)
            result.e2e_s.append(self.now_s - self.sent_s)
            result.events += reader.events
            result.usage = reader.usage or result.usage
        if reusable:
            request = self._run.take()
            if request is None:
                self.transport.close()
            else:
                self.send(request)
