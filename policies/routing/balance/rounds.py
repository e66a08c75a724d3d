"""One round of BR-0 or BR-H, compiled where the window allows it."""

import random
from collections.abc import Sequence

from policies.routing.balance.loads import Aim, FlatLoads, HorizonLoads
from policies.routing.balance.stages import Feasible, Round, StageLimits
from policies.routing.balance.subset import FEW
from policies.routing.base import Assignment
from policies.state.views import Snapshot, Worker


def balance(
    feasible: Feasible,
    snapshot: Snapshot,
    workers: Sequence[Worker],
    aim: Aim,
    limits: StageLimits,
    rng: random.Random,
) -> tuple[Assignment, ...]:
    """What a group admits at a tick. `workers`: all its decode workers, by id. Either way decides the same."""
    if limits.window <= FEW:
        from policies.routing.balance.compiled_round import (
            quick_round,
        )  # numba: loaded by who routes (`registry.prepare`)

        return quick_round(feasible, snapshot, workers, aim, limits, rng)
    loads = FlatLoads(workers) if aim == Aim() else HorizonLoads(workers, *aim)
    return Round(feasible, snapshot, loads, limits, rng).run()
