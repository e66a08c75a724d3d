"""Timeouts that count the time for which this event loop ran, not the time on the clock.

A process that was stopped for a minute, or a machine that was suspended, has not waited a minute for its peer: the
peer's answer may lie in the socket unread, and the peer may have been stopped as well. Time is therefore counted in
slices, each with a timer of its own (`LoopTicks`). A timer that fires late shows that the loop was stopped, so its
slice does not count. This is so for at most as many slices as the limit has (`Silence`), so that a limit ends even on
a slow machine.
"""

import asyncio
from collections.abc import Callable
from typing import Any

SLICES = 10


class LoopTicks:
    """Calls `tick(lived)` every `period_s` seconds until it is cancelled. `lived` says whether the loop ran meanwhile:
    it is False where the tick comes late by more than a period. `was_late_s` says by how many seconds the present tick,
    or the one before, came late.
    """

    __slots__ = ("_due_s", "_loop", "_period_s", "_tick", "_timer", "was_late_s")

    def __init__(self, period_s: float, tick: Callable[[bool], None]) -> None:
        self._period_s, self._tick = period_s, tick
        self._loop = asyncio.get_running_loop()
        self.was_late_s = 0.0
        self._arm()

    def cancel(self) -> None:
        """Stops the ticks. Idempotent."""
        self._timer.cancel()

    def late_s(self) -> float:
        """Returns by how many seconds the next tick is overdue."""
        return max(0.0, self._loop.time() - self._due_s)

    def _arm(self) -> None:
        self._due_s = self._loop.time() + self._period_s
        self._timer = self._loop.call_later(self._period_s, self._fire)

    def _fire(self) -> None:
        self.was_late_s = max(0.0, self._loop.time() - self._due_s)
        self._arm()
        self._tick(self.was_late_s <= self._period_s)


class Silence:
    """Counts the ticks since something was heard. Whoever hears it sets `heard`."""

    __slots__ = ("_excused", "_left", "_limit", "heard")

    def __init__(self, limit: int) -> None:
        self._limit = self._left = self._excused = limit
        self.heard = False

    @property
    def missed(self) -> int:
        """The ticks since something was heard, not counting those in which the loop was stopped."""
        return 0 if self.heard else self._limit - self._left

    def tick(self, lived: bool) -> bool:
        """Counts one tick. Returns whether nothing was heard for `limit` ticks, not counting those in which the loop
        was stopped (at most `limit` of them).
        """
        if self.heard:
            self.heard, self._left, self._excused = False, self._limit, self._limit
        elif lived or not self._excused:
            self._left -= 1
        else:
            self._excused -= 1
        return self._left <= 0


class LoopTimeout:
    """Calls `give_up()` once after `limit_s` seconds for which this loop ran, unless it is cancelled before.

    On a loop that runs on time these are `limit_s` seconds by the clock. On a loop whose timers are all late, the
    timeout needs twice the number of timers.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._silence = Silence(SLICES)
        self._ticks = LoopTicks(limit_s / SLICES, self._slice)

    def cancel(self) -> None:
        """Stops the timeout, so that `give_up` is not called any more. Idempotent."""
        self._ticks.cancel()

    def _slice(self, lived: bool) -> None:
        if self._silence.tick(lived):
            self._ticks.cancel()
            self._give_up()


async def within(limit_s: float, future: "asyncio.Future[Any]") -> bool:
    """Waits for `future` for at most `limit_s` seconds for which this loop ran, and returns whether it is done. The
    future is neither cancelled nor read.
    """
    tired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timeout = LoopTimeout(limit_s, lambda: tired.set_result(None))
    try:
        await asyncio.wait((future, tired), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timeout.cancel()
    return future.done()
