"""The experiment `overload_shedding` on figures made by hand: what its rule names, and which condition fails."""

from collections.abc import Callable

import pytest

from benchmarks.experiments import fairness, overload_shedding
from benchmarks.experiments.base import Metrics, Results, Row
from policies.admission.by_wait import ByWait

Figures = dict[str, float | None]
Change = Callable[[str, Figures], None]


def made(change: Change) -> list[Row]:
    """Returns the rows of runs that have the same figures everywhere, but for what is changed with `optimistic`."""
    variants = {one.name: one.config for one in overload_shedding.variants(quick=True)}
    runs: dict[str, dict[int, Metrics]] = {}
    for name, config in variants.items():
        figures: Figures = {
            "goodput_tokens_per_s": 1000.0,
            "refusal_p50_s": 0.01,
            "wasted_prefill_share": 0.0,
            "ttft_p99_s/interactive": 1.9,
            "ttft_p99_s/standard": 4.9,
            **{f"part_of_share/{tenant}": 0.9 for tenant in fairness.MODEST},
        }
        if config["params"] == {"shed_by": "optimistic"}:
            change(name, figures)
        runs[name] = {500: figures, 501: figures}
    return overload_shedding.compare(Results("overload_shedding", True, variants, runs))


def fairer(name: str, figures: Figures) -> None:
    if name.startswith("tenants, load 1.25,"):
        figures["part_of_share/bee"] = figures["part_of_share/ant"] = figures["part_of_share/cat"] = 0.96


def missed(rows: list[Row]) -> list[str]:
    return [row.name for row in rows[:-2] if row.met is False]


def test_optimistic_is_named_if_it_is_fairer_where_that_decides_and_costs_nothing_else() -> None:
    rows = made(fairer)
    assert missed(rows) == [] and (rows[-2].ours, rows[-2].met) == (0.0, True)
    assert rows[-1].aim == "optimistic" and rows[-1].met == (ByWait().shed_by == "optimistic")


def test_forecast_is_named_if_nothing_becomes_fairer() -> None:
    rows = made(lambda name, figures: None)
    [which] = missed(rows)
    assert which.startswith("tenants, load 1.25: least part of its fair share")
    assert rows[-1].aim == "forecast" and rows[-2].note == which


@pytest.mark.parametrize(
    ("start", "metric", "value", "fails"),
    [
        ("classes, prefill, load 1,", "goodput_tokens_per_s", 989.0, "classes, prefill, load 1: goodput"),
        ("classes, prefill, load 1,", "goodput_tokens_per_s", 991.0, ""),
        ("tenants, load 20,", "goodput_tokens_per_s", 980.0, "tenants, load 20: goodput"),
        ("tenants, load 2,", "part_of_share/ant", 0.88, "tenants, load 2: least part"),
        ("shares, decode, load 5,", "part_of_share/cat", 0.895, ""),
        ("shares, decode, load 5,", "part_of_share/cat", 0.88, "shares, decode, load 5: least part"),
        ("tenants, load 5,", "ttft_p99_s/standard", 5.1, "tenants, load 5: p99 TTFT of the standard"),
        # objectives are twice as long where prompts are long
        ("classes, prefill, load 5,", "ttft_p99_s/standard", 9.9, ""),
        ("classes, decode, load 2,", "refusal_p50_s", 0.06, "classes, decode, load 2: time to refuse"),
        # at 1.25 times capacity and below nothing is said about the time to refuse
        ("classes, decode, load 1.25,", "refusal_p50_s", 0.06, ""),
        ("classes, decode, load 2,", "wasted_prefill_share", 0.5, ""),
    ],
)
def test_a_condition_that_fails_is_named(start: str, metric: str, value: float, fails: str) -> None:
    def change(name: str, figures: Figures) -> None:
        fairer(name, figures)
        if name.startswith(start):
            figures[metric] = value

    rows = made(change)
    if fails:
        [which] = missed(rows)
        assert which.startswith(fails) and rows[-1].aim == "forecast"
    else:
        assert missed(rows) == [] and rows[-1].aim == "optimistic"


def test_where_forecast_misses_an_objective_nothing_is_asked_of_optimistic() -> None:
    variants = {one.name: one.config for one in overload_shedding.variants(quick=True)}
    figures: Figures = {"ttft_p99_s/interactive": 2.1, "ttft_p99_s/standard": None}
    results = Results("overload_shedding", True, variants, {name: {500: figures} for name in variants})
    [row] = overload_shedding._waits(results, "tenants", 2.0, "tenants, load 2")
    assert (row.aim, row.met, row.note) == ("", None, "with forecast 2.10 s")


def test_both_forms_run_with_the_same_requests() -> None:
    variants = overload_shedding.variants(quick=False)
    for one, other in zip(variants[::2], variants[1::2], strict=True):
        assert one.config["params"] == {"shed_by": "forecast"}
        assert other.config == {**one.config, "params": {"shed_by": "optimistic"}}
    assert {one.config["where"] for one in variants} == {
        *overload_shedding.CLASSES, "tenants", *overload_shedding.SHARES,
    }  # fmt: skip
