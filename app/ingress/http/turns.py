"""Turns: requests that arrive together begin one after another, with the rest of the loop's work between them.

Streams of equal length end in the same step, and their clients come back in the same moment. If all of them began in
one iteration of the event loop, the answers of router and engines about the first ones would wait until the last one
had been parsed: each stage of a burst would end before the next one begins. So one iteration begins requests for
`TURN_S`, and what has come beyond that begins in the next ones, in the order of its arrival.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

# ASSUMPTION: three or four requests of some 0.08 ms each. A look at the sockets costs some 0.01 ms, a thirtieth of it.
TURN_S = 0.0003
"""Seconds for which one iteration of the loop begins requests. The request during which they pass is the last one."""


class Turns:
    """The turns of all connections of one listener. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # when this iteration has begun its first request; None if it has begun none
        self._since_s: float | None = None
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self) -> bool:
        """Returns whether a request may begin now. If not, whoever asked calls `wait`."""
        if self._waiting:
            return False
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
            self._loop.call_soon(self._next_iteration)
        return now_s - self._since_s < TURN_S

    def wait(self, begin: Callable[[], None]) -> None:
        """Has `begin` called in a later iteration, behind all that wait already."""
        self._waiting.append(begin)

    def _next_iteration(self) -> None:
        waiting = self._waiting
        if not waiting:
            self._since_s = None
            return
        self._since_s = since_s = self._clock()
        # what waits behind these is for the iteration after the next look at the sockets
        self._loop.call_soon(self._next_iteration)
        waiting.popleft()()
        while waiting and self._clock() - since_s < TURN_S:
            waiting.popleft()()
