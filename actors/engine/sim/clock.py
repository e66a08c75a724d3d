"""The step clock of a sim engine. It has one timer while there is work, and none otherwise.

Steps follow each other on an absolute schedule, so a late step does not delay the next. The ranks of an engine with a
step barrier share a clock. A step then lasts as long as that of the slowest rank, a rank without work waits, and work
that arrives during a step joins the next one (as in data-parallel MoE engines, whose ranks meet in every layer).
"""

import asyncio
import time
from typing import Protocol

MAX_LAG_S = 0.05
"""ASSUMPTION: seconds of delay after which the event loop counts as stalled; the steps that it missed are then not made
up for."""

MAX_EARLY_S = 1e-4
"""Seconds by which a step may end early. uvloop counts whole milliseconds, so its timers may fire too early."""


class Stepper(Protocol):
    """A member that a clock drives. Neither method raises."""

    def begin_step(self) -> float | None:
        """Starts a step. Returns its duration in seconds, or None if there is nothing to compute now."""

    def end_step(self) -> None:
        """Ends the step that `begin_step` started."""


class StepClock:
    """Drives the steps of its members together. The members call `kick` when work has arrived. `ticking` says whether
    steps are under way. The present one, or the last one, began at `step_began_s` and ends at `step_end_s`.
    """

    def __init__(self) -> None:
        self.ticking = False
        self._members: list[Stepper] = []
        self._stepping: list[Stepper] = []
        self.step_began_s = self.step_end_s = 0.0
        self._loop: asyncio.AbstractEventLoop

    def join(self, member: Stepper) -> None:
        """Adds a member, which takes part from the next step on. Must be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._members.append(member)

    def kick(self) -> None:
        """Starts the steps if none is running. Work that arrives later in this loop iteration joins the same step."""
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
        self.step_began_s, self.step_end_s = start_s, start_s + longest_s
        self._loop.call_later(self.step_end_s - time.monotonic(), self._end)

    def _end(self) -> None:
        early_s = self.step_end_s - time.monotonic()
        if early_s > MAX_EARLY_S:
            self._loop.call_later(max(early_s, 1e-3), self._end)
            return
        for member in self._stepping:
            member.end_step()
        now_s = time.monotonic()
        self._begin(now_s if now_s - self.step_end_s > MAX_LAG_S else self.step_end_s)
