"""A progress line on stderr for long runs; silent where stderr is no terminal."""

import sys
import time
from typing import TextIO


class ProgressLine:
    """Pass it to `simulate(progress=...)`, then `close()`. `total`: requests to come. Redrawn twice a second."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label, self._total = label, total
        self._stream = sys.stderr if stream is None else stream
        self._on = self._stream.isatty()
        self._started = self._drawn = time.monotonic()

    def __call__(self, ended: int, now_s: float) -> None:
        wall = time.monotonic()
        if not self._on or wall - self._drawn < 0.5:
            return
        self._drawn = wall
        share = ended / self._total if self._total else 1.0
        bar = "#" * round(30 * share)
        self._stream.write(
            f"\r{self._label} [{bar:<30}] {ended}/{self._total} requests, {now_s:.0f} s simulated, "
            f"{wall - self._started:.0f} s"
        )
        self._stream.flush()

    def close(self) -> None:
        """Ends the line."""
        if self._on:
            self._stream.write("\n")
            self._stream.flush()
