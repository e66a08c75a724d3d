"""The contract of a routing policy, and the value that it returns.

A policy is a frozen dataclass of parameters. It gets the request, the workers that are feasible for it (never empty,
sorted by id; feasibility is the dispatcher's, see `policies.dispatch`), the snapshot, and a seeded random generator
for ties. It returns a `Decision` and changes nothing. Costs are finite; smaller is better; ties are broken by the
generator, never by the order of a set or a hash.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol, runtime_checkable

from policies.state.quick import quick
from policies.state.views import PoolEntry, Request, RequestId, Snapshot, Worker, WorkerId


class Reason(StrEnum):
    """Why a worker was chosen; goes into the decision log and `explain`."""

    ONLY_CANDIDATE = "only_candidate"
    NEXT_IN_TURN = "next_in_turn"
    LEAST_COST = "least_cost"
    TIE_DRAWN = "tie_drawn"
    LEASE_RESCUE = "lease_rescue"
    FILL = "fill"  # BalanceRoute's stage 1
    BEST_SUBSET = "best_subset"  # stage 2
    LEAST_HARM = (
        "least_harm"  # stage 2: every subset costs more than it gains, the single one that costs least
    )
    OVERDUE = "overdue"  # waited too long: placed first, whatever its size


class PolicyError(Exception):
    """A policy broke its contract (NaN cost, dead worker chosen). Names policy and worker; a bug, never traffic's
    fault.

    `decided`: the actions (`policies.dispatch.dispatcher.Action`) that the same event had led to before; they stand.
    """

    decided: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Ranked:
    """One candidate: its cost and the terms that the cost is made of, in the policy's own units."""

    worker: WorkerId
    cost: float
    terms: Mapping[str, float]


_ranked = quick(Ranked)


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen worker, the whole ranking (best first) and the reason."""

    worker: WorkerId
    ranking: tuple[Ranked, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Assignment:
    """A pool entry and the decode worker it goes to."""

    attempt_id: RequestId
    decision: Decision


@runtime_checkable
class PrefillPolicy(Protocol):
    """Chooses the worker that computes a request's KV. `formula`: one line, in the names of terms and parameters."""

    formula: ClassVar[str]

    @property
    def name(self) -> str: ...

    def choose(
        self, request: Request, candidates: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision: ...


@runtime_checkable
class DecodePolicy(Protocol):
    """Assigns pool entries to decode workers.

    `feasible` holds, for each entry in the order in which entries should be served, the workers that it fits on (empty:
    it must wait). Called again with a fresh snapshot until it returns nothing, so a policy may decide one entry at a
    time. `formula` as for PrefillPolicy.
    """

    formula: ClassVar[str]

    @property
    def name(self) -> str: ...

    def assign(
        self, feasible: Sequence[tuple[PoolEntry, Sequence[Worker]]], snapshot: Snapshot, rng: random.Random
    ) -> tuple[Assignment, ...]: ...


def least_cost(policy: str, ranked: Sequence[Ranked], rng: random.Random) -> Decision:
    """The candidate of least cost; equal ones by one seeded draw. Raises PolicyError on a cost that is not finite."""
    for candidate in ranked:
        if not math.isfinite(candidate.cost):
            raise PolicyError(f"policy {policy}: cost of {candidate.worker} is {candidate.cost}")
    ranking = tuple(sorted(ranked, key=lambda r: (r.cost, r.worker)))
    best = [r for r in ranking if r.cost == ranking[0].cost]
    if len(ranking) == 1:
        return Decision(ranking[0].worker, ranking, Reason.ONLY_CANDIDATE)
    if len(best) == 1:
        return Decision(best[0].worker, ranking, Reason.LEAST_COST)
    return Decision(best[rng.randrange(len(best))].worker, ranking, Reason.TIE_DRAWN)


RANKED = 8  # candidates that a ranking of many names


def best_of(
    policy: str,
    workers: Sequence[Worker],
    costs: Sequence[float],
    terms: Callable[[int], Mapping[str, float]],
    rng: random.Random,
) -> Decision:
    """`least_cost` for many candidates: the ranking holds the best RANKED only, and `terms(i)` is asked for those only,
    so that neither a decision's time nor its log grows with the cluster. Raises PolicyError on a cost not finite.
    """
    if not math.isfinite(sum(costs)):
        i = next(i for i, cost in enumerate(costs) if not math.isfinite(cost))
        raise PolicyError(f"policy {policy}: cost of {workers[i].id} is {costs[i]}")
    ascending = sorted(costs)
    lowest, highest = ascending[0], ascending[:RANKED][-1]
    near = [i for i, cost in enumerate(costs) if cost <= highest]
    near.sort(key=lambda i: workers[i].id)
    near.sort(key=costs.__getitem__)  # stable: equal ones by id
    ties = bisect_right(ascending, lowest)
    reason = Reason.ONLY_CANDIDATE if len(costs) == 1 else Reason.LEAST_COST
    if ties > 1:
        near.insert(0, near.pop(rng.randrange(ties)))  # the drawn one first
        reason = Reason.TIE_DRAWN
    best = [_ranked(workers[i].id, costs[i], terms(i)) for i in near[:RANKED]]
    return Decision(best[0].worker, tuple(best), reason)


def first_feasible(
    feasible: Sequence[tuple[PoolEntry, Sequence[Worker]]],
) -> tuple[PoolEntry, Sequence[Worker]] | None:
    """The first entry that fits anywhere, for policies that decide one entry at a time."""
    return next(((entry, workers) for entry, workers in feasible if workers), None)
