"""Carries a fault out and ends it: signals, limits of memory, orders to sim engines and others, poisonous prompts."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from actors.engine.sim.faults import Order, give
from benchmarks.chaos.cuts import give_cuts
from benchmarks.chaos.processes import SHORT_BYTES, Member
from benchmarks.chaos.redis_ray import AWAY
from benchmarks.chaos.schedule import Fault

DUTY_S = (0.02, 0.18)
"""Seconds for which a process that is slowed to a tenth runs, and is stopped, in turn."""

LOOK_S = 0.2
APART_AFTER_S = 10.0
"""Seconds for which the connections of a killed ingress still count apart. ASSUMPTION: all have been closed by then."""


@dataclass(slots=True, eq=False)
class Harm:
    """One fault of a run. Times are seconds since its start on the live clock.

    `service_s` is when the last request stopped waiting in vain, after the beginning; `whole_s` when the part that was
    harmed was whole again, and `over_s` when the fault itself was over; these are None until known. `bounded` says that
    the next fault did not wait for this one. `hit` is the part of the member that was harmed, where the kind leaves it
    open.
    """

    fault: Fault
    victim: str
    at_s: float
    ends_s: float
    service_s: float = 0.0
    whole_s: float | None = None
    bounded: bool = False
    over_s: float | None = None
    ports: set[int] = field(default_factory=set)
    outcome: str = ""
    hit: str = ""

    @property
    def part(self) -> str:
        """The part that was harmed: a lender is an engine of one role or another."""
        return self.hit or self.fault.kind.part


class Harmer:
    """Carries faults out. `poison` sends a poisonous prompt that kills engines of a role."""

    def __init__(
        self, orders: Path, poison: Callable[[str], Awaitable[None]], now_s: Callable[[], float]
    ) -> None:
        self._orders, self._now_s = orders, now_s
        self._poison = poison
        self._tasks: set[asyncio.Task[None]] = set()
        self._cuts: list[tuple[int, int]] = []
        self.harmed: dict[str, Harm] = {}
        """The faults in force by the name of the member."""

    def begin(self, harm: Harm, member: Member, other: Member | None = None) -> None:
        """Begins a fault at a member, which may be cut off from an `other` one; it ends by itself."""
        task = asyncio.create_task(self._run(harm, member, other))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end_all(self) -> None:
        """Ends all faults in force at once."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, harm: Harm, member: Member, other: Member | None) -> None:
        self.harmed[member.name] = harm
        try:
            await self._do(harm, member, other)
        finally:
            if self.harmed.get(member.name) is harm:
                del self.harmed[member.name]
            harm.over_s = self._now_s() - harm.at_s

    async def _do(self, harm: Harm, member: Member, other: Member | None) -> None:
        fault = harm.fault
        action, seconds = fault.kind.action, fault.seconds
        if action == "kill" and member.part == "gcs":
            await self._take_gcs(member, seconds)
        elif action == "kill":
            member.signal(signal.SIGKILL)
        elif action == "poison":
            await self._poison(fault.kind.part)
        elif action == "stop":
            member.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                member.signal(signal.SIGCONT)
        elif action == "memory":
            await self._starve(harm, member)
        elif action == "partition":
            assert other is not None
            await self._part(member, other, seconds)
        elif action == "slow" and member.part == "core":
            await _slow_down(member, seconds)
        else:
            await self._order(fault, member)

    async def _take_gcs(self, member: Member, seconds: float) -> None:
        """Kills Ray's control process, which its supervisor starts again after `seconds`."""
        away = self._orders / AWAY
        away.touch()
        member.signal(signal.SIGKILL)
        try:
            await asyncio.sleep(seconds)
        finally:
            away.unlink()

    async def _starve(self, harm: Harm, member: Member) -> None:
        """Leaves a process no memory, and notes whether it died of that, or got none."""
        hoards = member.part != "core"
        name = member.engine_id or str(member.pid)
        limit = member.starve(hoards)
        if limit is None:
            return
        if hoards:
            give(self._orders, name, Order(hoard=True))
        harm.outcome = "nothing seen"
        try:
            for _ in range(round(harm.fault.seconds / LOOK_S)):
                taken_bytes = member.taken_bytes()
                if taken_bytes is None:
                    harm.outcome = "died"
                    return
                if hoards and taken_bytes > limit - SHORT_BYTES:
                    harm.outcome = "got no memory"
                await asyncio.sleep(LOOK_S)
        finally:
            if hoards:
                give(self._orders, name, None)
            member.feed()

    async def _part(self, member: Member, other: Member, seconds: float) -> None:
        """Lets nothing pass between two processes."""
        pair = (member.pid, other.pid)
        self._cuts.append(pair)
        give_cuts(self._orders, self._cuts)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._cuts.remove(pair)
            give_cuts(self._orders, self._cuts)

    async def _order(self, fault: Fault, member: Member) -> None:
        orders = {
            "slow": Order(slow=10.0),
            "fail": Order(fail="kv_load" if fault.draw % 2 else "internal"),
            "stall": Order(stalled=True),
            "cut": Order(cut=True),
            # what is lent is read at once, so a lender loses what it lends from now on, too
            "expire": Order(expire=True, lapse=fault.kind.part == "lender"),
            "swap": Order(swap=True),
        }
        assert member.engine_id is not None
        give(self._orders, member.engine_id, orders[fault.kind.action])
        try:
            await _while_alive(member, fault.seconds)
        finally:
            give(self._orders, member.engine_id, None)


async def _while_alive(member: Member, seconds: float) -> None:
    """Waits until the time is over or the process has ended."""
    for _ in range(round(seconds / LOOK_S)):
        if not member.alive():
            return
        await asyncio.sleep(LOOK_S)


async def _slow_down(member: Member, seconds: float) -> None:
    """Lets a process run for a tenth of the time only."""
    end_s = asyncio.get_running_loop().time() + seconds
    runs_s, rests_s = DUTY_S
    try:
        while asyncio.get_running_loop().time() < end_s and member.signal(signal.SIGSTOP):
            await asyncio.sleep(rests_s)
            member.signal(signal.SIGCONT)
            await asyncio.sleep(runs_s)
    finally:
        member.signal(signal.SIGCONT)
