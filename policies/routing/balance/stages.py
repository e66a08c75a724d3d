"""BR-0, BR-H and the composition share the rules and parameters of BalanceRoute's two stages (3.2, 4.2, algorithms
2 and 3).

    stage 1, while the free slots are >= abundance * G: the worker with the most free slots (then the largest margin)
             takes the one request of the pool that maximises F
    stage 2, otherwise: workers are popped by (free slots, min_h m_g(h)) descending. Each takes, of the first W pool
             entries by s_r descending, the subset that maximises F; if no subset is above 0, the best single one of
             these entries. It is pushed back while it has slots

    free slots -> Worker.free_slots; |S| counts sequences. The pool and W are of one priority class at a time, the most
    urgent first (a class that can still be placed is never passed by a lower one)

The stages run compiled. `round` makes the arrays, `kernel` has the steps, and `loads` has the projections.

`ageing_s` keeps an entry from waiting without an end. An entry that has waited for `ageing_s` is worth as many tokens
more as the pool's mean prompt has: it stands further ahead in the order from which the window is taken, and a set is
worth F plus the bonus of its oldest entry. The order of a pool is the paper's as long as waits are short compared with
`ageing_s`, and every entry comes first some day. None leaves the order to F alone; choosing by size alone may starve
some sizes under lasting load (the paper leaves that to the pool's TTL).

`pool_wide` seeks the best single entry in the whole pool, by bisection, and takes it also where it beats the best
subset of the window. Near saturation most ticks have one free slot and every request overflows, and the W largest
rarely include the one that does least harm. The paper looks inside its window only, and only if no subset is above 0;
so does the default.

Before both stages, overdue entries are placed in the order of service, each on the worker of largest margin among those
it fits. Entries whose lease is about to end because it is renewed no more (`PoolEntry.is_overdue`) go before all
others, whatever their class, because their KV would be lost. Entries whose first token is about to miss its TTFT
objective (`PoolEntry.is_pressing`), and those that have waited longer than `max_wait_s`, if it is set, go before the
others of their class. Without an objective entries whose leases are renewed are never overdue, however long they wait.

Every admission is subtracted from slots and KV room and added to the load at once, so that a batch fits as a whole.
Workers with equal keys are ordered by one seeded draw per worker and round. Entries that fit nowhere stay in the pool.
A worker is tried only for entries for which the dispatcher calls it feasible.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.routing.base import Feasible
from policies.state.views import Health, PoolEntry, Role, Snapshot, Worker

MAX_WINDOW = 12
"""The largest window W. A kernel sums all 2^W subsets, which are 4,096 at this width, for every popped worker."""


class StageLimits(NamedTuple):
    """The parameters of the stages for BR-0 and BR-H.

    `window` is W. `abundance` is the number of free slots per worker from which stage 1 runs. `reserve_tokens` is the
    KV kept free per sequence. `ageing_s` is the wait that is worth one prompt of the pool's mean length (None:
    nothing). `pool_wide` seeks the best single entry in the whole pool. `max_wait_s` is a wait after which an entry is
    overdue and goes first in its class, besides those by `PoolEntry.is_pressing` (None: only those).
    """

    window: int
    abundance: float
    reserve_tokens: int
    ageing_s: float | None = None
    pool_wide: bool = False
    max_wait_s: float | None = None


class Aim(NamedTuple):
    """The parameters of F_H, whose defaults give BR-0's F. `beta` None means G of the worker's barrier.

    `slack_tokens` is subtracted from every margin, so that the envelope is not filled to its edge.
    """

    horizon: int = 0
    gamma: float = 1.0
    alpha: float = 1.0
    beta: float | None = None
    slack_tokens: float = 0.0

    @property
    def gain(self) -> float:
        """The score alpha * sum_h gamma^h that a token adds while nothing overflows."""
        return self.alpha * float(discounts(self.horizon, self.gamma).sum())


@functools.cache
def discounts(horizon: int, gamma: float) -> npt.NDArray[np.float64]:
    """Returns gamma^h for h = 0..H. Callers share the array and must not change it."""
    powers: npt.NDArray[np.float64] = gamma ** np.arange(horizon + 1, dtype=np.float64)
    return powers


def groups(feasible: Feasible, snapshot: Snapshot) -> list[tuple[Feasible, list[Worker]]]:
    """Returns (entries, workers) of each group that has placeable entries, in the order of the groups' names.

    `entries` keep their order. `workers` are all decode workers of the group by id, also those that may take no more:
    their loads count in the imbalance. A WARM worker is none of them, because its slots are not on offer.
    """
    entries: dict[str, list[tuple[PoolEntry, Sequence[Worker]]]] = {}
    # The list is sliced once, because the dispatcher's list computes its items on access.
    for placeable in feasible[:]:
        if placeable[1]:
            group = placeable[0].group
            if group not in entries:
                entries[group] = []
            entries[group].append(placeable)
    decode = [
        worker
        for worker in snapshot.workers.values()
        if worker.role is Role.DECODE and worker.health is not Health.WARM
    ]
    decode.sort(key=lambda worker: worker.id)
    return [(entries[name], [w for w in decode if w.group == name]) for name in sorted(entries)]
