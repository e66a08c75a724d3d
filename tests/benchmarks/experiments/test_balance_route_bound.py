"""The ceiling of BalanceRoute's imbalance: departures by hand, the rule against the policy, search against the rule."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.experiments import balance_route_bound as bound
from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments.base import Results
from policies.routing.balance.balance_route_h import BalanceRouteH
from policies.state.views import Health, PoolEntry, Request, Role, Snapshot, Worker

PLAIN = bound.Rule(beta=2.0, pool_lag=0.0, center=0.0, age_per_step=0.0)


def state(
    *arrivals: tuple[int, int], workers: int = 2, slots: int = 1, pool_tokens: float = 16.0
) -> bound.State:
    return bound.State(np.array(arrivals, dtype=np.float64), workers, slots, pool_tokens)


def test_a_departure_by_hand() -> None:
    """Two workers of one slot, 10 and 20 tokens with 3 and 5 steps left; 7 and 9 wait in a pool of 16, then come 4, 30.

    Three steps at 20 - 10; the gap on the first worker is 23 wide, 9 fits best. In its room comes 4, while 30 waits.
    """
    s = state((10, 3), (20, 5), (7, 2), (9, 4), (4, 1), (30, 1))
    assert s.pool[0, : s.pooled].tolist() == [7, 9]
    assert s.depart() == (3, 10, 0, 0)
    assert bound.choose(PLAIN, s, 0, 0, 1, 0) == 1
    assert s.admit(0, 0, 1) == 3  # it has been there from the beginning
    assert s.context.tolist() == [[9], [23]]
    assert sorted(s.pool[0, : s.pooled].tolist()) == [4, 7]
    # 23 - 9; the second worker's last two steps
    assert s.depart() == (2, 14, 1, 0)


def test_requests_that_do_not_last_are_refused() -> None:
    with pytest.raises(ValueError, match="do not outlast 2 slots"):
        state((10, 3), (20, 5))
    s = state((10, 3), (20, 5), (7, 2))
    s.depart()
    with pytest.raises(ValueError, match="have been admitted"):
        s.admit(0, 0, 0)


@given(
    st.lists(st.tuples(st.integers(20, 300), st.floats(0.0, 90.0)), min_size=1, max_size=10),
    st.lists(st.integers(50, 250), min_size=5, max_size=5),
    st.sampled_from([(3.0, 0.0, 0.0), (3.0, 1.0, 0.0), (2.0, 0.5, 1.0)]),
    st.sampled_from([None, 200.0]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_rule_is_the_policys(
    pool: list[tuple[int, float]],
    contexts: list[int],
    aim: tuple[float, float, float],
    ageing_s: float | None,
) -> None:
    """Three workers of two slots, one of them free: the best by `Rule` is among the best of what BR-H admits."""
    loads = [contexts[0], contexts[1] + contexts[2], contexts[3] + contexts[4]]
    workers = [
        Worker(
            f"w{i}",
            Role.DECODE,
            "g",
            f"n{i}",
            Health.READY,
            2,
            10_000,
            kv_tokens=load,
            slots_used=1 + (i > 0),
        )
        for i, load in enumerate(loads)
    ]
    entries = [
        PoolEntry(Request(f"r{i}", 0.0, tokens, 100), "p", "g", at_s, 1e9, 0, 0)
        for i, (tokens, at_s) in enumerate(pool)
    ]
    beta, pool_lag, center = aim
    policy = BalanceRouteH(
        0, 1.0, beta=beta, ageing_s=ageing_s, pool_wide=True, pool_lag=pool_lag, center=center
    )
    view = Snapshot(100.0, {w.id: w for w in workers}, tuple(entries), {})
    (made,) = policy.assign([(entry, workers) for entry in entries], view, random.Random(0))

    s = state(*[(1, 1)] * 7, workers=3, slots=2, pool_tokens=1.0)
    s.context = np.array([[0.0, contexts[0]], contexts[1:3], contexts[3:5]], dtype=np.float64)
    s.pool = np.array([(tokens, 1.0, at_s) for tokens, at_s in pool]).T
    s.pooled, s.step = len(pool), 100.0
    worth = bound.Rule(beta, pool_lag, center, 1.0 / ageing_s if ageing_s else 0.0).worth(s, 0)
    assert worth[int(made.attempt_id[1:])] == pytest.approx(worth.max())


def test_playing_on_takes_what_is_better_in_the_end() -> None:
    """Worker 0 has a free slot, worker 1 holds 101 for 999 more steps; the pool: 100 for one step, 90 for a thousand.

    100 first, the rule's choice: one step at 1, then 90 beside 102 for 998 steps: (1 + 998 * 12) / 999 = 11.989.
    90 first: 999 steps at 11, then 100 beside 1,089 for one: (999 * 11 + 989) / 1,000 = 11.978, the better of the two.
    """
    s = state((100, 1), (100, 1_000), (100, 1), (90, 1_000), (90, 1_000), (90, 1_000), pool_tokens=190.0)
    assert s.depart() == (1, 0, 0, 0)
    played = {s.pool[0, i]: bound._play(PLAIN, s, 0, 0, i, 2) for i in range(2)}
    assert played == pytest.approx({100: 11_977 / 999, 90: 11.978})
    chosen = [
        s.pool[0, bound.choose(PLAIN, s, 0, 0, candidates, departures)]
        for candidates, departures in ((1, 0), (2, 1), (2, 2))
    ]
    assert chosen == [100, 100, 90]


def test_search_comes_below_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(cluster.CASES["recurring-long"], requests=3_000)
    monkeypatch.setitem(cluster.CASES, "recurring-long", small)
    variants = [v for v in bound.variants(quick=True) if v.config["case"] == "recurring-long"]
    runs = {
        v.name: {0: bound.run_one({**v.config, "warmup_steps": 1_000, "steps": 2_000}, seed=0)}
        for v in variants
    }
    results = Results("bound", True, {v.name: v.config for v in variants}, runs)
    rule, search = (results.mean(v.name, "imbalance_tokens") for v in variants)
    assert 0 < search < 0.9 * rule
    assert len(bound.compare(results)) == 4
    assert bound.plots(results)
