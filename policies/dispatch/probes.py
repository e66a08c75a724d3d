"""Probes: single requests that are sent to quarantined workers, to learn whether these work again.

The policies do not see quarantined workers, so the dispatcher chooses probes itself: a worker whose back-off is over
gets the first waiting request that fits. A request that has failed before is never a probe.
"""

from collections.abc import Sequence

from policies.dispatch.feasibility import Lookups, Room
from policies.routing.base import Decision, Ranked, Reason
from policies.state.views import NO_HITS, PoolEntry, PrefixHits, Worker


def probe_decision(worker: Worker, now_s: float) -> Decision:
    """Returns the decision to try a quarantined worker; its term is the time that the worker has been quarantined."""
    assert worker.quarantine is not None
    terms = {"quarantined_s": now_s - worker.quarantine.since_s}
    return Decision(worker.id, (Ranked(worker.id, 0.0, terms),), Reason.PROBE)


def first_probe(
    entries: Sequence[PoolEntry], worker: Worker, reserve_tokens: int, hits: PrefixHits = NO_HITS
) -> PoolEntry | None:
    """Returns the first pool entry by which a quarantined decode worker can be tried, or None. The worker must have a
    free slot, because a queue inside the engine would hide how fast it is.
    """
    room = Room([worker], reserve_tokens, 0, Lookups(hits))
    for entry in entries:
        request = entry.request
        if entry.group == worker.group and not request.avoid and room.for_request(request):
            return entry
    return None
