"""Every registered policy keeps the contract of `policies.routing.base`; the baselines do what their names say."""

import copy
import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.network.contention import FORMS
from policies.network.oracle import Oracle
from policies.routing.base import (
    RANKED,
    Assignment,
    Decision,
    Feasible,
    Needs,
    PolicyError,
    Ranked,
    Reason,
    assign,
    best_of,
    least_cost,
    needs_of,
)
from policies.routing.registry import (
    DECODE,
    PREFILL,
    UnknownPolicy,
    decode_policy,
    prefill_policy,
)
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.routing.simple.round_robin import RoundRobin
from policies.state.views import Health, PoolEntry, Request, Role, Snapshot, Transfers, TypicalEntry, Worker


def worker(name: str, role: Role = Role.DECODE, **kw: int) -> Worker:
    facts: dict[str, int] = {"slots": 8, "kv_capacity_tokens": 1000} | kw
    return Worker(name, role, "g", "n", Health.READY, **facts)  # type: ignore[arg-type]


def snapshot(workers: Sequence[Worker], pool: Sequence[PoolEntry] = (), **last: str) -> Snapshot:
    return Snapshot(1.0, {w.id: w for w in workers}, tuple(pool), last)


REQUEST = Request("r", 0.0, 100, 8)
ENTRY = PoolEntry(REQUEST, "p", "g", 0.0, 30.0, 1, 0)

WORKERS = st.lists(
    st.builds(
        worker, st.sampled_from("abcdefgh"), slots_used=st.integers(0, 8), prefilling=st.integers(0, 8)
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda w: w.id,
)


@settings(max_examples=100, deadline=None)
@given(WORKERS, st.integers(0, 99), st.sampled_from(sorted(PREFILL)), st.randoms(use_true_random=False))
def test_prefill_policies_choose_a_candidate_change_nothing_and_ignore_order(
    workers, seed, name, shuffler
) -> None:  # type: ignore[no-untyped-def]
    view = snapshot(workers, prefill="c")
    before = copy.deepcopy(view)
    ordered = sorted(workers, key=lambda w: w.id)
    decision = prefill_policy(name).choose_prefill(REQUEST, ordered, view, random.Random(seed))
    assert decision.worker in {w.id for w in workers}
    assert {r.worker for r in decision.ranking} == {w.id for w in workers}
    assert view == before
    again = list(ordered)
    shuffler.shuffle(again)
    assert prefill_policy(name).choose_prefill(REQUEST, again, view, random.Random(seed)) == decision


@settings(max_examples=100, deadline=None)
@given(WORKERS, st.integers(0, 99), st.sampled_from(sorted(DECODE)), st.randoms(use_true_random=False))
def test_decode_policies_assign_only_what_is_feasible_change_nothing_and_ignore_order(
    workers, seed, name, shuffler
) -> None:  # type: ignore[no-untyped-def]
    view = snapshot(workers, [ENTRY])
    before = copy.deepcopy(view)
    workers = [w for w in workers if w.free_slots]  # a full one is never feasible
    if not workers:
        return
    feasible = workers[: 1 + seed % len(workers)]
    assigned = assign(decode_policy(name), [(ENTRY, feasible)], view, random.Random(seed))
    assert [a.attempt_id for a in assigned] == ["r"]
    decision = assigned[0].decision
    assert decision.worker in {w.id for w in feasible}
    assert decision.ranking[0].worker == decision.worker or decision.reason is Reason.TIE_DRAWN
    assert all(math.isfinite(n) for r in decision.ranking for n in (r.cost, *r.terms.values()))
    assert view == before
    again = shuffler.sample(feasible, len(feasible))
    assert assign(decode_policy(name), [(ENTRY, again)], view, random.Random(seed)) == assigned
    assert assign(decode_policy(name), [(ENTRY, [])], view, random.Random(seed)) == ()


class Guard:
    """Notes which inputs a policy reads, and refuses those that it does not declare."""

    def __init__(self, declared: Needs) -> None:
        self.declared, self.read = declared, Needs.NONE

    def __call__(self, need: Needs) -> None:
        self.read |= need
        assert need in self.declared, f"{need.name} is read and not declared"


def guarded(value: Any, guard: Guard, inputs: dict[str, Needs]) -> Any:
    """A value of the same type and fields whose `inputs` go through `guard` when they are read."""
    kind = type(value)

    def read(self: object, name: str) -> object:
        if name in inputs:
            guard(inputs[name])
        return kind.__getattribute__(self, name)

    guarded_kind = type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": read})
    return guarded_kind(**{f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init})


def needs_read(policy: Any) -> Needs:
    """The inputs that a policy reads to choose between two workers. Raises AssertionError where `needs` lacks one."""
    guard = Guard(needs_of(policy))
    request = guarded(
        dataclasses.replace(REQUEST, predicted_tokens=7.0), guard, {"predicted_tokens": Needs.LENGTHS}
    )
    entry = dataclasses.replace(ENTRY, request=request)
    transfers = (Transfers("a", 0, 1),)
    sender, colocated = (worker(name, role) for name, role in (("p", Role.PREFILL), ("c", Role.COLOCATED)))
    sender = guarded(dataclasses.replace(sender, transfers=transfers), guard, {"transfers": Needs.NETWORK})
    decode = [worker("a"), worker("b")]
    view = dataclasses.replace(
        snapshot([sender, colocated, *decode], [entry]),
        oracle=guarded(Oracle({3: 1e9}), guard, {"contention": Needs.CONTENTION}),
        typical=guarded(TypicalEntry(100.0, 10.0), guard, {"output_tokens": Needs.LENGTHS}),
    )
    view = guarded(view, guard, {"hits": Needs.HITS, "oracle": Needs.NETWORK})
    if hasattr(policy, "choose_prefill"):
        policy.choose_prefill(request, [sender, colocated], view, random.Random(0))
    if policy.name in DECODE:
        assert assign(policy, [(entry, decode)], view, random.Random(0))
    return guard.read


HEATMAP = {"prefill_tokens": [100], "ratios": [0.1], "cells": [[0.5]]}


@pytest.mark.parametrize("name", sorted(PREFILL | DECODE))
def test_a_policy_reads_what_it_says_that_it_needs_and_nothing_else(name: str) -> None:
    params = {"heatmap": HEATMAP} if name in ("pd_heatmap", "combined") else {}
    policy = prefill_policy(name, params) if name in PREFILL else decode_policy(name, params)
    assert needs_read(policy) == policy.needs


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_contention_that_is_learnt_is_read(form: str) -> None:
    policy = decode_policy("netkv", {"contention": form})
    assert needs_read(policy) == needs_of(policy) != policy.needs


@pytest.mark.parametrize("need", [Needs.HITS, Needs.NETWORK, Needs.LENGTHS])
def test_a_policy_that_reads_what_it_does_not_declare_is_found(need: Needs) -> None:
    class Undeclared:
        paper: ClassVar[str] = "none"
        formula: ClassVar[str] = "cost = 0"
        needs: ClassVar[Needs] = ~need
        name = "undeclared"

        def choose_prefill(
            self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
        ) -> Decision:
            inputs = {
                Needs.HITS: lambda: snapshot.hits,
                Needs.NETWORK: lambda: workers[0].transfers,
                Needs.LENGTHS: lambda: request.predicted_tokens,
            }
            inputs[need]()
            return Decision(workers[0].id, (Ranked(workers[0].id, 0.0, {}),), Reason.LEAST_COST)

    with pytest.raises(AssertionError, match=f"{need.name} is read and not declared"):
        needs_read(Undeclared())


class Pairwise:
    """A decode policy that assigns the first two entries of a round, each to the first worker that it fits on."""

    paper: ClassVar[str] = "none"
    formula: ClassVar[str] = "cost = 0"
    needs: ClassVar[Needs] = Needs.NONE
    name = "pairwise"

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        return tuple(
            Assignment(entry.request.attempt_id, Decision(workers[0].id, (), Reason.LEAST_COST))
            for entry, workers in feasible[:2]
        )


def test_a_round_policy_gets_all_entries_and_an_entry_policy_the_first_that_fits() -> None:
    a, b = worker("a"), worker("b")
    entries = [
        dataclasses.replace(ENTRY, request=dataclasses.replace(REQUEST, attempt_id=name)) for name in "rst"
    ]
    view = snapshot([a, b], entries)
    feasible: Feasible = [(entries[0], []), (entries[1], [b]), (entries[2], [a, b])]
    one = assign(RoundRobin(), feasible, view, random.Random(0))
    assert [(made.attempt_id, made.decision.worker) for made in one] == [("s", "b")]
    both = assign(Pairwise(), feasible[1:], view, random.Random(0))
    assert [(made.attempt_id, made.decision.worker) for made in both] == [("s", "b"), ("t", "a")]
    assert assign(RoundRobin(), feasible[:1], view, random.Random(0)) == ()


def test_a_long_ranking_keeps_the_best_few_and_the_drawn_one_first() -> None:
    workers = [worker(f"w{i:02d}") for i in range(40)]
    for costs in ([1.0] * 40, [float(i // 20) for i in range(40)], [float(i) for i in range(40)]):
        decision = best_of("x", workers, costs, lambda i: {"i": float(i)}, random.Random(3))
        assert len(decision.ranking) == RANKED
        assert decision.ranking[0].worker == decision.worker
        assert costs[workers.index(next(w for w in workers if w.id == decision.worker))] == min(costs)
        turned, back = workers[::-1], costs[::-1]
        other = best_of("x", turned, back, lambda i: {"i": 39.0 - i}, random.Random(3))
        assert other == decision
    with pytest.raises(PolicyError, match="policy x: cost of w01 is nan"):
        best_of("x", workers[:2], [1.0, float("nan")], lambda i: {}, random.Random(0))


@pytest.mark.parametrize(
    ("last", "chosen"), [(None, "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("bb", "c"), ("zz", "a")]
)
def test_round_robin_takes_the_next_in_turn_also_when_the_last_is_gone(last: str | None, chosen: str) -> None:
    workers = [worker("a"), worker("b"), worker("c")]
    view = snapshot(workers, **({"prefill": last} if last else {}))
    assert RoundRobin().choose_prefill(REQUEST, workers, view, random.Random(0)).worker == chosen


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [((2, 1, 3), "b"), ((0, 1, 1), "a"), ((5, 5, 4), "c")],
)
def test_join_shortest_queue_counts_requests(loads: tuple[int, ...], chosen: str) -> None:
    workers = [worker(n, slots_used=load, prefilling=load) for n, load in zip("abc", loads, strict=True)]
    view = snapshot(workers, [ENTRY])
    assert JoinShortestQueue().choose_prefill(REQUEST, workers, view, random.Random(0)).worker == chosen
    (assignment,) = assign(JoinShortestQueue(), [(ENTRY, workers)], view, random.Random(0))
    assert (assignment.decision.worker, assignment.decision.reason) == (chosen, Reason.LEAST_COST)


def test_a_colocated_worker_counts_what_it_decodes_too() -> None:
    # p computes 2; c computes 0 but decodes 3: p is shorter
    workers = [worker("c", Role.COLOCATED, slots_used=3), worker("p", Role.PREFILL, prefilling=2)]
    assert (
        JoinShortestQueue().choose_prefill(REQUEST, workers, snapshot(workers), random.Random(0)).worker
        == "p"
    )


def test_ties_are_drawn_from_the_seed_and_reach_every_worker() -> None:
    ranked = [Ranked(n, 1.0, {}) for n in "abc"]
    drawn = [least_cost("x", ranked, random.Random(seed)) for seed in range(40)]
    assert {d.worker for d in drawn} == {"a", "b", "c"}
    assert {d.reason for d in drawn} == {Reason.TIE_DRAWN}
    assert least_cost("x", ranked, random.Random(7)) == least_cost("x", ranked, random.Random(7))


@pytest.mark.parametrize("cost", [float("nan"), float("inf")])
def test_a_cost_that_is_not_finite_is_refused_naming_policy_and_worker(cost: float) -> None:
    with pytest.raises(PolicyError, match="policy x: cost of w is"):
        least_cost("x", [Ranked("w", cost, {})], random.Random(0))


def test_unknown_names_and_parameters_are_refused_with_the_list() -> None:
    with pytest.raises(
        UnknownPolicy, match=r"'netkvv' is not known: choose one of .*join_shortest_queue,.* round_robin"
    ):
        prefill_policy("netkvv")
    with pytest.raises(UnknownPolicy, match="no parameter 'alpha'"):
        decode_policy("round_robin", {"alpha": 1})


@pytest.mark.parametrize("table", [PREFILL, DECODE])
def test_every_policy_says_its_formula_in_one_line(table: dict[str, type]) -> None:
    for name, kind in table.items():
        formula = kind.formula  # type: ignore[attr-defined]
        assert formula and "\n" not in formula, name
