"""An open-loop load client, which sends each request at its planned time whether or not earlier ones have ended.

It uses raw HTTP/1.1 on kept-alive connections, like `benchmarks.live.load`. A request takes an idle connection, or
opens one. Each answer has its own times, so that replays can be compared request by request; they include the client's
own delay (sent - planned). Times are seconds from the start of the replay.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.live.load import StreamConnection, request_bytes, run_fast
from benchmarks.live.sse import StreamReader

# Seconds before the first request, in which the event loop starts up.
LEAD_S = 0.2


@dataclass(frozen=True, slots=True)
class Planned:
    """A request body, and the time at which it is to be sent, in seconds from the start."""

    at_s: float
    body: bytes


@dataclass(slots=True)
class Answer:
    """The outcome of one request.

    `problem` says why the answer is not whole; the times of text are valid only where it is None.
    """

    planned_s: float
    sent_s: float = 0.0
    first_s: float = 0.0  # first text
    last_s: float = 0.0  # finish reason
    ended_s: float = 0.0  # end of the answer, whole or not
    problem: str | None = "not answered in time"

    @property
    def late_s(self) -> float:
        """The client's own delay in sending, in seconds."""
        return self.sent_s - self.planned_s


def replay(
    port: int, path: str, plan: Sequence[Planned], patience_s: float, finish: str = "length"
) -> list[Answer]:
    """Sends all of `plan` to 127.0.0.1 and waits at most `patience_s` after the last; returns answers in that order.

    `finish` is the finish reason of a whole answer. Raises OSError when the server cannot be reached.
    """
    return run_fast(_replay(port, path, plan, patience_s, finish))


async def _replay(
    port: int, path: str, plan: Sequence[Planned], patience_s: float, finish: str
) -> list[Answer]:
    pool = _Pool(port, finish)
    requests = [request_bytes("127.0.0.1", port, path, one.body) for one in plan]
    answers = [Answer(one.at_s) for one in plan]
    pool.start_s = time.perf_counter() + LEAD_S
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
    """The connections of a replay; `idle` are those without a request."""

    def __init__(self, port: int, finish: str) -> None:
        self.finish = finish
        self.start_s = 0.0
        self.idle: list[_Connection] = []
        self._port = port
        self._all: list[_Connection] = []

    async def ask(self, answer: Answer, request: bytes) -> None:
        """Waits for the planned time, sends, and waits for the end of the answer."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self.start_s + answer.planned_s - time.perf_counter()))
        if self.idle:
            connection = self.idle.pop()
        else:
            _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
            self._all.append(connection)
        await connection.ask(answer, request)

    def close(self) -> None:
        """Ends every connection; unfinished requests stay unanswered."""
        for connection in self._all:
            connection.drop()


class _Connection(StreamConnection):
    """A connection that carries one request after the other, each sent when it is due."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__(pool.finish)
        self._pool = pool
        self._answer: Answer | None = None
        self._ended: asyncio.Future[None]

    def ask(self, answer: Answer, request: bytes) -> asyncio.Future[None]:
        """Sends a request now; returns a future that is done when the answer has ended, whole or not."""
        self._answer = answer
        self._ended = asyncio.get_running_loop().create_future()
        self.send(request)
        answer.sent_s = self.sent_s - self._pool.start_s
        return self._ended

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self in self._pool.idle:
            self._pool.idle.remove(self)

    def answered(self, reader: StreamReader, problem: str | None, reusable: bool) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None, "a request under way has its answer"
        if reusable:
            self._pool.idle.append(self)
        answer.problem, answer.ended_s = problem, time.perf_counter() - self._pool.start_s
        if problem is None:
            assert reader.first_s is not None
            assert reader.finish_s is not None
            answer.first_s = reader.first_s - self._pool.start_s
            answer.last_s = reader.finish_s - self._pool.start_s
        if not self._ended.done():
            self._ended.set_result(None)
