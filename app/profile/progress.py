"""Shows the progress of a long measurement: a bar with the time left on a terminal, a line for each point elsewhere."""

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from app.profile.fold import Pair
from app.profile.plan import Point

_BAR = 24


class Progress:
    """Shows how far a measurement is; the caller calls `add` after each measured point.

    The time left is estimated from the points so far: a point takes the time of its arrivals plus that of its longest
    request, which is in proportion to `Point.weight`.
    """

    def __init__(self, todo: Sequence[Point], per_engine: int, out: TextIO = sys.stderr) -> None:
        self._todo = list(todo)
        self._per_engine = per_engine
        self._out = out
        self._done = 0
        self._spent_s = self._spans_s = self._weights = 0.0
        self._started_s = time.monotonic()

    def left_s(self) -> float | None:
        """Returns the estimated seconds to the end, or None before the first point."""
        if not self._weights:
            return None
        rest = self._todo[self._done :]
        per_weight_s = max(0.0, self._spent_s - self._spans_s) / self._weights
        return sum(self._span_s(p) + per_weight_s * p.weight for p in rest)

    def add(self, pair: Pair, seconds: float) -> None:
        """Counts one more measured point and shows it."""
        self._done += 1
        self._spent_s += seconds
        self._spans_s += min(seconds, self._span_s(pair.point))
        self._weights += pair.point.weight
        self._show(pair)

    def end(self) -> None:
        """Ends the line of the bar, where one is shown."""
        if self._out.isatty() and self._done:
            print(file=self._out)

    def _span_s(self, point: Point) -> float:
        """Returns the seconds that the arrivals of a point take, in both modes one after the other."""
        return 2 * self._per_engine / point.rate_per_s

    def _show(self, pair: Pair) -> None:
        total, point = len(self._todo), pair.point
        left_s = self.left_s()
        result = f"{pair.cell:+.2f}" if pair.whole else "failed"
        where = f"{point.prefill_tokens}->{point.decode_tokens} tokens at {point.rate_per_s:g}/s: {result}"
        eta = "" if left_s is None else f"  {_clock(left_s)} left"
        if self._out.isatty():
            full = round(_BAR * self._done / total)
            bar = "#" * full + "." * (_BAR - full)
            print(f"\r[{bar}] {self._done}/{total}{eta}  {where}\033[K", end="", file=self._out, flush=True)
        else:
            spent = _clock(time.monotonic() - self._started_s)
            print(f"{self._done}/{total}  {spent}{eta}  {where}", file=self._out, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
