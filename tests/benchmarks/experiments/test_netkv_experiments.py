"""The netkv_* experiments: what they run, and what they make of figures whose reductions are known."""

import pytest
from matplotlib import pyplot as plt

from benchmarks.experiments import netkv_common as netkv
from benchmarks.experiments import netkv_contention, registry
from benchmarks.experiments.base import Experiment, Results
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


@pytest.mark.parametrize("scheduler", ["NetKV-Learnt-Own", "NetKV-Learnt-Fleet", "NetKV-Learnt-Ends"])
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
