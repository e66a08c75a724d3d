"""The signs of a finding: errors in the log, exceptions in the event loop, and memory that grows."""

import asyncio
import gc
import logging
import math
import os
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

GROWTH_BYTES = 64 * 2**20
"""Most growth of a process after its first tenth. ASSUMPTION: caches and rings that fill up take less; a leak of 100
bytes a case takes 100 MB in a million.
"""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES


class Watch(logging.Handler):
    """Collects findings: error records, exceptions of callbacks, and what a target notes. `kinds` counts outcomes."""

    def __init__(self, most_s: float = math.inf) -> None:
        super().__init__(logging.ERROR)
        self._most_s = most_s
        self.findings: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.rss: list[int] = []
        self.cases = 0
        self.broken = False
        self._began_s = time.monotonic()
        self._rss_first = rss_bytes()

    def __enter__(self) -> "Watch":
        logging.getLogger().addHandler(self)
        asyncio.get_running_loop().set_exception_handler(self._broken)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if _says_what_is_wrong(error) and record.name == "actors.wire.channel":
            self.kinds[f"refused: {str(error)[:20]}"] += 1
            return
        self.note(logging.Formatter().format(record))

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        record = logging.LogRecord("loop", logging.ERROR, "", 0, str(context["message"]), (), None)
        if error is not None:
            record.exc_info = (type(error), error, error.__traceback__)
        self.emit(record)

    @property
    def over(self) -> bool:
        """Whether the part is to end before all its cases, for time or for an error of its own."""
        return self.broken or time.monotonic() - self._began_s > self._most_s

    def note(self, finding: str) -> None:
        """Notes a finding."""
        if len(self.findings) < 1000:
            self.findings.append(finding)

    def fail(self, error: BaseException) -> None:
        """Notes an error of the fuzzer itself, after which it stops."""
        self.broken = True
        self.note("".join(traceback.format_exception(error)))

    def count(self, kind: str, cases: int = 1) -> None:
        """Counts the outcome of some cases."""
        self.kinds[kind] += cases
        self.cases += cases

    def sample(self) -> None:
        """Notes how much memory there is now."""
        gc.collect()
        self.rss.append(rss_bytes())

    def report(self) -> dict[str, Any]:
        """Returns counts, memory and findings. Memory that has grown too much is one of these."""
        grown = max(self.rss) - self.rss[len(self.rss) // 10] if len(self.rss) > 10 else 0
        if grown > GROWTH_BYTES:
            self.note(f"memory grew by {grown} bytes: {self.rss}")
        return {
            "cases": self.cases,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "rss_first_mb": round(self._rss_first / 1e6, 1),
            "rss_last_mb": round(rss_bytes() / 1e6, 1),
            "rss_mb": [round(n / 1e6, 1) for n in self.rss[:: max(1, len(self.rss) // 10)]],
            "kinds": dict(self.kinds.most_common()),
            "findings": len(self.findings),
        }


def _says_what_is_wrong(error: BaseException | None) -> bool:
    """Returns whether an error is a ValueError of ours, not one that a function of Python's raised."""
    return type(error) is ValueError or (
        isinstance(error, ValueError) and type(error).__module__ != "builtins"
    )
