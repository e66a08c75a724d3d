"""Length distributions against their closed forms."""

import numpy as np
import pytest

from benchmarks.workloads.lengths import (
    Empirical,
    Fixed,
    Lognormal,
    Quantiles,
    draw,
)
from benchmarks.workloads.record import WorkloadError

U = (np.arange(400_000) + 0.5) / 400_000
LINEAR = Quantiles(((0.0, 10.0), (0.5, 30.0), (1.0, 130.0)), logarithmic=False)

CASES = [
    Fixed(7),
    Empirical([5, 1, 9, 9]),
    Lognormal(300.0, 1.1),
    Lognormal(300.0, 1.1, cap_tokens=900),
    LINEAR,
    Quantiles(((0.0, 8.0), (0.5, 100.0), (1.0, 5_000.0))),
]


@pytest.mark.parametrize("lengths", CASES, ids=lambda c: type(c).__name__)
def test_the_mean_is_that_of_what_is_drawn(lengths):
    drawn = lengths.quantile(U)
    assert drawn.dtype == np.int64
    assert drawn.min() >= 1
    # 400,000 equal shares; rounding to whole tokens moves the mean by far less than half a token
    assert drawn.mean() == pytest.approx(lengths.mean_tokens, rel=0.004, abs=0.1)


@pytest.mark.parametrize("lengths", CASES, ids=lambda c: type(c).__name__)
def test_draws_depend_on_the_seed_alone(lengths):
    one, two = (draw(lengths, np.random.default_rng(3), 500) for _ in range(2))
    assert (one == two).all()


def test_empirical_gives_each_value_its_share():
    assert np.bincount(Empirical([5, 1, 9, 9]).quantile(U))[[1, 5, 9]].tolist() == [100_000, 100_000, 200_000]


def test_lognormal_by_mean_and_cv():
    drawn = Lognormal.of_mean(5_000.0, 0.6).quantile(U).astype(float)
    assert drawn.mean() == pytest.approx(5_000, rel=1e-3)
    assert drawn.std() / drawn.mean() == pytest.approx(0.6, rel=5e-3)


def test_a_cap_keeps_what_lies_below_it():
    free, capped = Lognormal(300.0, 1.1).quantile(U), Lognormal(300.0, 1.1, 900).quantile(U)
    assert (capped == np.minimum(free, 900)).all()


def test_linear_knots_by_hand():
    assert LINEAR.quantile(np.array([0.0, 0.25, 0.5, 0.75])).tolist() == [10, 20, 30, 80]
    assert LINEAR.mean_tokens == 0.5 * 20 + 0.5 * 80


def test_margins_are_met():
    made = Quantiles.of_margins(2_331, ((0.0, 16.0), (0.5, 1_046.0), (0.99, 14_359.0)), 0.85, 32_768)
    drawn = made.quantile(U)
    assert drawn.mean() == pytest.approx(2_331, rel=1e-3)
    assert np.quantile(drawn, [0.5, 0.99]) == pytest.approx([1_046, 14_359], rel=2e-3)


def test_margins_that_no_curve_meets_are_refused():
    with pytest.raises(WorkloadError, match="a mean of 90000 lies outside"):
        Quantiles.of_margins(90_000, ((0.0, 16.0), (0.5, 1_046.0), (0.99, 14_359.0)), 0.85, 32_768)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(0),
        lambda: Empirical([]),
        lambda: Empirical([3, 0]),
        lambda: Lognormal(0.0, 1.0),
        lambda: Lognormal(1.0, -1.0),
        lambda: Quantiles(((0.0, 1.0), (0.5, 2.0))),
        lambda: Quantiles(((0.0, 5.0), (1.0, 2.0))),
        lambda: Quantiles(((0.0, 0.0), (1.0, 2.0))),
    ],
)
def test_impossible_distributions_are_refused(make):
    with pytest.raises(WorkloadError):
        make()
