"""The simulated cluster against times worked by hand, and what must hold at the end of any run."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.sim.cluster import Cluster, SimulationError, simulate
from benchmarks.sim.config import IDEAL, ControlPlane, EngineSpec, Forecasting, LayerPlan, SimConfig
from benchmarks.sim.records import RunResult
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import TimingProfile
from policies.journal.replay import replay
from policies.state.views import Role
from predictors.oracle import Oracle
from predictors.protocol import Predictor

T = TimingProfile(
    source="test",
    prefill_base_s=1.0,
    prefill_per_token_s=0.1,
    decode_base_s=2.0,
    decode_per_seq_s=0.5,
    decode_per_kv_token_s=0.01,
    kv_bytes_per_token=1,
    transfer_bandwidth_bytes_per_s=10.0,
    transfer_latency_s=0.5,
)


def spec(name: str, role: Role, count: int = 1, **changes: Any) -> EngineSpec:
    return dataclasses.replace(EngineSpec(name, role, count, T), **changes)


def pair(**changes: Any) -> SimConfig:
    return SimConfig((spec("p", Role.PREFILL), spec("d", Role.DECODE, 2)), control=IDEAL, **changes)


def request(attempt_id: str, at_s: float, prompt: int, output: int, **more: Any) -> WorkloadRequest:
    return WorkloadRequest(attempt_id, at_s, prompt, output, **more)


def times(result: RunResult, *names: str) -> dict[str, list[float | None]]:
    return {
        r.request_id: [None if (at := getattr(r, name)) is None else round(at, 9) for name in names]
        for r in result.requests
    }


def test_three_requests_by_hand() -> None:
    """a and b arrive together, c while a decodes. Slots and blocks are taken between steps, then KV is pulled.

    prefill of a and b in one batch: 1 + 0.1 * 30 = 4               -> 5
    a: 10 bytes, 0.5 + 1.0 -> 6.5; steps 2.6, 2.61, 2.62            -> 9.1, 11.71, 14.33
    b: 20 bytes, 0.5 + 2.0 -> 7.5; steps 2.7, 2.71                  -> 10.2, 12.91
    c: prefill 1.5 -> 11.5; a's worker (drawn) admits it at a's step end 11.71 and pulls 0.5 + 0.5 -> 12.71;
       it joins at a's next step end 14.33: 2.55, 2.56, 2.57, 2.58  -> 16.88 .. 24.59
    """
    result = simulate(pair(), [request("a", 1.0, 10, 3), request("b", 1.0, 20, 2), request("c", 10.0, 5, 4)])
    steps = ("prefill_done_s", "transfer_done_s", "first_token_s", "finished_s")
    assert times(result, *steps) == {
        "a": [5.0, 6.5, 9.1, 14.33],
        "b": [5.0, 7.5, 10.2, 12.91],
        "c": [11.5, 12.71, 16.88, 24.59],
    }
    assert result.requests[2].decode_worker == result.requests[0].decode_worker
    assert result.steps.tokens == 3 + 2 + 4
    assert result.steps.steps == 9
    assert result.steps.busy_s == pytest.approx(2.6 + 2.61 + 2.62 + 2.7 + 2.71 + 2.55 + 2.56 + 2.57 + 2.58)


@pytest.mark.parametrize(("overcommit", "sooner_s"), [("always", 0.4), ("by_policy", 0.0)])
def test_an_engine_queues_what_it_has_no_slot_for_and_takes_it_without_a_word_to_the_router(
    overcommit: str, sooner_s: float
) -> None:
    """Four hops less: the end of a to the ingress and on to the router, its decision back and on to the engine."""
    began: list[float | None] = []
    for extra in (0, 1):
        config = SimConfig(
            (spec("p", Role.PREFILL), spec("d", Role.DECODE, 1, slots=1)),
            control=ControlPlane(hop_s=0.1, status_s=0.1, progress_s=0.1),
            dispatch=DispatchConfig(overcommit_slots=extra, overcommit=overcommit),
        )
        result = simulate(
            config, [request("a", 0.0, 10, 3), request("b", 0.0, 20, 2), request("c", 0.0, 5, 4)]
        )
        assert all(r.finished_s is not None for r in result.requests)
        began.append(result.requests[1].first_token_s)
    without, queued = began
    assert without is not None
    assert queued is not None
    assert without - queued == pytest.approx(sooner_s)


def test_hops_of_the_control_plane() -> None:
    """ingress and one hop to the router, two to the engine, two back, two on, two for the pull, one for the token."""
    control = ControlPlane(hop_s=0.001, ingress_s=0.1)
    config = dataclasses.replace(pair(), control=control)
    (record,) = simulate(config, [request("a", 0.0, 10, 1)]).requests
    assert record.prefill_routed_s == pytest.approx(0.101)
    assert record.prefill_started_s == pytest.approx(0.103)
    assert record.prefill_done_s == pytest.approx(2.103)
    assert record.decode_routed_s == pytest.approx(2.105)
    assert record.transfer_started_s == pytest.approx(2.109)
    assert record.transfer_done_s == pytest.approx(3.609)
    assert record.first_token_s == pytest.approx(3.609 + 2.6 + 0.001)


def test_barrier_step_is_the_slowest_members() -> None:
    """Two workers, one request each: a step lasts as long as the longer sequence's, the other worker waits.

    a: prefill 2.0, KV at 3.5, alone for steps of 2.60, 2.61, 2.62 -> 6.10, 8.71, 11.33, its partner waiting.
    b: prefill 4.0, admitted when that step ends, 6.10, KV at 9.6; it joins at 11.33.
    Both: 2.5 + 0.01 * max(13, 30) = 2.80 -> 14.13, a's last; then b alone, 2.81 -> 16.94, a's worker waiting.
    """
    config = SimConfig((spec("p", Role.PREFILL, 2), spec("d", Role.DECODE, 2, barrier="b")), control=IDEAL)
    result = simulate(config, [request("a", 0.0, 10, 4), request("b", 0.0, 30, 2)])
    assert times(result, "first_token_s", "finished_s") == {"a": [6.1, 14.13], "b": [14.13, 16.94]}
    steps = result.steps
    assert (steps.steps, steps.tokens) == (5, 6)
    assert steps.imbalance_sum == pytest.approx(10 + 11 + 12 + (30 - 13) + 31)
    assert steps.idle_s == pytest.approx(2.6 + 2.61 + 2.62 + (2.8 - 2.63) + 2.81)
    assert steps.busy_s == pytest.approx(2.6 + 2.61 + 2.62 + 2.63 + 2.8 + 2.81)
    assert (steps.full_steps, steps.full_imbalance_tokens) == (0, None)  # there are more slots than that


def test_steps_in_which_every_slot_runs_are_told_apart() -> None:
    """One slot a worker: only the step of both is full, max - min = 30 - 13."""
    config = SimConfig(
        (spec("p", Role.PREFILL, 2), spec("d", Role.DECODE, 2, barrier="b", slots=1)), control=IDEAL
    )
    steps = simulate(config, [request("a", 0.0, 10, 4), request("b", 0.0, 30, 2)]).steps
    assert (steps.steps, steps.full_steps, steps.full_imbalance_tokens) == (5, 1, 17.0)


def test_prefix_hits_shorten_prefill_and_transfer() -> None:
    """The second of two equal prompts of 8 tokens in blocks of 4: one block is a hit on both sides (the last token is
    always computed), so 1 + 0.4 s of prefill and 0.5 + 0.4 s of transfer.
    """
    sized = {"block_size_tokens": 4}
    config = SimConfig((spec("p", Role.PREFILL, **sized), spec("d", Role.DECODE, **sized)), control=IDEAL)
    hashes = {"block_hashes": (7, 8), "block_tokens": 4}
    result = simulate(config, [request("a", 0.0, 8, 1, **hashes), request("b", 50.0, 8, 1, **hashes)])
    second = result.requests[1]
    assert (second.prefill_hit_tokens, second.decode_hit_tokens, second.transfer_bytes) == (4, 4, 4)
    assert second.prefill_done_s == pytest.approx(50 + 1.4)
    assert second.transfer_done_s == pytest.approx(51.4 + 0.9)


def test_coarse_hashes_become_the_engines_blocks() -> None:
    sized = {"block_size_tokens": 4}
    config = SimConfig((spec("c", Role.COLOCATED, **sized),), control=IDEAL)
    hashes = {"block_hashes": (3,), "block_tokens": 12}
    result = simulate(config, [request("a", 0.0, 13, 1, **hashes), request("b", 50.0, 13, 1, **hashes)])
    assert [r.prefill_hit_tokens for r in result.requests] == [0, 12]


def test_colocated_worker_prefills_and_decodes() -> None:
    """A decode step of a (2.5 + 0.11) with the prefill of b (1 + 1) in it, then both decode."""
    config = SimConfig((spec("c", Role.COLOCATED),), control=IDEAL)
    result = simulate(config, [request("a", 0.0, 10, 3), request("b", 1.0, 10, 2)])
    # a: 2.0 -> then 2.61 + 2.0 -> 6.61 (a's 2nd, b's 1st) -> 2 + 1.0 + 0.01 * 23 -> 9.84
    assert times(result, "first_token_s", "finished_s") == {"a": [2.0, 9.84], "b": [6.61, 9.84]}
    assert all(r.colocated for r in result.requests)


def test_layers_let_the_kv_leave_while_the_prefill_goes_on() -> None:
    """8 tokens in 2 groups of layers: compute 0.9 s each, a collective of 5 bytes (0.5 + 0.5 s) after each.

    group 1 done at 1.9: 4 of 8 bytes leave (0.5 + 0.4 -> 2.8); group 2 at 3.8: the others -> 4.7. First step 2.58.
    """
    plan = LayerPlan(groups=2, collective_bytes_per_token=5 / 8)
    config = SimConfig((spec("p", Role.PREFILL, layers=plan), spec("d", Role.DECODE)), control=IDEAL)
    (record,) = simulate(config, [request("a", 0.0, 8, 1)]).requests
    assert record.transfer_started_s == pytest.approx(1.9)
    assert record.prefill_done_s == pytest.approx(3.8)
    assert record.transfer_done_s == pytest.approx(4.7)
    assert record.first_token_s == pytest.approx(4.7 + 2.58)


@pytest.mark.parametrize("seed", range(6))
def test_a_prefill_whose_kv_leaves_by_layers_counts_until_its_last_group(seed: int) -> None:
    """Group 1 of a ends at 0.9, and its prefill with group 2 at 1.8. b, in between, goes to the engine that is idle."""
    prefill = spec("p", Role.PREFILL, 2, layers=LayerPlan(groups=2))
    config = SimConfig(
        (prefill, spec("d", Role.DECODE)), control=IDEAL, prefill=("join_shortest_queue", {}), seed=seed
    )
    work = [request("a", 0.0, 8, 1), request("b", 1.0, 8, 1), request("c", 20.0, 8, 1)]
    records = simulate(config, work).requests
    assert records[0].transfer_started_s == pytest.approx(0.9)
    assert records[1].prefill_worker != records[0].prefill_worker
    assert records[1].prefill_done_s == pytest.approx(1.0 + 1.8)
    assert all(record.finished_s is not None for record in records)


def test_a_run_of_engines_with_layers_has_no_journal() -> None:
    config = SimConfig(
        (spec("p", Role.PREFILL, layers=LayerPlan(groups=2)), spec("d", Role.DECODE)), control=IDEAL
    )
    with pytest.raises(ValueError, match="no journal"):
        simulate(config, [request("a", 0.0, 8, 1)], journal=lambda _: None)


def test_heterogeneous_engines_have_their_own_times() -> None:
    slow = dataclasses.replace(T, decode_base_s=4.0)
    decode = (spec("d", Role.DECODE), dataclasses.replace(spec("e", Role.DECODE), profile=slow))
    config = SimConfig((spec("p", Role.PREFILL), *decode), control=IDEAL, decode=("round_robin", {}))
    result = simulate(config, [request("a", 0.0, 10, 1), request("b", 100.0, 10, 1)])
    took = {r.decode_worker: r.first_token_s - r.transfer_done_s for r in result.requests}  # type: ignore[operator]
    assert took == {"d-0": pytest.approx(2.6), "e-0": pytest.approx(4.6)}


def test_window_measures_what_arrives_in_it() -> None:
    config = pair(warmup_s=10.0, measure_s=10.0)
    work = [request(f"r{i}", 4.0 * i, 10, 2) for i in range(20)]
    result = simulate(config, work)
    assert [r.request_id for r in result.requests] == ["r3", "r4"]
    assert all(r.finished_s is not None for r in result.requests)
    assert result.duration_s == 10.0
    # r1 and r2 decode in the window as well: r1's steps end at 10.1 and 12.71, r2's at 14.1, 16.71, r3's at 18.1
    assert result.steps.tokens == 5


def test_without_draining_the_run_ends_with_its_window() -> None:
    """See the hand-worked three: by 13.0 s a has 2 of its tokens, b is done, and c has just been pulled."""
    work = [request("a", 1.0, 10, 3), request("b", 1.0, 20, 2), request("c", 10.0, 5, 4)]
    result = simulate(pair(measure_s=13.0, drain=False), work)
    assert times(result, "finished_s") == {"a": [None], "b": [12.91], "c": [None]}
    assert result.duration_s == 13.0
    assert result.steps.tokens == 2 + 2


@pytest.mark.parametrize("preempted", ["engine", "router"])
def test_preempted_requests_end_too_and_everything_is_given_back(preempted: str) -> None:
    small = {"block_size_tokens": 4, "kv_blocks": 14, "preempted": preempted}
    config = SimConfig(
        (spec("p", Role.PREFILL, lease_s=1000.0), spec("d", Role.DECODE, **small)),
        control=IDEAL,
        dispatch=DispatchConfig(queue_timeout_s=1000.0),
    )
    cluster = Cluster(config, iter([request(f"r{i}", 0.1 * i, 8, 20) for i in range(6)]), None, None)
    result = cluster.run()
    assert sum(r.preemptions for r in result.requests) > 0
    assert [r.generated_tokens for r in result.requests] == [20] * 6
    check_empty(cluster)


def check_empty(cluster: Cluster) -> None:
    assert cluster.ingress.refused == 0
    state = cluster.dispatcher.state
    assert (state.in_flight, state.pool_size, state.leases) == (0, 0, 0)
    for view in state.snapshot(1e9).workers.values():
        assert (view.slots_used, view.kv_tokens, view.prefilling, view.sending) == (0, 0, 0, 0), view
        assert view.transfers == view.departures == ()
    for worker in cluster.workers.values():
        assert (worker.pool.used, worker.model.n_active, worker.model.n_waiting, len(worker.leases)) == (
            0,
            0,
            0,
            0,
        )


@pytest.mark.parametrize("forecasting", [False, True])
@pytest.mark.parametrize("decode", ["balance_route_h", "netkv", "composition"])
def test_conservation_under_overload(decode: str, forecasting: bool) -> None:
    """More than fits, short leases and queues: every request ends once, for a reason, and nothing stays charged."""

    def oracle(lengths: Mapping[str, int]) -> Predictor:
        return Oracle(lengths)

    config = SimConfig(
        (
            spec("p", Role.PREFILL, 2, lease_s=12.0, kv_blocks=20, block_size_tokens=4),
            spec("d", Role.DECODE, 2, slots=2, kv_blocks=30, block_size_tokens=4),
        ),
        decode=(decode, {}),
        dispatch=DispatchConfig(max_queue=12, queue_timeout_s=30.0),
        forecasts=Forecasting(oracle) if forecasting else None,
    )
    work = [request(f"r{i}", 0.7 * i, 4 + 5 * (i % 7), 1 + 3 * (i % 5), priority=i % 3) for i in range(60)]
    cluster = Cluster(config, iter(work), None, None)
    result = cluster.run()
    assert [r.request_id for r in result.requests] == [w.request_id for w in work]
    for record in result.requests:
        assert (record.finished_s is None) == (record.rejected is not None)
        if record.finished_s is not None:
            assert record.generated_tokens == record.output_tokens
    reasons = {r.rejected for r in result.requests}
    # None and at least two ways to be turned away
    assert len(reasons) >= 3, reasons
    check_empty(cluster)


@pytest.mark.parametrize(
    ("params", "ageing_s", "least", "most"),
    [({}, None, 0, 2), ({"class_ratio": 3.0}, None, 9, 13), ({}, 8.0, 15, 30)],
    ids=["strict", "shared", "aged"],
)
def test_classes_share_or_age_in_the_simulator_as_its_journal_says(
    params: dict[str, Any], ageing_s: float | None, least: int, most: int
) -> None:
    """60 requests of either of two classes come at once. Of the 40 that are begun first a quarter are of the less
    urgent class with a ratio of 3. With ageing all that wait are soon of one class.
    """
    config = SimConfig(
        (spec("p", Role.PREFILL, lease_s=1e6), spec("d", Role.DECODE, 2, slots=2)),
        dispatch=DispatchConfig(queue_timeout_s=1e6, class_ageing_s=ageing_s),
        fairness=("vtc", {"slack_tokens": 0.0, "ahead_tokens": 30.0, "ahead_s": 0.0} | params),
    )
    work = [request(f"r{i}", 0.01 * i, 10, 3, priority=i % 2) for i in range(120)]
    lines: list[str] = []
    result = simulate(config, work, journal=lines.append)
    began = sorted((r.first_token_s, r.request_id) for r in result.requests if r.first_token_s is not None)
    urgent = {one.request_id for one in work if one.priority == 0}
    assert least <= sum(name not in urgent for _, name in began[:40]) <= most
    assert all(step.equal for step in replay("".join(lines).splitlines()))
    again: list[str] = []
    simulate(config, work, journal=again.append)
    assert lines == again


def test_a_lease_that_ends_in_the_decode_queue_is_a_retry() -> None:
    """b's lease of 12 s is rescued 8 s before its end, to a worker without a slot; a decodes there until 55 s. When b
    is admitted its KV is gone: once more under another attempt_id, as in the live ingress, and at last it ends.
    """
    config = SimConfig(
        (spec("p", Role.PREFILL, lease_s=12.0, max_lease_s=12.0), spec("d", Role.DECODE, slots=1)),
        control=IDEAL,
    )
    lines: list[str] = []
    work = [request("a", 0.0, 10, 20), request("b", 1.0, 10, 2)]
    result = simulate(config, work, journal=lines.append)
    a, b = result.requests
    assert (a.finished_s, b.finished_s) != (None, None)
    assert result.peaks["retries"] == 1
    assert b.prefill_done_s > a.finished_s  # type: ignore[operator]
    events = [json.loads(line) for line in "".join(lines).splitlines()]
    told = [
        (e["event"], e.get("attempt_id") or e["request"]["attempt_id"])
        for e in events
        if e.get("event") in ("Arrived", "Closed")
    ]
    assert told == [
        ("Arrived", "a"),
        ("Arrived", "b"),
        ("Closed", "a"),
        ("Closed", "b"),
        ("Arrived", "b~1"),
        ("Closed", "b~1"),
    ]


@pytest.mark.parametrize(("a_tokens", "rejected", "retries"), [(6, None, 1), (40, "pool_timeout", 2)])
def test_a_lease_that_ends_in_the_pool_is_a_retry(a_tokens: int, rejected: str | None, retries: int) -> None:
    """The router looks after leases too late (no margin), so the ingress' guard is first: b is computed again, as
    the live one does, until a has left the only slot or the retries are used up.
    """
    config = SimConfig(
        (spec("p", Role.PREFILL, lease_s=12.0, max_lease_s=12.0), spec("d", Role.DECODE, slots=1)),
        control=IDEAL,
        dispatch=DispatchConfig(lease_margin_s=0.0),
    )
    cluster = Cluster(config, iter([request("a", 0.0, 10, a_tokens), request("b", 1.0, 10, 2)]), None, None)
    result = cluster.run()
    assert [r.rejected for r in result.requests] == [None, rejected]
    assert result.peaks["retries"] == retries
    check_empty(cluster)


@pytest.mark.parametrize(
    ("max_lease_s", "retries"),
    [(600.0, 0), (60.0, 1)],
    ids=["renewed for as long as it waits", "up to the bound"],
)
def test_a_pool_that_waits_for_minutes_keeps_its_leases(max_lease_s: float, retries: int) -> None:
    """a takes the only slot for some 280 s; b waits under a lease of 12 s. When the lease may be renewed no more, b is
    rescued to the full worker, where its KV is gone before it gets the slot.
    """
    engines = (
        spec("p", Role.PREFILL, lease_s=12.0, max_lease_s=max_lease_s),
        spec("d", Role.DECODE, slots=1),
    )
    work = [request("a", 0.0, 10, 100), request("b", 1.0, 10, 2)]
    cluster = Cluster(SimConfig(engines, control=IDEAL), iter(work), None, None)
    result = cluster.run()
    a, b = result.requests
    assert a.finished_s is not None and a.finished_s > 250.0
    assert b.finished_s is not None and b.finished_s > a.finished_s
    assert result.peaks["retries"] == retries
    assert b.prefill_done_s is not None
    assert (b.prefill_done_s < 10.0) == (retries == 0)
    check_empty(cluster)


def test_a_request_that_waits_for_a_slot_in_its_decode_engine_keeps_its_lease() -> None:
    """The router sends b at once to the worker whose only slot a takes for some 280 s; b's lease is of 12 s."""
    engines = (spec("p", Role.PREFILL, lease_s=12.0), spec("d", Role.DECODE, 1, slots=1))
    config = SimConfig(
        engines, control=IDEAL, dispatch=DispatchConfig(overcommit_slots=1, overcommit="always")
    )
    cluster = Cluster(config, iter([request("a", 0.0, 10, 100), request("b", 1.0, 10, 2)]), None, None)
    result = cluster.run()
    a, b = result.requests
    assert b.decode_routed_s is not None and b.decode_routed_s < 10.0
    assert a.finished_s is not None and a.finished_s > 250.0
    assert b.finished_s is not None and b.finished_s > a.finished_s
    assert result.peaks["retries"] == 0
    check_empty(cluster)


def test_nothing_is_retried_where_no_retry_is_allowed() -> None:
    config = SimConfig(
        (spec("p", Role.PREFILL, lease_s=12.0, max_lease_s=12.0), spec("d", Role.DECODE, slots=1)),
        control=dataclasses.replace(IDEAL, max_retries=0),
    )
    result = simulate(config, [request("a", 0.0, 10, 20), request("b", 1.0, 10, 2)])
    assert [r.rejected for r in result.requests] == [None, "kv_load"]


def test_a_request_ends_at_its_timeout_wherever_it_is() -> None:
    """The first decodes, the second waits in the pool; the third, whose prefill ends at 36, has its first token."""
    config = SimConfig(
        (spec("p", Role.PREFILL, slots=1, lease_s=1000.0), spec("d", Role.DECODE, slots=1)),
        control=dataclasses.replace(IDEAL, request_timeout_s=30.0),
    )
    work = [request("a", 0.0, 10, 40), request("b", 0.1, 10, 40), request("c", 25.0, 100, 40)]
    cluster = Cluster(config, iter(work), None, None)
    a, b, c = cluster.run().requests
    assert (a.rejected, b.rejected) == ("deadline", "deadline")
    # KV at 3.5 s; steps of 2.6, 2.61, ...: the tenth ends at 29.95
    assert a.generated_tokens == 10
    assert c.rejected == "deadline"
    assert c.first_token_s is not None
    check_empty(cluster)


@pytest.mark.parametrize("layers", [None, LayerPlan(groups=4)])
@pytest.mark.parametrize("timeout_s", [5.0, 12.0, 15.0, 19.0])
def test_a_timeout_in_any_stage_gives_everything_back(layers: LayerPlan | None, timeout_s: float) -> None:
    """100 tokens: prefill to 11 s (its first quarter to 2.75), 0.5 + 10 s of transfer (by quarters 0.5 + 2.5 each)."""
    config = SimConfig(
        (spec("p", Role.PREFILL, layers=layers), spec("d", Role.DECODE)),
        control=dataclasses.replace(IDEAL, request_timeout_s=timeout_s),
    )
    cluster = Cluster(config, iter([request("a", 0.0, 100, 20)]), None, None)
    (record,) = cluster.run().requests
    assert (record.rejected, record.finished_s) == ("deadline", None)
    check_empty(cluster)


def test_a_prompt_that_no_engine_can_hold_is_rejected() -> None:
    config = SimConfig((spec("c", Role.COLOCATED, kv_blocks=2, block_size_tokens=4),), control=IDEAL)
    result = simulate(config, [request("a", 0.0, 9, 1), request("b", 0.0, 4, 1)])
    assert [r.rejected for r in result.requests] == ["invalid_value", None]


def test_bad_workloads_are_refused() -> None:
    with pytest.raises(SimulationError, match=r"b is at 1\.0 s, after one at 2\.0 s"):
        simulate(pair(), [request("a", 2.0, 1, 1), request("b", 1.0, 1, 1)])
    with pytest.raises(SimulationError, match="a has 0 prompt"):
        simulate(pair(), [request("a", 0.0, 0, 1)])
    with pytest.raises(SimulationError, match="two live requests are called a"):
        simulate(pair(), [request("a", 0.0, 5, 1), request("a", 0.1, 5, 1)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "engines 'x': count is 0"),
        ({"nodes": ("n0",), "count": 2}, "1 nodes for 2 engines"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"layers": LayerPlan(2)}, "layers are for engines of role prefill"),
    ],
)
def test_bad_engines_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec("x", Role.DECODE, **changes)
