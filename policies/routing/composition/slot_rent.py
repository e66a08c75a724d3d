"""What others lose while a request holds a decode slot: its rent, in request-seconds. Used by `composition`.

    rent(r, g) = hold_r * (rent_weight * Q T / S + near_g)
    near_g     = sum over the workers' distances l from g's own on of occ_l^j * (x_(l+1) - x_l)

    hold_r   how long r holds it, in usual holds: slots * Request.predicted_tokens / TypicalEntry.output_tokens
             (without a forecast slots alone)
    Q, S, T  entries that find no free slot; slots of all workers; seconds of a usual hold: each of Q entries waits
             hold_r T / S longer for its turn. To serve by value is then to serve the shortest first (Smith's rule), of
             all orders that of the least mean wait. Without forecasts none is known to be shorter: the part is 0
    x_l      seconds to move a typical entry's KV (TypicalEntry.kv_bytes) from r's sender to the workers at distance l,
             by the oracle, own transfers not counted
    occ_l^j  the chance that no slot is free at distance l or nearer: occupancy of those workers to the power
             `near_scarcity`. Who comes then moves its KV so much farther: near slots go to much KV and few tokens
Not claimed: that who comes next is like who came last; senders compete as if all had r's distances.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from policies.routing.netkv.network_term import NetworkTerm
from policies.state.views import PoolEntry, Snapshot, TypicalEntry, Worker, WorkerId

Floats = npt.NDArray[np.float64]

UNKNOWN_ENTRY = TypicalEntry(0.0)

FOREVER_S = 1e9  # a path of no bandwidth takes no longer than this


class SlotRent:
    """Rents as of one snapshot. `queued` is Q, `step_s` the length of a decode step, s."""

    def __init__(
        self,
        snapshot: Snapshot,
        workers: Sequence[Worker],
        queued: int,
        step_s: float,
        rent_weight: float,
        near_scarcity: float,
    ) -> None:
        self._snapshot, self._workers, self._scarcity = snapshot, workers, near_scarcity
        self.typical = snapshot.typical or UNKNOWN_ENTRY
        self._slots = np.array([worker.slots for worker in workers], dtype=np.float64)
        self._used = np.minimum([worker.slots_used for worker in workers], self._slots)
        usual_s = (self.typical.output_tokens or 0.0) * step_s
        self.queue_s = rent_weight * queued * usual_s / float(self._slots.sum())
        self._near: dict[WorkerId, list[float]] = {}  # by sender

    def hold(self, entry: PoolEntry) -> float:
        """hold_r: how long it keeps its slots, in usual holds of one slot."""
        request, usual = entry.request, self.typical.output_tokens
        if request.predicted_tokens is None or not usual:
            return float(request.slots)
        return request.slots * request.predicted_tokens / usual

    def per_hold_s(self, entry: PoolEntry, row: int) -> float:
        """The rent of a usual hold of a slot there."""
        return self.queue_s + self.near_s(entry.prefill_worker)[row]

    def near_s(self, sender: WorkerId) -> list[float]:
        """near_g of each worker."""
        if sender not in self._near:
            self._near[sender] = self._make_near(sender)
        return self._near[sender]

    def _make_near(self, sender: WorkerId) -> list[float]:
        workers, usual_bytes = self._workers, self.typical.kv_bytes
        network = NetworkTerm(self._snapshot, sender, workers, True, None)
        if not network.known or not usual_bytes:
            return [0.0] * len(workers)
        seconds = np.minimum(network.seconds_each(workers, usual_bytes), FOREVER_S)
        found: list[float] = self.near_of(seconds).tolist()
        return found

    def near_of(self, seconds: Floats) -> Floats:
        """near_g of each worker, which is so far from a sender; shape (workers,), or (senders, workers)."""
        order = seconds.argsort(axis=-1, kind="stable")
        ascending = np.take_along_axis(seconds, order, axis=-1)
        full = self._used[order].cumsum(axis=-1) / self._slots[order].cumsum(axis=-1)  # of those up to each
        gaps_s = np.diff(ascending, append=ascending[..., -1:])  # not 0 where the next one is farther
        each_s = full**self._scarcity * gaps_s
        near_s = np.empty_like(seconds)
        np.put_along_axis(near_s, order, each_s[..., ::-1].cumsum(axis=-1)[..., ::-1], axis=-1)
        return near_s
