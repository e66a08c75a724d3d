"""NetKV's worked examples (III-D, IV propositions 1 and 2), its ladder, and how the oracle degrades.

32 K tokens of Llama-3-70B, 10 GB of KV. d1: tier 2, 6.25 GB/s, 50 % hit, one own transfer in flight there.
d2: tier 3, 3.125 GB/s, 90 % hit, none. c2 = c3 = 0.2:
    d1: 5 GB / (6.25 * 0.8 / 2 = 2.5 GB/s) = 2.0 s        d2: 1 GB / (3.125 * 0.8 = 2.5 GB/s) = 0.4 s
c3 = 0.5: d2: 1 GB / 1.5625 GB/s = 0.64 s, so d1 wins only if d2's queue is longer by more than 2.0 - 0.64 = 1.36 s
(the paper's text says "a few hundred milliseconds").
"""

import dataclasses
import random
from typing import Any

import pytest

from policies.network.contention import FORMS, Curve
from policies.network.oracle import Oracle, PairEstimate
from policies.routing.base import Decision, Needs, assign, needs_of
from policies.routing.netkv.netkv import NetKV
from policies.routing.params import BadParameter
from policies.state.views import Role, Transfers, Worker
from tests.policies.routing.views import entry, snapshot, worker

GB = 1e9
LENGTH = 32_768
ENTRY = entry("r", LENGTH, kv_bytes=int(10 * GB))
HITS = {"r": {"d1": LENGTH // 2, "d2": LENGTH * 9 / 10}}
ORACLE = Oracle(
    bandwidth_bytes_per_s={2: 6.25 * GB, 3: 3.125 * GB},
    tier_map={("p", "d1"): 2, ("p", "d2"): 3, ("p", "d3"): 2},
    congestion={2: 0.2, 3: 0.2},
    congestion_at_s=0.0,
)
SENDER = worker("p", Role.PREFILL, transfers=(Transfers("d3", 0, 1),))


def decide(
    oracle: Oracle | None = ORACLE,
    sender: Worker = SENDER,
    d1: dict[str, Any] | None = None,
    d2: dict[str, Any] | None = None,
    now_s: float = 1.0,
    hits: Any = HITS,
    outputs: float | None = None,
    **params: Any,
) -> Decision:
    workers = [worker("d1", **(d1 or {})), worker("d2", **(d2 or {}))]
    view = snapshot([sender, worker("d3"), *workers], [ENTRY], oracle, hits, now_s)
    view = dataclasses.replace(view, usual_output_tokens=outputs)
    (assignment,) = assign(NetKV(**params), [(ENTRY, workers)], view, random.Random(0))
    return assignment.decision


def term(decision: Decision, of: str, name: str) -> float:
    return next(r for r in decision.ranking if r.worker == of).terms[name]


@pytest.mark.parametrize(("c3", "d2_s"), [(0.2, 0.4), (0.5, 0.64)])
def test_the_two_candidate_example(c3: float, d2_s: float) -> None:
    decision = decide(dataclasses.replace(ORACLE, congestion={2: 0.2, 3: c3}))
    assert term(decision, "d1", "transfer_s") == pytest.approx(2.0)
    assert term(decision, "d2", "transfer_s") == pytest.approx(d2_s)
    assert decision.worker == "d2"


@pytest.mark.parametrize(("queue_s", "chosen"), [(0.5, "d2"), (1.35, "d2"), (1.37, "d1")])
def test_the_example_flips_only_when_the_queue_differs_by_more_than_1_36_s(
    queue_s: float, chosen: str
) -> None:
    # d2 has one sequence more than slots: T_queue = 1 * t_iter = step_base_s (b = 0); the first step costs both alike
    decision = decide(
        dataclasses.replace(ORACLE, congestion={2: 0.2, 3: 0.5}),
        d2={"slots_used": 9},
        step_base_s=queue_s,
        step_per_seq_s=0.0,
    )
    assert term(decision, "d2", "queue_s") == pytest.approx(queue_s)
    assert decision.worker == chosen


@pytest.mark.parametrize(
    ("variant", "d1_s", "d2_s", "chosen"),
    [
        ("topo_only", 5 / 6.25, 1 / 3.125, "d2"),  # no own transfers, no congestion
        ("static", 2 * 5 / 6.25, 1 / 3.125, "d2"),  # + one own transfer on tier 2
        ("full", 2.0, 0.64, "d2"),  # + congestion 0.2 / 0.5
    ],
)
def test_the_ladder_adds_one_term_a_step(variant: str, d1_s: float, d2_s: float, chosen: str) -> None:
    decision = decide(dataclasses.replace(ORACLE, congestion={2: 0.2, 3: 0.5}), variant=variant)
    assert term(decision, "d1", "transfer_s") == pytest.approx(d1_s)
    assert term(decision, "d2", "transfer_s") == pytest.approx(d2_s)
    assert decision.worker == chosen


@pytest.mark.parametrize(
    ("used", "chosen"),
    # d1: 0/8 - 0.5 = -0.5 ; d2: used/8 - 0.9
    # 0.375 - 0.9 = -0.525 ; 0.5 - 0.9 = -0.4
    [(3, "d2"), (4, "d1")],
)
def test_cla_weighs_load_against_hits_and_sees_no_network(used: int, chosen: str) -> None:
    decision = decide(d2={"slots_used": used}, variant="cla")
    assert decision.worker == chosen
    assert set(decision.ranking[0].terms) == {"load", "hit_ratio"}


@pytest.mark.parametrize("kv_bytes", [1e6, 1e9, 1e11])
def test_proposition_1_ignoring_the_network_doubles_the_transfer(kv_bytes: float) -> None:
    # k = B1/B3 = 4, hit 0 against 0.5, equal congestion and queues: 1 < 4 * 0.5 = 2, so the near one wins by 2
    oracle = Oracle({1: 4 * GB, 3: GB}, tier_map={("p", "near"): 1, ("p", "far"): 3})
    big = dataclasses.replace(ENTRY, kv_bytes=int(kv_bytes))
    workers = [worker("near"), worker("far")]
    view = snapshot([worker("p", Role.PREFILL), *workers], [big], oracle, {"r": {"far": LENGTH // 2}})
    pick = {v: NetKV(variant=v).choose_decode(big, workers, view, random.Random(0)) for v in ("cla", "full")}
    assert {v: d.worker for v, d in pick.items()} == {"cla": "far", "full": "near"}
    assert term(pick["full"], "far", "transfer_s") == pytest.approx(
        2 * term(pick["full"], "near", "transfer_s")
    )


@pytest.mark.parametrize(
    ("oracle", "now_s", "d1_s", "d2_s"),
    [
        # congestion older than 60 s: static tiers, own transfers still count
        (ORACLE, 61.0, 2 * 5 / 6.25, 1 / 3.125),
        (dataclasses.replace(ORACLE, congestion_at_s=None), 1.0, 2 * 5 / 6.25, 1 / 3.125),
        # no tier has a bandwidth: no network term
        (Oracle(), 1.0, 0.0, 0.0),
        (None, 1.0, 0.0, 0.0),
        (dataclasses.replace(ORACLE, own_flows_excluded=False), 1.0, 1.0, 0.4),  # III-D: n = 0, c alone
    ],
)
def test_missing_and_stale_oracle_data_degrade(
    oracle: Oracle | None, now_s: float, d1_s: float, d2_s: float
) -> None:
    decision = decide(oracle, now_s=now_s)
    assert term(decision, "d1", "transfer_s") == pytest.approx(d1_s)
    assert term(decision, "d2", "transfer_s") == pytest.approx(d2_s)


def test_a_fresh_pair_estimate_overrides_its_tier_and_a_stale_one_does_not() -> None:
    learned = dataclasses.replace(ORACLE, pairs={("p", "d2"): PairEstimate(0.25 * GB, at_s=0.0)})
    assert term(decide(learned), "d2", "transfer_s") == pytest.approx(4.0)
    assert decide(learned).worker == "d1"
    assert term(decide(learned, now_s=61.0), "d2", "transfer_s") == pytest.approx(1 / 3.125)


@pytest.mark.parametrize(
    ("transfers", "params", "flows"),
    [
        ((("d3", 0, 40),), {}, 16),  # capped
        ((("d3", 0, 40),), {"max_inflight": 3}, 3),
        ((("d3", 0, 1), ("d1", 0, 2)), {}, 3),  # both go over tier 2
        ((("d3", 0, 1), ("d1", 5, 2)), {"strict_priorities": True}, 1),  # priority 5 yields to our 0
        ((("d2", 0, 2),), {}, 0),  # tier 3
    ],
)
def test_own_transfers_count_by_tier_capped_and_by_priority(
    transfers: Any, params: dict[str, Any], flows: int
) -> None:
    sender = dataclasses.replace(SENDER, transfers=tuple(Transfers(*t) for t in transfers))
    assert term(decide(sender=sender, **params), "d1", "own_flows") == flows


@pytest.mark.parametrize(
    ("uplinks", "d1_s"),
    # 5 GB over 5 GB/s, one own transfer on tier 2: the paper's share is a half; of 4 links it is on one in the mean
    [({}, 1.0 * 2), ({2: 1}, 1.0 * 2), ({2: 4}, 1.0 * (1 + 1 / 4)), ({3: 4}, 1.0 * 2)],
)
def test_own_transfers_are_spread_over_the_uplinks_that_are_told(
    uplinks: dict[int, int], d1_s: float
) -> None:
    decision = decide(dataclasses.replace(ORACLE, uplinks=uplinks))
    assert term(decision, "d1", "transfer_s") == pytest.approx(d1_s)
    assert term(decision, "d2", "transfer_s") == pytest.approx(0.4)
    shown = next(r for r in decision.ranking if r.worker == "d1").terms
    assert shown.get("uplinks") == uplinks.get(2)
    learned = dataclasses.replace(ORACLE, uplinks=uplinks, pairs={("p", "d1"): PairEstimate(5 * GB, 0.0)})
    assert term(decide(learned), "d1", "transfer_s") == pytest.approx(d1_s)


@pytest.mark.parametrize(
    ("used", "reported", "queue_steps"),
    [(8, (0, 0), 0), (10, (8, 0), 2), (4, (8, 3), 3), (0, (None, None), 0)],
)
def test_the_queue_is_what_exceeds_the_slots_by_our_charges_or_the_report(
    used: int, reported: tuple[int | None, int | None], queue_steps: int
) -> None:
    facts = {"slots_used": used, "engine_running": reported[0], "engine_waiting": reported[1]}
    decision = decide(d1=facts, step_base_s=0.5, step_per_seq_s=0.0)
    assert term(decision, "d1", "queue_s") == pytest.approx(queue_steps * 0.5)


@pytest.mark.parametrize(
    ("used", "reported", "queued", "batch"),
    [
        # four run and six wait for KV: T_queue = (6 - (8 - 4)) t(4), T_decode = t(5)
        (4, (4, 6), 2, 4),
        # two more are on their way, of which the report says nothing: they stand behind the six
        (12, (4, 6), 4, 4),
        # no report of a queue: the batch is full, and the rest waits for it
        (10, (8, 0), 2, 8),
        (10, (None, None), 2, 8),
        (10, (9, 1), 2, 8),
        # the last free slot, and none: the first behind a full batch has no blocked predecessor
        (7, (7, 0), 0, 7),
        (8, (8, 0), 0, 8),
    ],
)
def test_an_iteration_of_the_queue_is_as_long_as_the_batch_that_runs(
    used: int, reported: tuple[int | None, int | None], queued: int, batch: int
) -> None:
    facts = {"slots_used": used, "engine_running": reported[0], "engine_waiting": reported[1]}
    decision = decide(d1=facts, step_base_s=0.5, step_per_seq_s=0.01)
    assert term(decision, "d1", "queue_s") == pytest.approx(queued * (0.5 + 0.01 * batch))
    assert term(decision, "d1", "first_step_s") == pytest.approx(0.5 + 0.01 * (batch + 1))
    of_d1 = next(r for r in decision.ranking if r.worker == "d1")
    assert of_d1.terms.get("queued", 0) == queued
    names = ("transfer_s", "queue_s", "first_step_s")
    assert of_d1.cost == pytest.approx(sum(of_d1.terms[name] for name in names))


@pytest.mark.parametrize(
    ("used", "steps"),
    # a batch of 8 with outputs of 40 tokens frees a slot in 5 steps; the new request waits for one itself
    [(7, 0), (8, 5), (9, 10), (11, 20)],
)
def test_the_queue_may_be_the_wait_for_a_slot_by_the_usual_outputs(used: int, steps: int) -> None:
    facts, step = {"slots_used": used}, {"step_base_s": 0.1, "step_per_seq_s": 0.01}
    decision = decide(d1=facts, outputs=40.0, **step)
    assert term(decision, "d1", "queue_s") == pytest.approx(steps * 0.18)
    assert term(decision, "d1", "first_step_s") == pytest.approx(0.1 + 0.01 * min(used + 1, 9))
    # the paper's, and ours before any request has finished
    paper = decide(d1=facts, outputs=40.0, queue="iterations", **step), decide(d1=facts, **step)
    assert [term(one, "d1", "queue_s") for one in paper] == [pytest.approx(max(0, used - 8) * 0.18)] * 2


def test_with_the_wait_for_a_slot_an_entry_waits_in_the_pool_while_no_slot_is_free() -> None:
    full = [worker("d1", slots_used=8), worker("d2", slots_used=9)]
    view = snapshot([SENDER, worker("d3"), *full], [ENTRY], ORACLE, HITS)
    assert assign(NetKV(), [(ENTRY, full)], view, random.Random(0)) == ()
    (made,) = assign(NetKV(queue="iterations"), [(ENTRY, full)], view, random.Random(0))
    assert made.decision.worker == "d2"
    # an entry behind it that fits on a free slot is not held up
    other = entry("other", 10, kv_bytes=1)
    (made,) = assign(NetKV(), [(ENTRY, full), (other, [worker("d3")])], view, random.Random(0))
    assert (made.attempt_id, made.decision.worker) == ("other", "d3")


def test_a_warm_busy_worker_loses_to_a_cold_free_one_once_its_queue_is_longer_than_the_transfer_saved() -> (
    None
):
    # d2's hit saves 2.0 - 0.4 s. With steps of 0.5 s that is worth three blocked predecessors, not four
    chosen = {n: decide(d2={"slots_used": 8 + n}, step_base_s=0.5, step_per_seq_s=0.0).worker for n in (3, 4)}
    assert chosen == {3: "d2", 4: "d1"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"variant": "best"}, "variant is 'best': it must be one of cla, topo_only, static, full"),
        ({"step_base_s": 0}, "step_base_s is 0: it must be a number > 0"),
        ({"max_inflight": 1.5}, "max_inflight is 1.5: it must be a whole number 0"),
        ({"load_weight": float("nan")}, "load_weight is nan"),
    ],
)
def test_parameters_out_of_range_are_refused_with_what_is_allowed(
    params: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadParameter, match=message):
        NetKV(**params)


COUNTED_TERMS = ("own_flows", "in_flight", "leaving", "entering")
LEARNT = dataclasses.replace(
    ORACLE,
    contention={
        "own": {2: Curve(1.2, (0.1,), 40)},
        "fleet": {2: Curve(1.2, (0.1,), 40), 3: Curve(1.5, (0.25,), 7)},
        "ends": {2: Curve(1.2, (0.1, 0.3), 40)},
        "shared": {2: Curve(1.2, (0.1,), 40)},
    },
)


@pytest.mark.parametrize(
    ("form", "d1_slower", "d2_slower"),
    [
        # the sender has one transfer to d3 and three to d1, on tier 2; another sender two to d2 on tier 3
        ("own", 1.2 + 0.1 * 4, 1.0),
        ("fleet", 1.2 + 0.1 * 4, 1.5 + 0.25 * 2),
        # four leave the sender, three enter d1
        ("ends", 1.2 + 0.1 * 4 + 0.3 * 3, 1.0),
        # nothing has ended on tier 3, which has the level of tier 2
        ("shared", 1.2 + 0.1 * 4, 1.2),
    ],
)
def test_learnt_contention_takes_the_place_of_the_count(
    form: str, d1_slower: float, d2_slower: float
) -> None:
    """Alone, by the congestion of 0.2: 5 GB / (6.25 * 0.8) = 1 s to d1, 1 GB / (3.125 * 0.8) = 0.4 s to d2."""
    sender = dataclasses.replace(SENDER, transfers=(Transfers("d3", 0, 1), Transfers("d1", 0, 3)))
    other = worker("q", Role.PREFILL, transfers=(Transfers("d2", 0, 2),))
    workers = [worker("d1"), worker("d2")]
    oracle = dataclasses.replace(LEARNT, tier_map={**LEARNT.tier_map, ("q", "d2"): 3})
    view = snapshot([sender, other, worker("d3"), *workers], [ENTRY], oracle, HITS, 1.0)
    decision = NetKV(contention=form).choose_decode(ENTRY, workers, view, random.Random(0))
    assert decision is not None
    assert term(decision, "d1", "transfer_s") == pytest.approx(1.0 * d1_slower)
    assert term(decision, "d2", "transfer_s") == pytest.approx(0.4 * d2_slower)
    # the decision shows each factor, and from how many transfers it was learnt
    assert term(decision, "d1", "slowdown") == pytest.approx(d1_slower)
    assert term(decision, "d2", "slowdown") == pytest.approx(d2_slower)
    assert term(decision, "d1", "learnt_from") == 40
    assert term(decision, "d2", "learnt_from") == (7 if form == "fleet" else 0)
    shown = {r.worker: {k: v for k, v in r.terms.items() if k in COUNTED_TERMS} for r in decision.ranking}
    assert shown["d1"] == ({"leaving": 4, "entering": 3} if form == "ends" else {"in_flight": 4})
    assert shown["d2"] == ({"in_flight": 2} if form in ("fleet", "shared") else {})


@pytest.mark.parametrize("form", FORMS)
def test_a_slowdown_is_shown_only_where_one_was_used(form: str) -> None:
    def shown(oracle: Oracle | None, **params: Any) -> list[tuple[float | None, float | None]]:
        ranking = decide(oracle, **params).ranking
        return [(r.terms.get("slowdown"), r.terms.get("learnt_from")) for r in ranking]

    assert shown(ORACLE, contention=form) == [(1.0, 0.0)] * 2  # nothing is learnt yet
    blind = dataclasses.replace(LEARNT, own_flows_excluded=False)
    assert shown(blind, contention=form) == [(1.0, 0.0)] * 2
    for oracle, params in ((LEARNT, {}), (LEARNT, {"contention": form, "variant": "topo_only"}), (None, {})):
        assert shown(oracle, **params) == [(None, None)] * 2


@pytest.mark.parametrize("form", FORMS)
def test_before_anything_is_learnt_own_transfers_cost_nothing(form: str) -> None:
    bare = dataclasses.replace(ORACLE, congestion={})
    learnt, topo = (decide(bare, **params) for params in ({"contention": form}, {"variant": "topo_only"}))
    assert term(learnt, "d1", "transfer_s") == pytest.approx(term(topo, "d1", "transfer_s"))
    # nor where the oracle's congestion has them in it, or the rung has no own transfers
    blind = dataclasses.replace(LEARNT, own_flows_excluded=False)
    assert term(decide(blind, contention=form), "d1", "transfer_s") == pytest.approx(1.0)
    topo_only = decide(LEARNT, contention=form, variant="topo_only")
    assert term(topo_only, "d1", "transfer_s") == pytest.approx(5 / 6.25)
    assert term(decide(None, contention=form), "d1", "transfer_s") == 0.0


@pytest.mark.parametrize("form", FORMS)
def test_learnt_contention_counts_once_beside_what_else_own_transfers_taught(form: str) -> None:
    """The level of 1.2 is learnt on tier 2's 6.25 GB/s, by the transfers that taught the pair and c, too."""
    taught = {
        "congestion_learnt": (2,),
        "pairs": {("p", "d1"): PairEstimate(2 * GB, 1.0)},
        "contention": {form: {2: Curve(1.2, (0.0,) * (1 + (form == "ends")))}},
    }
    oracle = dataclasses.replace(ORACLE, **taught)  # type: ignore[arg-type]
    # 5 GB / 6.25 GB/s * 1.2; on tier 3 the operator's c of 0.2 stays: 1 GB / (3.125 * 0.8 = 2.5 GB/s); by "shared" it
    # has tier 2's level, too
    decision = decide(oracle, contention=form)
    assert term(decision, "d1", "transfer_s") == pytest.approx(0.96)
    assert term(decision, "d2", "transfer_s") == pytest.approx(0.4 * (1.2 if form == "shared" else 1.0))
    # the count, and an oracle that knows no tiers, take the pair's estimate: 5 GB / 2 GB/s, twice as much by the count
    assert term(decide(oracle), "d1", "transfer_s") == pytest.approx(5.0)
    blind = dataclasses.replace(oracle, own_flows_excluded=False)
    assert term(decide(blind, contention=form), "d1", "transfer_s") == pytest.approx(2.5)


def test_contention_is_needed_only_where_it_is_read() -> None:
    assert needs_of(NetKV()) == NetKV.needs
    assert needs_of(NetKV(contention="own", variant="topo_only")) == NetKV.needs
    assert needs_of(NetKV(contention="own")) == NetKV.needs | Needs.CONTENTION
