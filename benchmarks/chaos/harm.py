"""Carries a fault out and ends it: signals, limits of memory, orders to sim engines, poisonous prompts."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from actors.engine.sim.faults import Order, give
from benchmarks.chaos.processes import Member
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
    the next fault did not wait for this one.
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


class Harmer:
    """Carries faults out. `poison` sends a poisonous prompt that kills engines of a role."""

    def __init__(
        self, orders: Path, poison: Callable[[str], Awaitable[None]], now_s: Callable[[], float]
    ) -> None:
        self._orders, self._now_s = orders, now_s
        self._poison = poison
        self._tasks: set[asyncio.Task[None]] = set()
        self.harmed: dict[str, Harm] = {}
        """The faults in force by the name of the member."""

    def begin(self, harm: Harm, member: Member) -> None:
        """Begins a fault at a member; it ends by itself."""
        task = asyncio.create_task(self._run(harm, member))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end_all(self) -> None:
        """Ends all faults in force at once."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, harm: Harm, member: Member) -> None:
        self.harmed[member.name] = harm
        try:
            await self._do(harm.fault, member)
        finally:
            if self.harmed.get(member.name) is harm:
                del self.harmed[member.name]
            harm.over_s = self._now_s() - harm.at_s

    async def _do(self, fault: Fault, member: Member) -> None:
        action, seconds = fault.kind.action, fault.seconds
        if action == "kill":
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
            member.starve()
            try:
                await _while_alive(member, seconds)
            finally:
                member.feed()
        elif action == "slow" and member.part == "core":
            await _slow_down(member, seconds)
        else:
            await self._order(fault, member)

    async def _order(self, fault: Fault, member: Member) -> None:
        orders = {
            "slow": Order(slow=10.0),
            "fail": Order(fail="kv_load" if fault.draw % 2 else "internal"),
            "stall": Order(stalled=True),
            "cut": Order(cut=True),
            "expire": Order(expire=True),
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
