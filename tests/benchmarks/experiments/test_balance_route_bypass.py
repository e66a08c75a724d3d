"""The bypass of BR-0's pool: transfers ahead of slots in the simulator, its cells, and its rows."""

import pytest
from matplotlib import pyplot as plt

from benchmarks.aims import stated
from benchmarks.experiments import balance_route_bypass as bypass
from benchmarks.experiments import forecast_cluster
from benchmarks.experiments.base import Metrics, Results, Row
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import IDEAL, EngineSpec, SimConfig
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import TimingProfile
from policies.state.views import Role

T = TimingProfile(
    source="test",
    prefill_base_s=1.0,
    prefill_per_token_s=0.0,
    decode_base_s=1.0,
    decode_per_seq_s=0.5,
    decode_per_kv_token_s=0.0,
    kv_bytes_per_token=1,
    transfer_bandwidth_bytes_per_s=1e9,
    transfer_latency_s=10.0,
)


@pytest.mark.parametrize(("ahead", "waited_s"), [(0, 10.0 + 1.5), (1, 1.5)])
def test_the_next_request_is_loaded_while_the_slot_is_taken(ahead: int, waited_s: float) -> None:
    """One slot. A transfer takes 10 s and a step 1.5 s. The first request runs for 20 steps, 30 s, in which the KV of
    the second comes; without `ahead` it comes when the slot is free.
    """
    specs = (
        EngineSpec("p", Role.PREFILL, 1, T, lease_s=1e6, max_lease_s=1e6, prefix_cache=False),
        EngineSpec("d", Role.DECODE, 1, T, slots=1, prefix_cache=False, receive_ahead=ahead),
    )
    dispatch = DispatchConfig(overcommit="always", overcommit_slots=1)
    config = SimConfig(specs, dispatch=dispatch, control=IDEAL)
    work = [WorkloadRequest("a", 0.0, 100, 20), WorkloadRequest("b", 0.1, 100, 20)]
    first, second = simulate(config, work).requests
    assert first.finished_s is not None and second.first_token_s is not None
    assert second.first_token_s - first.finished_s == pytest.approx(waited_s, abs=0.01)
    assert second.finished_s == pytest.approx(second.first_token_s + 19 * 1.5, abs=0.01)


def test_engines_cannot_receive_ahead_of_less_than_nothing() -> None:
    with pytest.raises(ValueError, match="receive_ahead is -1"):
        EngineSpec("d", Role.DECODE, 1, T, receive_ahead=-1)


@pytest.mark.parametrize(("rule", "extra"), [("JSQ", 1 << 20), ("pool", 0), ("bypass, cap 2", 2)])
def test_only_the_bypass_is_capped_a_little_above_the_slots(
    rule: str, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_cluster, "HISTORY", 300)
    forecast_cluster.history.cache_clear()
    forecast_cluster._sizing.cache_clear()
    config = bypass._config("dry", "near", 5.0, rule, True)
    load = forecast_cluster.load_of.__wrapped__("dry", "near", 320, 0.1)
    made = bypass.sim_config(config, load, 320)
    policy = made.decode[1]
    never = made.dispatch.overcommit == "never"
    assert (0 if never else made.dispatch.overcommit_slots) == extra
    assert policy.get("bypass", False) is rule.startswith("bypass")
    for spec in made.engines:
        assert spec.profile.transfer_bandwidth_bytes_per_s == 5e9
        assert (spec.receive_ahead > 0) is (spec.role is Role.DECODE)
    forecast_cluster.history.cache_clear()
    forecast_cluster._sizing.cache_clear()


def test_a_small_run_of_each_rule_ends_and_serves_alike() -> None:
    """Both rules get equal requests, and serve all but the last ones."""
    found = {
        rule: bypass.run_one(
            {**bypass._config("dry", "near", 5.0, rule, True), "size": 0.3}, bypass.SEEDS_FROM
        )
        for rule in ("pool", "bypass, cap 1")
    }
    requests = {rule: metrics["requests"] for rule, metrics in found.items()}
    assert requests["pool"] == requests["bypass, cap 1"]
    for metrics in found.values():
        assert metrics["finished"] is not None and metrics["requests"] is not None
        assert metrics["finished"] > 0.4 * metrics["requests"]


def made(quick: bool, change: dict[str, dict[str, float]]) -> list[Row]:
    """Returns the rows of runs with equal figures, but for what `change` says of variants that end with a text."""
    variants = {one.name: one.config for one in bypass.variants(quick)}
    runs: dict[str, dict[int, Metrics]] = {}
    for name in variants:
        figures: dict[str, float | None] = dict.fromkeys(
            (bypass.IMBALANCE, bypass.TTFT, bypass.P99, bypass.RUNNING, bypass.RATE), 100.0
        )
        for end, other in change.items():
            if name.endswith(end):
                figures |= other
        runs[name] = {
            seed: {k: None if v is None else v * (1.0 + 0.001 * seed) for k, v in figures.items()}
            for seed in (0, 1)
        }
    results = Results("balance_route_bypass", quick, variants, runs)
    rows = bypass.compare(results)
    assert list(stated.differences("balance_route_bypass", rows, quick)) == []
    assert len({row.name for row in rows}) == len(rows)
    assert {variant for variant, _ in results.read} == set(variants)
    for figure in bypass.plots(results).values():
        plt.close(figure)
    return rows


@pytest.mark.parametrize("quick", [True, False])
def test_rows_say_what_the_bypass_gains_and_costs(quick: bool) -> None:
    change = {
        "JSQ": {bypass.IMBALANCE: 300.0},
        ", bypass, cap 1": {bypass.TTFT: 90.0, bypass.IMBALANCE: 150.0, bypass.RUNNING: 98.0},
    }
    rows = {row.name: row for row in made(quick, change)}
    ours = "dry near, 5 GB/s, bypass, cap 1"
    assert rows[f"{ours}: mean TTFT below the pool's"].ours == pytest.approx(10.0)
    assert rows[f"{ours}: mean TTFT below the pool's"].met is True
    assert rows[f"{ours}: slots that run, of the pool's"].aim == ""
    ours = "long near, 5 GB/s, bypass, cap 1"
    assert rows[f"{ours}: slots that run, of the pool's"].aim == ""
    tight = rows[f"{ours}: slots that run, of those of the widest"]
    assert (tight.ours, tight.met) == (pytest.approx(98.0), False)
    assert rows[f"{ours}: imbalance over the pool's"].ours == pytest.approx(1.5)
    assert rows[f"{ours}: imbalance of JSQ over it"].ours == pytest.approx(2.0)
    assert rows[f"{ours}: imbalance of JSQ over it"].met is True


def test_seeds_are_of_nothing_that_was_tuned() -> None:
    seeds = set(range(bypass.SEEDS_FROM, bypass.SEEDS_FROM + bypass.SEEDS[0]))
    assert not seeds & {*range(100, 120), 800, 801, forecast_cluster.HISTORY_SEED}
