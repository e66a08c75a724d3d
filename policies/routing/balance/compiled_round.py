"""One round of BR-0 or BR-H: arrays in (`stages_arrays`), the two stages compiled (`stages_kernel`), decisions out.

`stages` explains the stages; its `Round` makes the same decisions from the same input, bit for bit (a test compares the
two), at some 1.5 ms more for a tick of 80 admissions.
"""

import random
from collections.abc import Sequence

import numpy as np

from policies.routing.balance.arrays import REASONS, Fleet, fleet_of, kinds_of, pool_of, table
from policies.routing.balance.decisions import Others, decide, terms_of
from policies.routing.balance.kernel import ADMISSION, place
from policies.routing.balance.loads import Aim, discounts
from policies.routing.balance.stages import Feasible, StageLimits
from policies.routing.base import RANKED, Assignment
from policies.state.fast_frozen import fast_constructor
from policies.state.views import Snapshot, Worker

_assignment = fast_constructor(Assignment)


def quick_round(
    feasible: Feasible,
    snapshot: Snapshot,
    workers: Sequence[Worker],
    aim: Aim,
    limits: StageLimits,
    rng: random.Random,
) -> tuple[Assignment, ...]:
    """What a group admits at a tick; `workers`: all its decode workers, by id. The window is `subset.FEW` at most."""
    draws, discount = [rng.random() for _ in workers], discounts(aim.horizon, aim.gamma)[1]
    kind, allowed = kinds_of(feasible, workers)
    fleet = fleet_of(workers, allowed, aim, draws)
    pool = pool_of(feasible, kind, len(workers), aim, limits, snapshot.now_s)
    done, chosen = table(ADMISSION, len(feasible)), np.empty(len(feasible), np.int64)
    made = np.array([0, 0, sum(fleet.free)])
    place(
        fleet.workers,
        fleet.departures,
        fleet.barriers,
        discount,
        pool.entries,
        allowed,
        pool.order,
        pool.ends,
        pool.rules,
        done,
        chosen,
        made,
    )
    requests = [pool.requests[i] for i in chosen[: made[1]].tolist()]
    others = _others(workers, fleet)
    assigned: list[Assignment] = []
    for row, reason, free, tokens, size, score, margin in done[: made[0]].tolist():
        terms = terms_of(score, tokens, margin, fleet.sizes[row], free, size)
        decision = decide(workers[row].id, terms, others.without(row), REASONS[reason])
        for request in requests[len(assigned) : len(assigned) + size]:
            assigned.append(_assignment(request.attempt_id, decision))
    return tuple(assigned)


def _others(workers: Sequence[Worker], fleet: Fleet) -> Others:
    """What rankings name beside the chosen worker, as the round began."""
    facts, margin = fleet.workers, fleet.workers["first_margin"]
    order = np.lexsort((facts["draw"], -margin, -np.array(fleet.free), facts["open"] == 0))
    rows = order[: min(RANKED, int(facts["open"].sum()))].tolist()
    return Others(workers, rows, fleet.free, lambda row: float(margin[row]))
