"""The clients of a run: each sends one request after the other, judges its answer, and notes every gap in it.

What is lost with an ingress itself counts apart: answers that end with the connection to an ingress that has died of
what was done to it, and connections that the kernel hands to one that is dead or stopped. An ingress that lives owes an
answer to all that it was asked, and an error is none. Bystanders that are refused as poison count apart: of poison, and
of two faults that took two engines from the same request.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.chaos.answers import Answer
from benchmarks.chaos.asks import Ask
from benchmarks.chaos.http import Connection, ConnectionEndedError, connect, get, post_bytes

GAP_S = 0.5
"""Seconds without progress that are noted. ASSUMPTION: far above a step, and below what anybody calls a stall."""

HANG_S = 100.0
"""Seconds without progress after which a request counts as failed; the longest stop lasts 60 s."""

GREET_S = 6.0
"""Seconds of this process's own running time in which a new connection must be answered, as the aim for a stall after a
silent process is; an ingress that is stopped does not answer."""

REQUESTS_A_CONNECTION = 10
"""Requests after which a client connects anew, so that its next ones may reach another ingress."""

DEAD_S = 2.0
"""Seconds in which a process whose connections have ended must be seen to have died: the kernel closes them first."""

TICK_S = 0.05
MAX_TICK_S = 0.25
DETAILS = 40
"""Failed and wrong answers that a result describes one by one."""


class LiveClock:
    """Seconds that this process lived: a freeze of its own event loop is not blamed on the server.

    A server's stall during a freeze is not seen either, so figures count only where `frozen_share` is small.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.frozen_s = 0.0

    async def run(self) -> None:
        """Advances the clock until it is cancelled."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            lived_s = min(now_s - last_s, MAX_TICK_S)
            self.now_s += lived_s
            self.frozen_s += now_s - last_s - lived_s
            last_s = now_s

    def frozen_share(self) -> float:
        """Returns the share of the time since its beginning for which this clock stood still."""
        whole_s = self.now_s + self.frozen_s
        return self.frozen_s / whole_s if whole_s else 0.0


class Apart(NamedTuple):
    """A fault of an ingress, whose connections count apart. `dead` says whether the ingress has died."""

    fault: str
    dead: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a stream made no progress, or by which a whole answer was late, for whatever reasons. It counts
    `apart` if its ingress itself was harmed.
    """

    start_s: float
    end_s: float
    seconds: float
    form: str
    apart: bool
    whole: bool = False


@dataclass(slots=True, eq=False)
class Exchange:
    """One request under way."""

    ask: Ask
    answer: Answer
    port: int
    sent_s: float
    last_s: float
    apart: Apart | None = None
    gaps: list[tuple[float, float]] = field(default_factory=list)
    hung: bool = False

    def progress(self, now_s: float) -> None:
        """Notes that a part of the answer has come."""
        if now_s - self.last_s > GAP_S:
            self.gaps.append((self.last_s, now_s))
        self.last_s = now_s

    def waiting_s(self, now_s: float) -> float:
        """Returns the seconds for which the request has waited in vain."""
        if self.ask.stream:
            return now_s - self.last_s
        return max(0.0, now_s - self.sent_s - self.ask.output_s)


@dataclass(slots=True)
class Tally:
    """The counts of a run. `details` describe the first failed and wrong answers: (seconds, cause, form, message)."""

    requests: int = 0
    right: int = 0
    by_form: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    near_ties: int = 0
    apart: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    gaps: list[Gap] = field(default_factory=list)
    details: list[tuple[float, str, str, str]] = field(default_factory=list)
    ended_at_s: list[float] = field(default_factory=list)

    def describe(self, now_s: float, cause: str, form: str, message: str) -> None:
        """Keeps the description of one failed or wrong answer, if there is room for it."""
        if len(self.details) < DETAILS:
            self.details.append((round(now_s, 1), cause, form, message[:300]))


Judge = Callable[[Ask, Answer], tuple[str, str] | None]
"""Returns None for a right answer, or ("wrong" or "near tie", why)."""


class Clients:
    """All clients of one run. `harmed` says what is wrong with an ingress now, or None. `excused` names what explains
    a failure, by its cause and the time at which it was sent, which then counts apart, or None.
    """

    def __init__(
        self,
        port: int,
        judge: Judge,
        harmed: Callable[[], str | None],
        excused: Callable[[str, float], str | None] = lambda _cause, _sent_s: None,
    ) -> None:
        self.clock = LiveClock()
        self.tally = Tally()
        self.open: set[Exchange] = set()
        self._apart: dict[int, Apart] = {}
        self._port, self._judge, self._harmed = port, judge, harmed
        self._excused = excused
        self._stopping = False

    def stop(self) -> None:
        """Lets the clients end after the requests that they have under way."""
        self._stopping = True

    def waiting_s(self) -> float:
        """Returns the longest time for which an open request, which does not count apart, has waited in vain."""
        now_s = self.clock.now_s
        return max((e.waiting_s(now_s) for e in self.open if e.apart is None), default=0.0)

    def set_apart(self, ports: set[int], apart: Apart) -> None:
        """Marks the requests on these connections, present and future ones: their ingress is about to be harmed."""
        self._apart |= dict.fromkeys(ports, apart)
        for exchange in self.open:
            if exchange.port in ports:
                exchange.apart = apart

    def end_apart(self, ports: set[int]) -> None:
        """Ends `set_apart` for requests that begin from now on."""
        for port in ports:
            self._apart.pop(port, None)

    def cut_hung(self) -> None:
        """Ends the requests that hang for longer than `HANG_S`; each then fails."""
        for exchange in self.open:
            if exchange.waiting_s(self.clock.now_s) > HANG_S:
                exchange.hung = True

    async def run(self, make: Callable[[], Ask]) -> None:
        """Sends requests until `stop` is called; one client of many."""
        connection: Connection | None = None
        used = 0
        while not self._stopping:
            if connection is None or not connection.usable or used >= REQUESTS_A_CONNECTION:
                if connection is not None:
                    connection.drop()
                connection, used = await self._connect(), 0
                if connection is None:
                    await asyncio.sleep(0.2)
                    continue
            used += 1
            await self.send(connection, make())
        if connection is not None:
            connection.drop()

    async def send(self, connection: Connection, ask: Ask) -> Answer:
        """Sends one request and counts its answer."""
        now_s = self.clock.now_s
        exchange = Exchange(ask, Answer(ask.stream), connection.local_port, now_s, now_s)
        exchange.apart = self._apart.get(exchange.port)
        answer = exchange.answer

        def piece(data: bytes) -> None:
            if answer.feed(data):
                exchange.progress(self.clock.now_s)

        self.open.add(exchange)
        cut: str | None = None
        lost = False
        asking = asyncio.ensure_future(connection.ask(post_bytes(ask.path, ask.body), piece, answer.head))
        try:
            while not asking.done():
                await asyncio.wait([asking], timeout=1.0)
                if exchange.hung and not asking.done():
                    connection.drop()
            asking.result()
            answer.end()
        except ConnectionEndedError as error:
            cut = "hang" if exchange.hung else str(error)
        finally:
            self.open.discard(exchange)
        if cut is not None and exchange.apart is not None and not exchange.hung:
            lost = await _within(DEAD_S, exchange.apart.dead)
        self._count(exchange, cut, lost)
        return answer

    async def _connect(self) -> Connection | None:
        """Returns a connection to an ingress that answers, or None."""
        try:
            connection = await connect(self._port, GREET_S)
        except (OSError, TimeoutError) as error:
            self._not_connected(f"no connection: {type(error).__name__}")
            return None
        try:
            await get(connection, "/health/live", GREET_S)
        except (OSError, TimeoutError) as error:
            self._not_connected(f"no greeting: {type(error).__name__}")
            return None
        return connection

    def _not_connected(self, cause: str) -> None:
        fault = self._harmed()
        if fault is not None:
            self.tally.apart[f"{fault}: {cause}"] += 1
        else:
            self.tally.failed[cause] += 1
            self.tally.describe(self.clock.now_s, cause, "", "")

    def _count(self, exchange: Exchange, cut: str | None, lost: bool) -> None:
        """Counts an answer, which may be `cut`, and be `lost` with its ingress."""
        tally, ask, answer, now_s = self.tally, exchange.ask, exchange.answer, self.clock.now_s
        if ask.poison:
            tally.notes[f"poison: {cut or f'{answer.status} {answer.error}'}"] += 1
            return
        tally.requests += 1
        tally.by_form[ask.form.partition("+")[0]] += 1
        tally.ended_at_s.append(now_s)
        exchange.progress(now_s)
        self._keep_gaps(exchange)
        cause = cut
        if cause is None and (answer.status != 200 or answer.error is not None):
            where = "" if answer.status == 200 else f"{answer.status} "
            cause = f"{where}{answer.error}"
        if cause is not None:
            apart = exchange.apart.fault if lost and exchange.apart else self._excused(cause, exchange.sent_s)
            if apart is not None:
                tally.apart[f"{apart}: {cause}"] += 1
                return
            tally.failed[cause] += 1
            sent = f"sent {now_s - exchange.sent_s:.1f} s before: "
            tally.describe(now_s, cause, ask.form, sent + answer.message)
            return
        if answer.note is not None:
            tally.notes[f"answers with a note: {', '.join(sorted(answer.note))}"] += 1
        verdict = self._judge(ask, answer)
        if verdict is None:
            tally.right += 1
        elif verdict[0] == "near tie":
            tally.right += 1
            tally.near_ties += 1
        else:
            tally.wrong[ask.form] += 1
            tally.describe(now_s, "wrong", ask.form, verdict[1])

    def _keep_gaps(self, exchange: Exchange) -> None:
        ask, kept = exchange.ask, exchange.gaps
        if not ask.stream:
            late_s = exchange.last_s - exchange.sent_s - ask.output_s
            kept = [(exchange.last_s - late_s, exchange.last_s)] if late_s > GAP_S else []
        for start_s, end_s in kept:
            begun_s = start_s if ask.stream else exchange.sent_s
            self.tally.gaps.append(
                Gap(begun_s, end_s, end_s - start_s, ask.form, exchange.apart is not None, not ask.stream)
            )


async def _within(limit_s: float, condition: Callable[[], bool]) -> bool:
    """Waits for a condition, for `limit_s` at most, and returns whether it came about."""
    for _ in range(round(limit_s / TICK_S)):
        if condition():
            return True
        await asyncio.sleep(TICK_S)
    return condition()
