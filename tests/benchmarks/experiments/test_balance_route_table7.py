"""Table 7: its points and its rows."""

import pytest
from matplotlib import pyplot as plt

from benchmarks.aims import stated
from benchmarks.experiments import balance_route_table1 as table1
from benchmarks.experiments import balance_route_table7 as table7
from benchmarks.experiments.base import Metrics, Results, Row


def rows_of(quick: bool, imbalance: dict[str, float]) -> dict[str, Row]:
    """Returns the rows of runs of two seeds with the given imbalances, and of one throughput."""
    variants = {one.name: one.config for one in table7.variants(quick)}
    runs: dict[str, dict[int, Metrics]] = {}
    for name in variants:
        figures: Metrics = {
            "imbalance_tokens": imbalance.get(name, 100_000.0),
            "tpot_p95_ms": 70.0,
            **dict.fromkeys(
                (table1.RAW, table1.SAME, table1.BY_TPOT), 900.0 if name == table7.JSQ else 990.0
            ),
        }
        runs[name] = {0: figures, 1: figures}
    results = Results("balance_route_table7", quick, variants, runs)
    rows = table7.compare(results)
    assert list(stated.differences("balance_route_table7", rows, quick)) == []
    assert len({row.name for row in rows}) == len(rows)
    assert {variant for variant, _ in results.read} == set(variants)
    for figure in table7.plots(results).values():
        plt.close(figure)
    return {row.name: row for row in rows}


@pytest.mark.parametrize("quick", [True, False])
def test_points_are_compared_with_jsq_and_with_each_other(quick: bool) -> None:
    rows = rows_of(quick, {table7.JSQ: 600_000.0, "H 1, gamma 0.9": 130_000.0})
    point = rows["H 48, gamma 0.9: imbalance of JSQ over it"]
    assert (point.ours, point.met) == (6.0, True)
    assert point.paper == pytest.approx(5.706, abs=1e-3)  # 675,607 / 118,396
    assert rows["H 1, gamma 0.9: imbalance of JSQ over it"].met is False  # 4.6
    gain = rows["H 48, gamma 0.9: throughput by TPOT over JSQ's"]
    assert gain.ours == pytest.approx(10.0) and gain.paper == pytest.approx(35.52, abs=0.01)
    spread = rows["sweep: largest imbalance over the least"]
    assert (spread.ours, spread.met) == (pytest.approx(1.3), False)
    assert spread.note.startswith("H 1, gamma 0.9; ")
    if not quick:
        assert spread.paper == pytest.approx(1.2205, abs=1e-4)  # 127,207 / 104,229


def test_the_rule_is_the_papers_own_with_nothing_added() -> None:
    configs = {one.name: one.config for one in table7.variants(False)}
    assert len(configs) == 8
    own = configs["H 24, gamma 0.9"]
    assert (own["workers"], own["policy"], own["predictor"]) == (16, "balance_route_h", "oracle")
    assert own["params"] == {
        "ageing_s": None, "window": 12, "pool_wide": False, "horizon": 24, "gamma": 0.9,
    }  # fmt: skip
