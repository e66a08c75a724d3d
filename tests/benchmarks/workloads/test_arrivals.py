"""Arrival processes against their closed forms; bounds are five standard errors wide."""

import math
from itertools import islice

import numpy as np
import pytest

from benchmarks.workloads.arrivals import Diurnal, Gamma, MarkovModulated, Poisson, until
from benchmarks.workloads.record import WorkloadError

BURSTY = MarkovModulated((20.0, 1.0), (2.0, 6.0))  # mean (20 * 2 + 1 * 6) / 8 = 5.75
DAY = Diurnal((1.0, 5.0, 0.0, 2.0), 50.0)  # mean 2


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("process", [Poisson(4.0), Gamma(4.0, 0.3), Gamma(4.0, 3.0), BURSTY, DAY])
def test_times_increase_from_zero_and_depend_on_the_seed_alone(process):
    times = list(islice(process.times(rng()), 3_000))
    assert times[0] >= 0.0
    assert times == sorted(times)
    assert times == list(islice(process.times(rng()), 3_000))
    assert times != list(islice(process.times(rng(2)), 3_000))


@pytest.mark.parametrize("cv", [0.25, 1.0, 2.5])
def test_gamma_gaps_have_the_rate_and_the_cv(cv):
    gaps = np.diff(list(islice(Gamma(8.0, cv).times(rng()), 100_001)))
    n = gaps.size
    assert gaps.mean() == pytest.approx(1 / 8.0, abs=5 * cv / 8.0 / math.sqrt(n))
    # the relative error of a gamma's sample cv is about sqrt((1 + 3 cv^2) / (2 n)) at worst
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=5 * math.sqrt((1 + 3 * cv * cv) / (2 * n)))


def test_poisson_counts_have_variance_equal_to_mean():
    counts = np.bincount(
        np.array(list(until(Poisson(6.0).times(rng()), 20_000.0))).astype(int), minlength=20_000
    )
    assert counts.mean() == pytest.approx(6.0, abs=5 * math.sqrt(6.0 / 20_000))
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=5 * math.sqrt(2 / 20_000))


@pytest.mark.parametrize("process", [Gamma(0.5, 3.0), BURSTY])
def test_the_expected_count_is_exact_from_the_first_second_on(process):
    """A renewal process that started with a whole gap would be off by (cv^2 - 1) / 2 = 4 arrivals."""
    horizon_s, runs = 4.0, 1_500
    counts = [len(list(until(process.times(rng(seed)), horizon_s))) for seed in range(runs)]
    error = 5 * np.std(counts) / math.sqrt(runs)
    assert np.mean(counts) == pytest.approx(process.rate_per_s * horizon_s, abs=error)


def test_markov_modulated_counts_are_as_overdispersed_as_they_should_be():
    """Two states: variance / mean of counts tends to 1 + 2 (l1 - l2)^2 s1 s2 / ((s1 + s2)^2 (l1 s2 + l2 s1)), s the
    rates of leaving: 1 + 2 * 361 * (1/12) / ((2/3)^2 * (20/6 + 1/2)) = 36.3 (Fischer and Meier-Hellstern)."""
    times = np.array(list(until(BURSTY.times(rng()), 400_000.0)))
    assert times.size / 400_000 == pytest.approx(5.75, rel=0.02)
    counts = np.bincount((times / 400.0).astype(int), minlength=1_000)
    exact = 1 + 2 * 361 * (1 / 12) / ((2 / 3) ** 2 * (20 / 6 + 1 / 2))
    assert counts.var() / counts.mean() == pytest.approx(exact, rel=5 * math.sqrt(2 / 1_000))


def test_a_diurnal_process_follows_its_steps_and_repeats():
    times = np.array(list(until(DAY.times(rng()), 200.0 * 500)))
    per_step = np.bincount((times % 200.0 // 50.0).astype(int), minlength=4) / (500 * 50.0)
    assert per_step[2] == 0
    for got, rate in zip(per_step, DAY.rates_per_s, strict=True):
        assert got == pytest.approx(rate, abs=5 * math.sqrt(rate / (500 * 50.0)) + 1e-12)


def test_a_sinusoid_has_its_mean_and_its_amplitude():
    day = Diurnal.sinusoid(3.0, 0.5, 86_400.0, steps=96)
    assert day.rate_per_s == pytest.approx(3.0)
    assert max(day.rates_per_s) == pytest.approx(4.5, rel=1e-3)
    assert day.period_s == pytest.approx(86_400.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(0.0),
        lambda: Poisson(math.nan),
        lambda: Gamma(1.0, -1.0),
        lambda: MarkovModulated((1.0,), (1.0,)),
        lambda: MarkovModulated((1.0, -1.0), (1.0, 1.0)),
        lambda: MarkovModulated((0.0, 0.0), (1.0, 1.0)),
        lambda: MarkovModulated((1.0, 2.0), (1.0, 0.0)),
        lambda: Diurnal((), 1.0),
        lambda: Diurnal((0.0, 0.0), 1.0),
        lambda: Diurnal.sinusoid(1.0, 1.5, 10.0),
    ],
)
def test_impossible_processes_are_refused(make):
    with pytest.raises(WorkloadError):
        make()
