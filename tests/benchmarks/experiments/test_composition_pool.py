"""Tests of the rivals with a pool of shortest expected output first."""

import random

import pytest

from benchmarks.experiments import composition_pool, shortest_first
from benchmarks.experiments.base import Results
from policies.routing import registry
from policies.routing.base import Needs, needs_of
from policies.routing.registry import UnknownPolicy
from tests.policies.routing.views import entry, snapshot, worker

BALANCED = ("balance_route_0", {"ageing_s": None})


@pytest.mark.parametrize("inside", [("join_shortest_queue", {}), BALANCED], ids=lambda inside: inside[0])
def test_the_shortest_expected_output_is_admitted_first(inside: tuple[str, dict[str, object]]) -> None:
    workers = [worker("d0", slots=1), worker("d1", slots=1)]
    tokens = {"long": 900.0, "short": 10.0, "middle": 300.0}
    entries = [entry(name, 100, predicted_tokens=expected) for name, expected in tokens.items()]
    policy = shortest_first.ShortestFirst(*inside)
    chosen = []
    rng = random.Random(1)
    while workers and (found := policy.assign([(e, workers) for e in entries], snapshot(workers), rng)):
        chosen += [one.attempt_id for one in found]
        entries = [e for e in entries if e.request.attempt_id not in chosen]
        taken = {one.decision.worker for one in found}
        workers = [w for w in workers if w.id not in taken]
    assert sorted(chosen) == ["middle", "short"]


def test_an_entry_that_would_lose_its_kv_goes_before_shorter_ones() -> None:
    only = worker("d0", slots=1)
    late = entry("late", 100, lease_s=1.0, predicted_tokens=5_000.0)
    short = entry("short", 100, predicted_tokens=1.0)
    now = snapshot([only], now_s=0.99)
    policy = shortest_first.ShortestFirst()
    (found,) = policy.assign([(short, [only]), (late, [only])], now, random.Random(1))
    assert found.attempt_id == "late"


def test_it_needs_what_the_policy_inside_needs_and_is_known_to_experiments_only() -> None:
    policy = shortest_first.ShortestFirst("netkv", {"contention": "shared"})
    assert needs_of(policy) == Needs.LENGTHS | needs_of(policy.policy)
    assert shortest_first.ShortestFirst("balance_route_h").horizon > 0
    with shortest_first.known():
        registry.decode_policy("shortest_first", {"inside": "netkv"})
    with pytest.raises(UnknownPolicy):
        registry.decode_policy("shortest_first")


def test_each_half_of_the_seeds_meets_the_part_that_is_best_on_the_other() -> None:
    variants = [v for v in composition_pool.variants(False) if " load 0.6 client " in v.name]
    ttft = dict.fromkeys([v.config["label"] for v in variants], (4.0, 4.0))
    ttft |= {"composition": (2.0, 2.0), "JSQ": (1.0, 4.0), "BR-0": (4.0, 1.0)}
    runs = {
        v.name: {seed: {"ttft_mean_s": ttft[v.config["label"]][seed]} for seed in (0, 1)} for v in variants
    }
    results = Results("x", False, {v.name: v.config for v in variants}, runs)
    cell = variants[0].config["cell"]
    worse, best = composition_pool._against_best(results, cell, "client", "composition")
    # on seed 0 the part is compared that is best on seed 1, and the other way round
    assert (worse, best) == ([-50.0, -50.0], "BR-0 or JSQ")
