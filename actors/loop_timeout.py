"""How long to wait for somebody who may only be slow: by the time that this event loop lived, not by the clock alone.

A process that was stopped for a minute, or a machine that was suspended, has not waited a minute for its peer: what the
peer sent meanwhile may lie in the socket unread, and the peer may have been stopped as well. So a limit is counted in
slices, each a timer of its own; one that fires late (we were away) does not count, a bounded number of times.
"""

import asyncio
from collections.abc import Callable
from typing import Any

SLICES = 10


class LoopTimeout:
    """Calls `give_up()` once after `limit_s` seconds of this loop's life, unless cancelled before.

    On a loop that runs in time that is `limit_s` by the clock; on one that stalls all the time at most twice as many
    (late) timers.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._slice_s = limit_s / SLICES
        self._left = self._excused = SLICES
        self._arm()

    def cancel(self) -> None:
        """No `give_up` any more. Idempotent."""
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
    """Whether `future` is done within so many seconds of this loop's life. It is neither cancelled nor read."""
    tired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timeout = LoopTimeout(limit_s, lambda: tired.set_result(None))
    try:
        await asyncio.wait((future, tired), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timeout.cancel()
    return future.done()
