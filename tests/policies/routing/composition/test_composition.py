"""The composition: F_H up to a factor, brute force over subsets with per-pair costs, and what each term does.

`test_round` checks whole rounds.
"""

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.network.oracle import Oracle
from policies.routing.balance.stages import Aim
from policies.routing.base import Decision, Reason
from policies.routing.composition import kernel
from policies.routing.composition.composition import Composition
from policies.routing.composition.round import Start, group_of, start_of
from policies.routing.params import BadParameter
from policies.state.views import Departure, PoolEntry, Role, Snapshot, Transfers, TypicalEntry, Worker
from tests.policies.routing.balance.projected import Projected
from tests.policies.routing.views import entry, snapshot, worker

MB = 1_000_000
ORACLE = Oracle(
    {1: 100.0 * MB, 3: 25.0 * MB},
    {1: 0.001, 3: 0.002},
    {("p", "near"): 1, ("p", "far"): 3, ("p", "w0"): 1, ("p", "w1"): 3, ("p", "w2"): 3},
)
SENDER = worker("p", Role.PREFILL)


def start(policy: Composition, view: Snapshot, workers: list[Worker]) -> Start:
    group = group_of(policy, [(e, workers) for e in view.pool], view, workers)
    return start_of(group, [0.0] * len(workers))


def first_decision(policy: Composition, view: Snapshot, worker: Worker) -> Decision:
    """The first of a round in which all entries may go to one worker only."""
    made = policy.assign([(e, [worker]) for e in view.pool], view, random.Random(0))
    return made[0].decision


def subsets(n: int) -> list[tuple[int, ...]]:
    return [some for k in range(1, n + 1) for some in itertools.combinations(range(n), k)]


def fleet(drops: list[int]) -> list[Worker]:
    departures = tuple(Departure(h, 1, drop) for h, drop in enumerate(drops, start=1))
    return [
        worker("w0", kv_tokens=sum(drops) + 50, slots_used=len(drops), departures=departures),
        worker("w1", kv_tokens=20, slots_used=1),
        worker("w2", kv_tokens=10, slots_used=2),
    ]


def discounted(gamma: float, horizon: int) -> float:
    """sum_h gamma^h: as `hold_steps` it leaves the discounted overflow as it is."""
    return sum(gamma**h for h in range(horizon + 1))


SIZES = st.lists(st.integers(1, 120), min_size=1, max_size=6)
DROPS = st.lists(st.integers(0, 100), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(SIZES, DROPS, st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([1e-6, 3e-4]))
def test_with_cost_0_and_credit_by_tokens_the_value_is_f_h_up_to_a_factor(
    sizes, drops, gamma, credit
) -> None:  # type: ignore[no-untyped-def]
    # k F_H = k alpha Gamma w - k beta P(w): k beta = N s D / Gamma, k alpha Gamma = credit per token; N = 1 on w1
    policy = Composition(
        len(drops),
        gamma,
        1e-5,
        hold_steps=discounted(gamma, len(drops)),
        stream_weight=1.0,
        abundance=99.0,
        reserve_tokens=0,
        credit="tokens",
        credit_s_per_token=credit,
        ageing_s=None,
        cost_weight=0.0,
    )
    workers = fleet(drops)
    view = snapshot([SENDER, *workers], [entry(f"r{i}", s) for i, s in enumerate(sizes)], ORACLE)
    k = 1e-5  # with beta = 1
    alpha = credit / (k * sum(gamma**h for h in range(len(drops) + 1)))
    f_h = Projected(workers, Aim(len(drops), gamma, alpha, 1.0))
    sums = [sum(sizes[i] for i in some) for some in subsets(len(sizes))]
    best = max(f_h.scores(1, sums))
    score = first_decision(policy, view, workers[1]).ranking[0].terms["score"]
    assert score == pytest.approx(k * (best if best > 0 else max(f_h.scores(1, sizes))), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 120), st.integers(0, 40), st.integers(1, 2), st.sampled_from([None, 0.5, 4.0])
        ),
        min_size=1,
        max_size=6,
    ),
    DROPS,
    st.integers(1, 7),
    st.integers(50, 500),
)
def test_stage_2_equals_brute_force_with_per_pair_costs(requests, drops, free, room) -> None:  # type: ignore[no-untyped-def]
    policy = Composition(
        len(drops),
        0.9,
        2e-3,
        hold_steps=discounted(0.9, len(drops)),
        stream_weight=1.0,
        abundance=99.0,
        reserve_tokens=2,
    )
    workers = fleet(drops)
    workers[1] = worker("w1", kv_tokens=20, slots_used=8 - free, kv_capacity_tokens=room + 20)
    pool = [
        entry(f"r{i}", size, kv_bytes=mb * MB, slots=k, ttft_slo_s=slo, predicted_tokens=size)
        for i, (size, mb, k, slo) in enumerate(requests)
    ]
    view = snapshot([SENDER, *workers], pool, ORACLE, {"r0": {"w1": requests[0][0] // 2}})
    view = dataclasses.replace(view, typical=TypicalEntry(20.0 * MB, 40.0))
    placeable = [e for e in pool if e.request.slots <= free]
    if not placeable:
        assert policy.assign([(e, [workers[1]]) for e in pool], view, random.Random(0)) == ()
        return
    waiting = max(1, 8 - free)
    slowest_s = max(0.02 + 0.0005 * w.slots_used + 2e-3 * w.kv_tokens for w in workers)
    queued = max(0, len(pool) - sum(w.free_slots for w in workers))
    queue_rent_s = queued * 40.0 * slowest_s / 24
    margins = Projected(workers, Aim(len(drops), 0.9)).margins(1)

    def value(some: list[PoolEntry]) -> float:
        w = sum(e.request.prompt_tokens for e in some)
        found = -waiting * 2e-3 * sum(0.9**h * max(0.0, w - m) for h, m in enumerate(margins))
        for e in some:
            request = e.request
            weight = kernel.slack_weight(0.0, request.terms.ttft_slo_s or 0.0, 1.0, 8.0)
            first_s = 0.02 + 0.0005 * (8 - free + 1)
            hit = (requests[0][0] // 2) / requests[0][0] if request.attempt_id == "r0" else 0.0
            cost_s = 0.002 + e.kv_bytes * (1 - hit) / (25.0 * MB) + first_s
            dearest_s = 0.002 + e.kv_bytes / (25.0 * MB) + first_s  # w1 is all that it may go to
            found += weight * (0.5 + dearest_s) - weight * cost_s
            # all have waited for 1 s; no worker is farther than w1, so nearness costs nothing there
            found += 1.0 - request.slots * request.predicted_tokens / 40.0 * queue_rent_s
        return found

    def takes(some: list[PoolEntry]) -> bool:
        k = sum(e.request.slots for e in some)
        return k <= free and sum(e.request.prompt_tokens for e in some) + 2 * k <= room

    sets = [[placeable[i] for i in some] for some in subsets(len(placeable))]
    best = max((value(some) for some in sets if takes(some)), default=-1.0)
    decision = first_decision(policy, view, workers[1])
    expected = best if best > 0 else max(value([e]) for e in placeable)
    assert decision.ranking[0].terms["score"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert decision.reason is (Reason.BEST_SUBSET if best > 0 else Reason.LEAST_HARM)


def place(
    policy: Composition, workers: list[Worker], pool: list[PoolEntry], sender: Worker = SENDER, **kw: Any
) -> dict[str, tuple[str, Reason]]:
    view = snapshot([sender, *workers], pool, ORACLE, **kw)
    made = policy.assign([(e, workers) for e in pool], view, random.Random(0))
    return {a.attempt_id: (a.decision.worker, a.decision.reason) for a in made}


def test_equal_loads_go_to_the_near_worker_until_balance_is_worth_more() -> None:
    # 10 MB: near 0.101 s, far 0.402 s. 1000 tokens onto near (margin 0): N s D * 1000 with N = 7, D = 2
    pool = [entry("r", 1000, kv_bytes=10 * MB)]
    # 0.14 s against 0.301 s of transfer; 1.4 s against it
    for s, chosen in (
        (1e-5, "near"),
        (1e-4, "far"),
    ):
        workers = [
            worker("near", kv_tokens=5000, slots_used=7, slots=16),
            worker("far", kv_tokens=1000, slots_used=7, slots=16),
        ]
        policy = Composition(1, 0.9, s, hold_steps=2.0, stream_weight=1.0, abundance=0.0, step_per_seq_s=0.0)
        assert place(policy, workers, pool)["r"] == (chosen, Reason.FILL)


def test_transfers_of_the_same_round_and_before_it_share_the_near_path() -> None:
    # 10 MB near: alone 0.101 s, 4 sharing 0.401 s, 5 sharing 0.501 s; far alone 0.402 s: the fifth goes far
    workers = [worker("near", slots=64), worker("far", slots=64)]
    policy = Composition(seconds_per_kv_token=0.0, step_per_seq_s=0.0, abundance=0.0)
    pool = [entry(f"r{i}", 10, kv_bytes=10 * MB) for i in range(5)]
    placed = [w for w, _ in place(policy, workers, pool).values()]
    assert placed == ["near"] * 4 + ["far"]
    busy = worker("p", Role.PREFILL, transfers=(Transfers("near", 0, 4),))
    assert place(policy, workers, pool[:1], busy)["r0"][0] == "far"


def test_without_a_balance_term_every_feasible_set_is_worth_more_than_none() -> None:
    workers = [worker("near", kv_tokens=9000, slots_used=5), worker("far", kv_tokens=10, slots_used=6)]
    pool = [entry(f"r{i}", 100 * (i + 1), kv_bytes=50 * MB) for i in range(4)]
    placed = place(Composition(seconds_per_kv_token=0.0, abundance=99.0), workers, pool)
    assert {reason for _, reason in placed.values()} == {Reason.BEST_SUBSET}
    assert len(placed) == 4


def test_a_slower_step_costs_more_the_fewer_slots_are_left_and_the_more_wait() -> None:
    # N = batch * (0.1 + 0.9 * occupancy^2) + queued, one worker of 8 slots; s D / Gamma = 1e-3
    policy = Composition(0, 1.0, 1e-3, hold_steps=1.0, stream_weight=0.1, scarcity=2.0)
    pool = [entry(f"r{i}", 10) for i in range(5)]
    for used, waiting in ((2, 2 * (0.1 + 0.9 / 16)), (6, 6 * (0.1 + 0.9 * 9 / 16) + 3)):
        workers = [worker("w1", slots_used=used)]
        made = start(policy, snapshot([SENDER, *workers], pool, ORACLE), workers)
        assert made.tables.workers["slowdown"][0] == pytest.approx(1e-3 * waiting)


def one_slot(pool: list[PoolEntry], usual: TypicalEntry, now_s: float = 1.0, **params: Any) -> set[str]:
    """The identifiers of the attempts that get the only free slot, on far."""
    workers = [worker("near", slots_used=8), worker("far", slots_used=7)]
    view = dataclasses.replace(snapshot([SENDER, *workers], pool, ORACLE, now_s=now_s), typical=usual)
    policy = Composition(abundance=99.0, **params)
    made = policy.assign([(e, workers[1:]) for e in view.pool], view, random.Random(0))
    return {a.attempt_id for a in made}


def test_scarce_slots_go_to_the_shortest_outputs() -> None:
    # by hand: Q = 2 - 1, T = 100 tokens at 20 + 8 * 0.5 ms = 2.4 s, S = 16: a usual hold costs 1 * 2.4 / 16 = 0.15 s
    pool = [entry("long", 100, predicted_tokens=300.0), entry("short", 100, predicted_tokens=30.0)]
    usual = TypicalEntry(1.0, 100.0)
    assert one_slot(pool, usual, seconds_per_kv_token=0.0) == {"short"}
    assert one_slot(pool, usual, seconds_per_kv_token=0.0, rent_weight=0.0) == {"long"}  # the first of equals
    workers = [worker("near", slots_used=8), worker("far", slots_used=7)]
    view = dataclasses.replace(snapshot([SENDER, *workers], pool, ORACLE), typical=usual)
    tables = start(Composition(seconds_per_kv_token=0.0), view, workers).tables
    assert tables.rules["queue_rent_s"][0] == pytest.approx(0.15)
    assert tables.entries["hold"].tolist() == pytest.approx([3.0, 0.3])


def test_without_forecasts_nobody_is_told_from_others() -> None:
    pool = [entry("first", 100), entry("second", 100)]
    assert one_slot(pool, TypicalEntry(1.0)) == {"first"}
    assert one_slot(pool, TypicalEntry(1.0), rent_weight=50.0) == {"first"}


def test_a_near_slot_rents_for_what_the_next_one_loses_when_all_of_them_are_taken() -> None:
    # a usual entry of 10 MB: near 0.101 s, far 0.402 s; near is 7/8 full: (7/8)^2 * 0.301 s; far has nothing behind it
    workers = [worker("near", slots_used=7), worker("far", slots_used=2)]
    view = snapshot([SENDER, *workers], [entry("r", 10, kv_bytes=5 * MB)], ORACLE)
    view = dataclasses.replace(view, typical=TypicalEntry(10.0 * MB))
    made = start(Composition(near_scarcity=2.0), view, workers)
    rents_s = dict(zip(["near", "far"], made.tables.paths["near_s"].tolist(), strict=True))
    assert rents_s == {"near": pytest.approx(0.301 * 49 / 64), "far": 0.0}


def test_the_last_near_slot_goes_to_much_kv_and_few_tokens() -> None:
    workers = [worker("near", slots_used=7), worker("far", slots_used=2)]
    for kv_bytes, tokens, chosen in (
        (10 * MB, 30.0, "near"),
        # three usual holds of (7/8)^8 * 0.301 s = 0.31 s against 0.301 s of transfer
        (
            10 * MB,
            300.0,
            "far",
        ),
        (MB, 100.0, "far"),  # 0.103 s against 0.031 s
        (40 * MB, 300.0, "near"),
    ):
        pool = [entry("r", 10, kv_bytes, predicted_tokens=tokens)]
        view = dataclasses.replace(
            snapshot([SENDER, *workers], pool, ORACLE), typical=TypicalEntry(10.0 * MB, 100.0)
        )
        policy = Composition(seconds_per_kv_token=0.0, step_per_seq_s=0.0, near_scarcity=8.0)
        made = policy.assign([(e, workers) for e in pool], view, random.Random(0))
        assert made[0].decision.worker == chosen


def test_overdue_entries_go_first_each_to_its_best_worker() -> None:
    # near costs 0.301 s less; the margin alone would send it to far, which is empty
    workers = [worker("near", kv_tokens=50, slots_used=1), worker("far")]
    pool = [
        dataclasses.replace(entry("old", 10, 10 * MB, predicted_tokens=900.0), lease_until_s=300.0),
        dataclasses.replace(
            entry("new", 10, 10 * MB, entered_s=55.0, predicted_tokens=1.0), lease_until_s=300.0
        ),
    ]
    for now_s, reason in ((59.0, Reason.FILL), (61.0, Reason.OVERDUE)):
        placed = place(Composition(seconds_per_kv_token=1e-9, max_wait_s=60.0), workers, pool, now_s=now_s)
        assert placed == {"old": ("near", reason), "new": ("near", Reason.FILL)}
    short_lease = [dataclasses.replace(entry, lease_until_s=entry.entered_s + 30.0) for entry in pool]
    for now_s, reason in ((19.0, Reason.FILL), (21.0, Reason.OVERDUE)):
        assert place(Composition(), workers, short_lease[:1], now_s=now_s)["old"][1] == reason


def test_a_pool_that_waits_for_minutes_is_ordered_by_value_not_by_arrival() -> None:
    """Leases that are renewed make nothing overdue, and a second is worth little where `ageing_s` says so."""
    usual = TypicalEntry(1.0, 100.0)
    pool = [
        dataclasses.replace(
            entry(f"r{i}", 100, entered_s=30.0 * i, predicted_tokens=tokens),
            lease_until_s=325.0,
            renewed_s=295.0,
        )
        for i, tokens in enumerate((150.0, 120.0, 20.0, 90.0))
    ]
    more: dict[str, Any] = {"now_s": 300.0, "seconds_per_kv_token": 0.0}
    assert one_slot(pool, usual, ageing_s=None, **more) == {"r2"}
    assert one_slot(pool, usual, ageing_s=1e4, **more) == {"r2"}
    assert one_slot(pool, usual, ageing_s=1.0, **more) == {"r0"}
    assert one_slot(pool, usual, ageing_s=None, max_wait_s=60.0, **more) == {"r0"}


def test_an_entry_about_to_miss_its_objective_goes_first_until_it_has_missed_it() -> None:
    workers = [worker("w0")]
    pool = [entry("large", 100, lease_s=1e6), entry("soon", 10, lease_s=1e6, ttft_slo_s=30.0)]
    for now_s, reason in (
        (20.0, Reason.FILL),
        (20.1, Reason.OVERDUE),
        (30.0, Reason.OVERDUE),
        (30.1, Reason.FILL),
    ):
        view = dataclasses.replace(
            snapshot([SENDER, *workers], pool, ORACLE, now_s=now_s), overdue_by_slo=True
        )
        made = Composition().assign([(e, workers) for e in pool], view, random.Random(0))
        assert {a.attempt_id: a.decision.reason for a in made}["soon"] == reason
    assert {reason for _, reason in place(Composition(), workers, pool, now_s=25.0).values()} == {Reason.FILL}


def test_an_objective_goes_first_in_its_class_and_a_lease_that_ends_before_all() -> None:
    workers = [worker("w0", slots_used=7)]

    def placed(*pool: PoolEntry) -> list[tuple[str, Reason]]:
        view = dataclasses.replace(
            snapshot([SENDER, *workers], pool, ORACLE, now_s=25.0), overdue_by_slo=True
        )
        made = Composition().assign([(e, workers) for e in pool], view, random.Random(0))
        return [(a.attempt_id, a.decision.reason) for a in made]

    # from two thirds of its 30 s on `late` is about to miss its objective
    late = entry("late", 10, priority=1, lease_s=1e6, ttft_slo_s=30.0)
    old, urgent = entry("old", 10, priority=1, lease_s=1e6), entry("urgent", 10, lease_s=1e6)
    assert placed(old, late) == [("late", Reason.OVERDUE)]
    assert [name for name, _ in placed(old, late, urgent)] == ["urgent"]
    rescued = dataclasses.replace(late, lease_until_s=30.0)
    assert placed(rescued, urgent) == [("late", Reason.OVERDUE)]


@pytest.mark.parametrize(("window", "chosen"), [(2, {"r1", "r3"}), (6, {"r1", "r2"})])
def test_the_window_holds_the_shortest_by_forecast(window: int, chosen: set[str]) -> None:
    # r2's output is the longest, but it has 0.1 of 1.1 s left: it is worth most where the window reaches it
    workers = [worker("far", slots_used=6), worker("full", slots_used=8, kv_tokens=900)]
    tokens = [50.0, 10.0, 80.0, 20.0, 60.0, 70.0]
    pool = [
        entry(f"r{i}", 100 + i, predicted_tokens=t, ttft_slo_s=1.1 if i == 2 else None)
        for i, t in enumerate(tokens)
    ]
    policy = Composition(window=window, abundance=99.0, seconds_per_kv_token=0.0)
    view = dataclasses.replace(snapshot([SENDER, *workers], pool, ORACLE), typical=TypicalEntry(1.0, 50.0))
    made = policy.assign([(e, workers[:1]) for e in view.pool], view, random.Random(0))
    assert {a.attempt_id for a in made} == chosen


def test_age_makes_up_for_length() -> None:
    # one waits besides: a usual hold costs 0.15 s (above), so the short one is worth (1.5 - 0.3) * 0.15 = 0.18 s more
    usual = TypicalEntry(1.0, 100.0)
    for entered_s, first in ((0.8, "long"), (0.9, "short")):  # worth 0.2 s or 0.1 s more by its age
        old = dataclasses.replace(entry("long", 100, predicted_tokens=150.0), entered_s=entered_s)
        new = dataclasses.replace(entry("short", 100, predicted_tokens=30.0), entered_s=1.0)
        assert one_slot([old, new], usual, seconds_per_kv_token=0.0) == {first}


def test_transfers_of_all_senders_count_by_their_mean() -> None:
    # 2 senders: other's 2 near and 2 far transfers are n = (2 + 2) / 2 near and 2 / 2 far: 0.301 s against 0.802 s
    workers = [worker("far"), worker("near")]
    other = worker("q", Role.PREFILL, transfers=(Transfers("near", 0, 2), Transfers("far", 0, 2)))
    tiers = {(p, d): t for p in ("p", "q") for d, t in (("near", 1), ("far", 3))}
    oracle = Oracle({1: 100.0 * MB, 3: 25.0 * MB}, {1: 0.001, 3: 0.002}, tiers)
    pool = [entry("r", 10, kv_bytes=10 * MB)]
    view = snapshot([SENDER, other, *workers], pool, oracle)

    def costs_s(t: kernel.Tables) -> list[float]:
        return [
            kernel.cost_s(t.entries[0], t.workers[row], t.paths[row], t.rules[0], t.flows, 0)
            for row in (0, 1)
        ]

    tables = start(Composition(step_base_s=1e-9, step_per_seq_s=0.0), view, workers).tables
    assert costs_s(tables) == pytest.approx([0.802, 0.301], abs=1e-6)
    tables.classes["begun"] = 1
    kernel.send(tables.classes, tables.flows, tables.entries[0], 1)  # one more near: n = 2.5
    assert costs_s(tables) == pytest.approx([0.802, 0.351], abs=1e-6)
    blind = start(Composition(max_inflight=0, step_base_s=1e-9, step_per_seq_s=0.0), view, workers)
    assert costs_s(blind.tables) == pytest.approx([0.402, 0.101], abs=1e-6)


def test_scarce_slots_go_to_who_has_least_slack() -> None:
    # one slot, far: both cost 0.402 s there and 0.101 s near. now = 5: "late" has 1 of 6 s left, weight 6
    workers = [worker("near", slots_used=8), worker("far", slots_used=7)]
    pool = [entry("calm", 100, 10 * MB, ttft_slo_s=60.0), entry("late", 100, 10 * MB, ttft_slo_s=6.0)]
    placed = place(Composition(abundance=99.0), workers, pool, now_s=5.0)
    assert set(placed) == {"late"}


@pytest.mark.parametrize(
    ("slo_s", "now_s", "weight"),
    [(None, 9.0, 1.0), (4.0, 0.0, 1.0), (4.0, 2.0, 2.0), (4.0, 3.5, 8.0), (4.0, 3.9, 8.0), (4.0, 99.0, 8.0)],
)
def test_the_weight_grows_as_the_slack_shrinks(slo_s: float | None, now_s: float, weight: float) -> None:
    assert kernel.slack_weight(0.0, slo_s or 0.0, now_s, 8.0) == pytest.approx(weight)


def test_the_terms_add_up_to_the_score() -> None:
    workers = [worker("near", kv_tokens=100, slots_used=8), worker("far", slots_used=6)]
    pool = [entry(f"r{i}", 90 - i, MB, predicted_tokens=20.0) for i in range(4)]
    view = dataclasses.replace(snapshot([SENDER, *workers], pool, ORACLE), typical=TypicalEntry(MB, 40.0))
    feasible = [(e, workers[1:]) for e in view.pool]
    made = Composition(abundance=99.0).assign(feasible, view, random.Random(0))
    terms = made[0].decision.ranking[0].terms
    assert terms["score"] == pytest.approx(
        terms["credit_less_cost_s"] + terms["age_s"] - terms["rent_s"] - terms["slowdown_s"]
    )
    rent_s = terms["usual_holds"] * (terms["queue_rent_s"] + terms["near_rent_s"])
    assert terms["rent_s"] == pytest.approx(rent_s)
    assert min(terms["slowdown_s"], terms["rent_s"], terms["age_s"]) > 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"window": 13}, r"window is 13: it must be a whole number 1\.\.12"),
        ({"credit": "gift"}, "credit is 'gift': it must be one of wait, tokens"),
        ({"stream_weight": 1.5}, "stream_weight is 1.5: it must be a number > 0 and <= 1"),
        ({"max_weight": 0.5}, "max_weight is 0.5: it must be a number >= 1"),
    ],
)
def test_parameters_out_of_range_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=f"policy composition: {message}"):
        Composition(**params)
