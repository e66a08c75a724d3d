"""The links by which a sim engine sends KV, chosen by a name pattern of the reading engine. Transfers on a link share
it evenly.

    t_transfer = latency_s + time at bandwidth / n(t),  n(t): transfers of this engine on that link at that moment

With links, several sim engines on one machine can lie in tiers of different bandwidth, and transfers of one sender slow
each other down as they do on a network card (NetKV III-C). KV for a reader that no pattern fits moves by the timing
profile, unaffected by other transfers. Not claimed: links shared by several senders, or limits of the reader.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

MAX_EARLY_S = 1e-3
"""Seconds before its end at which a transfer counts as ended. uvloop counts whole milliseconds, so timers may fire
early."""


Sent = Callable[[float], None]
"""Is called with the seconds that bytes took, when they have arrived."""


@dataclass(frozen=True, slots=True)
class SimLink:
    """Configuration of a link. The constructor raises ValueError if a number is impossible."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise ValueError(
                f"a link's bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}: it must be above 0 and finite"
            )
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"a link's latency_s is {self.latency_s}: it must be at least 0 and finite")


class SharedLink:
    """Processor sharing of one link. Times are in s on the caller's clock, which never runs backwards.

    `served` is the number of bytes that a transfer present from the beginning would have got. A transfer of b bytes
    that begins when `served` is s ends when it is s + b, regardless of the transfers that join or leave in the
    meantime.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._served = 0.0
        self._at_s = 0.0
        self._ends: dict[str, float] = {}  # key -> `served` at its end
        self._heap: list[tuple[float, str]] = []  # may still hold dropped transfers

    def begin(self, key: str, n_bytes: float, now_s: float) -> None:
        """Adds a transfer."""
        self._advance(now_s)
        self._ends[key] = self._served + n_bytes
        heapq.heappush(self._heap, (self._ends[key], key))

    def drop(self, key: str, now_s: float) -> None:
        """Removes a transfer before its end. An unknown key is no error."""
        self._advance(now_s)
        self._ends.pop(key, None)

    def next_end_s(self) -> float | None:
        """Returns the time at which the next transfer ends if none joins before, or None without transfers."""
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        return self._at_s + max(0.0, self._heap[0][0] - self._served) * len(self._ends) / self._bytes_per_s

    def end_next(self) -> tuple[str, float]:
        """Removes the transfer that ends next, and returns its key and its end time. `next_end_s` must not be None."""
        end_s = self.next_end_s()
        assert end_s is not None
        self._advance(end_s)
        _, key = heapq.heappop(self._heap)
        del self._ends[key]
        return key, end_s

    def _advance(self, now_s: float) -> None:
        if self._ends:
            self._served += max(0.0, now_s - self._at_s) * self._bytes_per_s / len(self._ends)
        self._at_s = max(self._at_s, now_s)


@dataclass(slots=True)
class _Link:
    """A configured link with its transfers and its timer."""

    latency_s: float
    shared: SharedLink
    timer: asyncio.TimerHandle | None = None


class LinkPacer:
    """All links of one node of a sending engine."""

    def __init__(self, links: Mapping[str, SimLink]) -> None:
        self._links = {
            pattern: _Link(link.latency_s, SharedLink(link.bandwidth_bytes_per_s))
            for pattern, link in links.items()
        }
        self._loop = asyncio.get_running_loop()
        self._begun: dict[str, tuple[_Link, float, Sent]] = {}
        self._arriving: dict[str, asyncio.TimerHandle] = {}

    def fits(self, reader: str) -> bool:
        """Whether some link leads to this reader."""
        return self._link_to(reader) is not None

    def _link_to(self, reader: str) -> _Link | None:
        return next((link for pattern, link in self._links.items() if fnmatchcase(reader, pattern)), None)

    def begin(self, key: str, reader: str, n_bytes: int, sent: Sent) -> bool:
        """Starts to send; `sent(seconds)` is called when the bytes have arrived, `seconds` after this call. Returns
        False, and sends nothing, if no pattern fits the reader.
        """
        link = self._link_to(reader)
        if link is None:
            return False
        now_s = self._loop.time()
        # Transfers that have ended by now must not be slowed down by the new one.
        self._end_due(link)
        self._begun[key] = (link, now_s, sent)
        link.shared.begin(key, n_bytes, now_s)
        self._set_timer(link)
        return True

    def drop(self, key: str) -> None:
        """Stops sending for a read that has ended for another reason. An unknown key is no error."""
        begun = self._begun.pop(key, None)
        if begun is not None:
            begun[0].shared.drop(key, self._loop.time())
            self._set_timer(begun[0])
        arriving = self._arriving.pop(key, None)
        if arriving is not None:
            arriving.cancel()

    def stop(self) -> None:
        """Drops all transfers."""
        for key in [*self._begun, *self._arriving]:
            self.drop(key)

    def _set_timer(self, link: _Link) -> None:
        if link.timer is not None:
            link.timer.cancel()
        end_s = link.shared.next_end_s()
        link.timer = None if end_s is None else self._loop.call_at(end_s, self._due, link)

    def _due(self, link: _Link) -> None:
        self._end_due(link)
        self._set_timer(link)

    def _end_due(self, link: _Link) -> None:
        now_s = self._loop.time()
        while (end_s := link.shared.next_end_s()) is not None and end_s <= now_s + MAX_EARLY_S:
            key, end_s = link.shared.end_next()
            _, begun_s, sent = self._begun.pop(key)
            at_s = end_s + link.latency_s
            self._arriving[key] = self._loop.call_at(at_s, self._arrived, key, sent, at_s - begun_s)

    def _arrived(self, key: str, sent: Sent, seconds: float) -> None:
        del self._arriving[key]
        sent(seconds)
