"""Tests that the experiment `overcommit` compares each number with 0 and judges the default only."""

import pytest

from benchmarks.experiments import composition_cluster, overcommit
from benchmarks.experiments.base import Results
from benchmarks.experiments.overcommit import DEFAULT, POLICIES


def results(change_percent: float) -> Results:
    """Two seeds in which each sequence beyond the slots makes the first token later by `change_percent`."""
    made = overcommit.variants(False)
    runs = {}
    for variant in made:
        ttft = 2.0 * (1.0 + variant.config["overcommit_slots"] * change_percent / 100.0)
        measured = {"ttft_mean_s": ttft, "ttft_p95_s": 3.0, "pool_mean_s": 0.0, "transfer_mean_s": 1.0}
        runs[variant.name] = dict.fromkeys((0, 1), measured)
    return Results("overcommit", False, {v.name: v.config for v in made}, runs)


@pytest.mark.parametrize(("change_percent", "met"), [(3.0, True), (-3.0, False)])
def test_the_default_is_judged_against_the_other_numbers(change_percent: float, met: bool) -> None:
    rows = overcommit.compare(results(change_percent))
    (judged,) = [row for row in rows if row.met is not None]
    assert judged.name.startswith(f"all policies, {DEFAULT} beyond")
    assert judged.ours == pytest.approx(DEFAULT * change_percent)
    assert judged.met is met
    assert len([row for row in rows if row.unit == "%"]) == (1 + len(POLICIES)) * 4


def test_the_cells_are_as_their_docstring_says() -> None:
    long, short = (
        next(v.config for v in overcommit.variants(False) if v.config["cell"] == cell)
        for cell in overcommit.CELLS
    )
    assert composition_cluster.outputs(long).mean_tokens / long["slots"] == pytest.approx(150, rel=0.2)
    assert composition_cluster.outputs(short).mean_tokens / short["slots"] == pytest.approx(40, rel=0.2)
    engines = [composition_cluster.sim_config(one, 0).engines[1] for one in (long, short)]
    assert [engine.slots for engine in engines] == [8, 3]
    limits = [composition_cluster.sim_config({**long, "overcommit_slots": n}, 0).dispatch for n in (0, 4)]
    assert [limit.overcommit_slots for limit in limits] == [0, 4]
