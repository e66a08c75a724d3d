"""BR-0 and BR-H: the F-score, projections, the two stages, and that H = 0 is BR-0. `test_round` has brute force."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing.balance.balance_route_0 import BalanceRoute0
from policies.routing.balance.balance_route_h import BalanceRouteH, _refilled
from policies.routing.balance.stages import Aim
from policies.routing.base import Reason
from policies.routing.composition.composition import Composition
from policies.routing.params import BadParameter
from policies.state.views import Departure, PoolEntry, Snapshot, Worker
from tests.policies.routing.balance.projected import Projected
from tests.policies.routing.views import entry, snapshot, worker


def fleet(loads: Sequence[int], **kw: int) -> list[Worker]:
    return [worker(f"w{i}", kv_tokens=load, **kw) for i, load in enumerate(loads)]


def imbalance(loads: Sequence[float]) -> float:
    return sum(max(loads) - load for load in loads)


# ------------------------------------------------------------------------------------------------------ the F-score


@pytest.mark.parametrize(
    ("w", "score"),
    # loads 300, 200, 250, 300: G = 4, M = 300; worker 1 has margin 100
    [(50, 50), (100, 100), (101, 97), (150, -50), (200, -200)],  # above the margin: w - 4 (w - 100)
)
def test_the_scores_regimes(w: int, score: int) -> None:
    assert Projected(fleet([300, 200, 250, 300]), Aim()).scores(1, [w]) == [score]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=6), st.integers(1, 500), st.data())
def test_the_score_is_minus_the_change_of_imbalance(loads: list[int], w: int, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(loads) - 1))
    after = [load + w * (i == row) for i, load in enumerate(loads)]
    assert Projected(fleet(loads), Aim()).scores(row, [w]) == [imbalance(loads) - imbalance(after)]


def test_workers_of_different_barriers_have_their_own_envelope() -> None:
    workers = [
        worker("a", kv_tokens=100, barrier="x"),
        worker("b", kv_tokens=40, barrier="x"),
        worker("c", kv_tokens=900, barrier="y"),
    ]
    loads = Projected(workers, Aim())
    assert loads.rows["margin"].tolist() == [0, 60, 0]
    assert loads.sizes == [2, 2, 1]


# ------------------------------------------------------------------------------------------------------ projections


def naive_load(requests: Sequence[tuple[int, int, float | None]], h: int) -> int:
    """DESIGN 3.5, word by word; a request is (s_r, a_r, c_r or None for stays)."""
    return sum(s + a + h for s, a, c in requests if h == 0 or c is None or h < c)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 200), st.integers(0, 50), st.none() | st.integers(1, 12)), max_size=8
)


@given(st.lists(REQUESTS, min_size=1, max_size=4), st.integers(0, 10))
def test_projected_loads_follow_the_formula_request_by_request(fleet_requests, horizon) -> None:  # type: ignore[no-untyped-def]
    workers = []
    for i, requests in enumerate(fleet_requests):
        steps = sorted({c for _, _, c in requests if c is not None})
        departures = tuple(
            Departure(c, sum(x == c for _, _, x in requests), sum(s + a for s, a, x in requests if x == c))
            for c in steps
        )
        tokens = sum(s + a for s, a, _ in requests)
        workers.append(worker(f"w{i}", slots_used=len(requests), kv_tokens=tokens, departures=departures))
    expected = [[naive_load(requests, h) for h in range(horizon + 1)] for requests in fleet_requests]
    assert Projected(workers, Aim(horizon)).load.tolist() == expected


def test_a_horizon_score_by_hand() -> None:
    # a: 100 tokens, 1 sequence, stays: 100, 101, 102.   b: 60 tokens, 1 sequence, gone at step 2: 60, 61, 0
    # margins of b: 40, 40, 102.  gamma 0.5: weights 1, .5, .25 (sum 1.75).  alpha 1, beta 2, w = 50:
    # 50 * 1.75 - 2 * (1 * 10 + .5 * 10 + 0) = 87.5 - 30 = 57.5
    workers = [
        worker("a", kv_tokens=100, slots_used=1),
        worker("b", kv_tokens=60, slots_used=1, departures=(Departure(2, 1, 60),)),
    ]
    loads = Projected(workers, Aim(2, 0.5))
    assert loads.margins(1) == [40, 40, 102]
    assert loads.scores(1, [50]) == [57.5]
    assert loads.rows["margin"][1] == 40
    # slopes of the penalty: 2 * (1) = 2 >= 1.75 at the first margin: the peak is 40
    assert loads.peak(1) == 40


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 200), st.integers(1, 2)), max_size=6),
    st.integers(0, 6),
    st.integers(1, 2),
)
def test_updates_by_admissions_equal_a_fresh_projection(start, admissions, horizon, barriers) -> None:  # type: ignore[no-untyped-def]
    workers = [dataclasses.replace(w, barrier=f"b{i % barriers}") for i, w in enumerate(fleet(start))]
    loads = Projected(workers, Aim(horizon))
    for row, tokens, sequences in admissions:
        row %= len(workers)
        loads.add(row, tokens, sequences)
        old = workers[row]
        workers[row] = dataclasses.replace(
            old, kv_tokens=old.kv_tokens + tokens, slots_used=old.slots_used + sequences
        )
    fresh = Projected(workers, Aim(horizon))
    assert loads.load.tolist() == fresh.load.tolist()
    assert loads.envelope.tolist() == fresh.envelope.tolist()
    assert loads.rows["margin"].tolist() == fresh.rows["margin"].tolist()


# ----------------------------------------------------------------------------------------------------------- stages


def assign(
    policy: BalanceRoute0 | BalanceRouteH,
    workers: Sequence[Worker],
    pool: Sequence[PoolEntry],
    now_s: float = 1.0,
    seed: int = 0,
    by_slo: bool = False,
) -> dict[str, tuple[str, Reason]]:
    view = dataclasses.replace(snapshot(workers, pool, now_s=now_s), overdue_by_slo=by_slo)
    made = policy.assign([(e, workers) for e in pool], view, random.Random(seed))
    return {a.attempt_id: (a.decision.worker, a.decision.reason) for a in made}


def test_stage_1_gives_the_emptiest_worker_the_request_that_fills_its_margin_best() -> None:
    # w1 has 8 free slots, margin 100: of 150, 90, 40 it takes 90 (150 would score 150 - 2 * 50 = 50)
    workers = [worker("w0", kv_tokens=100, slots_used=8), worker("w1")]
    made = assign(BalanceRoute0(abundance=1.0), workers, [entry("a", 150), entry("b", 90), entry("c", 40)])
    assert made["b"] == ("w1", Reason.FILL)


def test_stage_2_takes_the_subset_that_fills_the_margin() -> None:
    # two slots free, margin 100: {60, 40} = 100 beats {90} = 90 and {90, 60} = 150 - 2 * 50
    workers = [worker("w0", kv_tokens=100, slots_used=8), worker("w1", slots_used=6)]
    pool = [entry("a", 90), entry("b", 60), entry("c", 40), entry("d", 25)]
    made = assign(BalanceRoute0(abundance=4.0), workers, pool)
    assert made == {"b": ("w1", Reason.BEST_SUBSET), "c": ("w1", Reason.BEST_SUBSET)}


def test_when_everything_overflows_the_single_best_is_admitted_anyway() -> None:
    # equal loads: margin 0, F = w - 2 w < 0 for all; the smallest of the window costs least, or that of the whole pool
    workers = [worker("w0", kv_tokens=100, slots_used=8), worker("w1", kv_tokens=100, slots_used=7)]
    pool = [entry("a", 90), entry("b", 60), entry("c", 5)]
    made = assign(BalanceRoute0(abundance=4.0, window=2), workers, pool)
    assert made == {"b": ("w1", Reason.LEAST_HARM)}
    made = assign(BalanceRoute0(abundance=4.0, window=2, pool_wide=True), workers, pool)
    assert made == {"c": ("w1", Reason.LEAST_HARM)}


def test_a_single_of_the_pool_that_beats_a_positive_subset_is_taken_only_if_asked_for() -> None:
    # margin 50, two slots, W = 2: 60 - 2 * 10 = 40 is the best subset of {70, 60}, and 50 alone is worth 50
    workers = [worker("w0", kv_tokens=50, slots_used=8), worker("w1", slots_used=6)]
    pool = [entry("a", 70), entry("b", 60), entry("c", 50)]
    paper = assign(BalanceRoute0(abundance=4.0, window=2), workers, pool)
    assert next(iter(paper.items())) == ("b", ("w1", Reason.BEST_SUBSET))
    ours = assign(BalanceRoute0(abundance=4.0, window=2, pool_wide=True), workers, pool)
    assert next(iter(ours.items())) == ("c", ("w1", Reason.BEST_SUBSET))


def test_a_departure_in_the_window_makes_room_that_br0_cannot_see() -> None:
    # Both have 100 tokens, one free slot, no margin now. From step 2 on w1 has lost 95 tokens. H = 4, gamma = 1, G = 2:
    # on w1: big 80 * 5 - 2 * (80 + 80) = 80, small 3 * 5 - 2 * (3 + 3) = 3; on w0: -80 * 5 and -3 * 5
    workers = [
        worker("w0", kv_tokens=100, slots_used=7),
        worker("w1", kv_tokens=100, slots_used=7, departures=(Departure(2, 6, 95),)),
    ]
    pool = [entry("big", 80), entry("small", 3)]
    seeds = range(8)
    br_h = [assign(BalanceRouteH(4, 1.0, abundance=9.0), workers, pool, seed=s) for s in seeds]
    assert {made["big"] for made in br_h} == {("w1", Reason.BEST_SUBSET)}
    br_0 = [assign(BalanceRoute0(abundance=9.0), workers, pool, seed=s) for s in seeds]
    assert {made["big"][0] for made in br_0} == {"w0", "w1"}


def test_the_more_urgent_class_is_placed_first() -> None:
    workers = [worker("w0", kv_tokens=100, slots_used=8), worker("w1", slots_used=7)]
    pool = [entry("fits", 100), entry("urgent", 10, priority=-1)]
    assert set(assign(BalanceRoute0(), workers, pool)) == {"urgent"}


def test_an_overdue_entry_goes_first_whatever_its_size() -> None:
    workers = [worker("w0", kv_tokens=100, slots_used=8), worker("w1", slots_used=7)]
    pool = [entry("old", 10, entered_s=0.0), entry("fits", 100, entered_s=19.0)]
    # the lease of 30 s is not renewed: from 20 s on it is about to end
    assert set(assign(BalanceRoute0(), workers, pool, now_s=20.0)) == {"fits"}
    assert assign(BalanceRoute0(), workers, pool, now_s=20.1) == {"old": ("w1", Reason.OVERDUE)}
    renewed = [dataclasses.replace(pool[0], lease_until_s=48.0, renewed_s=18.0), pool[1]]
    assert set(assign(BalanceRoute0(), workers, renewed, now_s=20.1)) == {"fits"}


@pytest.mark.parametrize("kind", [BalanceRoute0, BalanceRouteH])
def test_an_objective_goes_first_in_its_class_and_a_lease_that_ends_before_all(kind: Any) -> None:
    workers = [worker("w0", kv_tokens=100, slots_used=8), worker("w1", slots_used=7)]
    late = entry("late", 10, priority=1, lease_s=1e6, ttft_slo_s=30.0)
    fits, urgent = entry("fits", 100, priority=1, lease_s=1e6), entry("urgent", 5, lease_s=1e6)
    # from two thirds of its 30 s on `late` is about to miss its objective
    made = assign(kind(), workers, [fits, late], now_s=25.0, by_slo=True)
    assert made == {"late": ("w1", Reason.OVERDUE)}
    assert set(assign(kind(), workers, [fits, late, urgent], now_s=25.0, by_slo=True)) == {"urgent"}
    assert set(assign(kind(max_wait_s=1.0), workers, [late, urgent], now_s=25.0)) == {"urgent"}
    rescued = dataclasses.replace(late, lease_until_s=30.0)
    made = assign(kind(), workers, [rescued, urgent], now_s=25.0, by_slo=True)
    assert made == {"late": ("w1", Reason.OVERDUE)}


def test_a_pool_that_waits_for_minutes_is_ordered_by_f_not_by_arrival() -> None:
    """Leases that are renewed make nothing overdue; a limit of 10 s turns the same pool into first in, first out."""
    workers = [worker("w0", kv_tokens=500, slots_used=8), worker("w1", slots_used=7)]
    pool = [
        dataclasses.replace(entry(f"r{i}", tokens, entered_s=30.0 * i), lease_until_s=325.0, renewed_s=295.0)
        for i, tokens in enumerate((5, 80, 300, 499, 40, 120))
    ]
    for kind in (BalanceRoute0, BalanceRouteH):
        # at 300 s they have waited for 150 to 300 s; margin 500
        assert assign(kind(), workers, pool, now_s=300.0) == {"r3": ("w1", Reason.BEST_SUBSET)}
        assert assign(kind(max_wait_s=10.0), workers, pool, now_s=300.0) == {"r0": ("w1", Reason.OVERDUE)}


@pytest.mark.parametrize("kind", [BalanceRoute0, BalanceRouteH])
@pytest.mark.parametrize("size", [1, 35, 300])
def test_nobody_is_starved_however_long_better_ones_come(kind: Any, size: int) -> None:
    """An entry of any size goes within the time in which its bonus makes up for the largest score of a set, although
    eight newcomers that fit the margin exactly arrive before every round.
    """
    workers = [worker("w0", kv_tokens=100, slots_used=8), worker("w1", slots_used=6)]
    policy, now_s, waited_s = kind(ageing_s=60.0), 0.0, None
    for number in range(200):
        now_s = 5.0 * number
        pool = [entry("odd", size, lease_s=1e6)]
        pool += [entry(f"new{i}", 50, entered_s=now_s, lease_s=1e6) for i in range(8)]
        if "odd" in assign(policy, workers, pool, now_s=now_s):
            waited_s = now_s
            break
        assert "odd" not in assign(kind(ageing_s=None), workers, pool, now_s=now_s)
    # F lies between 100 and 300 - 2 * 200 = -100 at each step, the mean prompt is above 44, and it takes some time
    assert waited_s is not None and 0.0 < waited_s <= 60.0 * 200 / 44 + 5.0


@pytest.mark.parametrize(("now_s", "chosen"), [(12.0, "fits"), (110.0, "old")])
def test_age_counts_like_tokens_when_it_is_asked_to(now_s: float, chosen: str) -> None:
    # margin 100, one slot: 90 against 30. The mean is 60, so a second is worth 10 * 60 / 1000 = 0.6 tokens:
    # at 12 s "old" leads by 10 s = 6 tokens of the 60 that it lacks; at 110 s by 108 s = 65
    workers = [worker("w0", kv_tokens=100, slots_used=8), worker("w1", slots_used=7)]
    pool = [entry("old", 30, entered_s=2.0), entry("fits", 90, entered_s=now_s)]
    pool = [dataclasses.replace(one, lease_until_s=1e6) for one in pool]
    policy = BalanceRouteH(0, 1.0, ageing_s=100.0, slack=0.0)
    assert set(assign(policy, workers, pool, now_s=now_s)) == {chosen}


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.0, 90.0)), min_size=1, max_size=12),
    st.integers(0, 300),
    st.floats(200.0, 10_000.0),
    st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=100)
def test_the_aged_choice_is_the_best_of_all(
    pool: list[tuple[int, float]], margin: int, ageing_s: float, slack: float
) -> None:
    """Against scoring every entry: the search leaves out only what cannot be the best."""
    workers = [worker("w0", kv_tokens=margin, slots_used=8), worker("w1", slots_used=7)]
    entries = [entry(f"r{i}", tokens, entered_s=at_s, lease_s=1e6) for i, (tokens, at_s) in enumerate(pool)]
    policy = BalanceRouteH(0, 1.0, ageing_s=ageing_s, pool_wide=True, slack=slack)
    (attempt_id,) = assign(policy, workers, entries, now_s=100.0)
    mean = sum(tokens for tokens, _ in pool) / len(pool)
    peak = margin - slack * mean

    def worth(tokens: int, at_s: float) -> float:
        return tokens - 2.0 * max(0.0, tokens - peak) + mean * (100.0 - at_s) / ageing_s

    assert worth(*pool[int(attempt_id[1:])]) == pytest.approx(max(worth(*one) for one in pool))


def test_slack_leaves_the_envelope_unfilled() -> None:
    # margin 100; the mean of 100, 80, 60 is 80, so slack 0.25 aims at 80: 80 - 0 beats 100 - 2 * 20 and 60
    workers = [worker("w0", kv_tokens=100, slots_used=8), worker("w1", slots_used=7)]
    pool = [entry("a", 100), entry("b", 80), entry("c", 60)]
    assert set(assign(BalanceRouteH(0, 1.0, slack=0.0, ageing_s=None), workers, pool)) == {"a"}
    assert set(assign(BalanceRouteH(0, 1.0, slack=0.25, ageing_s=None), workers, pool)) == {"b"}


@pytest.mark.parametrize(
    ("tokens", "pool_lag", "chosen"),
    [
        # margin 100; 1,500 tokens of 15 sequences are 100 each, and the pool's mean is 80: 20 are missing
        ((100, 80, 60), 0.0, "r0"),
        # aims at 80: 80 beats 100 - 2 * 20 and 60
        ((100, 80, 60), 1.0, "r1"),
        ((100, 80, 60), 2.0, "r2"),  # aims at 60: 60 beats 80 - 2 * 20
        ((100, 150, 80), 2.0, "r0"),  # a mean of 110 lacks nothing
    ],
)
def test_a_pool_of_small_prompts_lowers_the_aim(
    tokens: tuple[int, ...], pool_lag: float, chosen: str
) -> None:
    workers = [worker("w0", kv_tokens=800, slots_used=8), worker("w1", kv_tokens=700, slots_used=7)]
    pool = [entry(f"r{i}", one) for i, one in enumerate(tokens)]
    assert set(assign(BalanceRouteH(0, 1.0, pool_lag=pool_lag), workers, pool)) == {chosen}


@pytest.mark.parametrize(
    ("center", "used", "chosen"),
    [
        # loads 100, 60 and 0: the envelope is 100, the two full workers' mean 80
        (0.0, 8, "at-envelope"),
        (0.5, 8, "between"),  # aims at 90
        (1.0, 8, "at-mean"),
        # with no full worker there is nothing to aim at but the envelope
        (1.0, 7, "at-envelope"),
    ],
)
def test_the_aim_can_be_the_mean_of_the_full_workers(center: float, used: int, chosen: str) -> None:
    workers = [
        worker("w0", kv_tokens=100, slots_used=used),
        worker("w1", kv_tokens=60, slots_used=used),
        worker("w2", slots_used=min(used, 7) - (used < 8)),
    ]
    pool = [entry("at-envelope", 100), entry("between", 90), entry("at-mean", 80)]
    made = assign(BalanceRouteH(0, 1.0, center=center), workers, pool)
    assert next(iter(made)) == chosen


def test_a_barrier_has_its_own_mean() -> None:
    """The far barrier's full worker is its envelope, 1,000: no margin; x's two have 0 and 40. The mean is 13 1/3."""
    workers = [
        worker("w0", kv_tokens=100, slots_used=8, barrier="x"),
        worker("w1", kv_tokens=60, slots_used=8, barrier="x"),
        worker("w2", slots_used=7, barrier="x"),
        worker("w3", kv_tokens=1_000, slots_used=8, barrier="y"),
    ]
    pool = [entry("a", 100), entry("b", 86), entry("c", 80)]  # aims at 86 2/3
    assert set(assign(BalanceRouteH(0, 1.0, center=1.0), workers, pool)) == {"b"}


@pytest.mark.parametrize(
    ("refill", "spare", "chosen"),
    [
        # w1's margin: 10 now and 60 from step 1 on, when 50 of its tokens are gone. H = 2, gamma 1, G = 2:
        # 60: 3 * 60 - 2 * 50 = 80; 10: 3 * 10 = 30
        (False, 1, "large"),
        # two entries, one slot: the other entry follows the one that goes. 60: 180 - 2 * 3 * 50
        (
            True,
            1,
            "small",
        ),
        (True, 0, "large"),  # nothing is left to follow it
    ],
)
def test_a_departure_that_the_pool_makes_up_for_opens_no_margin(
    refill: bool, spare: int, chosen: str
) -> None:
    workers = [
        worker("w0", kv_tokens=110, slots_used=8),
        worker("w1", kv_tokens=100, slots_used=7, departures=(Departure(1, 1, 50),)),
    ]
    pool = [entry("large", 60), entry("small", 10)][: 1 + spare]
    made = assign(BalanceRouteH(2, 1.0, refill=refill), workers, pool)
    assert next(iter(made)) == chosen


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), max_size=4), min_size=1, max_size=4),
    st.integers(-2, 12),
)
def test_the_first_departures_are_made_up_for(steps: list[list[tuple[int, int]]], entries: int) -> None:
    """The departures that remain are those that the pool cannot follow; none left out comes after one that was kept."""
    workers = [
        worker(f"w{i}", departures=tuple(Departure(step, n, 10 * n) for step, n in one))
        for i, one in enumerate(steps)
    ]
    after = _refilled(workers, entries)
    assert [w.id for w in after] == [w.id for w in workers]
    kept = [gone for w in after for gone in w.departures]
    every = [gone for w in workers for gone in w.departures]
    followed = sum(gone.sequences for gone in every) - sum(gone.sequences for gone in kept)
    assert followed <= max(0, entries)
    if kept:
        assert followed + max(gone.sequences for gone in every) > entries
        left_out = list(every)
        for gone in kept:
            left_out.remove(gone)
        assert max((gone.step for gone in left_out), default=0) <= min(gone.step for gone in kept)


def test_bypass_decides_one_entry_for_the_largest_margin() -> None:
    workers = [worker("w0", kv_tokens=100), worker("w1", kv_tokens=40), worker("w2", kv_tokens=70)]
    view = snapshot(workers)
    (made,) = BalanceRoute0(bypass=True).assign([(entry("a", 50), workers)], view, random.Random(0))
    # F: w0: 50 - 3*50 = -100 ; w1: 50 ; w2: 50 - 3*20 = -10
    assert [(r.worker, -r.cost) for r in made.decision.ranking] == [("w1", 50), ("w2", -10), ("w0", -100)]


def test_bypass_fills_a_worker_a_little_above_its_slots() -> None:
    workers = [worker("w0", kv_tokens=100, slots_used=9), worker("w1", kv_tokens=40, slots_used=10)]
    feasible = [(entry("a", 50), workers)]
    view = dataclasses.replace(snapshot(workers), overcommit_slots=2)
    (made,) = BalanceRoute0(bypass=True).assign(feasible, view, random.Random(0))
    # both have 8 slots, so w1 has as many as it may have, though its margin is larger
    assert made.decision.worker == "w0"
    assert not BalanceRoute0(bypass=True, bypass_slots=1).assign(feasible, view, random.Random(0))
    (most,) = BalanceRoute0(bypass=True, bypass_slots=3).assign(feasible, view, random.Random(0))
    assert most.decision.worker == "w1"


def test_an_entry_above_the_cap_of_the_bypass_does_not_block_those_that_fit() -> None:
    # 8 slots and one more: three sequences more do not stay within the cap, one does
    workers = [worker("w0", slots_used=7), worker("w1", slots_used=8)]
    feasible = [(entry(name, 50, slots=slots), workers) for name, slots in (("a", 3), ("b", 3), ("c", 1))]
    view = dataclasses.replace(snapshot(workers), overcommit_slots=9)
    (made,) = BalanceRoute0(bypass=True, bypass_slots=1).assign(feasible, view, random.Random(0))
    assert made.attempt_id == "c"
    assert not BalanceRoute0(bypass=True, bypass_slots=1).assign(feasible[:2], view, random.Random(0))


def test_the_decision_shows_score_sum_margin_and_the_other_workers() -> None:
    workers = [
        worker("w0", kv_tokens=100, slots_used=8),
        worker("w1", slots_used=6),
        worker("w2", slots_used=7),
    ]
    pool = [entry("a", 60), entry("b", 40)]
    view = snapshot(workers, pool)
    made = BalanceRoute0(abundance=9.0).assign([(e, workers) for e in pool], view, random.Random(0))
    ranking = made[0].decision.ranking
    assert ranking[0].terms == {
        "score": 100.0,
        "w_tokens": 100.0,
        "margin_tokens": 100.0,
        "workers": 3.0,
        "free_slots": 2.0,
        "set_size": 2.0,
    }
    assert [r.worker for r in ranking] == ["w1", "w2", "w0"]


CLUSTERS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 8), st.integers(100, 2000)), min_size=1, max_size=6
)
POOLS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 2), st.integers(0, 1)), min_size=1, max_size=10
)
RESERVE = 3


def case(cluster, pool, mask: int) -> tuple[Snapshot, list[tuple[PoolEntry, list[Worker]]]]:  # type: ignore[no-untyped-def]
    """A snapshot and what the dispatcher would call feasible (some pairs left out by the bits of `mask`)."""
    workers = [
        worker(f"w{i}", kv_tokens=load if used else 0, slots_used=used, kv_capacity_tokens=capacity)
        for i, (load, used, capacity) in enumerate(cluster)
    ]
    entries = [entry(f"r{i}", size, slots=k, priority=p) for i, (size, k, p) in enumerate(pool)]
    feasible = []
    for i, e in enumerate(entries):
        need = e.request.prompt_tokens + RESERVE * e.request.slots
        fits = [
            w
            for j, w in enumerate(workers)
            if w.free_slots >= e.request.slots
            and (w.free_kv_tokens >= need or w.slots_used == 0)
            and not (mask >> (i * 7 + j) & 1 and j)
        ]
        feasible.append((e, fits))
    return snapshot(workers, entries), feasible


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([BalanceRouteH, Composition]),
    CLUSTERS,
    POOLS,
    st.integers(0, 2**70),
    st.sampled_from([0.0, 1.0, 9.0]),
    st.integers(1, 5),
)
def test_a_round_fits_as_a_whole_and_leaves_nothing_that_fits(
    kind, cluster, pool, mask, abundance, window
) -> None:  # type: ignore[no-untyped-def]
    view, feasible = case(cluster, pool, mask)
    policy = kind(horizon=3, abundance=abundance, window=window, reserve_tokens=RESERVE)
    made = policy.assign(feasible, view, random.Random(1))
    requests = {e.request.attempt_id: e.request for e, _ in feasible}
    assert len({a.attempt_id for a in made}) == len(made)
    left = {w: [view.workers[w].free_slots, view.workers[w].free_kv_tokens, 0] for w in view.workers}
    for a in made:
        request, state = requests[a.attempt_id], left[a.decision.worker]
        assert a.decision.worker in {
            w.id for e, ws in feasible if e.request.attempt_id == a.attempt_id for w in ws
        }
        state[0] -= request.slots
        state[1] -= request.prompt_tokens + RESERVE * request.slots
        state[2] += 1
    for w, (slots, room, admitted) in left.items():
        assert slots >= 0
        alone_on_an_empty_worker = admitted == 1 and view.workers[w].slots_used == 0
        assert room >= 0 or admitted == 0 or alone_on_an_empty_worker
    taken = {a.attempt_id for a in made}
    # whoever was left behind fits no untouched worker any more
    for e, ws in feasible:
        if e.request.attempt_id not in taken:
            assert all(left[w.id][2] > 0 for w in ws)


@settings(max_examples=200, deadline=None)
@given(CLUSTERS, POOLS, st.integers(0, 2**70), st.sampled_from([0.0, 1.0, 9.0]), st.integers(0, 9))
def test_br_h_at_h_0_is_br_0(cluster, pool, mask, abundance, seed) -> None:  # type: ignore[no-untyped-def]
    view, feasible = case(cluster, pool, mask)
    br_0 = BalanceRoute0(abundance=abundance, reserve_tokens=RESERVE)
    br_h = BalanceRouteH(0, 0.5, 1.0, None, abundance=abundance, reserve_tokens=RESERVE)
    expected = br_0.assign(feasible, view, random.Random(seed))
    assert br_h.assign(feasible, view, random.Random(seed)) == expected


def test_br_h_at_h_0_with_beta_g_written_out_is_br_0() -> None:
    view, feasible = case([(100, 8, 999), (0, 6, 999), (50, 7, 999)], [(90, 1, 0), (60, 1, 0), (40, 1, 0)], 0)
    expected = BalanceRoute0().assign(feasible, view, random.Random(0))
    assert BalanceRouteH(0, 1.0, 1.0, 3.0).assign(feasible, view, random.Random(0)) == expected
    assert BalanceRouteH(0, 1.0, 1.0, 0.0).assign(feasible, view, random.Random(0)) != expected


@settings(max_examples=100, deadline=None)
@given(CLUSTERS, POOLS, st.integers(0, 2**70), st.randoms(use_true_random=False))
def test_the_order_of_workers_does_not_matter(cluster, pool, mask, shuffler) -> None:  # type: ignore[no-untyped-def]
    view, feasible = case(cluster, pool, mask)
    expected = BalanceRoute0().assign(feasible, view, random.Random(3))
    turned = list(view.workers.items())
    shuffler.shuffle(turned)
    other = dataclasses.replace(view, workers=dict(turned))
    mixed = [(e, shuffler.sample(ws, len(ws))) for e, ws in feasible]
    assert BalanceRoute0().assign(mixed, other, random.Random(3)) == expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"horizon": -1}, "horizon is -1: it must be a whole number 0"),
        ({"gamma": 1.5}, "gamma is 1.5: it must be a number > 0 and <= 1"),
        ({"window": 0}, r"window is 0: it must be a whole number 1\.\.12"),
        ({"beta": -2.0}, "beta is -2.0"),
        ({"slack": -0.1}, "slack is -0.1"),
        ({"ageing_s": 0.0}, "ageing_s is 0.0: it must be a number > 0"),
        ({"pool_lag": float("nan")}, "pool_lag is nan"),
        ({"refill": 1}, "refill is 1: it must be true or false"),
        ({"center": 1.5}, "center is 1.5: it must be a number >= 0 and <= 1"),
        ({"abundance": float("inf")}, "abundance is inf"),
    ],
)
def test_parameters_out_of_range_are_refused(params, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadParameter, match=f"policy balance_route_h: {message}"):
        BalanceRouteH(**params)
