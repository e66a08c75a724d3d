"""The progress of a long run. A terminal shows a bar with the time that is left; other outputs get occasional lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_BAR_EVERY_S = 0.2
_LINE_EVERY_S = 30.0


def teller(clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Returns a function that prints a line behind the seconds since this call."""
    begun_s = clock()

    def say(text: str) -> None:
        print(f"[{clock() - begun_s:6.1f} s] {text}", flush=True)

    return say


class Progress:
    """The progress of `total` steps. It is a context manager, so that the bar ends when the work ends."""

    def __init__(
        self,
        label: str,
        total: float,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._total = total
        self._done = 0.0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._bar = self._stream.isatty()
        self._start_s = clock()
        self._shown_s: float | None = None

    def __enter__(self) -> Progress:
        self._show(self._clock(), "")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._stream.write("\n")
            self._stream.flush()

    def step(self, detail: str = "", steps: float = 1.0) -> None:
        """Notes that `steps` more steps are done."""
        self.at(self._done + steps, detail)

    def at(self, done: float, detail: str = "") -> None:
        """Notes that `done` steps are done in total."""
        self._done = min(done, self._total)
        now_s = self._clock()
        every_s = _BAR_EVERY_S if self._bar else _LINE_EVERY_S
        if self._shown_s is None or now_s - self._shown_s >= every_s or self._done >= self._total:
            self._show(now_s, detail)

    def _show(self, now_s: float, detail: str) -> None:
        self._shown_s = now_s
        share = self._done / self._total if self._total > 0 else 1.0
        line = f"{self._label}: {share:4.0%}  {_duration(now_s - self._start_s)} gone"
        if 0.0 < share < 1.0:
            line += f", about {_duration((now_s - self._start_s) * (1.0 - share) / share)} left"
        line += f"  {detail}" if detail else ""
        if self._bar:
            full = round(_WIDTH * share)
            self._stream.write(f"\r\x1b[K[{'#' * full}{'.' * (_WIDTH - full)}] {line}")
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3_600} h {whole % 3_600 // 60:02d} min"
