"""A page that is made anew only when it is due, because making it holds up the streams of the same event loop.

`/metrics` and `/sluice/status` are open to everybody, can be asked for many times in one packet, and take the longer to
make the more engines there are. A page is kept until making it again and again takes at most `SHARE` of the loop's
time, but never for longer than a bound.
"""

import time
from collections.abc import Callable

SHARE = 0.5
"""Most of the event loop's time that one page may take. ASSUMPTION: streams go on beside half a loop, and a page that
is made in 5 ms is never older than 10 ms, less than an answer takes that it should count."""


class KeptPage:
    """The bytes that `make` returns, kept for at most `max_age_s` (0: not at all).

    `clock_s` is the time by which a page grows old, and `cpu_s` the time that this thread has computed.
    """

    def __init__(
        self,
        make: Callable[[], bytes],
        max_age_s: float,
        clock_s: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._make, self._max_age_s = make, max_age_s
        self._clock_s, self._cpu_s = clock_s, cpu_s
        self._page: bytes | None = None
        self._until_s = 0.0

    def get(self) -> bytes:
        """Returns the page as it is kept, or as `make` returns it now; an error of that is raised and nothing kept."""
        if self._page is None or self._clock_s() >= self._until_s:
            began_s = self._cpu_s()
            self._page = None
            self._page = self._make()
            took_s = self._cpu_s() - began_s
            self._until_s = self._clock_s() + min(self._max_age_s, took_s / SHARE)
        return self._page
