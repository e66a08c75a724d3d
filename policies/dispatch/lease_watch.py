"""The entries of the prompt pool that cannot wait: which must be rescued first as its lease ends, which worker can
still take it, and which entries starve.
"""

import heapq
import math
from collections.abc import Sequence

from policies.dispatch.config import StarvesFrom
from policies.dispatch.feasibility import has_kv
from policies.routing.base import RANKED, Decision, Ranked, Reason
from policies.state.reducer import ClusterState, PoolKey, pool_key
from policies.state.views import NO_HITS, PoolEntry, PrefixHits, RequestId, Worker


class LeaseWatch:
    """Pool entries in the order in which they fall due: a margin before their KV's lease ends, though not before they
    are overdue, or at the request's deadline if that is earlier. The renewal of a lease puts its entry off, which is
    noticed when the entry comes first. Entries that have left the pool are dropped when they come first or are the
    majority.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._margin_s = 0.0
        self._due: list[tuple[float, RequestId, float]] = []  # heap: due, id, entered

    def add(self, entries: Sequence[PoolEntry], margin_s: float) -> None:
        """Starts to watch entries that have come into the pool."""
        self._margin_s = margin_s
        for entry in entries:
            heapq.heappush(self._due, self._watched(entry))
        if len(self._due) > 1024 + 4 * self._state.pool_size:
            self.restart(margin_s)

    def restart(self, margin_s: float) -> None:
        """Starts again with all entries of the pool, because the margin has changed or most of the heap is outdated."""
        self._margin_s = margin_s
        self._due = [self._watched(entry) for entry in self._state.waiting()]
        heapq.heapify(self._due)

    def due(self, now_s: float) -> PoolEntry | None:
        """Returns the entry that must be rescued now, of several the one that fell due first; None when none is due."""
        while self._due and self._due[0][0] <= now_s:
            due_s, attempt_id, entered_s = self._due[0]
            entry = self._state.find_waiting(attempt_id)
            if entry is None or entry.entered_s != entered_s:
                heapq.heappop(self._due)
                continue
            watched = self._watched(entry)
            if watched[0] <= due_s:
                return entry
            heapq.heapreplace(self._due, watched)
        return None

    def _watched(self, entry: PoolEntry) -> tuple[float, RequestId, float]:
        due_s = max(entry.lease_until_s - self._margin_s, entry.overdue_from_s)
        due_s = min(due_s, entry.request.deadline_s)
        return due_s, entry.request.attempt_id, entry.entered_s


class StarvingEntries:
    """The pool entries that starve if they fit nowhere, found without looking at all that wait. When an entry begins to
    starve is known as it comes, and does not change with its lease. It may cease, with its TTFT objective, and begin
    again later. `of` says which rule holds.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._rule: object = None
        self._starves_from_s: StarvesFrom = _never
        self._coming: list[tuple[float, PoolKey]] = []  # heap: starves from, key
        self._starving: list[PoolKey] = []  # heap

    def of(self, rule: object, starves_from_s: StarvesFrom) -> None:
        """Sets the function that says when an entry starves; `rule` is equal as long as it is the same."""
        if rule != self._rule:
            self._rule, self._starves_from_s = rule, starves_from_s
            self._restart()

    def add(self, entries: Sequence[PoolEntry]) -> None:
        """Starts to watch entries that have come into the pool."""
        for entry in entries:
            heapq.heappush(self._coming, self._first_time(entry))
        if len(self._coming) + len(self._starving) > 1024 + 4 * self._state.pool_size:
            self._restart()

    def starves(self, entry: PoolEntry, now_s: float) -> bool:
        """Whether an entry that fits nowhere starves now."""
        return self._starves_from_s(entry, now_s) < now_s

    def first(self, now_s: float) -> PoolKey | None:
        """Returns the key of the most urgent entry that starves now; None when none does."""
        while self._coming and self._coming[0][0] < now_s:
            heapq.heappush(self._starving, heapq.heappop(self._coming)[1])
        while self._starving:
            key = self._starving[0]
            entry = self._state.find_waiting(key[-1])
            if entry is not None and pool_key(entry) == key:
                from_s = self._starves_from_s(entry, now_s)
                if from_s < now_s:
                    return key
                # its objective has passed, and it starves again by its lease
                heapq.heappush(self._coming, (from_s, key))
            heapq.heappop(self._starving)
        return None

    def _first_time(self, entry: PoolEntry) -> tuple[float, PoolKey]:
        """Returns when an entry begins to starve for the first time, which may have passed already, and its key."""
        return self._starves_from_s(entry, -math.inf), pool_key(entry)

    def _restart(self) -> None:
        self._starving = []
        self._coming = [self._first_time(entry) for entry in self._state.waiting()]
        heapq.heapify(self._coming)


def _never(entry: PoolEntry, now_s: float) -> float:
    return math.inf


def rescue(
    entry: PoolEntry, workers: Sequence[Worker], overcommit_slots: int, hits: PrefixHits = NO_HITS
) -> Decision | None:
    """Chooses the least loaded of `workers` with KV room for what the prompt adds there, also among those that have no
    free slot, but fewer than `overcommit_slots` sequences beyond their slots. The ranking holds the best RANKED of
    them.

    Returns None when no worker has room.
    """
    most = overcommit_slots
    room = [w for w in workers if w.slots_used < w.slots + most and has_kv(entry.request, w, 0, hits)]
    if not room:
        return None
    ranked = heapq.nsmallest(RANKED, room, key=lambda w: (w.slots_used / w.slots, w.id))
    ranking = tuple(
        Ranked(w.id, w.slots_used / w.slots, {"slot_usage": w.slots_used / w.slots}) for w in ranked
    )
    return Decision(ranked[0].id, ranking, Reason.LEASE_RESCUE)
