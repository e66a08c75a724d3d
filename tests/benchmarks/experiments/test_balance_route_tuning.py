"""The tuning of the paper's own BR-0 and BR-H: its variants differ in W and reading only, and its choice by hand."""

import pytest

from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments import balance_route_tuning as tuning
from benchmarks.experiments.base import Results

IMBALANCE = {
    "recurring-long": {4: 100.0, 8: 200.0, None: 50.0},
    "reasoning-long": {4: 90.0, 8: 60.0, None: 45.0},
}


def made() -> Results:
    """Returns results of two seeds in which both methods have the imbalance above by workload and W (None: pool)."""
    variants = {v.name: v.config for v in tuning.variants(False) if v.config.get("window") in (4, 8, None)}
    runs = {}
    for name, config in variants.items():
        seen = {tuning.IMBALANCE: IMBALANCE[config["case"]][config.get("window")]}
        runs[name] = {0: seen, 1: seen}
    return Results("balance_route_tuning", False, variants, runs)


def test_runs_are_of_the_training_part_and_differ_in_window_and_reading_only() -> None:
    configs = [v.config for v in tuning.variants(False)]
    assert {config["part"] for config in configs} == {"train"}
    for config in configs:
        params = {k: v for k, v in config["params"].items() if k not in ("window", "pool_wide")}
        assert params == cluster.PAPERS_OWN
    read = {(c["case"], c["policy"], c["params"]["window"], c["params"]["pool_wide"]) for c in configs}
    assert len(read) == len(configs) == len(tuning.CASES) * len(tuning.METHODS) * (len(tuning.WINDOWS) + 1)


def test_the_window_of_least_relative_imbalance_is_chosen() -> None:
    """W 4 has 100/100 + 90/60 = 2.5, W 8 has 200/100 + 60/60 = 3; the pool's 45 is half of W 4's 90."""
    results = made()
    assert tuning.regrets(results, tuning.CASES, "br_0", [4, 8]) == pytest.approx({4: 2.5, 8: 3.0})
    rows = {row.name: row.ours for row in tuning.compare(results)}
    assert rows["br_h oracle: W of least imbalance"] == 4.0
    against = "reasoning-long, br_0: imbalance of the single of the pool against W 4"
    assert rows[against] == pytest.approx(-50.0)


@pytest.mark.parametrize(
    ("method", "wide"), [("br_0", False), ("br_0_pool", True), ("br_h_pool oracle", True)]
)
def test_tables_have_the_tuned_windows(method: str, wide: bool) -> None:
    params = cluster.config_of("recurring-long", method, 8, quick=True)["params"]
    rule = method.partition(" ")[0].removesuffix("_pool")
    assert params == {**cluster.PAPERS_OWN, "window": cluster.TUNED[rule], "pool_wide": wide}
