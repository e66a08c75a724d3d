"""An open-loop load client: each request is sent at its planned time, whatever became of those before it.

Raw HTTP/1.1 on kept-alive connections, like `benchmarks.live.load`; a connection is taken from those at rest, else
opened. Each answer keeps its own times, so that a replay can be compared request by request; how late the client itself
was (sent - planned) is among them. Times are seconds of the monotonic clock from the start of the replay.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from benchmarks.live.http1 import BadResponse, ResponseParser
from benchmarks.live.load import request_bytes
from benchmarks.live.sse import StreamReader

LEAD_S = 0.2  # before the first request: the loop has settled by then


@dataclass(frozen=True, slots=True)
class Planned:
    """A request body and when it is to be sent, seconds from the start."""

    at_s: float
    body: bytes


@dataclass(slots=True)
class Answer:
    """What became of one request. `problem`: why its answer is not whole; its times count only where that is None."""

    planned_s: float
    sent_s: float = 0.0
    first_s: float = 0.0  # first text
    last_s: float = 0.0  # finish reason
    problem: str | None = "not answered in time"

    @property
    def late_s(self) -> float:
        """The client's own delay."""
        return self.sent_s - self.planned_s


def replay(
    port: int, path: str, plan: Sequence[Planned], patience_s: float, finish: str = "length"
) -> list[Answer]:
    """Sends all of `plan` to 127.0.0.1 and waits at most `patience_s` after the last; answers in the plan's order.

    `finish`: the finish reason of a whole answer. Raises OSError when the server cannot be reached.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_replay(port, path, plan, patience_s, finish))
    return uvloop.run(_replay(port, path, plan, patience_s, finish))


async def _replay(
    port: int, path: str, plan: Sequence[Planned], patience_s: float, finish: str
) -> list[Answer]:
    pool = _Pool(port, finish)
    requests = [request_bytes("127.0.0.1", port, path, one.body) for one in plan]
    answers = [Answer(one.at_s) for one in plan]
    pool.start_s = time.monotonic() + LEAD_S
    tasks = [
        asyncio.ensure_future(pool.ask(answer, request))
        for answer, request in zip(answers, requests, strict=True)
    ]
    last_s = max((one.at_s for one in plan), default=0.0)
    done, late = await asyncio.wait(tasks, timeout=LEAD_S + last_s + patience_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    pool.close()
    for task in done:
        task.result()  # raises what it raised
    return answers


class _Pool:
    """The connections; `idle` those at rest."""

    def __init__(self, port: int, finish: str) -> None:
        self.finish = finish
        self.start_s = 0.0
        self.idle: list[_Connection] = []
        self._port = port
        self._all: list[_Connection] = []

    async def ask(self, answer: Answer, request: bytes) -> None:
        """Waits for the planned time, sends, and waits for the end of the answer."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self.start_s + answer.planned_s - time.monotonic()))
        if self.idle:
            connection = self.idle.pop()
        else:
            _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
            self._all.append(connection)
        await connection.ask(answer, request)

    def close(self) -> None:
        """Ends every connection; what is still under way stays unanswered."""
        for connection in self._all:
            connection.drop()


class _Connection(asyncio.Protocol):
    """One request after the other."""

    transport: asyncio.Transport

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._parser = ResponseParser(self)
        self._reader = StreamReader()
        self._answer: Answer | None = None
        self._ended: asyncio.Future[None]
        self._status = 0
        self._bad_body = b""
        self._last = False  # the server closes after this answer
        self._now_s = 0.0

    def ask(self, answer: Answer, request: bytes) -> asyncio.Future[None]:
        """Sends now; the future is done when the answer has ended, well or not."""
        self._answer, self._reader = answer, StreamReader()
        self._ended = asyncio.get_running_loop().create_future()
        answer.sent_s = time.monotonic() - self._pool.start_s
        self.transport.write(request)
        return self._ended

    def drop(self) -> None:
        """Ends the connection without a word about its request."""
        self._answer = None
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic() - self._pool.start_s
        try:
            self._parser.feed(data)
        except ValueError as error:  # BadResponse, or an event that is no JSON
            self._end(f"{type(error).__name__}: {error}")
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._pool.idle:
            self._pool.idle.remove(self)
        self._end(f"connection ended: {exc or 'closed by the server'}")

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._bad_body = status, b""
        self._last = headers.get(b"connection", b"").lower() == b"close"

    def on_body(self, data: bytes) -> None:
        if self._status == 200:
            self._reader.feed(data, self._now_s)
        else:
            self._bad_body += data

    def on_end(self) -> None:
        if self._answer is None:
            raise BadResponse("an answer that nobody asked for")
        if self._status != 200:
            problem: str | None = f"status {self._status}: {self._bad_body[:200].decode(errors='replace')}"
        else:
            problem = self._reader.problem(self._pool.finish)
        if not self._last:
            self._pool.idle.append(self)
        self._end(problem)

    def _end(self, problem: str | None) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            return
        answer.problem = problem
        if problem is None:
            assert self._reader.first_s is not None
            assert self._reader.finish_s is not None
            answer.first_s, answer.last_s = self._reader.first_s, self._reader.finish_s
        if not self._ended.done():
            self._ended.set_result(None)
