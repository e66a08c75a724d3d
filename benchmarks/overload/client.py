"""The load client: one process and one loop for all sides, which sends each request at its planned time.

Like `benchmarks.live.openloop` it uses raw HTTP/1.1 on kept-alive connections. Beyond that a request has a head of its
own (the API key of its tenant), and an answer that is cut keeps the time of its first text.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from benchmarks.live.load import StreamConnection, request_bytes, run_fast
from benchmarks.live.measure import CHAT
from benchmarks.live.sse import StreamReader
from benchmarks.overload.load import Work
from benchmarks.overload.outcomes import End, Outcome, end_of

LEAD_S = 0.2
"""Seconds before the first request, in which the event loop starts up."""
CLOSE_S = 1.0
"""Seconds that the loop has to notice that all connections are cut."""

Form = Callable[[Work], tuple[bytes, Sequence[str]]]
"""How a side wants a request: its body and further header lines."""


def sent(port: int, load: Sequence[Work], form: Form, cut_s: float) -> list[Outcome]:
    """Sends the load to 127.0.0.1 and returns the outcomes in the same order, after `cut_s` seconds at most.

    A connection that cannot be opened is a failure of its request.
    """
    return run_fast(_sent(port, load, form, cut_s))


async def _sent(port: int, load: Sequence[Work], form: Form, cut_s: float) -> list[Outcome]:
    requests = []
    for work in load:
        body, head = form(work)
        requests.append(request_bytes("127.0.0.1", port, CHAT, body, head))
    pool = _Pool(port)
    tasks = [
        asyncio.ensure_future(pool.ask(work, request)) for work, request in zip(load, requests, strict=True)
    ]
    if tasks:
        await asyncio.wait(tasks, timeout=pool.start_s + cut_s - time.perf_counter())
        pool.close()
        await asyncio.wait(tasks, timeout=CLOSE_S)
    return [_outcome(task, work, cut_s) for task, work in zip(tasks, load, strict=True)]


def _outcome(task: "asyncio.Task[Outcome]", work: Work, cut_s: float) -> Outcome:
    """Returns the outcome of a request; one that has no connection yet is cut."""
    if task.done():
        return task.result()
    task.cancel()
    return Outcome(work, cut_s, cut_s, "cut")


class _Pool:
    """The connections of a load; `idle` are those without a request."""

    def __init__(self, port: int) -> None:
        self.start_s = time.perf_counter() + LEAD_S
        self.idle: list[_Connection] = []
        self._port = port
        self._all: list[_Connection] = []

    def now_s(self) -> float:
        return time.perf_counter() - self.start_s

    async def ask(self, work: Work, request: bytes) -> Outcome:
        """Waits for the planned time, sends, and returns the outcome."""
        await asyncio.sleep(max(0.0, work.at_s - self.now_s()))
        connection = self.idle.pop() if self.idle else await self._opened()
        if isinstance(connection, str):
            return Outcome(work, self.now_s(), self.now_s(), "failed", reason=connection)
        return await connection.ask(work, request)

    async def _opened(self) -> "_Connection | str":
        """Returns a new connection, or why there is none."""
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
        except OSError as error:
            return f"no connection: {type(error).__name__}"
        self._all.append(connection)
        return connection

    def close(self) -> None:
        """Cuts what has not ended, and ends every connection."""
        for connection in self._all:
            connection.cut()


class _Connection(StreamConnection):
    """A connection that carries one request after the other, each sent when it is due."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__()
        self._pool = pool
        self._work: Work | None = None
        self._ended: asyncio.Future[Outcome]

    def ask(self, work: Work, request: bytes) -> "asyncio.Future[Outcome]":
        """Sends a request now; returns a future of its outcome."""
        self._work, self._ended = work, asyncio.get_running_loop().create_future()
        self.send(request)
        return self._ended

    def cut(self) -> None:
        """Ends the connection; a request under way is cut."""
        if self._reader is not None:
            self._end(self._reader, "cut", "")
        self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self in self._pool.idle:
            self._pool.idle.remove(self)

    def answered(self, reader: StreamReader, problem: str | None, reusable: bool) -> None:
        if reusable:
            self._pool.idle.append(self)
        self._end(reader, *end_of(problem, self._bad_body))

    def _end(self, reader: StreamReader, end: End, reason: str) -> None:
        work, start_s = self._work, self._pool.start_s
        assert work is not None, "a request under way has its work"
        first_s = None if reader.first_s is None else reader.first_s - start_s
        found = Outcome(work, self.sent_s - start_s, self._pool.now_s(), end, first_s, reason)
        if not self._ended.done():
            self._ended.set_result(found)
