"""Timeouts that count the time for which this event loop ran, not the time on the clock.

A process that was stopped for a minute, or a machine that was suspended, has not waited a minute for its peer: the
peer's answer may lie in the socket unread, and the peer may have been stopped as well. A limit is therefore counted in
slices, each with a timer of its own. A timer that fires late shows that the loop was stopped, so its slice does not
count. This happens for at most SLICES slices, so that a timeout ends even on a slow machine.
"""

import asyncio
from collections.abc import Callable
from typing import Any

SLICES = 10


class LoopTimeout:
    """Calls `give_up()` once after `limit_s` seconds for which this loop ran, unless it is cancelled before.

    On a loop that runs on time these are `limit_s` seconds by the clock. On a loop whose timers are all late, the
    timeout needs twice the number of timers.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._slice_s = limit_s / SLICES
        self._left = self._excused = SLICES
        self._arm()

    def cancel(self) -> None:
        """Stops the timeout, so that `give_up` is not called any more. Idempotent."""
        self._timer.cancel()

    def _arm(self) -> None:
        self._due_s = self._loop.time() + self._slice_s
        self._timer = self._loop.call_later(self._slice_s, self._lived)

    def _lived(self) -> None:
        if self._loop.time() - self._due_s > self._slice_s and self._excused:
            self._excused -= 1
        else:
            self._left -= 1
        if self._left:
            self._arm()
        else:
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
