"""The tuning of the paper's own BR-0 and BR-H: its variants differ in W and reading only, and its choice by hand."""

import pytest

from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments import balance_route_tuning as tuning
from benchmarks.experiments.base import Results

IMBALANCE = {"recurring-long": {4: 100.0, 8: 200.0}, "reasoning-long": {4: 90.0, 8: 60.0}}


def made(imbalance: dict[str, dict[int, float]]) -> Results:
    """Returns results in which every method and reading has the given imbalance by workload and W."""
    variants = {v.name: v.config for v in tuning.variants(False) if v.config["window"] in (4, 8)}
    values = {
        name: {0: {"imbalance_tokens": imbalance[config["case"]][config["window"]]}}
        for name, config in variants.items()
    }
    return Results("balance_route_tuning", False, variants, values)


def test_runs_are_of_the_training_part_and_differ_in_window_and_reading_only() -> None:
    configs = [v.config for v in tuning.variants(False)]
    assert {config["part"] for config in configs} == {"train"}
    for config in configs:
        params = {k: v for k, v in config["params"].items() if k not in ("window", "pool_wide")}
        assert params == cluster.PAPERS_OWN
    assert len({(c["case"], c["policy"], *sorted(c["params"].items(), key=str)) for c in configs}) == len(
        configs
    )


def test_the_window_of_least_relative_imbalance_is_chosen() -> None:
    """W 4 has 100/100 + 90/60 = 2.5, W 8 has 200/100 + 60/60 = 3."""
    results = made(IMBALANCE)
    sums = tuning.regrets(results, list(tuning.CASES), "br_0", "of the window", [4, 8])
    assert sums == pytest.approx({4: 2.5, 8: 3.0})
    rows = {row.name: row.ours for row in tuning.compare(results)}
    assert rows["br_h oracle, single of the pool: W of least imbalance"] == 4.0


def test_tables_have_the_tuned_windows() -> None:
    for method in ("br_0", "br_h oracle"):
        config = cluster.config_of("recurring-long", method, 8, quick=True)
        assert config["params"]["window"] == cluster.TUNED[method.partition(" ")[0]]["of the window"]
