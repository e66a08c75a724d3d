"""The mfs_* experiments: their clusters, their requests, their figures of known runs, and short runs that repeat."""

import pytest
from matplotlib import pyplot as plt

from actors.flow.config import AgentConfig
from benchmarks.experiments import mfs_common as mfs
from benchmarks.experiments import mfs_thresholds as thresholds
from benchmarks.experiments import registry
from benchmarks.experiments.base import Experiment, Results
from benchmarks.experiments.mfs_rates import BEST, over_rivals, rate_at, sustained
from benchmarks.workloads.catalog import as_if_present

NAMES = [name for name in registry.EXPERIMENTS if name.startswith("mfs_")]
SMALL = {"requests": 40, "warmup": 10, "groups": 4, "instances": 1}
# As if MFS took 0.6 of fair sharing's time, the others 0.9.
TIMES = {"fair": 1.0, "mfs": 0.6}


def results(name: str, experiment: Experiment, quick: bool) -> Results:
    """Every variant with two seeds; a policy's share in time falls with the rate."""
    with as_if_present():
        variants = experiment.variants(quick)
    runs, configs = {}, {}
    for variant in variants:
        config = variant.config
        seconds = TIMES.get(config["policy"], 0.9) * (0.5 if config.get("isolated") else 1.0)
        share = max(0.0, 1.0 - config["rate"] * seconds / 2)
        runs[variant.name] = {
            seed: {
                "ttft_mean_s": seconds,
                "cct_mean_s": seconds / 100,
                "earliness_slo_mean": seconds / 2,
                "ttft_slo_share": share,
                "ttft_slo_share/short": share,
                "ttft_slo_share/long": share,
            }
            for seed in (0, 1)
        }
        configs[variant.name] = config
    return Results(name, quick, configs, runs)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_figures_of_known_times(name: str, quick: bool) -> None:
    experiment = registry.load(name)
    found = results(name, experiment, quick)
    rows = experiment.compare(found)
    assert rows
    assert len({row.name for row in rows}) == len(rows)
    by_name = {row.name: row for row in rows}
    if name == "mfs_testbed":
        ours = by_name["agent: mean TTFT, MFS vs fair"]
        assert ours.paper == -32.3
        assert ours.ours == pytest.approx(-40.0)
        assert ours.met is True
        assert by_name["agent: mean TTFT by contention"].ours == pytest.approx(100.0)
        assert by_name["conversation: mean CCT, MFS vs fair"].met
    if name == "mfs_breakdown":
        assert by_name["at 0.7/s, MFS vs fair: mean CCT"].ours == pytest.approx(-40.0)
        assert by_name["at 0.7/s, MFS vs fair: mean CCT"].met is False
    for figure in experiment.plots(found).values():
        plt.close(figure)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_unique_and_configs_are_of_known_models(name: str) -> None:
    with as_if_present():
        variants = registry.load(name).variants(quick=False)
    assert len({v.name for v in variants}) == len(variants)
    for variant in variants:
        assert variant.config["model"] in mfs.MODELS
        assert variant.config["policy"] in mfs.POLICIES


def test_earliness_is_left_out_where_a_policy_has_no_request_in_time() -> None:
    experiment = registry.load("mfs_breakdown")
    found = results("mfs_breakdown", experiment, False)
    found.runs["dbrx conversation 0.7/s fair"][1]["earliness_slo_mean"] = None  # type: ignore[index]
    rows = {row.name: row for row in experiment.compare(found)}
    left_out = rows["at 0.7/s, MFS vs fair: earliness of requests in time"]
    assert (left_out.ours, left_out.met) == (None, None)
    assert rows["at 0.4/s, MFS vs fair: earliness of requests in time"].ours is not None
    for figure in experiment.plots(found).values():
        plt.close(figure)


def test_permits_keep_a_share_of_the_ideal_saving() -> None:
    """Fair takes 1.0, ideal MFS 0.6 and permits 0.7: they keep 0.3 of 0.4."""
    experiment = registry.load("mfs_permits")
    found = results("mfs_permits", experiment, True)
    for name, config in found.variants.items():
        if config.get("permits") and config["policy"] == "mfs":
            for metrics in found.runs[name].values():
                metrics["ttft_mean_s"] = 0.7  # type: ignore[index]
    kept = [row for row in experiment.compare(found) if "kept" in row.name]
    assert [row.ours for row in kept] == [pytest.approx(75.0)] * len(kept)
    assert [row.met for row in kept] == [False, None]


def test_a_point_of_the_thresholds_is_taken_only_where_it_is_better_on_every_workload() -> None:
    """Q_1 = 0.5 gains 3, 3 and 0 points, Q_1 = 1 gains 1, 2 and 3: only the latter is better everywhere. With a gain of
    0.1 points on each, the mean is too small.
    """
    found = results("mfs_thresholds", registry.load("mfs_thresholds"), False)
    assert thresholds.proposed(found) is None

    def gain(first: float, *points: float) -> None:
        for where, more in zip(thresholds.AT, points, strict=True):
            name = f"{where} Q_1 = {first:g}, E = 4, K = 8 {thresholds._RATES[where]:g}/s mfs"
            for metrics in found.runs[name].values():
                metrics["ttft_slo_share"] += more / 100  # type: ignore[operator]

    gain(0.5, 3.0, 3.0, 0.0)
    assert thresholds.proposed(found) is None
    gain(1.0, 0.1, 0.1, 0.1)
    assert thresholds.proposed(found) is None
    gain(1.0, 0.9, 1.9, 2.9)
    assert thresholds.proposed(found) == (1.0, 4.0, 8)


def test_rates_are_read_between_those_that_ran() -> None:
    """0.9 at 1/s and 0.7 at 2/s: 0.8 is halfway; 0.5 is below all."""
    assert rate_at({1.0: 0.9, 2.0: 0.7}, 0.8) == pytest.approx(1.5)
    assert rate_at({1.0: 0.9, 2.0: 0.85}, 0.8) is None


SHARES = {
    "fair": {1.0: 0.5, 2.0: 0.2},
    "edf": {1.0: 0.8, 2.0: 0.4},
    "karuna": {1.0: 0.9, 2.0: 0.4},
    "mfs": {1.0: 1.0, 2.0: 0.6},
    # more in time than any rival, and no rival
    "mfs-swept": {1.0: 0.99, 2.0: 0.79},
    "mfs-pruned": {1.0: 0.7, 2.0: 0.6},
}


def test_each_form_of_mfs_is_compared_with_the_best_rival_and_with_karuna() -> None:
    """At 1/s, the highest rate with 0.3 of fair sharing's requests in time, Karuna is the best; without it EDF."""
    where = "x: in time at 1/s,"
    rows = over_rivals("x", SHARES, 1.05)
    assert [(r.name, r.ours, r.paper, r.met, r.note) for r in rows] == [
        (f"{where} MFS vs {BEST}", pytest.approx(1 / 0.9), 1.05, True, "karuna"),
        (f"{where} MFS vs karuna", pytest.approx(1 / 0.9), None, None, ""),
        (f"{where} MFS with Q_1 = 1, K = 2 vs {BEST}", pytest.approx(0.99 / 0.9), 1.05, True, "karuna"),
        (f"{where} MFS with Q_1 = 1, K = 2 vs karuna", pytest.approx(0.99 / 0.9), None, None, ""),
        (f"{where} MFS with pruning vs {BEST}", pytest.approx(0.7 / 0.9), 1.05, False, "karuna"),
        (f"{where} MFS with pruning vs karuna", pytest.approx(0.7 / 0.9), None, None, ""),
    ]
    worse = {**SHARES, "karuna": {1.0: 0.4, 2.0: 0.3}}
    rows = over_rivals("x", worse, 2.0, against="karuna")
    assert [(r.ours, r.paper, r.met, r.note) for r in rows[:2]] == [
        (pytest.approx(1 / 0.8), None, None, "edf"),
        (pytest.approx(1 / 0.4), 2.0, True, ""),
    ]


def test_sustained_rates_of_each_form_are_over_the_best_rival_and_over_karuna() -> None:
    """Karuna falls to 0.8 at 1.2/s, EDF at 1/s; MFS at 1.5/s, mfs-swept at 1.95/s, and mfs-pruned is below at both."""
    rows = sustained("x", SHARES, 1.2)
    assert [(r.ours, r.paper, r.met, r.note) for r in rows] == [
        (pytest.approx(1.5 / 1.2), None, None, "karuna"),
        (pytest.approx(1.5 / 1.2), 1.2, True, ""),
        (pytest.approx(1.95 / 1.2), None, None, "karuna"),
        (pytest.approx(1.95 / 1.2), 1.2, True, ""),
        (None, None, None, "karuna, mfs-pruned below 80 % at all rates"),
        (None, 1.2, None, "mfs-pruned below 80 % at all rates"),
    ]
    # a rival that sustains all rates is better than one with a rate
    above = {**SHARES, "sjf": {1.0: 0.95, 2.0: 0.85}}
    assert sustained("x", above, 1.2)[0].note == "sjf, sjf above 80 % at all rates"


def test_a_ratio_is_open_where_the_seeds_leave_it_open() -> None:
    """MFS has 1 and 0.9 at 1/s and Karuna 0.9 and 0.72: 1.11 and 1.25 times, 1.17 by the means, and two seeds decide
    little. A seed that is never at 80 % has no rate, so the ratio of rates has no interval.
    """
    seeds = [SHARES, {**SHARES, "mfs": {1.0: 0.9, 2.0: 0.6}, "karuna": {1.0: 0.72, 2.0: 0.4}}]
    means = {
        policy: {rate: (seeds[0][policy][rate] + seeds[1][policy][rate]) / 2 for rate in (1.0, 2.0)}
        for policy in SHARES
    }
    row = over_rivals("x", means, 1.05, against="karuna", seeds=seeds)[1]
    assert (
        row.half_width is not None and row.half_width > 0.1 and (row.aim, row.met) == ("at least 1.05", None)
    )
    assert over_rivals("x", SHARES, 1.05, against="karuna", seeds=[SHARES] * 2)[1].met is True
    rate = sustained("x", means, 1.2, seeds)[1]
    assert (rate.half_width, rate.met, rate.note) == (None, None, "a seed without such a rate")


@pytest.mark.parametrize(("work", "mean", "reuse"), [("conversation", 2_000, 0.50), ("agent", 1_000, 0.65)])
def test_requests_are_as_long_and_as_shared_as_the_paper_s(work: str, mean: int, reuse: float) -> None:
    made, known, share = mfs.workload_of(mfs.config("mixtral-8x7b", work, "mfs", 1.0), 0)
    assert sum(r.prompt_tokens for r in made) / len(made) == pytest.approx(mean, rel=0.25)
    assert share == pytest.approx(reuse, abs=0.05)
    assert set(known.values()) == {f"node{i}" for i in range(16)}
    assert all(r.ttft_slo_s is not None and r.ttft_slo_s > 0 for r in made)


def test_pruning_is_by_the_share_of_live_agents_and_by_the_form_s_own() -> None:
    assert AgentConfig().drop_share == mfs.DROP_SHARE
    shares = {
        policy: mfs.sim_config(mfs.config("mixtral-8x7b", "agent", policy, 1.0, **SMALL), 0).flows
        for policy in mfs.POLICIES
    }
    assert {policy: flows and flows.drop_share for policy, flows in shares.items()} == {
        **dict.fromkeys((*mfs.RIVALS, "mfs", mfs.SWEPT_FORM), 0.0),
        mfs.PRUNED: mfs.DROP_SHARE,
    }
    assert {policy for policy, flows in shares.items() if flows and flows.policy[0] == "mfs"} == set(mfs.OURS)


def test_in_overload_the_pruned_form_prunes_and_the_others_do_not() -> None:
    made = {
        policy: mfs.run_one(mfs.config("dbrx", "conversation", policy, 2.0, **SMALL), 0)
        for policy in ("mfs", mfs.PRUNED)
    }
    assert made["mfs"]["pruned"] == 0.0
    assert made[mfs.PRUNED]["pruned"]
    assert made[mfs.PRUNED]["unfinished"] == 0.0


def test_every_policy_meets_the_same_requests_and_a_run_repeats() -> None:
    made = {
        policy: mfs.run_one(mfs.config("mixtral-8x7b", "agent", policy, 1.0, **SMALL), 0)
        for policy in ("fair", "karuna", "mfs")
    }
    again = mfs.run_one(mfs.config("mixtral-8x7b", "agent", "mfs", 1.0, **SMALL), 0)
    assert again == made["mfs"]
    assert {found["requests"] for found in made.values()} == {40.0}
    assert {found["unfinished"] for found in made.values()} == {0.0}
    assert all(found["cct_mean_s"] for found in made.values())


def test_alone_a_request_is_in_time_and_takes_the_time_of_low_load() -> None:
    """At a hundredth of the rate requests hardly meet; their TTFT is a third of the SLO, by its definition."""
    found = mfs.run_one(mfs.config("mixtral-8x7b", "agent", "fair", 0.01, **SMALL), 1)
    assert found["ttft_slo_share"] == 1.0
    assert found["earliness_slo_mean"] == pytest.approx(2 / 3, abs=0.06)


def test_permits_run_the_same_requests() -> None:
    chunks, bounded, unbounded = (
        mfs.run_one(mfs.config("mixtral-8x7b", "agent", "mfs", 1.0, permits=permits, **SMALL), 0)
        for permits in (
            [0.0025, 2, 0.0002, False, None],
            [0.0025, 2, 0.0002, True, 0.005],
            [0.0025, 2, 0.0002, True, None],
        )
    )
    assert chunks["unfinished"] == bounded["unfinished"] == unbounded["unfinished"] == 0.0
    # the longer a whole read may be, the fewer permits there are
    assert chunks["permits"] > bounded["permits"] > unbounded["permits"]


def test_mooncake_s_prompts_run_on_the_dense_model() -> None:
    config = mfs.config(
        "llama3-8b", "mooncake-conversation", "mfs", 0.05, trace="mooncake-conversation-excerpt", **SMALL
    )
    found = mfs.run_one(config, 0)
    assert found["unfinished"] == 0.0
    assert found["reuse_share"]
