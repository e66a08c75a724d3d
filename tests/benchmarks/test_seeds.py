"""Means over seeds and paired differences, by hand."""

import math

import pytest

from benchmarks.seeds import all_met, jackknife, met, paired, ratio, spread


def test_spread_by_hand():
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    # sd = sqrt(2.5); t(0.975, 4) = 2.776445; half = 2.776445 * sqrt(2.5 / 5) = 1.963243
    assert (found.n, found.mean, found.sd) == (5, 3.0, pytest.approx(math.sqrt(2.5)))
    assert found.half_width == pytest.approx(1.963243, abs=1e-5)
    assert (found.low, found.high) == (
        pytest.approx(3 - 1.963243, abs=1e-5),
        pytest.approx(4.963243, abs=1e-5),
    )


def test_the_jackknife_of_a_mean_is_its_interval_and_one_seed_has_none():
    values = [1.0, 2.0, 4.0, 8.0]
    whole, half = jackknife(4, lambda kept: sum(values[i] for i in kept) / len(kept))
    assert (whole, half) == (3.75, pytest.approx(spread(values).half_width))
    assert jackknife(1, lambda kept: float(len(kept))) == (1.0, None)


def test_the_jackknife_of_a_ratio_of_means_by_hand():
    over, under = [1.0, 1.0, 3.0], [1.0, 2.0, 1.0]
    # t(0.975, 2) = 4.302653. All give 5 / 4; without the first 4 / 3, without the second 4 / 2, without the third 2 / 3
    left = [4.0 / 3.0, 2.0, 2.0 / 3.0]
    mean = sum(left) / 3.0
    error = math.sqrt(2.0 / 3.0 * sum((one - mean) ** 2 for one in left))
    whole, half = jackknife(3, lambda kept: sum(over[i] for i in kept) / sum(under[i] for i in kept))
    assert (whole, half) == (pytest.approx(1.25), pytest.approx(4.302653 * error, rel=1e-6))


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


@pytest.mark.parametrize(
    ("low", "high", "bounds", "expected"),
    [
        (1.0, 2.0, {"least": 1.0}, True),
        (0.9, 2.0, {"least": 1.0}, None),
        (0.1, 0.9, {"least": 1.0}, False),
        (-2.0, 1.0, {"most": 1.0}, True),
        (-2.0, 1.1, {"most": 1.0}, None),
        (1.1, 2.0, {"most": 1.0}, False),
        # between two bounds: within, across one, across both, and beyond each
        (-14.0, -10.0, {"least": -14.8, "most": -8.8}, True),
        (-15.0, -10.0, {"least": -14.8, "most": -8.8}, None),
        (-15.0, -8.0, {"least": -14.8, "most": -8.8}, None),
        (-20.0, -15.0, {"least": -14.8, "most": -8.8}, False),
        (-8.0, -5.0, {"least": -14.8, "most": -8.8}, False),
        # two sides that are the same are not above one another
        (0.0, 0.0, {"above": 0.0}, False),
        (0.0, 1.0, {"above": 0.0}, None),
        (0.1, 1.0, {"above": 0.0}, True),
    ],
)
def test_an_aim_is_met_or_missed_where_the_whole_interval_says_so(low, high, bounds, expected):
    assert met(low, high, **bounds) is expected


def test_an_aim_without_a_bound_is_refused():
    with pytest.raises(ValueError, match="needs a bound"):
        met(0.0, 1.0)


def test_an_aim_on_several_figures():
    assert all_met([True, True]) is True
    assert all_met([True, None]) is None
    assert all_met([None, False, True]) is False


def test_a_ratio_of_means_has_the_interval_of_what_is_left_of_it():
    # 12 / 6 = 2; what is left is 10 - 2 * 4 = 2, 12 - 2 * 6 = 0, 14 - 2 * 8 = -2: sd 2, t(0.975, 2) = 4.302653
    found, half = ratio([10.0, 12.0, 14.0], [4.0, 6.0, 8.0])
    assert (found, half) == (2.0, pytest.approx(4.302653 * 2.0 / math.sqrt(3) / 6.0, abs=1e-5))
    assert ratio([3.0], [2.0]) == (1.5, None)
    # in proportion on every seed: nothing is left
    assert ratio([2.0, 4.0], [1.0, 2.0]) == (2.0, 0.0)
    with pytest.raises(ValueError, match="pair the same seeds"):
        ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="the mean below"):
        ratio([1.0, 1.0], [1.0, -1.0])
