"""Every registered policy keeps the contract of `policies.routing.base`; the baselines do what their names say."""

import copy
import dataclasses
import math
import random
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing.base import RANKED, PolicyError, Ranked, Reason, best_of, least_cost
from policies.routing.registry import (
    DECODE,
    PREFILL,
    USES_HITS,
    USES_LENGTHS,
    UnknownPolicy,
    decode_policy,
    prefill_policy,
)
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.routing.simple.round_robin import RoundRobin
from policies.state.views import Health, PoolEntry, Request, Role, Snapshot, Usual, Worker


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
    decision = prefill_policy(name).choose(REQUEST, ordered, view, random.Random(seed))
    assert decision.worker in {w.id for w in workers}
    assert {r.worker for r in decision.ranking} == {w.id for w in workers}
    assert view == before
    again = list(ordered)
    shuffler.shuffle(again)
    assert prefill_policy(name).choose(REQUEST, again, view, random.Random(seed)) == decision


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
    assigned = decode_policy(name).assign([(ENTRY, feasible)], view, random.Random(seed))
    assert [a.attempt_id for a in assigned] == ["r"]
    decision = assigned[0].decision
    assert decision.worker in {w.id for w in feasible}
    assert decision.ranking[0].worker == decision.worker or decision.reason is Reason.TIE_DRAWN
    assert all(math.isfinite(n) for r in decision.ranking for n in (r.cost, *r.terms.values()))
    assert view == before
    again = shuffler.sample(feasible, len(feasible))
    assert decode_policy(name).assign([(ENTRY, again)], view, random.Random(seed)) == assigned
    assert decode_policy(name).assign([(ENTRY, [])], view, random.Random(seed)) == ()


class Watched:
    """Hits that note who looks."""

    looked = False

    def tokens(self, request: Request) -> dict[str, int]:
        self.looked = True
        return {}


@pytest.mark.parametrize("name", sorted(PREFILL | DECODE))
def test_the_policies_that_look_at_hits_are_the_ones_that_say_so(name: str) -> None:
    workers, hits = [worker("a"), worker("b")], Watched()
    view = dataclasses.replace(snapshot(workers, [ENTRY]), hits=hits)
    if name in PREFILL:
        prefill_policy(name).choose(REQUEST, workers, view, random.Random(0))
    if name in DECODE:
        decode_policy(name).assign([(ENTRY, workers)], view, random.Random(0))
    assert hits.looked == (name in USES_HITS)


class Curious(Request):
    """A request that notes who looks at its expected length."""

    looked: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> object:
        if name == "predicted_tokens":
            Curious.looked.add("predicted_tokens")
        return super().__getattribute__(name)


@pytest.mark.parametrize("name", sorted(PREFILL | DECODE))
def test_the_policies_that_look_at_lengths_are_the_ones_that_say_so(name: str) -> None:
    workers = [worker("a"), worker("b")]
    kinds = [worker("p", Role.PREFILL), worker("c", Role.COLOCATED)]
    cells = {"prefill_tokens": [100], "ratios": [0.1], "cells": [[0.5]]}
    params = {"heatmap": cells} if name in ("pd_heatmap", "combined") else {}
    facts = {field.name: getattr(REQUEST, field.name) for field in dataclasses.fields(REQUEST)}
    request = Curious(**facts | {"predicted_tokens": 7.0})
    entry = dataclasses.replace(ENTRY, request=request)
    view = dataclasses.replace(snapshot(workers + kinds, [entry]), usual=Usual(100.0, 10.0))
    Curious.looked.clear()
    if name in PREFILL:
        prefill_policy(name, params).choose(request, kinds, view, random.Random(0))
    if name in DECODE:
        decode_policy(name).assign([(entry, workers)], view, random.Random(0))
    assert bool(Curious.looked) == (name in USES_LENGTHS)


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
    assert RoundRobin().choose(REQUEST, workers, view, random.Random(0)).worker == chosen


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [((2, 1, 3), "b"), ((0, 1, 1), "a"), ((5, 5, 4), "c")],
)
def test_join_shortest_queue_counts_requests(loads: tuple[int, ...], chosen: str) -> None:
    workers = [worker(n, slots_used=load, prefilling=load) for n, load in zip("abc", loads, strict=True)]
    view = snapshot(workers, [ENTRY])
    assert JoinShortestQueue().choose(REQUEST, workers, view, random.Random(0)).worker == chosen
    (assignment,) = JoinShortestQueue().assign([(ENTRY, workers)], view, random.Random(0))
    assert (assignment.decision.worker, assignment.decision.reason) == (chosen, Reason.LEAST_COST)


def test_a_colocated_worker_counts_what_it_decodes_too() -> None:
    # p computes 2; c computes 0 but decodes 3: p is shorter
    workers = [worker("c", Role.COLOCATED, slots_used=3), worker("p", Role.PREFILL, prefilling=2)]
    assert JoinShortestQueue().choose(REQUEST, workers, snapshot(workers), random.Random(0)).worker == "p"


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
