"""The step clock of a sim engine: one timer while there is work, none without.

One step follows the other on an absolute schedule: a late step does not delay the next. The ranks of an engine with a
step barrier share a clock: a step lasts as long as that of the slowest rank, a rank without work waits, and work that
arrives meanwhile joins the next step (data-parallel MoE engines, whose ranks meet in every layer).
"""

import asyncio
import time
from typing import Protocol

MAX_LAG_S = 0.05
"""A loop that is later than this was stalled, and the steps that it missed are not made up for. ASSUMPTION."""

MAX_EARLY_S = 1e-4
"""Seconds by which a step may end early. uvloop counts whole milliseconds, so its timers may fire before their time."""


class Stepper(Protocol):
    """A member that a clock drives. Neither call raises."""

    def begin_step(self) -> float | None:
        """Starts a step; its duration in seconds, None if nothing can be computed now."""

    def end_step(self) -> None:
        """Ends the step that `begin_step` started."""


class StepClock:
    """Drives its members together. `kick` after work has arrived."""

    def __init__(self) -> None:
        self.ticking = False
        self._members: list[Stepper] = []
        self._stepping: list[Stepper] = []
        self._step_end_s = 0.0
        self._loop: asyncio.AbstractEventLoop

    def join(self, member: Stepper) -> None:
        """One more to drive, from the next step on. In the event loop."""
        self._loop = asyncio.get_running_loop()
        self._members.append(member)

    def kick(self) -> None:
        """Starts the steps if they rest; what else arrives in this loop iteration joins the same step."""
        if not self.ticking:
            self.ticking = True
            self._loop.call_soon(self._begin, time.monotonic())

    def _begin(self, start_s: float) -> None:
        longest_s: float | None = None
        self._stepping = []
        for member in self._members:
            seconds = member.begin_step()
            if seconds is not None:
                self._stepping.append(member)
                longest_s = seconds if longest_s is None else max(longest_s, seconds)
        if longest_s is None:
            self.ticking = False
            return
        self._step_end_s = start_s + longest_s
        self._loop.call_later(self._step_end_s - time.monotonic(), self._end)

    def _end(self) -> None:
        early_s = self._step_end_s - time.monotonic()
        if early_s > MAX_EARLY_S:
            self._loop.call_later(max(early_s, 1e-3), self._end)
            return
        for member in self._stepping:
            member.end_step()
        now_s = time.monotonic()
        self._begin(now_s if now_s - self._step_end_s > MAX_LAG_S else self._step_end_s)
