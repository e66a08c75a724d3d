"""The tuning of the paper's own BR-0 and BR-H: its variants differ in W and reading only, and its choice by hand."""

import json

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
    variants = {
        v.name: v.config
        for v in tuning.variants(False)
        if v.config.get("window") in (4, 8, None) and not tried(v.name)
    }
    runs = {}
    for name, config in variants.items():
        seen = {tuning.IMBALANCE: IMBALANCE[config["case"]][config.get("window")]}
        runs[name] = {0: seen, 1: seen}
    return Results("balance_route_tuning", False, variants, runs)


def tried(name: str) -> bool:
    return any(f", {param} " in name for values in tuning.TRIED.values() for param in values)


def test_runs_are_of_the_training_part_and_differ_in_window_and_reading_only() -> None:
    assert {v.config["part"] for v in tuning.variants(False)} == {"train"}
    configs = [v.config for v in tuning.variants(False) if not tried(v.name)]
    for config in configs:
        params = {k: v for k, v in config["params"].items() if k not in ("window", "pool_wide")}
        tuned = {"gamma": 0.7, "beta": 16.0} if config["policy"] == "balance_route_h" else {}
        assert params == {"ageing_s": None, **tuned}
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


def test_each_parameter_of_both_forms_is_varied_alone_around_the_values_in_use() -> None:
    variants = {v.name: v.config["params"] for v in tuning.variants(False) if tried(v.name)}
    for method, grids in tuning.TRIED.items():
        base = cluster.config_of("recurring-long", method, 8, False)["params"]
        for param, values in grids.items():
            assert tuning.in_use(method, param) in values
            for value in values:
                name = f"reasoning-long, {method}, {param} {json.dumps(value)}"
                assert variants.pop(name) == base | {param: value}
                assert variants.pop(name.replace("reasoning", "recurring")) == base | {param: value}
    assert not variants
    # every constant of ours is the output of a run
    assert set(cluster.OURS) - {"pool_wide"} <= set(tuning.TRIED[tuning.OURS])
    sizes = [sum(map(len, grids.values())) for grids in tuning.TRIED.values()]
    # beside the paper's form stand the values of W
    assert abs(sizes[0] + len(tuning.WINDOWS) - sizes[1]) <= 5


@pytest.mark.parametrize(
    ("long", "above", "best"),
    [
        # beta 3, in use, has 110/100 + 60/60 = 2.1, beta 4 100/100 + 90/60 = 2.5
        ({2.0: 180.0, 3.0: 60.0, 4.0: 90.0, None: 300.0}, 0.0, "3.0"),
        # 110/100 + 60/30 = 3.1 against 2
        ({2.0: 180.0, 3.0: 60.0, 4.0: 30.0, None: 300.0}, 55.0, "4.0"),
    ],
)
def test_the_value_in_use_is_compared_with_the_best_of_its_parameter(
    long: dict[float | None, float], above: float, best: str
) -> None:
    seen = {"recurring-long": {2.0: 200.0, 3.0: 110.0, 4.0: 100.0, None: 300.0}, "reasoning-long": long}
    variants = {v.name: v.config for v in tuning.variants(False) if ", ours oracle, beta " in v.name}
    runs = {
        name: {seed: {tuning.IMBALANCE: seen[c["case"]][c["params"]["beta"]]} for seed in (0, 1)}
        for name, c in variants.items()
    }
    windows = made()
    results = Results("x", False, {**windows.variants, **variants}, {**windows.runs, **runs})
    [row] = [row for row in tuning.compare(results) if "value in use" in row.name]
    assert (row.ours, row.met) == (pytest.approx(above), above == 0.0)
    assert row.note.startswith(f"best: {best}, in use: 3.0; against 4.0 ")


@pytest.mark.parametrize(
    ("rivals", "used_at_the_end", "met"), [((20.0, 30.0), False, None), ((30.0, 31.0), True, None)]
)
def test_noise_and_the_end_of_a_grid_leave_the_best_value_open(
    rivals: tuple[float, float], used_at_the_end: bool, met: bool | None
) -> None:
    """Rivals have 20 and 30 tokens where the value in use has 24 and 24: the interval holds 0. A value at the end of a
    grid may be surely better than its neighbour, and is open all the same.
    """
    param = "pool_lag" if used_at_the_end else "horizon"
    used = tuning.in_use(tuning.OURS, param)
    variants = {v.name: v.config for v in tuning.variants(False) if f", ours oracle, {param} " in v.name}
    runs = {
        name: {
            seed: {tuning.IMBALANCE: 24.0 if c["params"][param] == used else rivals[seed] + 0.1 * i}
            for seed in (0, 1)
        }
        for i, (name, c) in enumerate(variants.items())
    }
    windows = made()
    results = Results("x", False, {**windows.variants, **variants}, {**windows.runs, **runs})
    [row] = [row for row in tuning.compare(results) if "value in use" in row.name]
    assert row.met is met and ("at the end of its grid" in row.note) is used_at_the_end


@pytest.mark.parametrize(("best", "met"), [(12, None), (8, False)])
def test_the_last_window_of_the_grid_is_not_met_as_the_best(best: int, met: bool | None) -> None:
    variants = {v.name: v.config for v in tuning.variants(False) if not tried(v.name)}
    runs = {
        name: {0: {tuning.IMBALANCE: 50.0 if config.get("window") == best else 100.0}}
        for name, config in variants.items()
    }
    rows = {row.name: row for row in tuning.compare(Results("x", False, variants, runs))}
    row = rows["br_h oracle: W of least imbalance"]
    assert (row.ours, row.met, bool(row.note)) == (best, met, best == 12)


TUNED = {"gamma": 0.7, "beta": 16.0}


@pytest.mark.parametrize(
    ("method", "wide", "tuned"),
    [
        ("br_0", False, {}),
        ("br_0_pool", True, {}),
        ("br_h oracle", False, TUNED),
        ("br_h_pool oracle", True, TUNED),
        ("br_h_printed oracle", False, {}),
    ],
)
def test_tables_have_the_tuned_values_and_once_the_printed_ones(
    method: str, wide: bool, tuned: dict[str, float]
) -> None:
    params = cluster.config_of("recurring-long", method, 8, quick=True)["params"]
    assert params == {"ageing_s": None, "window": 12, "pool_wide": wide, **tuned}
