"""The leases of the prompt pool: which entry must be rescued first, and which worker can still take it."""

import heapq
from collections.abc import Sequence

from policies.routing.base import Decision, Ranked, Reason
from policies.state.reducer import ClusterState
from policies.state.views import PoolEntry, RequestId, Worker


class LeaseWatch:
    """Pool entries in the order in which they fall due: a margin before their KV's lease ends, or at the request's
    deadline if that is earlier. Entries that have left the pool are dropped when they come first or are the majority.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._due: list[tuple[float, RequestId, float]] = []  # heap: due, id, entered

    def add(self, entries: Sequence[PoolEntry], margin_s: float) -> None:
        """Starts to watch entries that have come into the pool."""
        for entry in entries:
            heapq.heappush(self._due, _watched(entry, margin_s))
        if len(self._due) > 1024 + 4 * self._state.pool_size:
            self.restart(margin_s)

    def restart(self, margin_s: float) -> None:
        """Starts again with all entries of the pool, because the margin has changed or most of the heap is outdated."""
        self._due = [_watched(entry, margin_s) for entry in self._state.waiting()]
        heapq.heapify(self._due)

    def due(self, now_s: float) -> PoolEntry | None:
        """Returns the entry that must be rescued now, of several the one that fell due first; None when none is due."""
        while self._due and self._due[0][0] <= now_s:
            _, attempt_id, entered_s = self._due[0]
            entry = self._state.find_waiting(attempt_id)
            if entry is not None and entry.entered_s == entered_s:
                return entry
            heapq.heappop(self._due)
        return None


def _watched(entry: PoolEntry, margin_s: float) -> tuple[float, RequestId, float]:
    due_s = min(entry.lease_until_s - margin_s, entry.request.deadline_s)
    return due_s, entry.request.attempt_id, entry.entered_s


def rescue(entry: PoolEntry, workers: Sequence[Worker]) -> Decision | None:
    """Chooses the least loaded of `workers` with KV room for the prompt, even without a free slot.

    Returns None when no worker has KV room.
    """
    room = [w for w in workers if w.free_kv_tokens >= entry.request.prompt_tokens]
    if not room:
        return None
    ranked = sorted(room, key=lambda w: (w.slots_used / w.slots, w.id))
    ranking = tuple(
        Ranked(w.id, w.slots_used / w.slots, {"slot_usage": w.slots_used / w.slots}) for w in ranked
    )
    return Decision(ranked[0].id, ranking, Reason.LEASE_RESCUE)
