"""Table 3: predictors on requests that they have not seen, and the rows beside the paper's."""

import dataclasses

import pytest
from matplotlib import pyplot as plt

from benchmarks.aims import stated
from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments import balance_route_table3 as table3
from benchmarks.experiments.base import Metrics, Results, Row


@pytest.fixture
def all_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table3, "available", lambda workload: True)


def test_exact_match_knows_recurring_prompts_and_survival_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(cluster.CASES["recurring-long"], requests=2_000)
    monkeypatch.setitem(cluster.CASES, "recurring-long", small)
    config = {"case": "recurring-long", "windows": [48], "train_requests": 800, "test_requests": 100}
    found = table3.run_one(config, 900)
    assert found["auc/exact match/48"] > 0.1 + found["auc/survival/48"]  # type: ignore[operator]
    assert found["mae_tokens/exact match/48"] < found["mae_tokens/survival/48"]  # type: ignore[operator]
    assert table3.run_one(config, 900) == found


def results_of(auc: float, mae: float, quick: bool = False) -> Results:
    variants = {one.name: one.config for one in table3.variants(quick)}
    figures: Metrics = {
        f"{metric}/{source}/{window}": value
        for metric, value in (("auc", auc), ("mae_tokens", mae), ("ends_share", 0.25))
        for source in table3.SOURCES
        for window in table3.WINDOWS
    }
    runs: dict[str, dict[int, Metrics]] = {name: {900: figures, 901: figures} for name in variants}
    return Results("balance_route_table3", quick, variants, runs)


def rows_of(results: Results) -> dict[str, Row]:
    rows = table3.compare(results)
    assert list(stated.differences("balance_route_table3", rows, results.quick)) == []
    assert len({row.name for row in rows}) == len(rows)
    for figure in table3.plots(results).values():
        plt.close(figure)
    return {row.name: row for row in rows}


def test_aims_are_the_papers_figures_at_one_window(all_traces: None) -> None:
    rows = rows_of(results_of(0.97, 4.4))
    exact = rows["proprietary (recurring-long), exact match, H = 96: AUC"]
    assert (exact.paper, exact.met, exact.note) == (0.974, True, "25 % of the rows end within H")
    assert rows["proprietary (recurring-long), survival, H = 96: AUC"].met is False
    assert rows["proprietary (recurring-long), exact match, H = 96: conditional MAE"].met is False
    assert rows["Azure 2024 (azure2024), survival, H = 96: conditional MAE"].met is True  # 4.05 to 6.75
    for name in (
        "proprietary (recurring-long), exact match, H = 48: AUC",
        "Azure 2024 (azure2024), exact match, H = 96: AUC",
        "proprietary (recurring-long), lightgbm, H = 96: AUC",
    ):
        assert rows[name].aim == ""
    assert rows["Azure 2024 (azure2024), exact match, H = 96: AUC"].paper == 0.995
    assert rows["proprietary (recurring-long), lightgbm, H = 96: AUC"].paper is None


def test_a_score_that_is_not_defined_has_no_row(all_traces: None) -> None:
    results = results_of(0.97, 4.4)
    for by_seed in results.runs.values():
        for seed, figures in by_seed.items():
            by_seed[seed] = {**figures, "auc/survival/48": None}  # type: ignore[index]
    rows = {row.name for row in table3.compare(results)}
    assert "proprietary (recurring-long), survival, H = 48: AUC" not in rows
    assert "proprietary (recurring-long), survival, H = 48: conditional MAE" in rows


def test_a_reduced_run_reads_no_trace() -> None:
    assert [one.config["case"] for one in table3.variants(True)] == ["recurring-long"]
    rows_of(results_of(0.7, 20.0, quick=True))
