"""Completion times to cells: literal tables, and what is not measured."""

import math

import pytest

from app.profile.fold import Pair, Sample, fold, sample
from app.profile.plan import Grid, Point

GRID = Grid((100, 200), (0.5, 1.0), (1.0, 2.0))


def pair(p: int, r: float, rate: float, colocated_s: float, disaggregated_s: float) -> Pair:
    return Pair(Point(p, r, rate), Sample(2, 4, colocated_s, 0.0), Sample(2, 4, disaggregated_s, 0.0))


def whole() -> list[Pair]:
    return [
        pair(100, 0.5, 1.0, 1.0, 2.0), pair(100, 0.5, 2.0, 3.0, 4.0),    # -0.5, -0.25
        pair(100, 1.0, 1.0, 2.0, 2.0), pair(100, 1.0, 2.0, 2.0, 1.0),    #  0.0, +1.0
        pair(200, 0.5, 1.0, 3.0, 2.0), pair(200, 0.5, 2.0, 5.0, 4.0),    # +0.5, +0.25
        pair(200, 1.0, 1.0, 6.0, 2.0), pair(200, 1.0, 2.0, 6.0, 8.0),    # +2.0, -0.25
    ]  # fmt: skip


def test_cells_of_all_rates_are_added_element_by_element() -> None:
    folded = fold(GRID, whole())
    assert folded.complete
    assert [rate.cells for rate in folded.rates] == [((-0.5, 0.0), (0.5, 2.0)), ((-0.25, 1.0), (0.25, -0.25))]
    assert folded.heatmap is not None
    assert folded.heatmap.cells == ((-0.75, 1.0), (0.75, 1.75))
    assert folded.heatmap.rates == 2
    assert folded.heatmap.mean_cell(200, 200) == 0.875
    assert {mark for row in folded.marks for mark in row} == {"measured"}


def test_a_cell_that_lacks_a_rate_has_the_mean_of_the_others_and_is_marked() -> None:
    folded = fold(GRID, whole()[:-1])
    assert folded.heatmap is not None
    assert folded.heatmap.cells[1][1] == 4.0  # the measured 2.0 stands for both rates
    assert folded.marks == (("measured", "measured"), ("measured", "partial"))
    assert folded.rates[1].cells[1][1] is None
    assert not folded.complete


def test_a_cell_without_any_rate_is_interpolated_and_marked() -> None:
    folded = fold(GRID, whole()[:-2])
    # One doubling away (0.0 + 1.0) / 2 = 0.5 and (0.5 + 0.25) / 2 = 0.375, weight 1; two (diagonal, distance^2 = 2)
    # -0.375, weight 1/2: (0.5 + 0.375 - 0.1875) / 2.5 = 0.275 a rate.
    assert folded.heatmap is not None
    assert folded.heatmap.cells[1][1] == pytest.approx(0.55)
    assert folded.marks[1][1] == "interpolated"
    assert [rate.cells[1][1] for rate in folded.rates] == [None, None]


def test_nothing_measured_is_no_heatmap() -> None:
    folded = fold(GRID, [])
    assert folded.heatmap is None
    assert not folded.complete


def test_a_batch_with_a_failure_does_not_count() -> None:
    bad = Pair(Point(100, 0.5, 1.0), Sample(2, 3, 1.0, 0.0, {"503: full": 1}), Sample(2, 4, 2.0, 0.0))
    folded = fold(GRID, [bad, *whole()[1:]])
    assert folded.marks[0][0] == "partial"
    assert folded.rates[0].cells[0][0] is None


def test_a_point_outside_the_grid_is_left_out() -> None:
    assert fold(GRID, [*whole(), pair(300, 0.5, 1.0, 9.0, 1.0)]) == fold(GRID, whole())


def test_the_sample_and_the_standard_error() -> None:
    one = sample(1, [1.0, 3.0], {})
    assert (one.requests, one.jct_mean_s) == (2, 2.0)
    assert one.jct_std_s == pytest.approx(math.sqrt(2))
    assert sample(1, [], {"x": 2}).whole is False
    assert sample(1, [5.0], {}).jct_std_s == 0.0
    # m = 2, s = 1, n = 4 colocated; m = 4, s = 2, n = 4 disaggregated: 0.5 x sqrt(1/16 + 4/64) = 0.5 x sqrt(1/8)
    both = Pair(Point(1, 1.0, 1.0), Sample(1, 4, 2.0, 1.0), Sample(1, 4, 4.0, 2.0))
    assert both.standard_error == pytest.approx(0.5 * math.sqrt(1 / 8))
