"""The experiment `forecast_value`: its cells, one small run of each kind, and its rules on figures made by hand."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from matplotlib import pyplot as plt

from benchmarks.aims import stated
from benchmarks.experiments import balance_route_cluster, forecast_cluster, forecast_value
from benchmarks.experiments.base import Metrics, Results, Row
from benchmarks.sim.records import RequestRecord, RunResult, StepStats
from benchmarks.workloads.arrivals import Poisson
from benchmarks.workloads.record import WorkloadRequest

Figures = dict[str, float | None]
SEEDS = (900, 901, 902)


# --------------------------------------------------------------------------------------------------------------- cells


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little history, which no other test gets to see."""
    monkeypatch.setattr(forecast_cluster, "HISTORY", 400)
    forget()
    yield
    forget()


def forget() -> None:
    for cached in (
        forecast_cluster.history,
        forecast_cluster.past,
        forecast_cluster._sizing,
        forecast_cluster.load_of,
    ):
        cached.cache_clear()


@pytest.mark.parametrize("pool", forecast_cluster.POOLS)
def test_a_cell_begins_with_running_requests_and_goes_on_at_its_load(small: None, pool: str) -> None:
    cell = forecast_cluster.POOLS[pool]
    load = forecast_cluster.load_of(pool, "near", 900, 4.0)
    times = np.array([r.at_s for r in load.requests])
    running = round(min(cell.load, 1.0) * 8 * cell.slots)
    waiting = 8 * 16 if pool == "long" else 0
    first_s = running * forecast_cluster.RUSH_S
    assert (np.diff(times) >= 0).all()
    assert times[:running] == pytest.approx(np.arange(running) * forecast_cluster.RUSH_S)
    assert times[running : running + waiting] == pytest.approx([first_s] * waiting)
    assert times[running + waiting] == pytest.approx(first_s)
    end_s = load.warmup_s + load.measure_s
    assert first_s < times[-1] <= end_s
    wanted = cell.load * load.sizing.requests_per_s * (end_s - first_s)
    # Some 2,000 arrivals have a deviation of 2 %; bursts change the rate for a fiftieth of the run at a time.
    assert len(times) - running - waiting == pytest.approx(wanted, rel=0.5 if cell.bursts else 0.08)
    # The first requests have a part of their outputs still to come.
    outputs = np.array([r.output_tokens for r in load.requests])
    assert outputs[:running].mean() < 0.8 * outputs[running:].mean()


def test_capped_outputs_nearly_all_end_at_their_cap() -> None:
    rows = forecast_cluster.requests_of("capped", Poisson(1.0), 900, 1_000)
    caps = forecast_cluster.OUTPUTS["capped"].caps
    assert {r.max_tokens for r in rows} == set(caps)
    assert all(r.max_tokens is not None and r.output_tokens <= r.max_tokens for r in rows)
    assert sum(r.output_tokens == r.max_tokens for r in rows) > 900
    free = forecast_cluster.requests_of("near", Poisson(1.0), 900, 10)
    assert {r.max_tokens for r in free} == {None}


@pytest.mark.parametrize(("output", "cap", "left"), [(256, 256, 128), (200, 256, 256), (200, None, None)])
def test_what_is_left_of_a_request_ends_at_what_is_left_of_its_cap(
    output: int, cap: int | None, left: int | None
) -> None:
    """Half of 255 tokens after the first are 127, of 199 they are 99."""
    request = WorkloadRequest("a", 5.0, 10, output, max_tokens=cap)
    begun = forecast_cluster._begun(request, 1.0, 0.5)
    assert (begun.at_s, begun.output_tokens) == (1.0, 128 if output == 256 else 100)
    assert begun.max_tokens == left


def test_history_lies_before_the_run_and_is_of_other_requests(small: None) -> None:
    outcomes = forecast_cluster.history("near", 9)
    assert all(o.arrival.arrival_s < o.finish_s < 0.0 for o in outcomes)
    load = forecast_cluster.load_of("dry", "near", 900, 0.2)
    assert not {o.arrival.request_id for o in outcomes} & {r.request_id for r in load.requests}
    with pytest.raises(ValueError, match="no forecast source is called"):
        forecast_cluster.predictor_of("crystal ball", "near", 9, {}, 0)


def test_who_still_waits_counts_with_the_time_until_now() -> None:
    """At 10 s one has waited 1 s for its first token, one 4 s without any. In the pool they were 0.5 and 3 s."""
    requests = [
        RequestRecord("a", "", 1, 2, 1.0, prefill_done_s=1.25, decode_routed_s=1.75, first_token_s=2.0),
        RequestRecord("b", "", 1, 2, 6.0, prefill_done_s=7.0),
        RequestRecord("c", "", 1, 2, 10.0),
    ]
    steps = StepStats(steps=4, imbalance_sum=40.0, idle_s=1.0, busy_s=3.0, tokens=8)
    found = forecast_cluster.measures(RunResult(requests, steps, 5.0), 10.0)
    assert found["ttft_mean_s"] == pytest.approx(5.0 / 3.0)
    assert found["pooled"] == pytest.approx(3.5 / 5.0)
    assert (found["imbalance_tokens"], found["throughput_tok_s"], found["running"]) == (10.0, 1.6, 2.0)
    assert (found["tpot_p95_ms"], found["finished"], found["requests"]) == (None, 0.0, 3.0)


def test_with_certain_forecasts_the_gate_and_the_dial_change_nothing(small: None) -> None:
    """The oracle's runs are those of a dial at 1; both see what a run without forecasts does not."""
    variants = {v.name: v.config for v in forecast_value.variants(False)}
    config = {**variants["long near, printed, oracle"], "size": 0.12}
    oracle = forecast_value.run_one(config, 900)
    assert forecast_value.run_one({**config, "source": "dial 1"}, 900) == oracle
    assert (oracle["auc"], oracle["mae_tokens"]) == (1.0, 0.0)
    without = forecast_value.run_one({**config, "source": None}, 900)
    assert "auc" not in without and without["imbalance_tokens"] != oracle["imbalance_tokens"]
    expected = forecast_value.run_one({**config, "source": "survival", "expected": True}, 900)
    assert 0.4 < (expected["auc"] or 0.0) < 0.9


# --------------------------------------------------------------------------------------------------------------- rules


def made(change: Callable[[str, int, Figures], None], quick: bool = True) -> list[Row]:
    """Returns the rows of runs that have equal figures in all variants, but for what is changed."""
    results = ran(change, quick)
    rows = forecast_value.compare(results)
    assert list(stated.differences("forecast_value", rows, quick)) == []
    assert len({row.name for row in rows}) == len(rows)
    return rows


def ran(change: Callable[[str, int, Figures], None], quick: bool) -> Results:
    """Returns such runs of three seeds."""
    variants = {one.name: one.config for one in forecast_value.variants(quick)}
    runs: dict[str, dict[int, Metrics]] = {}
    for name, config in variants.items():
        runs[name] = {}
        for i, seed in enumerate(SEEDS):
            figures: Figures = dict.fromkeys(forecast_value.METRICS, 100.0 + i)
            figures |= {"pooled": 3.0, "running": 50.0}
            if config.get("source") is not None:
                figures |= {"auc": 0.9, "mae_tokens": 5.0, "gate_share": 0.2, "gate_right": 0.8}
            change(name, i, figures)
            runs[name][seed] = figures
    return Results("forecast_value", quick, variants, runs)


def better(metric: str, by: dict[str, float]) -> Callable[[str, int, Figures], None]:
    """Returns a change by which `metric` is less by a factor in the variants that end with a text."""

    def change(name: str, seed: int, figures: Figures) -> None:
        for end, factor in by.items():
            if name.endswith(end):
                value = figures[metric]
                assert value is not None
                # Seeds differ a little in what they gain.
                figures[metric] = value * (factor + 0.001 * seed)

    return change


def named(rows: list[Row], name: str) -> Row:
    [row] = [row for row in rows if row.name == name]
    return row


SHARE = "long near, printed: share of what the oracle adds that lightgbm keeps, imbalance"
WORTH = "cells in which forecasts of {} are worth their cost for {}"


def test_without_a_gain_there_is_nothing_to_keep_and_forecasts_are_worth_nothing() -> None:
    rows = made(lambda name, seed, figures: None)
    share = named(rows, SHARE)
    assert (share.ours, share.met, share.aim) == (None, None, ">= 95")
    verdict = named(rows, WORTH.format("lightgbm", "balance"))
    assert (verdict.ours, verdict.met, verdict.note) == (0.0, False, "none")
    idle = named(rows, "cells in which not even the oracle adds to balance or throughput of BR-H")
    assert idle.ours == 2.0 and idle.note == "long near; short capped"
    least = named(rows, "long near, printed: least AUC from which forecasts add to the balance")
    assert least.ours is None
    # Nothing is missed, for nothing was to be kept.
    assert [row.name for row in rows if row.met is False] == [verdict.name]


@pytest.mark.parametrize(("lightgbm", "share", "reached"), [(0.80, 100.0, True), (0.90, 50.0, False)])
def test_the_share_is_of_what_forecasts_add(lightgbm: float, share: float, reached: bool) -> None:
    """The oracle is 20 % better than none, LightGBM as much or 10 %: all of it, or half."""
    rows = made(better("imbalance_tokens", {", oracle": 0.80, ", lightgbm": lightgbm}))
    row = named(rows, SHARE)
    assert row.ours == pytest.approx(share, abs=0.3) and row.met is reached
    verdict = named(rows, WORTH.format("lightgbm", "balance"))
    assert (verdict.ours, verdict.met) == (2.0, True)
    assert (
        verdict.note == "long near (printed, tuned, expected); short capped (printed, tuned, expected)"
        or (verdict.note.startswith("long near (printed"))
    )


def test_a_rule_that_gains_without_its_forecasts_has_no_gain_from_them() -> None:
    """All of "tuned" are 20 % better than BR-0, with forecasts or without."""

    def change(name: str, seed: int, figures: Figures) -> None:
        if ", tuned, " in name:
            figures["imbalance_tokens"] = 80.0 + 0.1 * seed

    rows = made(change)
    gain = named(rows, "long near, tuned, oracle: imbalance below BR-0's")
    assert gain.ours == pytest.approx(20.7, abs=0.2) and "imbalance against no forecasts +0.0" in gain.note
    share = named(rows, SHARE.replace("printed", "tuned"))
    assert (share.ours, share.met) == (None, None)
    assert named(rows, WORTH.format("oracle", "balance")).ours == 0.0


def test_forecasts_that_cost_throughput_are_not_worth_it() -> None:
    def change(name: str, seed: int, figures: Figures) -> None:
        better("imbalance_tokens", {", oracle": 0.80, ", lightgbm": 0.80})(name, seed, figures)
        better("throughput_tok_s", {", lightgbm": 0.98})(name, seed, figures)

    rows = made(change)
    assert named(rows, WORTH.format("oracle", "balance")).ours == 2.0
    assert named(rows, WORTH.format("lightgbm", "balance")).ours == 0.0


def test_waiting_is_judged_by_the_composition() -> None:
    rows = made(better("ttft_mean_s", {"composition, oracle": 0.5, "composition, lightgbm": 0.7}))
    assert named(rows, WORTH.format("lightgbm", "waiting")).ours == 2.0
    assert named(rows, WORTH.format("lightgbm", "balance")).ours == 0.0
    row = named(rows, "long near, composition: share of what the oracle adds that lightgbm keeps, mean TTFT")
    assert row.ours == pytest.approx(60.0, abs=1.0) and row.met is False


def test_the_least_quality_is_that_from_which_all_better_ones_add() -> None:
    """Dials from 0.8 on and the oracle add; that of 0.5 adds too, by chance, and 0.7 does not."""
    ends = dict.fromkeys((", dial 0.5", ", dial 0.8", ", dial 0.9", ", dial 0.97", ", oracle"), 0.8)
    aucs = {f"dial {auc:g}": auc for auc in forecast_value.AUCS}

    def change(name: str, seed: int, figures: Figures) -> None:
        better("imbalance_tokens", ends)(name, seed, figures)
        source = name.rpartition(", ")[2]
        if source in aucs and "auc" in figures:
            figures["auc"] = aucs[source]

    rows = made(change, quick=False)
    least = named(rows, "dry heavy, printed: least AUC from which forecasts add to the balance")
    assert least.ours == pytest.approx(0.8)


@pytest.mark.parametrize("quick", [True, False])
def test_a_plot_for_each_metric_has_a_panel_for_each_cell(quick: bool) -> None:
    figures = forecast_value.plots(ran(lambda name, seed, figures: None, quick))
    assert set(figures) == {f"forecast_value_{what}" for what in ("imbalance", "ttft", "throughput")}
    for figure in figures.values():
        titles = [axis.get_title(loc="left") for axis in figure.axes if axis.get_visible()]
        assert titles == forecast_value.names(ran(lambda name, seed, figures: None, quick))
        plt.close(figure)


def test_quick_runs_have_every_rule_and_one_seed_decides_nothing() -> None:
    names = [v.name for v in forecast_value.variants(True)]
    assert all(f"long near, {rule}, oracle" in names for rule in (*forecast_value.FORMS, "composition"))
    variants = {one.name: one.config for one in forecast_value.variants(True)}
    figures = {
        **dict.fromkeys(forecast_value.METRICS, 1.0),
        **dict.fromkeys(("pooled", "running", "auc", "mae_tokens", "gate_share", "gate_right"), 0.5),
    }
    results = Results("forecast_value", True, variants, {name: {900: figures} for name in variants})
    assert [row for row in forecast_value.compare(results) if row.met is not None] == []


def test_rules_differ_as_the_docstring_says() -> None:
    printed, tuned = (forecast_value.policy_of(rule)[1] for rule in ("printed", "tuned"))
    assert {k: v for k, v in tuned.items() if printed.get(k) != v} == {"gamma": 0.7, "beta": 16.0}
    assert forecast_value.policy_of("expected") == forecast_value.policy_of("printed")
    assert forecast_value.policy_of("BR-0")[0] == "balance_route_0"
    # No seed of a run is one on which something was tuned or fitted.
    first, count = forecast_value.SEEDS_FROM, forecast_value.SEEDS[0]
    assert not {800, 801, balance_route_cluster.TRAIN_SEED, forecast_cluster.HISTORY_SEED} & set(
        range(first, first + count)
    )
