"""How far the prompt pool is scanned by one event, so that neither a backlog nor a storm of events costs more than its
bound. When a scan starts is the dispatcher's rule (`Dispatcher._pool_wakes`).

    room came       the whole pool is scanned from the front, at most `tick_entries` entries an event. The next event,
                    whatever it is, resumes where this one stopped. The scan starts again from the front when a more
                    urgent entry comes, when a scanned one begins to starve, and once more if more room comes meanwhile.
    no room came    only entries that came with this event are tried: nothing that waited before fits anywhere. A
                    starving entry forbids those behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policies.dispatch.config import DispatchConfig
from policies.state.reducer import ClusterState, PoolKey, pool_key
from policies.state.views import PoolEntry


class Placement(NamedTuple):
    """How an attempt to place entries ended."""

    bounded: bool
    """`tick_admissions` was reached; entries that fit may be left."""
    slots_left: bool
    """Some decode worker still has a free slot."""
    blocked: bool
    """A starving entry that fits nowhere was met; nothing behind it was tried."""


PlaceEntries = Callable[[list[PoolEntry]], Placement]
"""Sends to decode workers what it can of the entries."""


@dataclass(slots=True)
class _Progress:
    """How far the present scan has come."""

    unfinished: bool = False
    """A bound stopped the scan; the next event resumes it."""
    resume_after: PoolKey | None = None
    """The last entry scanned; entries up to this one fit nowhere."""
    oldest_s: float = float("inf")
    """When the oldest scanned entry entered the pool, in s."""
    rescan: bool = False
    """Room was freed while the scan was in progress; start another one from the front when this one ends."""
    blocked: bool = False
    """The scan ended early because a starving entry must not be overtaken."""
    left_pool: int = 0
    """Entries that had left the pool when the scan ended."""


class PoolScan:
    """The scan of one dispatcher's pool. `scan` is called for every event while the pool is not empty."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._progress = _Progress()

    def unblocked(self) -> bool:
        """Whether the last scan ended at a starving entry and some entry, this one or another, has left since."""
        return self._progress.blocked and self._progress.left_pool != self._state.left_pool

    def scan(
        self,
        room_came: bool,
        entered: list[PoolEntry],
        now_s: float,
        config: DispatchConfig,
        place: PlaceEntries,
    ) -> None:
        """Has the entries placed that may fit now; `entered` are those that came with this event."""
        if room_came or self._progress.unfinished:
            self._scan_on(room_came, entered, now_s, config, place)
        elif entered:
            self._try_new(entered, now_s, config, place)

    def _scan_on(
        self,
        room_came: bool,
        entered: list[PoolEntry],
        now_s: float,
        config: DispatchConfig,
        place: PlaceEntries,
    ) -> None:
        """Scans on, most urgent entry first, as far as the bounds allow."""
        progress, most = self._progress, config.tick_entries
        if progress.resume_after is not None:
            starved = now_s - progress.oldest_s > config.starvation_s
            if starved or any(pool_key(entry) < progress.resume_after for entry in entered):
                progress = self._progress = _Progress()
            progress.rescan |= room_came and progress.resume_after is not None
        progress.unfinished = True  # stands if the policy raises
        entries = self._state.waiting(progress.resume_after, most)
        placed = place(entries)
        if placed.bounded:
            return
        if placed.slots_left and not placed.blocked and len(entries) == most:
            progress.resume_after = pool_key(entries[-1])
            progress.oldest_s = min(progress.oldest_s, min(entry.entered_s for entry in entries))
        else:
            self._progress = _Progress(
                unfinished=progress.rescan, blocked=placed.blocked, left_pool=self._state.left_pool
            )

    def _try_new(
        self, entered: Sequence[PoolEntry], now_s: float, config: DispatchConfig, place: PlaceEntries
    ) -> None:
        """Tries the new entries only, and of these none that a starving entry is ahead of."""
        before_s = now_s - config.starvation_s
        starving = [key for key in self._state.oldest_of_each_priority() if key[1] < before_s]
        ordered = sorted((e for e in entered if not starving or pool_key(e) < starving[0]), key=pool_key)
        placed = place(ordered[: config.tick_entries])
        self._progress.unfinished = placed.bounded or len(ordered) > config.tick_entries
