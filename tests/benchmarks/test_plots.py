"""Labels that do not overlap, and bars whose axis is made for the bars."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import plots


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([], []),
        ([0, 20, 40], [0, 20, 40]),
        ([0, 0, 0], [-10, 0, 10]),  # around their mean
        ([0, 4, 30], [-3, 7, 30]),  # mean 2, 5 to each side
        # the first two reach the third: one pile of three
        ([0, 4, 12], [16 / 3 - 10, 16 / 3, 16 / 3 + 10]),
    ],
)
def test_labels_are_moved_no_further_than_they_must(wanted, places):
    assert plots.spread(wanted, 10) == pytest.approx(places)


@given(st.lists(st.floats(-1e3, 1e3), max_size=20).map(sorted))
def test_labels_never_overlap_and_keep_their_order_and_their_middle(wanted):
    places = plots.spread(wanted, 10)
    assert all(high - low > 10 - 1e-6 for low, high in itertools.pairwise(places))
    assert sum(places) == pytest.approx(sum(wanted), abs=1e-6)


def test_a_name_has_one_colour_in_all_panels():
    made, (left, right) = plots.figure(2)
    a, b = plots.Series([0, 1], [1, 2]), plots.Series([0, 1], [3, 4])
    plots.lines(left, {"a": a, "b": b}, "x", "y")
    plots.lines(right, {"b": b, "c": a}, "x", "y")
    colours = [line.get_color() for axes in (left, right) for line in axes.lines]
    assert colours[1] == colours[2] and len({*colours}) == 3
    plots.plt.close(made)


def test_an_interval_far_longer_than_the_bars_does_not_make_the_axis():
    made, (axes,) = plots.figure()
    plots.bars(axes, {"a": (100.0, 5_000.0), "b": (80.0, None)}, "tokens")
    low, high = axes.get_xlim()
    assert low == 0 and 100 < high <= 160
    plots.plt.close(made)
    made, (axes,) = plots.figure()
    plots.bars(axes, {"a": (-10.0, 1.0), "b": (20.0, 1.0)}, "%")
    low, high = axes.get_xlim()
    assert low < -10 and high > 21
    plots.plt.close(made)
