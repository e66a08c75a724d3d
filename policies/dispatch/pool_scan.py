"""The scan of the prompt pool. One event scans a limited number of entries, so that neither a backlog nor a storm of
events can cost more than its bound. The dispatcher decides when a scan starts (`Dispatcher._pool_wakes`).

    room came       the whole pool is scanned from the front, at most `tick_entries` entries an event. The next event
                    of any kind resumes where this one stopped. The scan starts again from the front when a more urgent
                    entry comes or a scanned one begins to starve, and once more at its end if room came meanwhile.
                    Where several tenants wait in a class, a scan has the first entries of each and ends with them.
    no room came    only entries that came with this event are tried, because nothing that waited before fits anywhere.
                    Entries behind a starving one are not tried. They wait for the next scan, which starts when that one
                    starves no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policies.dispatch.config import DispatchConfig
from policies.dispatch.lease_watch import StarvingEntries
from policies.state.reducer import ClusterState, PoolKey, pool_key
from policies.state.views import PoolEntry


class Placement(NamedTuple):
    """How an attempt to place entries ended."""

    bounded: bool
    """Whether `tick_admissions` was reached, so that entries that fit may be left."""
    slots_left: bool
    """Whether some decode worker may still take an entry."""
    blocked_by: PoolEntry | None
    """The starving entry that fitted nowhere, so that nothing behind it was tried; None: there was none."""


Front = Callable[[PoolKey | None, int], tuple[list[PoolEntry], bool]]
"""A function that returns the first entries of the pool behind a key, this many at most, and whether the scan may go on
behind them (`policies.dispatch.sharing`).
"""

PlaceEntries = Callable[[list[PoolEntry]], Placement]
"""A function that sends as many of the entries as possible to decode workers."""


@dataclass(slots=True)
class _Progress:
    """How far the present scan has come."""

    unfinished: bool = False
    """Whether a bound stopped the scan; the next event then resumes it."""
    resume_after: PoolKey | None = None
    """Key of the last entry scanned: entries up to this one fit nowhere. None: the scan begins at the front."""
    starves_s: float = float("inf")
    """The time at which the first of the scanned entries begins to starve."""
    rescan: bool = False
    """Whether room was freed during the scan; then another one starts from the front when this one ends."""
    blocked_by: PoolEntry | None = None
    """The starving entry behind which entries were not tried, because it must not be overtaken."""
    left_pool: int = 0
    """`ClusterState.left_pool` when they were not tried."""


class PoolScan:
    """The scan of one dispatcher's pool. `scan` is called for every event while the pool is not empty. `front` says
    what a scan looks at; without it that is the pool in its order.
    """

    def __init__(self, state: ClusterState, front: Front | None = None) -> None:
        self._state = state
        self._front = front or self._as_they_came
        self._progress = _Progress()
        self._starving = StarvingEntries(state)

    def _as_they_came(self, after: PoolKey | None, most: int) -> tuple[list[PoolEntry], bool]:
        entries = self._state.waiting(after, most)
        return entries, len(entries) == most

    def unblocked(self, now_s: float) -> bool:
        """Whether entries were not tried because of a starving one, and since then any entry has left the pool, or that
        one has ceased to starve.
        """
        blocked_by = self._progress.blocked_by
        if blocked_by is None:
            return False
        return self._progress.left_pool != self._state.left_pool or not self._starving.starves(
            blocked_by, now_s
        )

    def scan(
        self,
        room_came: bool,
        entered: list[PoolEntry],
        now_s: float,
        config: DispatchConfig,
        place: PlaceEntries,
    ) -> None:
        """Passes the entries that may fit now to `place`. `entered` are the entries that came with this event."""
        self._starving.of((config.starvation_s, config.overdue_by_slo), config.starves_from_s)
        self._starving.add(entered)
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
        """Starts or continues the scan, most urgent entry first, as far as the bounds allow."""
        progress, most = self._progress, config.tick_entries
        if progress.resume_after is not None:
            if progress.starves_s < now_s or any(
                pool_key(entry) < progress.resume_after for entry in entered
            ):
                progress = self._progress = _Progress()
            progress.rescan |= room_came and progress.resume_after is not None
        progress.unfinished = True  # remains so if the policy raises
        entries, goes_on = self._front(progress.resume_after, most)
        placed = place(entries)
        if placed.bounded:
            return
        if placed.slots_left and not placed.blocked_by and goes_on:
            progress.resume_after = pool_key(entries[-1])
            starves_from_s = config.starves_from_s
            soonest_s = min([starves_from_s(entry, now_s) for entry in entries])
            progress.starves_s = min(progress.starves_s, soonest_s)
        else:
            self._progress = _Progress(
                unfinished=progress.rescan, blocked_by=placed.blocked_by, left_pool=self._state.left_pool
            )

    def _try_new(
        self, entered: Sequence[PoolEntry], now_s: float, config: DispatchConfig, place: PlaceEntries
    ) -> None:
        """Tries only the new entries, and of these only the ones that are not behind a starving entry."""
        first, left_pool = self._starving.first(now_s), self._state.left_pool
        # a new one that starves already has not been tried yet
        ordered = sorted((e for e in entered if first is None or pool_key(e) <= first), key=pool_key)
        behind = None if first is None or len(ordered) == len(entered) else self._state.pool_entry(first[-1])
        placed = place(ordered[: config.tick_entries])
        self._progress.unfinished = placed.bounded or len(ordered) > config.tick_entries
        blocked_by = placed.blocked_by or behind
        if blocked_by is not None:
            self._progress.blocked_by, self._progress.left_pool = blocked_by, left_pool
