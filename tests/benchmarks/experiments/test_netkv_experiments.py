"""The netkv_* experiments: what they run, and what they make of figures whose reductions are known."""

import pytest
from matplotlib import pyplot as plt

from benchmarks.aims import stated
from benchmarks.experiments import netkv_common as netkv
from benchmarks.experiments import (
    netkv_contention,
    netkv_fit,
    netkv_flows,
    netkv_grid,
    netkv_memory,
    netkv_predict,
    netkv_shared,
    registry,
)
from benchmarks.experiments.base import Experiment, Metrics, Results, Row
from benchmarks.experiments.netkv_tuning import best
from benchmarks.sim.records import RequestRecord

NAMES = [name for name in registry.EXPERIMENTS if name.startswith("netkv_")]
TTFT_S = {
    "RR": 2.0,
    "LA": 2.0,
    "CA": 1.9,
    "CLA*": 1.8,
    "NetKV-Topo-Only": 1.65,
    "NetKV-Static": 1.62,
    "NetKV-Full": 1.6,
    "NetKV-Uplinks": 1.5,
    "NetKV-Learnt-Own": 1.62,
    "NetKV-Learnt-Fleet": 1.59,
    "NetKV-Learnt-Ends": 1.61,
    "NetKV-Learnt-Shared": 1.58,
    "NetKV-Congestion": 1.64,
}


def results(name: str, experiment: Experiment, quick: bool) -> Results:
    """Every variant with two seeds, as if each scheduler always took the same time."""
    runs, configs = {}, {}
    for variant in experiment.variants(quick):
        ttft_s = TTFT_S[variant.config["scheduler"]]
        runs[variant.name] = {
            seed: {
                "ttft_mean_s": ttft_s,
                "transfer_mean_s": ttft_s - 1,
                "tbt_mean_s": 0.0127,
                "ttft_slo_share": 0.9,
                "ttft_p99_s": 5 * ttft_s,
                "goodput_per_s": 10 / ttft_s,
                "pool_mean_s": 0.0,
                "tier_share/2": 0.5,
            }
            for seed in (0, 1)
        }
        configs[variant.name] = variant.config
    return Results(name, quick, configs, runs)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_figures_of_known_times(name: str, quick: bool) -> None:
    experiment = registry.load(name)
    found = results(name, experiment, quick)
    rows = experiment.compare(found)
    assert rows
    for row in rows:
        if row.name.endswith("NetKV-Full vs RR: mean TTFT"):
            assert row.ours == pytest.approx(-20.0)
        if row.name.endswith("NetKV-Full vs CLA*: mean TTFT"):
            assert row.ours == pytest.approx(100 * (1.6 / 1.8 - 1))
            assert row.met is (None if row.paper is None else abs(row.paper - row.ours) <= 3.0)
    for figure in experiment.plots(found).values():
        plt.close(figure)


@pytest.mark.parametrize("name", NAMES)
def test_variants_can_be_built(name: str) -> None:
    for variant in registry.load(name).variants(quick=False):
        made = netkv.sim_config(variant.config, 0)
        assert sum(spec.count for spec in made.engines) == variant.config.get("gpus", 64) // 4
        assert variant.config["workload"] in netkv.WORKLOADS
        assert ("weights" in variant.config) == (variant.config["scheduler"] == "CLA*")


def test_windows_near_the_paper_are_counted() -> None:
    """-20 % vs RR and -11.1 % vs CLA* in both windows; then one of them -35 % vs RR. The paper: -18.8 and -11.8 %."""
    experiment = registry.load("netkv_windows")
    found = results("netkv_windows", experiment, False)
    near = {row.name: row.ours for row in experiment.compare(found) if row.name.endswith("3 points of both")}
    assert near["rag 100%, windows within 3 points of both"] == 100.0
    assert near["long 100%, windows within 3 points of both"] == 0.0
    found.runs["rag 100% RR"][1]["ttft_mean_s"] = 1.6 / 0.65  # type: ignore[index]
    rows = {row.name: row for row in experiment.compare(found)}
    assert rows["rag 100%, windows within 3 points of both"].ours == 50.0
    assert rows["rag 100%, NetKV-Full vs RR, all windows: mean TTFT"].ours == pytest.approx(-27.5)
    assert "-35.0 to -20.0" in rows["rag 100%, NetKV-Full vs RR, all windows: mean TTFT"].note


def test_what_table_3_implies_is_shown_beside_ours() -> None:
    """CLA* is 1.8 s where RR has 2: -10 %. Table III's -13.3 and -3.2 % at 4K imply 0.867 / 0.968: -10.4 %."""
    experiment = registry.load("netkv_context")
    rows = {row.name: row for row in experiment.compare(results("netkv_context", experiment, False))}
    row = rows["4096 tokens 2K shared, CLA* vs RR: mean TTFT"]
    assert (row.paper, row.ours, row.met) == (-10.4, pytest.approx(-10.0), None)


def test_the_best_weights_are_those_of_the_least_time() -> None:
    experiment = registry.load("netkv_tuning")
    found = results("netkv_tuning", experiment, True)
    name = found.where(weights=[1.05, 0.1])[0]
    found.runs[name][0]["ttft_mean_s"] = 1.5  # type: ignore[index]
    assert best(found, "rag") == (name, (1.05, 0.1))


def test_the_form_of_least_worst_cell_is_chosen_and_judged_on_other_windows() -> None:
    """Fleet is least everywhere, 1.59 against Full's 1.6. With 1.8 in one cell it is the worst there, and ends is."""
    experiment = registry.load("netkv_contention")
    found = results("netkv_contention", experiment, False)
    rows = {row.name: row for row in experiment.compare(found)}
    assert rows["the form of least worst cell, part choose"].note == "fleet"
    aimed = rows["long 100%, chosen form vs the better of Topo-Only and Full: mean TTFT"]
    assert (aimed.ours, aimed.met) == (pytest.approx(100 * (1.59 / 1.6 - 1)), True)
    for seed in (0, 1):
        found.runs["choose, long 100%, NetKV-Learnt-Fleet"][seed]["ttft_mean_s"] = 1.8  # type: ignore[index]
        found.runs["report, long 100%, NetKV-Learnt-Ends"][seed]["ttft_mean_s"] = 1.7  # type: ignore[index]
    rows = {row.name: row for row in experiment.compare(found)}
    assert rows["the form of least worst cell, part choose"].note == "ends"
    aimed = rows["long 100%, chosen form vs Topo-Only: mean TTFT"]
    assert (aimed.ours, aimed.met) == (pytest.approx(100 * (1.7 / 1.65 - 1)), False)


def test_no_window_of_the_trace_both_chooses_and_reports() -> None:
    windows = {
        part: {netkv_contention.seed_of(part, seed) % netkv_contention.WINDOWS for seed in range(10)}
        for part in (netkv_contention.CHOOSE, netkv_contention.REPORT)
    }
    assert windows == {"choose": set(range(0, 20, 2)), "report": set(range(1, 20, 2))}


@pytest.mark.parametrize("scheduler", [name for name in netkv.SCHEDULERS if "Learnt" in name])
def test_where_senders_and_receivers_share_links_some_transfers_leave_the_pod(scheduler: str) -> None:
    """With one NIC an instance and 2.5 times the load. Before anything is learnt, all go to the pod, as with
    Topo-Only.
    """
    config = netkv.config("rag", scheduler, load=2.5, fixed_nic=True, windows=20)
    first, again = netkv.run_one(config, 900), netkv.run_one(config, 900)
    assert first == again
    in_pod = first["tier_share/2"]
    assert in_pod is not None and 0.4 < in_pod < 0.95


def test_contention_is_learnt_only_by_those_who_use_it() -> None:
    learns = {s: netkv.sim_config(netkv.config("rag", s), 0).learn_contention for s in netkv.SCHEDULERS}
    assert {scheduler for scheduler, asked in learns.items() if asked} == {
        "NetKV-Learnt-Own",
        "NetKV-Learnt-Fleet",
        "NetKV-Learnt-Ends",
        "NetKV-Learnt-Shared",
    }


def test_slowdowns_are_counted_by_what_the_sender_has_in_flight() -> None:
    """Transfers of 100 B at 100 B/s, so each takes 1 s alone. p sends b while a is on its way, and c after both; q has
    its own.
    """
    sent = [("a", "p", 0.0, 1.5), ("b", "p", 1.0, 3.0), ("c", "p", 4.0, 5.0), ("d", "q", 1.0, 2.0)]
    records = [
        RequestRecord(
            name,
            "rag",
            1,
            1,
            0.0,
            prefill_worker=sender,
            transfer_started_s=start_s,
            transfer_done_s=done_s,
            tier=2,
            transfer_bytes=100,
        )
        for name, sender, start_s, done_s in sent
    ]
    found = netkv_contention.slowdowns(records, {2: 100.0})
    # a 1.5, c 1 and d 1 had no other, b 2 had one
    assert found == {"slow/2/0": 3.5, "moved/2/0": 3.0, "slow/2/1": 2.0, "moved/2/1": 1.0}


def rows_of(name: str, found: Results) -> dict[str, Row]:
    return {row.name: row for row in registry.load(name).compare(found)}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "netkv_grid",
        "netkv_columns",
        "netkv_flows",
        "netkv_memory",
        "netkv_fit",
        "netkv_predict",
        "netkv_shared",
    ],
)
def test_every_variant_is_read_by_a_row_and_every_aim_is_stated(name: str, quick: bool) -> None:
    experiment = registry.load(name)
    found = results(name, experiment, quick)
    rows = experiment.compare(found)
    assert {variant for variant, _ in found.read} == set(found.variants)
    assert list(stated.differences(name, rows, quick)) == []
    assert len({row.name for row in rows}) == len(rows)


def test_every_cell_and_every_step_of_figure_1_counts_once() -> None:
    """60 cells; steps from 2:1 on: 2 of each of 5 lines of 3 workloads; steps of background: 4 of each of 4 lines."""
    found = results("netkv_grid", registry.load("netkv_grid"), False)
    rows = rows_of("netkv_grid", found)
    cells = "cells in which NetKV-Full is shorter than CLA*, of all"
    ratio = "steps of oversubscription from 2:1 on with which the gain grows, of all"
    share = "steps of background with which the gain grows, of all"
    assert [(rows[name].paper, rows[name].ours, rows[name].met) for name in (cells, ratio, share)] == [
        (60.0, 60.0, True),
        (30.0, 30.0, True),
        (48.0, 48.0, True),
    ]
    # no gain at 4:1 with 10 %: 4:1 is not above 2:1, 10 % not above 5 %, and the steps behind it grow
    for seed in (0, 1):
        found.runs["rag 4:1 10% NetKV-Full"][seed]["ttft_mean_s"] = 1.9  # type: ignore[index]
    rows = rows_of("netkv_grid", found)
    assert [(rows[name].ours, rows[name].met) for name in (cells, ratio, share)] == [
        (59.0, False),
        (29.0, False),
        (47.0, False),
    ]
    assert rows["rag: cells in which NetKV-Full is shorter than CLA*"].ours == 19.0


def test_a_cell_that_windows_do_not_decide_leaves_all_cells_open() -> None:
    """NetKV-Full is 5.6 % longer in one window and 11.1 % shorter in the other: shorter by the mean, and not surely.
    The step from 2:1 then falls by the mean, and not surely either.
    """
    found = results("netkv_grid", registry.load("netkv_grid"), False)
    found.runs["rag 4:1 10% NetKV-Full"][0]["ttft_mean_s"] = 1.9  # type: ignore[index]
    rows = rows_of("netkv_grid", found)
    cells = rows["cells in which NetKV-Full is shorter than CLA*, of all"]
    assert (cells.ours, cells.met, cells.note) == (60.0, None, "0 surely not")
    steps = rows["steps of oversubscription from 2:1 on with which the gain grows, of all"]
    assert (steps.ours, steps.met, steps.note) == (29.0, None, "0 surely not")


def test_the_cost_in_tbt_is_a_band_over_the_cells() -> None:
    """NetKV-Full costs 0.1 ms in one cell and nothing in the others."""
    found = results("netkv_grid", registry.load("netkv_grid"), False)
    for seed in (0, 1):
        found.runs["long 2:1 5% NetKV-Full"][seed]["tbt_mean_s"] = 0.0128  # type: ignore[index]
    rows = rows_of("netkv_grid", found)
    band = rows["long: TBT added by NetKV-Full, over all cells"]
    assert (band.paper, band.ours, band.met) == (netkv_grid.BAND_MS, pytest.approx(0.1), False)
    assert rows["rag: TBT added by NetKV-Full, over all cells"].met is True


def test_the_other_columns_are_differences_and_reductions() -> None:
    """P99 is five times the mean: -11.1 %. In time are 2 points more than with CLA*, goodput is 1.8 / 1.6 of its."""
    found = results("netkv_columns", registry.load("netkv_columns"), False)
    for seed in (0, 1):
        found.runs["rag 200% NetKV-Full"][seed]["ttft_slo_share"] = 0.92  # type: ignore[index]
    rows = rows_of("netkv_columns", found)
    slo = rows["rag 200%, NetKV-Full vs CLA*: SLO"]
    assert (slo.paper, slo.ours, slo.unit, slo.met) == (2.7, pytest.approx(2.0), "points", True)
    p99 = rows["rag 250%, NetKV-Full vs CLA*: P99 of TTFT"]
    assert (p99.paper, p99.ours, p99.met) == (-18.4, pytest.approx(100 * (1.6 / 1.8 - 1)), False)
    more = rows["rag 200%, NetKV-Full vs CLA*: goodput"]
    assert (more.paper, more.ours, more.met) == (3.0, pytest.approx(12.5), False)
    # what cannot fail is not aimed at
    assert rows["1024 tokens, NetKV-Full vs RR: SLO"].aim == ""
    assert rows["32768 tokens, NetKV-Full vs RR: SLO"].met is True
    # one cell stands in several tables: p_share 0.7 and 64 GPUs are RAG at 100 %
    assert rows["p_share 0.7, NetKV-Full vs CA: SLO"].paper == 2.5
    assert rows["64 GPUs, NetKV-Full vs CLA*: SLO"].paper == 1.8
    assert not {"rag p0.7 CLA*", "rag 64 GPUs CLA*"} & set(found.variants)


def test_slo_attainment_by_size_has_a_row_where_it_was_measured() -> None:
    found = results("netkv_scale", registry.load("netkv_scale"), False)
    row = rows_of("netkv_scale", found)["1024 GPUs, NetKV-Full vs CLA*: SLO"]
    assert (row.paper, row.ours, row.aim) == (1.7, 0.0, "")
    for by_seed in found.runs.values():
        for figures in by_seed.values():
            del figures["ttft_slo_share"]  # type: ignore[attr-defined]
    assert not [name for name in rows_of("netkv_scale", found) if name.endswith("SLO")]


def test_memory_is_the_cause_only_where_long_prompts_are_as_in_table_3_and_16k_stays() -> None:
    """Everywhere -20 % vs RR and -11.1 % vs CLA*: 16K stays, and none of 32K's and 64K's is near Table III's."""
    found = results("netkv_memory", registry.load("netkv_memory"), False)
    far, kept = registry.load("netkv_memory").compare(found)[:2]
    assert (far.ours, far.met, kept.ours, kept.met) == (0.0, False, 2.0, True)
    for tokens, (vs_rr, vs_cla) in ((32768, (-6.7, -4.3)), (65536, (0.0, 0.2))):
        for scheduler, ttft_s in (
            ("NetKV-Full", 10.0),
            ("RR", 10.0 / (1 + vs_rr / 100)),
            ("CLA*", 10.0 / (1 + vs_cla / 100)),
        ):
            for seed in (0, 1):
                found.runs[f"rag {tokens} 45 GB {scheduler}"][seed]["ttft_mean_s"] = ttft_s  # type: ignore[index]
    near, kept = registry.load("netkv_memory").compare(found)[:2]
    assert (near.ours, near.met, kept.met) == (4.0, True, True)
    assert netkv_memory.SIZES["45 GB"] * netkv.KV_TOKENS * netkv.PROFILE.kv_bytes_per_token == pytest.approx(
        45e9, rel=1e-4
    )


def test_changes_that_windows_do_not_decide_leave_memory_open() -> None:
    """With 45 GB and 32K tokens CLA* takes 10.9 and 10.2 s where NetKV-Full takes 10: -8.3 and -2.0 %, of -4.3."""
    found = results("netkv_memory", registry.load("netkv_memory"), True)
    at = "rag 32768 45 GB"
    for seed, cla_s in ((0, 10.9), (1, 10.2)):
        found.runs[f"{at} NetKV-Full"][seed]["ttft_mean_s"] = 10.0  # type: ignore[index]
        found.runs[f"{at} RR"][seed]["ttft_mean_s"] = 10.0 / (1 - 0.067)  # type: ignore[index]
        found.runs[f"{at} CLA*"][seed]["ttft_mean_s"] = cla_s  # type: ignore[index]
    near, kept = registry.load("netkv_memory").compare(found)[:2]
    assert (near.ours, near.met, kept.met) == (2.0, None, True)
    assert near.note.startswith("apart: -0.0 ± 0.0, ") or near.note.startswith("apart: +0.0 ± 0.0, ")


@pytest.mark.parametrize("missing", ["unfinished", "rejected"])
def test_a_request_that_does_not_end_fails_a_run_of_little_memory(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"unfinished": 0.0, "rejected": 0.0, "ttft_mean_s": 1.0}
    monkeypatch.setattr(netkv, "run_one", lambda config, seed: figures)
    assert netkv_memory.run_one({}, 0) == figures
    figures[missing] = 1.0
    with pytest.raises(ValueError, match="all have to end"):
        netkv_memory.run_one({}, 0)


def test_the_setup_of_least_distance_is_named_and_the_one_in_use_is_judged() -> None:
    found = results("netkv_fit", registry.load("netkv_fit"), False)
    other = "spread, 2K shared, one NIC"
    assert netkv_fit.IN_USE in netkv_fit.SETUPS and other in netkv_fit.SETUPS
    for load, by_scheduler in netkv_fit.TABLE_2.items():
        for scheduler, figures in by_scheduler.items():
            for seed in (0, 1):
                run = found.runs[f"{other}, {load:.0%} {scheduler}"][seed]
                run["transfer_mean_s"] = figures[3] / 1e3  # type: ignore[index]
    rows = rows_of("netkv_fit", found)
    row = rows["distance of the setup in use from Table II"]
    assert row.met is False and row.note.endswith(f"± 0.0 points further than the best; best: {other}")
    assert netkv_fit.distance(found, other, range(2)) == pytest.approx(0.0, abs=1e-9)
    assert rows[f"{other}: distance from Table II"].note == ""
    assert rows[f"{netkv_fit.IN_USE}: distance from Table II"].note.endswith("points further than the best")


def test_what_is_fitted_and_what_is_predicted_have_other_windows_and_one_setup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seen(config: object, seed: int) -> Metrics:
        return {"seed": float(seed)}

    monkeypatch.setattr(netkv, "run_one", seen)
    fitted, predicted = (
        {(module.run_one({}, seed)["seed"] or 0.0) % netkv_fit.WINDOWS for seed in range(10)}
        for module in (netkv_fit, netkv_predict)
    )
    assert (fitted, predicted) == (set(range(0, 20, 2)), set(range(1, 20, 2)))
    for variant in netkv_predict.variants(False):
        options = {"prefill": list(netkv_fit.PREFILL), "windows": netkv_fit.WINDOWS}
        options |= netkv_fit.SETUPS[netkv_fit.IN_USE]
        assert variant.config.items() >= options.items()


def test_predictions_are_counted_by_their_verdicts() -> None:
    found = results("netkv_predict", registry.load("netkv_predict"), False)
    rows = registry.load("netkv_predict").compare(found)
    inside, outside, *judged = rows
    assert (inside.ours, outside.ours) == (
        float(sum(row.met is True for row in judged)),
        float(sum(row.met is False for row in judged)),
    )
    # NetKV-Full would run as Static does
    assert "long 100% NetKV-Static" in found.variants and "long 100% NetKV-Full" not in found.variants
    # 12 of Table III, 4 of Table IV, 6 of Figure 1, 8 of Figure 3, 2 of Table V, 2 of Table VI
    assert len(judged) == 34 and all(row.aim and row.paper is not None for row in judged)


def test_the_reading_in_use_is_judged_by_its_distance() -> None:
    """Transfers are alike for all readings: a tie, which the first wins. Then those of quarter links are Table II's."""
    found = results("netkv_flows", registry.load("netkv_flows"), False)
    name = "one path: distance of transfer times from Table II"
    assert rows_of("netkv_flows", found)[name].met is True
    for load in netkv_flows.LOADS:
        for scheduler, figures in netkv_flows.TABLE_2[load].items():
            for seed in (0, 1):
                run = found.runs[f"rag {load:.0%} quarter links {scheduler}"][seed]
                run["transfer_mean_s"] = figures[3] / 1e3  # type: ignore[index]
    row = rows_of("netkv_flows", found)[name]
    assert (row.met, row.note) == (False, "nearest: quarter links")


def test_a_reading_that_is_nearer_in_one_window_only_leaves_it_open() -> None:
    found = results("netkv_flows", registry.load("netkv_flows"), False)
    for load in netkv_flows.LOADS:
        for scheduler, figures in netkv_flows.TABLE_2[load].items():
            run = found.runs[f"rag {load:.0%} quarter links {scheduler}"][0]
            run["transfer_mean_s"] = figures[3] / 1e3  # type: ignore[index]
    row = rows_of("netkv_flows", found)["one path: distance of transfer times from Table II"]
    assert (row.met, row.note) == (None, "nearest: quarter links")
    at_250 = rows_of("netkv_flows", found)["rag 250% one NIC, NetKV-Full against Topo-Only: mean TTFT"]
    assert (at_250.paper, at_250.ours) == (None, pytest.approx(100 * (1.6 / 1.65 - 1)))


def test_in_the_second_round_the_better_form_is_chosen_and_no_window_is_in_both_parts() -> None:
    found = results("netkv_shared", registry.load("netkv_shared"), False)
    rows = rows_of("netkv_shared", found)
    assert rows["the form of least worst cell, part choose"].note == "shared"
    one = rows["rag 100% switching, chosen form vs Topo-Only: mean TTFT"]
    assert (one.ours, one.met) == (pytest.approx(100 * (1.58 / 1.65 - 1)), True)
    windows = [
        {netkv_shared.seed_of(part, seed) % netkv_shared.WINDOWS for seed in range(10)}
        for part in netkv_shared.FIRST_SEED
    ]
    assert [len(of) for of in windows] == [10, 10] and not windows[0] & windows[1]
    # the cause is shown where there is background
    with_cause = {c["cell"] for c in found.variants.values() if c["scheduler"] == "NetKV-Congestion"}
    assert with_cause == {cell for cell in netkv_shared.CELLS if "switching" in cell or "40%" in cell}
