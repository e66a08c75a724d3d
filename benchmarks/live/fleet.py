"""Drives a live app whose fleet changes: numbers of engines by the admin API, and streams with their texts.

`Fleet` asks and orders over HTTP. `Streams` sends streaming requests from a thread of its own and keeps whole answers.
All times are seconds of `time.perf_counter`, which all threads of this process share.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from benchmarks.live.load import StreamConnection, request_bytes, run_fast
from benchmarks.live.openloop import Planned
from benchmarks.live.servers import ServerError, administrator
from benchmarks.live.sse import StreamReader, events_of, text_of

_T = TypeVar("_T")

SCALE = "/sluice/admin/scale"
COMPLETIONS = "/v1/completions"
POLL_S = 0.05


@dataclass(slots=True)
class Answer:
    """One streamed answer; `body` has its events. `problem` says why it is not whole, or is None."""

    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    problem: str | None = "not answered in time"
    body: bytes = field(default=b"", repr=False)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON objects of all whole events."""
        return events_of(self.body[: self.body.rfind(b"\n\n") + 2])

    @property
    def request_id(self) -> str:
        """The request's id as the router's journal has it; "" for an answer without events."""
        for event in self.events[:1]:
            return str(event.get("id", "")).partition("-")[2]
        return ""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(map(text_of, self.events))


class Streams:
    """Streaming requests to one app, on connections of their own, from a thread with its own event loop."""

    def __init__(self, port: int, path: str = COMPLETIONS) -> None:
        self._port, self._path = port, path
        self._loop: asyncio.AbstractEventLoop
        self._ready, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: run_fast(self._live()), name="streams", daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Ends the thread; what still streams is cut."""
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(30.0)

    def send(self, plan: Sequence[Planned], patience_s: float) -> "Future[list[Answer]]":
        """Sends each request at its time from now on, and waits for its end for at most `patience_s`."""

        async def every() -> list[Answer]:
            start_s = time.perf_counter()
            return list(
                await asyncio.gather(*(self._one(one.body, start_s + one.at_s, patience_s) for one in plan))
            )

        return self._run(every())

    @contextlib.contextmanager
    def kept(
        self, body: Callable[[int], bytes], connections: int, patience_s: float = 60.0
    ) -> Iterator[list[Answer]]:
        """A context in which `connections` requests are always open: after one has ended the next is sent, with the
        body of its number. The list grows with every answer; after the context the last ones have ended.
        """
        answers: list[Answer] = []
        stop, numbers = threading.Event(), iter(range(10**9))

        async def worker() -> None:
            while not stop.is_set():
                answers.append(await self._one(body(next(numbers)), 0.0, patience_s))
                if answers[-1].problem is not None:
                    # a server that refuses is not asked as fast as it can refuse
                    await asyncio.sleep(0.2)

        async def every() -> None:
            await asyncio.gather(*(worker() for _ in range(connections)))

        future = self._run(every())
        try:
            yield answers
        finally:
            stop.set()
            future.result(patience_s + 10.0)

    def _run(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _live(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._done.wait()

    async def _one(self, body: bytes, at_s: float, patience_s: float) -> Answer:
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        request = request_bytes("127.0.0.1", self._port, self._path, body)
        try:
            _, connection = await self._loop.create_connection(
                lambda: _Connection(request), "127.0.0.1", self._port
            )
        except OSError as error:
            return Answer(sent_s=time.perf_counter(), problem=f"no connection: {error}")
        try:
            return await asyncio.wait_for(asyncio.shield(connection.ended), patience_s)
        except TimeoutError:
            return Answer(sent_s=connection.sent_s)
        finally:
            connection.drop()


class _Connection(StreamConnection):
    """A connection of one request; `ended` has the answer."""

    def __init__(self, request: bytes) -> None:
        super().__init__()
        self.ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._request = request
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(self._request)

    def on_body(self, data: bytes) -> None:
        super().on_body(data)
        self._parts.append(bytes(data))

    def answered(self, reader: StreamReader, problem: str | None, reusable: bool) -> None:
        made = Answer(
            self.sent_s, reader.first_s or 0.0, reader.finish_s or 0.0, problem, b"".join(self._parts)
        )
        if not self.ended.done():
            self.ended.set_result(made)


class Fleet:
    """The app's fleet, over its API. Methods raise httpx's errors."""

    def __init__(self, port: int) -> None:
        self._client = administrator(port, 60.0)

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def status(self) -> dict[str, Any]:
        """Returns the answer of `/sluice/status`."""
        answer: dict[str, Any] = self._client.get("/sluice/status").raise_for_status().json()
        return answer

    def engines(self, **wanted: str) -> list[str]:
        """Returns the ids of the ready engines with these properties, such as duty="warm"."""
        return [
            engine["id"]
            for engine in self.status()["engines"]
            if engine["state"] == "ready" and all(engine[key] == value for key, value in wanted.items())
        ]

    def numbers(self) -> dict[str, int]:
        """Returns the number of ready engines by group and duty, such as {"d active": 2}."""
        found: dict[str, int] = {}
        for engine in self.status()["engines"]:
            if engine["state"] == "ready":
                key = f"{engine['id'].rpartition('-')[0]} {engine['duty']}"
                found[key] = found.get(key, 0) + 1
        return found

    def scale(self, counts: Mapping[str, int] | None) -> float:
        """Orders numbers of serving replicas by group, or gives them back to the policy (None). Returns when the order
        was sent.
        """
        sent_s = time.perf_counter()
        order = {"mode": "auto"} if counts is None else {"counts": dict(counts)}
        self._client.put(SCALE, json=order).raise_for_status()
        return sent_s

    def scaling(self) -> dict[str, Any]:
        """Returns the autoscaler's state."""
        answer: dict[str, Any] = self._client.get(SCALE).raise_for_status().json()
        return answer

    def takes_orders(self) -> bool:
        """Returns whether the autoscaler is connected and knows all groups, so that it takes an order."""
        return all(group["replicas"] is not None for group in self.scaling()["groups"])

    def sleeps(self) -> bool:
        """Returns whether the application sleeps and has no engine left."""
        status = self.status()
        return not status["engines"] and status["sleep"]["phase"] == "asleep"

    def metric(self, name: str) -> float:
        """Returns the sum of all samples of a metric; 0.0 while there is none."""
        total = 0.0
        for line in self._client.get("/metrics").raise_for_status().text.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                total += float(line.rpartition(" ")[2])
        return total

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Polls until `condition()` holds and returns when it did. Raises ServerError after `timeout_s`."""
        end_s = time.perf_counter() + timeout_s
        while time.perf_counter() < end_s:
            with contextlib.suppress(httpx.HTTPError):
                if condition():
                    return time.perf_counter()
            time.sleep(POLL_S)
        raise ServerError(f"not within {timeout_s:.0f} s: {what}; the engines are {self.numbers()}")

    def wait_role(self, engine: str, role: str, timeout_s: float = 30.0) -> float:
        """Waits until an engine serves this role and returns when it did."""
        return self.wait(
            lambda: engine in self.engines(role=role, duty="active"), f"{engine} serves {role}", timeout_s
        )

    def wait_idle(self, timeout_s: float = 120.0) -> None:
        """Waits until no request is open and no lease is held."""

        def idle() -> bool:
            status = self.status()
            busy = any(engine["running"] or engine["waiting"] for engine in status["engines"])
            return not (busy or status["leases"] or any(status["requests"].values()))

        self.wait(idle, "nothing is under way", timeout_s)


def first_tokens(
    answers: Sequence[Answer], routes: Mapping[str, str], engines: Sequence[str], since_s: float
) -> dict[str, float]:
    """Returns the seconds from `since_s` to the first text of any answer from each of `engines`; an engine that has
    given none is left out.
    """
    found: dict[str, float] = {}
    for answer in sorted(answers, key=lambda a: a.first_s):
        if answer.first_s <= since_s:
            continue
        engine = routes.get(answer.request_id, "")
        if engine in engines and engine not in found:
            found[engine] = answer.first_s - since_s
    return found
