"""Means over seeds and paired differences, by hand."""

import math

import pytest

from benchmarks.seeds import paired, spread


def test_spread_by_hand():
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    # sd = sqrt(2.5); t(0.975, 4) = 2.776445; half = 2.776445 * sqrt(2.5 / 5) = 1.963243
    assert (found.n, found.mean, found.sd) == (5, 3.0, pytest.approx(math.sqrt(2.5)))
    assert found.half_width == pytest.approx(1.963243, abs=1e-5)
    assert (found.low, found.high) == (
        pytest.approx(3 - 1.963243, abs=1e-5),
        pytest.approx(4.963243, abs=1e-5),
    )


def test_one_value_has_no_interval():
    found = spread([2.0])
    assert (found.mean, found.sd, found.half_width) == (2.0, None, None)
    assert not paired([1.0], [2.0]).significant


def test_pairing_takes_out_what_a_seed_does_to_both():
    base = [10.0, 20.0, 30.0, 40.0]
    ours = [9.0, 18.9, 29.1, 39.0]
    found = paired(base, ours)
    assert found.difference.mean == pytest.approx(-1.0)
    assert found.relative_percent == pytest.approx(-4.0)
    assert found.significant
    low, high = found.bootstrap
    assert -1.1 <= low <= -1.0 <= high <= -0.9
    # unpaired, the two cannot be told apart
    assert found.base.low < found.ours.mean < found.base.high


def test_no_difference_is_not_significant_and_the_bootstrap_repeats():
    found = paired([1.0, 2.0, 3.0, 4.0], [1.1, 1.9, 3.1, 3.9])
    assert not found.significant
    assert found == paired([1.0, 2.0, 3.0, 4.0], [1.1, 1.9, 3.1, 3.9])


def test_a_base_of_zero_has_no_relative_difference():
    assert paired([0.0, 0.0], [1.0, 2.0]).relative_percent is None


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_nothing_to_summarise(values):
    with pytest.raises(ValueError, match="finite values"):
        spread(values)


def test_unequal_seeds_cannot_be_paired():
    with pytest.raises(ValueError, match="pair the same seeds"):
        paired([1.0], [1.0, 2.0])
