"""The simulator's clock, a heap of callbacks keyed (time, priority, sequence).

Callbacks of one instant run in the order of their priority (lower first), then in the order in which they were
scheduled. There is no wall time and no randomness, so the same program always runs the same way.
"""

import heapq
import math
from collections.abc import Callable


class Timer:
    """A scheduled callback. After `cancel` it does not run; the clock drops it when its time comes."""

    __slots__ = ("callback", "time_s")

    def __init__(self, time_s: float, callback: Callable[[], None]) -> None:
        self.time_s = time_s
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Kernel:
    """The virtual clock. `now_s` is its time in seconds, and `events` is the number of callbacks that have run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, int, Timer]] = []
        self._sequence = 0
        self._stopped = False

    def at(self, time_s: float, callback: Callable[[], None], priority: int = 0) -> Timer:
        """Schedules `callback` for `time_s` and returns its timer.

        Raises ValueError for a time that has passed or is not finite.
        """
        if not (time_s >= self.now_s and math.isfinite(time_s)):
            raise ValueError(f"scheduled at {time_s}, but it is {self.now_s}: give a finite time from now on")
        timer = Timer(time_s, callback)
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, priority, self._sequence, timer))
        return timer

    def after(self, delay_s: float, callback: Callable[[], None], priority: int = 0) -> Timer:
        """Schedules `callback` to run in `delay_s` seconds (>= 0) and returns its timer."""
        return self.at(self.now_s + delay_s, callback, priority)

    def stop(self) -> None:
        """Makes `run` return after the callback that is running."""
        self._stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Runs callbacks until none is left, `stop` is called, or the next one comes after `until_s`.

        Callbacks after `until_s` stay scheduled.
        """
        self._stopped = False
        heap = self._heap
        while heap and not self._stopped:
            time_s, _, _, timer = heap[0]
            if time_s > until_s:
                self.now_s = until_s
                return
            heapq.heappop(heap)
            if timer.callback is None:
                continue
            self.now_s = time_s
            self.events += 1
            timer.callback()
