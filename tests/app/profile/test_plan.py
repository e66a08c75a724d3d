"""The grid, the order of its points, and the requests of a point."""

import statistics
from itertools import pairwise

import pytest

from app.profile.plan import Grid, Point, points, requests_of


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (((), (1.0,), (1.0,)), "prefill-tokens"),
        (((128, 64), (1.0,), (1.0,)), "prefill-tokens"),
        (((0, 64), (1.0,), (1.0,)), "prefill-tokens"),
        (((64,), (0.5, 0.5), (1.0,)), "ratios"),
        (((64,), (1.0,), (float("nan"),)), "rates"),
        (((64,), (1.0,), (1.0, float("inf"))), "rates"),
    ],
)
def test_an_axis_that_is_not_ascending_and_positive_is_named(axes: tuple, says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=says):
        Grid(*axes)


def test_points_go_from_short_to_long_with_all_rates_of_a_cell_together() -> None:
    grid = Grid((10, 100), (0.1, 2.0), (1.0, 3.0))
    fits, too_long = points(grid, 250)
    # Weights P/10 + D: 10x0.1 -> 1+1, 100x0.1 -> 10+10, 10x2 -> 1+20; 100x2 has 300 tokens and does not fit into 250.
    cells = [(p.prefill_tokens, p.decode_tokens, p.rate_per_s) for p in fits]
    assert cells == [(10, 1, 1), (10, 1, 3), (100, 10, 1), (100, 10, 3), (10, 20, 1), (10, 20, 3)]
    assert too_long == [Point(100, 2.0, 1.0), Point(100, 2.0, 3.0)]


def test_every_request_has_the_lengths_of_its_point_and_at_least_one_token() -> None:
    made = requests_of(Point(7, 0.05, 2.0), "colocated", 2, 3, 0, "a", 1000)
    assert [(len(r.prompt), r.max_tokens) for r in made] == [(7, 1)] * 6
    assert all(256 <= token < 1000 for r in made for token in r.prompt)


def test_arrivals_are_poisson_at_the_rate_of_all_engines_together() -> None:
    made = requests_of(Point(1, 1.0, 5.0), "colocated", 2, 2000, 3, "a", 1000)
    gaps = [b.at_s - a.at_s for a, b in pairwise(made)]
    assert made[0].at_s == 0
    # 4000 gaps of mean 1 / (2 x 5): the mean's standard error is 0.1 / sqrt(4000) = 0.0016; exponential: std = mean.
    assert statistics.fmean(gaps) == pytest.approx(0.1, abs=0.006)
    assert statistics.stdev(gaps) == pytest.approx(0.1, abs=0.01)


def test_both_modes_meet_the_same_arrivals_and_no_prompt_comes_twice() -> None:
    point = Point(32, 1.0, 1.0)
    plans = [
        requests_of(point, "colocated", 2, 8, 0, "a", 8192),
        requests_of(point, "disaggregated", 2, 8, 0, "a", 8192),
        requests_of(point, "disaggregated", 2, 8, 0, "second run", 8192),
    ]
    assert len({tuple(r.at_s for r in plan) for plan in plans}) == 1
    starts = {tuple(r.prompt[:8]) for plan in plans for r in plan}
    assert len(starts) == 3 * 16
    assert plans[0] == requests_of(point, "colocated", 2, 8, 0, "a", 8192)
    assert plans[0] != requests_of(point, "colocated", 2, 8, 1, "a", 8192)
