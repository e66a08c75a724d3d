"""One round of the composition: tables in (`seconds_arrays`), stages compiled (`seconds_kernel`), decisions out.

`request_seconds` is the same round in plain Python: it makes the same decisions from the same input, bit for bit (a
test compares the two), in some four times the time for a tick of 80 admissions.
"""

import random
from collections.abc import Sequence

import numpy as np

from policies.routing.balance.arrays import REASONS
from policies.routing.balance.decisions import Others, decide, terms_of
from policies.routing.balance.loads import discounts
from policies.routing.balance.stages import Feasible, StageLimits
from policies.routing.base import RANKED, Assignment
from policies.routing.composition.arrays import Floats, Group, Start, start_of
from policies.routing.composition.entry_costs import Prices
from policies.routing.composition.kernel import DONE, HITS, advance
from policies.state.fast_frozen import fast_constructor
from policies.state.views import Snapshot, Worker

_assignment = fast_constructor(Assignment)


def quick_seconds(
    feasible: Feasible,
    snapshot: Snapshot,
    workers: Sequence[Worker],
    horizon: int,
    gamma: float,
    prices: Prices,
    limits: StageLimits,
    rng: random.Random,
) -> tuple[Assignment, ...]:
    """What a group admits at a tick; `workers`: all its decode workers, by id."""
    draws, discount = [rng.random() for _ in workers], discounts(horizon, gamma)[1]
    start = start_of(Group(feasible, snapshot, workers, draws, discount, prices, limits))
    shown = _others(workers, start)
    _run(start, feasible, snapshot, workers, discount)
    return _assignments(start, feasible, workers, shown, discount)


def _run(
    start: Start, feasible: Feasible, snapshot: Snapshot, workers: Sequence[Worker], discount: Floats
) -> None:
    """All steps of the round."""
    tables = start.tables
    state, over, overflow = tables.state[0], tables.over, tables.overflow
    while (asked := advance(*tables)) != DONE:
        if asked == HITS:
            _look_up_hits(start, feasible, snapshot, workers)
        else:
            rows = state["rows"]
            np.matmul(over[:rows], discount, out=overflow[:rows])


def _look_up_hits(start: Start, feasible: Feasible, snapshot: Snapshot, workers: Sequence[Worker]) -> None:
    """Those of an entry, and of the next in turn: as many as may be weighed before the free slots are used up."""
    tables = start.tables
    state = tables.state[0]
    at = int(np.flatnonzero(tables.by_turn == state["entry"])[0])
    column = {workers[row].id: i for i, row in enumerate(start.kept)}
    for entry in tables.by_turn[at : at + state["free"] + len(tables.window)].tolist():
        for worker, tokens in snapshot.hits.tokens(feasible[entry][0].request).items():
            if worker in column:
                tables.hits[entry, column[worker]] = tokens
        tables.entries["looked"][entry] = 1


def _others(workers: Sequence[Worker], start: Start) -> Others:
    """What rankings name beside the chosen worker, as the round began."""
    facts = start.tables.workers
    free, margin = facts["free"], facts["margin"].tolist()
    order = np.lexsort((facts["draw"], -facts["margin"], -free, facts["open"] == 0))
    rows = order[: min(RANKED, int(facts["open"].sum()))].tolist()
    return Others([workers[row] for row in start.kept], rows, free.tolist(), lambda row: margin[row])


def _assignments(
    start: Start, feasible: Feasible, workers: Sequence[Worker], others: Others, discount: Floats
) -> tuple[Assignment, ...]:
    """The decisions, one for all entries of a set."""
    tables = start.tables
    state = tables.state[0]
    done = tables.done[: state["made"]]
    # one product each, as the plain round's: the BLAS rounds a row of a larger matrix otherwise
    overflow = np.matmul(tables.done_over[: len(done), None, :], discount)[:, 0]
    slowdown_s = (tables.workers["slowdown"][done["row"]] * overflow).tolist()
    chosen = tables.chosen[: state["chosen"]].tolist()
    assigned: list[Assignment] = []
    for admission, slowed_s in zip(done.tolist(), slowdown_s, strict=True):
        row, reason, free, tokens, size, score, margin, worth_s, age_s, cost_s, rent_s, holds = admission
        terms = terms_of(score, tokens, margin, start.sizes[row], free, size)
        terms["credit_less_cost_s"] = worth_s + rent_s - age_s
        terms["age_s"] = age_s
        terms["cost_s"] = cost_s
        terms["rent_s"] = rent_s
        terms["usual_holds"] = holds
        terms["queue_rent_s"] = start.queue_rent_s
        terms["near_rent_s"] = rent_s / holds - start.queue_rent_s if holds else 0.0
        terms["slowdown_s"] = slowed_s
        decision = decide(workers[start.kept[row]].id, terms, others.without(row), REASONS[reason])
        for entry in chosen[len(assigned) : len(assigned) + size]:
            assigned.append(_assignment(feasible[entry][0].request.attempt_id, decision))
    return tuple(assigned)
