"""BalanceRoute's cluster: sizes by hand, small runs whose order is certain, rows of the tables."""

import dataclasses

import pytest

from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments import balance_route_sensitivity as sensitivity
from benchmarks.experiments import balance_route_table1 as table1
from benchmarks.experiments import balance_route_table2 as table2
from benchmarks.experiments.base import Results
from benchmarks.sim import profiles
from benchmarks.sim.records import RunResult, StepStats
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import Dispatcher
from policies.engine_model.timing import TimingProfile
from policies.routing.registry import decode_policy
from policies.routing.simple.join_shortest_queue import JoinShortestQueue

T = TimingProfile(
    source="test",
    prefill_base_s=1.0,
    prefill_per_token_s=0.0,
    decode_base_s=1.0,
    decode_per_seq_s=0.5,
    decode_per_kv_token_s=0.01,
    kv_bytes_per_token=1,
    transfer_bandwidth_bytes_per_s=1e9,
    transfer_latency_s=0.0,
)
SMALL = dataclasses.replace(cluster.CASES["recurring-long"], requests=1_000)


def test_sizing_by_hand() -> None:
    """Prompt 10, output 2: 10 and 11 tokens; prompt 20, output 1: 20. Three steps of a slot hold 41 tokens: 13 2/3.

    Two slots: 1 + 2 * (0.5 + 0.01 * 41 / 3) = 2.27333 s a step, in which 4 workers make 8 tokens; a request has 1.5.
    """
    lengths = [WorkloadRequest("a", 0.0, 10, 2), WorkloadRequest("b", 1.0, 20, 1)]
    sizing = cluster.Sizing.of(lengths, workers=4, slots=2, t=T)
    assert sizing.context_tokens == pytest.approx(41 / 3)
    assert sizing.step_s == pytest.approx(2.273333, abs=1e-6)
    assert sizing.tokens_per_s == pytest.approx(8 / 2.273333, rel=1e-6)
    assert sizing.requests_per_s == pytest.approx(8 / 2.273333 / 1.5, rel=1e-6)


def test_a_load_fills_the_cluster_first_and_then_outruns_it() -> None:
    load = cluster.load_of(SMALL, workers=2, pool=4.0, warmup_steps=500, steps=1_000, seed=3)
    times_s = [r.at_s for r in load.requests]
    assert times_s == sorted(times_s)
    assert times_s[:18] == pytest.approx(
        [cluster.RUSH_S * i for i in range(18)]
    )  # one by one into 2 * 9 slots
    assert times_s[18:26] == pytest.approx([cluster.RUSH_S * 18] * 8)  # at once: 2 * 4 for the pool
    later = times_s[26:]
    assert (
        len(later) / (later[-1] - later[0]) > 0.8 * cluster.OVERLOAD * load.sizing.requests_per_s
    )  # it is bursty
    assert load.warmup_s == pytest.approx(500 * load.sizing.step_s)
    assert load.pool_tokens >= 2 * max(r.prompt_tokens for r in load.requests)


def test_history_ends_before_the_run_and_is_of_the_earlier_part() -> None:
    outcomes = cluster.history(SMALL, 2, 400)
    assert all(o.arrival.arrival_s < o.finish_s < 0.0 for o in outcomes)
    seen = {o.arrival.request_id for o in outcomes}
    load = cluster.load_of(SMALL, 2, 4.0, 500, 1_000, cluster.TRAIN_SEED)
    assert not seen & {f"train {r.request_id}" for r in load.requests}


def test_figures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of 2 workers; 42 s in all, of which 7 are waited: 2.1 s a step, 0.1 s above 1 + 2 * 0.5 at 0.01 s a
    token is a heaviest worker of 10 tokens. The other profile, half as steep: 2 + 0.05 s for 4 tokens.
    """
    other = dataclasses.replace(T, decode_per_kv_token_s=0.005)
    both = {cluster.PROFILE: T, cluster.PROFILE_BY_TPOT: other}
    monkeypatch.setattr(profiles, "load", both.__getitem__)
    steps = StepStats(steps=10, imbalance_sum=50.0, idle_s=7.0, busy_s=35.0, tokens=40)
    load = cluster.Load((), cluster.Sizing(1.0, 2.0, 3.0, 4.0), 100, 0.0, 21.0)
    found = cluster.figures(RunResult([], steps, 21.0), load, workers=2, slots=2)
    assert found["imbalance_tokens"] == 5.0
    assert found["envelope_tokens"] == pytest.approx(10.0)
    assert found["throughput_tok_s"] == pytest.approx(40 / 21)
    assert found["throughput_by_tpot_tok_s"] == pytest.approx(4 / 2.05)
    assert found["barrier_free_tok_s"] == pytest.approx(40 / 21 * 42 / 35)


@pytest.mark.parametrize("method", cluster.METHODS)
def test_only_the_baselines_send_every_request_on_at_once(method: str) -> None:
    load = cluster.load_of(SMALL, 2, 4.0, 500, 1_000, 0)
    config = cluster.sim_config(cluster.config_of("recurring-long", method, 2, quick=True), SMALL, load, 0)
    dispatcher = Dispatcher(config.dispatch, JoinShortestQueue(), decode_policy(*config.decode))
    assert (dispatcher.overcommit_slots > 100_000) == (method in cluster.BASELINES)


def test_balance_routing_is_more_balanced_than_jsq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cluster.CASES, "recurring-long", SMALL)
    sizes = {"warmup_steps": 600, "steps": 1_500, "train_requests": 700}
    found = {
        method: cluster.run_one(cluster.config_of("recurring-long", method, 4, quick=True) | sizes, seed=0)
        for method in ("join_shortest_queue", "br_0", "br_h oracle", "ours oracle", "ours survival")
    }
    jsq = found.pop("join_shortest_queue")
    for metrics in found.values():
        assert metrics["imbalance_tokens"] < 0.6 * jsq["imbalance_tokens"]  # type: ignore[operator]
        assert metrics["barrier_idle_share"] < 0.6 * jsq["barrier_idle_share"]  # type: ignore[operator]
        assert metrics["running"] > 0.97 * 4 * 9  # type: ignore[operator]  # near saturation


@pytest.mark.parametrize(
    "experiment", [table1, table2, sensitivity], ids=lambda e: e.__name__.rsplit("_", 1)[-1]
)
@pytest.mark.parametrize("quick", [True, False])
def test_rows_and_plots_from_any_results(experiment, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(table1, "available", lambda workload: True)
    variants = experiment.variants(quick)
    metrics = {
        "imbalance_tokens": 100_000.0,
        "tpot_p95_ms": 80.0,
        "throughput_tok_s": 900.0,
        "throughput_same_load_tok_s": 900.0,
        "barrier_free_tok_s": 1_000.0,
        "full_imbalance_tokens": 8_000.0,
        "rejected": 0.0,
    }
    runs = {}
    for variant in variants:
        better = 1.0 if variant.config["policy"] in cluster.BASELINES else 0.1
        runs[variant.name] = {
            seed: metrics
            | {
                "imbalance_tokens": better * 100_000.0 + seed,
                **dict.fromkeys((table1.RAW, table1.SAME), 900.0 + 50.0 * (better < 1.0)),
            }
            for seed in (0, 1)
        }
    results = Results("x", quick, {v.name: v.config for v in variants}, runs)
    rows = experiment.compare(results)
    assert len({row.name for row in rows}) == len(rows)
    assert any(row.paper is not None for row in rows)
    assert all(row.met for row in rows if row.aim)
    assert experiment.plots(results)


def test_without_a_gain_there_is_no_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_TRACES", raising=False)
    variants = table1.variants(quick=True)
    same = dict.fromkeys(
        [*(metric for metric, _ in table1.FIGURES), "barrier_free_tok_s", "full_imbalance_tokens"], 100.0
    )
    results = Results("x", True, {v.name: v.config for v in variants}, {v.name: {0: same} for v in variants})
    shares = [row for row in table1.compare(results) if "share of the oracle" in row.name]
    assert shares
    assert all(row.ours is None and row.met is None for row in shares)


def test_a_run_without_a_step_in_which_every_slot_ran_is_compared_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLUICE_TRACES", raising=False)
    variants = table1.variants(quick=True)
    same = dict.fromkeys([*(metric for metric, _ in table1.FIGURES), "barrier_free_tok_s"], 100.0)
    without = same | {"full_imbalance_tokens": None}
    configs = {v.name: v.config for v in variants}
    rows = table1.compare(Results("x", True, configs, {v.name: {0: without} for v in variants}))
    assert rows
    assert not [row for row in rows if "while every slot runs" in row.name]


def test_only_known_cases_run_without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_TRACES", raising=False)
    names = {v.config["case"] for v in table1.variants(quick=False)}
    assert names == {"recurring-long"}


def test_ours_is_also_run_with_leases_that_end() -> None:
    """Leases of 30 s, renewed for 600 s in all, as a deployment grants; all else is ours."""
    ours, leased = (
        cluster.config_of("recurring-long", f"{rule} oracle", 8, True) for rule in ("ours", "ours_leased")
    )
    assert leased == ours | {"lease_s": 30.0, "max_lease_s": 600.0}
    case = cluster.CASES["recurring-long"]
    load = cluster.load_of(case, 8, 16.0, 100, 100, 0)
    specs = [cluster.sim_config(config, case, load, 0).engines[0] for config in (ours, leased)]
    assert [(spec.lease_s, spec.max_lease_s) for spec in specs] == [(1e6, 1e6), (30.0, 600.0)]
    for experiment, name in ((table1, "recurring-long/ours_leased oracle"), (table2, "8/ours_leased oracle")):
        assert name in {v.name for v in experiment.variants(False)}
