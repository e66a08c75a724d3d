"""The plain BR-H by its source of forecasts: what runs, and what the rows say."""

import dataclasses

import pytest
from matplotlib import pyplot as plt

from benchmarks.aims import stated
from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments import balance_route_plain as plain
from benchmarks.experiments import balance_route_table1 as table1
from benchmarks.experiments.base import Metrics, Results, Row

SMALL = dataclasses.replace(cluster.CASES["recurring-long"], requests=1_000)


@pytest.fixture(autouse=True)
def all_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "available", lambda workload: True)


def test_without_forecasts_the_rule_stays_the_same_and_nothing_is_forecast() -> None:
    configs = {one.name: one.config for one in plain.variants(False)}
    none, oracle = (configs[f"recurring-long/br_h {source}"] for source in ("no forecasts", "oracle"))
    assert {key for key in none if none[key] != oracle[key]} == {"predictor", "method"}
    assert none["predictor"] is None and none["policy"] == "balance_route_h"
    # gamma and beta are the policy's defaults, which are the paper's
    assert none["params"] == {"ageing_s": None, "window": 12, "pool_wide": False}
    load = cluster.load_of(SMALL, 8, 4.0, 100, 200, 0)
    assert cluster.sim_config(none, SMALL, load, 0).forecasts is None
    assert cluster.sim_config(oracle, SMALL, load, 0).forecasts is not None


def test_the_pool_of_one_trace_is_also_smaller_and_larger() -> None:
    pools = {one.config["cell"]: one.config.get("pool") for one in plain.variants(False)}
    assert pools == {
        "recurring-long": None, "reasoning-long": None, "azure2024": None,
        "recurring-long, pool 4": 4.0, "recurring-long, pool 32": 32.0,
    }  # fmt: skip
    assert {one.config["cell"] for one in plain.variants(True)} == {"recurring-long"}
    # of other pools the paper has no figures, so what runs says what forecasts add
    methods = [c.config["method"] for c in plain.variants(False) if c.config["cell"].endswith("pool 4")]
    assert methods == [
        "join_shortest_queue", "br_0", "br_h no forecasts", "br_h lightgbm", "br_h oracle",
    ]  # fmt: skip


def rows_of(quick: bool, imbalance: dict[str, tuple[float, float, float]]) -> dict[str, Row]:
    """Returns the rows of runs of three seeds; `imbalance` has those of variants that end with a text."""
    variants = {one.name: one.config for one in plain.variants(quick)}
    runs: dict[str, dict[int, Metrics]] = {}
    for name in variants:
        seen = next((v for end, v in imbalance.items() if name.endswith(end)), (100.0, 101.0, 102.0))
        runs[name] = {
            seed: {
                "imbalance_tokens": seen[seed],
                "tpot_p95_ms": 70.0,
                **dict.fromkeys(
                    (table1.RAW, table1.SAME, table1.BY_TPOT), 800.0 if name.endswith(plain.JSQ) else 880.0
                ),
            }
            for seed in range(3)
        }
    results = Results("balance_route_plain", quick, variants, runs)
    rows = plain.compare(results)
    assert list(stated.differences("balance_route_plain", rows, quick)) == []
    assert len({row.name for row in rows}) == len(rows)
    assert {variant for variant, _ in results.read} == set(variants)
    for figure in plain.plots(results).values():
        plt.close(figure)
    return {row.name: row for row in rows}


@pytest.mark.parametrize("quick", [True, False])
def test_the_aims_are_the_papers_ratios(quick: bool) -> None:
    rows = rows_of(quick, {"br_h oracle": (40.0, 40.4, 40.8), "br_h survival": (90.0, 90.9, 91.8)})
    oracle = rows["recurring-long: imbalance of BR-0 over br_h oracle"]
    assert (oracle.ours, oracle.aim, oracle.met) == (pytest.approx(2.5), ">= 2.20", True)
    assert oracle.paper == pytest.approx(2.2025, abs=1e-4)  # 51,927 / 23,577
    survival = rows["recurring-long: imbalance of BR-0 over br_h survival"]
    assert (survival.aim, survival.met) == (">= 1.27", False)
    assert rows["recurring-long: imbalance of BR-0 over br_h lightgbm"].aim == ""
    assert rows["recurring-long: imbalance of BR-0 over br_h no forecasts"].aim == ""
    less = rows["recurring-long: imbalance of br_h oracle below that without forecasts"]
    assert less.ours == pytest.approx(60.0)
    gain = rows["recurring-long: throughput by TPOT of br_h oracle over JSQ's"]
    assert gain.ours == pytest.approx(10.0) and gain.paper == pytest.approx(22.06, abs=0.01)  # 1,029 / 843
    if not quick:
        assert rows["azure2024: imbalance of BR-0 over br_h oracle"].aim == ">= 1.53"
        assert rows["recurring-long, pool 4: imbalance of BR-0 over br_h oracle"].aim == ""


KEPT = "recurring-long: share of what the oracle adds to the balance that lightgbm keeps"


def test_the_share_that_is_kept_is_of_what_forecasts_add() -> None:
    """The oracle takes 60 off 100, LightGBM 30: half of it."""
    half = rows_of(True, {"br_h oracle": (40.0, 41.0, 42.0), "br_h lightgbm": (70.0, 71.0, 72.0)})[KEPT]
    assert (half.ours, half.met) == (pytest.approx(50.0), False)
    nothing = rows_of(True, {"br_h lightgbm": (70.0, 71.0, 72.0)})[KEPT]
    assert (nothing.ours, nothing.met, nothing.note) == (None, None, "the oracle does not add")
