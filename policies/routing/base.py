"""Every routing policy keeps the contract below and returns a `Decision`.

A policy is a frozen dataclass of parameters. It gets the request, the workers that are feasible for it, the
snapshot, and a seeded random generator for ties. The workers are never empty and are sorted by id; the dispatcher
decides which are feasible (`policies.dispatch`). A policy returns a `Decision` and changes nothing. Costs are
finite, and a smaller cost is better. Ties are broken by the generator, never by the order of a set or a hash.

    PrefillPolicy.choose_prefill    the worker that computes a request's KV
    EntryPolicy.choose_decode       the worker that decodes one pool entry; `assign` picks the entry
    RoundPolicy.assign              workers for many pool entries at once

Whether an entry waits in the pool for a free slot or in the queue of an engine whose slots are taken is the decode
policy's choice. A policy that weighs such queues has an attribute `overcommits` (`Overcommit`): it is offered the
workers that have no free slot too, up to `Snapshot.overcommit_slots` sequences beyond their slots. It chooses one of
them, or leaves the entry in the pool (`assign` without it, `choose_decode` None). Any other policy is offered workers
with a free slot only.

One class may serve both stages. `paper` cites the policy's source; `formula` is the cost in one line, in the names of
terms and parameters; `needs` names the inputs that the policy reads and that cost something to provide (`Needs`). A
policy that reads more with some of its parameters has an attribute `needs_by_params` beside it.
docs/policies.md shows all three with the class's docstring and its parameters (`params`).
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from enum import Flag, StrEnum, auto
from typing import Any, ClassVar, Protocol, runtime_checkable

from policies.record import record
from policies.state.views import PoolEntry, Request, RequestId, Snapshot, Worker, WorkerId


class Needs(Flag):
    """Inputs of a decision that are provided only while a policy in use declares them in `needs`."""

    NONE = 0
    HITS = auto()
    """The policy reads `Snapshot.hits`, for which prompts are hashed and engines send their KV events."""
    NETWORK = auto()
    """The policy reads `Snapshot.oracle` and `Worker.transfers`, for which ingresses report their transfers."""
    LENGTHS = auto()
    """The policy reads `Request.predicted_tokens` and their mean in `Snapshot.typical`, for which lengths are
    predicted.
    """
    CONTENTION = auto()
    """The policy reads `Oracle.contention`, which the router learns from the transfers that ingresses report."""
    FLOWS = auto()
    """The dispatcher lends prefixes, for which the router takes in what flow agents report of their ports
    (`FlowsReported`); no policy declares it.
    """


class Overcommit(StrEnum):
    """When a decode policy is offered workers without a free slot, on which an entry queues inside the engine."""

    NEVER = "never"
    BESIDE_FREE_SLOTS = "beside_free_slots"
    """While another worker of the group has a free slot. Without one every entry waits in the pool."""
    ALWAYS = "always"


class Reason(StrEnum):
    """The reason why a worker was chosen, for the decision log and `explain`."""

    ONLY_CANDIDATE = "only_candidate"
    NEXT_IN_TURN = "next_in_turn"
    LEAST_COST = "least_cost"
    TIE_DRAWN = "tie_drawn"
    LEASE_RESCUE = "lease_rescue"
    FILL = "fill"
    """BalanceRoute's stage 1 placed the entry of largest score, because many slots are free."""
    BEST_SUBSET = "best_subset"
    """BalanceRoute's stage 2 placed the subset of the window that scores best."""
    LEAST_HARM = "least_harm"
    """BalanceRoute's stage 2 placed the single entry that costs least, because every subset costs more than it
    gains.
    """
    OVERDUE = "overdue"
    """The entry's lease is about to end, so it was placed first of all; or it is about to miss its TTFT objective, or
    has waited for longer than the policy's `max_wait_s`, so it was placed first in its class. Its size did not count.
    """
    PROBE = "probe"
    """The worker is quarantined, and this request shows whether it works again (`policies.state.outliers`)."""


class PolicyError(Exception):
    """A policy broke its contract (it gave a NaN cost or chose a dead worker), or raised an exception of another kind,
    which then is the cause of this one. This is a bug and not the fault of a request. The message names the policy and
    the worker or request.

    `decided` are all actions (`policies.dispatch.actions`) that the same event has caused; they are valid and must be
    carried out.
    """

    decided: tuple[Any, ...] = ()


@record
class Ranked:
    """A candidate worker with its cost and the terms of the cost, in the policy's own units."""

    worker: WorkerId
    cost: float
    terms: Mapping[str, float]


@record
class Decision:
    """The chosen worker, the ranking of the candidates (best first, possibly only the best RANKED) and the reason."""

    worker: WorkerId
    ranking: tuple[Ranked, ...]
    reason: Reason


@record
class Assignment:
    """A pool entry and the decision for its decode worker."""

    attempt_id: RequestId
    decision: Decision


class Policy(Protocol):
    """The members that every policy has."""

    paper: ClassVar[str]
    formula: ClassVar[str]
    needs: ClassVar[Needs]

    @property
    def name(self) -> str: ...


class PrefillPolicy(Policy, Protocol):
    """A policy that chooses the worker that computes a request's KV."""

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision: ...


@runtime_checkable
class LooksAhead(Protocol):
    """The member of a policy that reads the forecast departures of running requests (`Worker.departures`)."""

    @property
    def horizon(self) -> int:
        """H, the number of decode steps that the policy looks ahead; at 0 it reads no forecast."""
        ...


class EntryPolicy(Policy, Protocol):
    """A policy that chooses the decode worker of one pool entry without regard to the other entries. None: the entry
    stays in the pool.
    """

    def choose_decode(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision | None: ...


Feasible = Sequence[tuple[PoolEntry, Sequence[Worker]]]
"""Pool entries in the order in which they should be served, each with the workers on which it fits. An entry
without such workers waits.
"""


class RoundPolicy(Policy, Protocol):
    """A policy that assigns pool entries to decode workers and weighs the entries against each other.

    `assign` is called again with a fresh snapshot until it returns nothing.
    """

    def assign(
        self, feasible: Feasible, snapshot: Snapshot, rng: random.Random
    ) -> tuple[Assignment, ...]: ...


DecodePolicy = EntryPolicy | RoundPolicy


def needs_of(policy: Policy) -> Needs:
    """Returns the inputs that a policy needs with its parameters: its `needs`, and its `needs_by_params` if any."""
    return policy.needs | Needs(getattr(policy, "needs_by_params", Needs.NONE))


def overcommit_of(policy: DecodePolicy) -> Overcommit:
    """Returns when a decode policy is offered workers without a free slot: its `overcommits`, or never."""
    return Overcommit(getattr(policy, "overcommits", Overcommit.NEVER))


def check_overcommit(policy: DecodePolicy, slots: int) -> None:
    """Raises ValueError if a decode policy was told to use more than the `slots` sequences beyond a worker's slots that
    the dispatcher allows. A policy with such a parameter has a method `check_overcommit`.
    """
    check = getattr(policy, "check_overcommit", None)
    if check is not None:
        check(slots)


def assign(
    policy: DecodePolicy, feasible: Feasible, snapshot: Snapshot, rng: random.Random
) -> tuple[Assignment, ...]:
    """Returns the assignments that a decode policy makes on one snapshot.

    A RoundPolicy sees all entries. An EntryPolicy decides only the first entry that fits on any worker and that it does
    not leave in the pool. The caller repeats the call with the snapshot that follows from the assignments, until the
    answer is empty.
    """
    if hasattr(policy, "assign"):
        return policy.assign(feasible, snapshot, rng)
    for entry, workers in feasible:
        decision = policy.choose_decode(entry, workers, snapshot, rng) if workers else None
        if decision is not None:
            return (Assignment(entry.request.attempt_id, decision),)
    return ()


def least_cost(policy: str, ranked: Sequence[Ranked], rng: random.Random) -> Decision:
    """Chooses the candidate of least cost, and among equal ones by a seeded draw. Raises PolicyError on a cost that
    is not finite.
    """
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


RANKED = 8
"""The largest number of candidates in a ranking that `best_of` or round robin makes."""


def best_of(
    policy: str,
    workers: Sequence[Worker],
    costs: Sequence[float],
    terms: Callable[[int], Mapping[str, float]],
    rng: random.Random,
) -> Decision:
    """Chooses as `least_cost` does, but fast for many candidates.

    The ranking holds only the best RANKED candidates, and `terms(i)` is called only for these, so that the log of a
    decision does not grow with the cluster. Raises PolicyError on a cost that is not finite.
    """
    if not math.isfinite(sum(costs)):
        i = next(i for i, cost in enumerate(costs) if not math.isfinite(cost))
        raise PolicyError(f"policy {policy}: cost of {workers[i].id} is {costs[i]}")
    if len(costs) == 1:
        (only,) = workers
        return Decision(only.id, (Ranked(only.id, costs[0], terms(0)),), Reason.ONLY_CANDIDATE)
    ascending = sorted(costs)
    lowest, highest = ascending[0], ascending[:RANKED][-1]
    near = [i for i, cost in enumerate(costs) if cost <= highest]
    near.sort(key=lambda i: workers[i].id)
    # stable, so equal costs stay ordered by id
    near.sort(key=costs.__getitem__)
    ties = bisect_right(ascending, lowest)
    reason = Reason.LEAST_COST
    if ties > 1:
        near.insert(0, near.pop(rng.randrange(ties)))  # the drawn worker comes first
        reason = Reason.TIE_DRAWN
    best = [Ranked(workers[i].id, costs[i], terms(i)) for i in near[:RANKED]]
    return Decision(best[0].worker, tuple(best), reason)
