"""Statistics over seeds: the mean of one variant, and the difference of two variants, with their uncertainty.

Intervals are Student's t at 95 %. A paired comparison takes the difference seed by seed, so the effect that a seed has
on both variants cancels. Its bootstrap interval resamples seeds and assumes no distribution. With few seeds the t
interval is wide, and the bootstrap interval is too narrow (five seeds have only 126 distinct resamples).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

_LEVEL = 0.95
_RESAMPLES = 4_000


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of `n` values: their mean, their sample deviation, and the 95 % interval [low, high] of the mean.

    Deviation and interval are None for one value.
    """

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        """Half of the interval's width, or None for one value."""
        return None if self.high is None else self.high - self.mean


@dataclass(frozen=True, slots=True)
class Paired:
    """The comparison of `ours` with `base` on the same seeds.

    `difference` is ours - base, and `bootstrap` its bootstrap interval. `relative_percent` is the mean difference in
    per cent of the base's mean, or None where that mean is 0.
    """

    base: Spread
    ours: Spread
    difference: Spread
    bootstrap: tuple[float, float] | None
    relative_percent: float | None

    @property
    def significant(self) -> bool:
        """Whether the t interval of the difference excludes 0."""
        d = self.difference
        return d.low is not None and d.high is not None and (d.low > 0 or d.high < 0)


def spread(values: Sequence[float]) -> Spread:
    """Returns the statistics of the values. Raises ValueError without values, or for a value that is not finite."""
    if not values or not all(math.isfinite(v) for v in values):
        raise ValueError(f"cannot summarise {list(values)}: finite values are needed")
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Spread(1, mean, None, None, None)
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = float(stdtrit(n - 1, 0.5 + _LEVEL / 2.0)) * sd / math.sqrt(n)
    return Spread(n, mean, sd, mean - half, mean + half)


def paired(base: Sequence[float], ours: Sequence[float]) -> Paired:
    """Compares values of the same seeds, given in the same order. Raises ValueError for unequal numbers of values."""
    if len(base) != len(ours):
        raise ValueError(f"{len(base)} values against {len(ours)}: pair the same seeds")
    differences = [b - a for a, b in zip(base, ours, strict=True)]
    before = spread(base)
    relative = None if before.mean == 0 else 100.0 * spread(differences).mean / before.mean
    return Paired(before, spread(ours), spread(differences), _bootstrap(differences), relative)


def met(
    low: float,
    high: float,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> bool | None:
    """Returns whether an aim is met: True or False if the whole 95 % interval says so, None if it says neither.

    The aim is a figure of at least `least`, at most `most` and more than `above`, as far as they are given. Raises
    ValueError where none is.
    """
    if least is None and most is None and above is None:
        raise ValueError("an aim needs a bound: give least, most or above")
    within = (
        (least is None or low >= least) and (most is None or high <= most) and (above is None or low > above)
    )
    beyond = (
        (least is not None and high < least)
        or (most is not None and low > most)
        or (above is not None and high <= above)
    )
    return True if within else False if beyond else None


def all_met(verdicts: Iterable[bool | None]) -> bool | None:
    """Returns whether an aim on several figures is met: False where one misses it, else None where one is open."""
    found = list(verdicts)
    return False if False in found else None if None in found else True


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float | None]:
    """Returns the ratio of the means of values of the same seeds, and half of its 95 % interval (None for one seed).

    The interval is that of the mean of over - ratio * under, over the mean of `under` (the ratio estimator of sampling
    theory). Raises ValueError for unequal numbers of values, and for a mean of 0 below.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} values over {len(under)}: pair the same seeds")
    below = spread(under).mean
    if below == 0:
        raise ValueError("the mean below the ratio is 0")
    found = spread(over).mean / below
    half = spread([a - found * b for a, b in zip(over, under, strict=True)]).half_width
    return found, None if half is None else half / abs(below)


def jackknife(n: int, figure: Callable[[Sequence[int]], float]) -> tuple[float, float | None]:
    """Returns (a figure of `n` seeds that is no mean of single seeds, half of its 95 % interval or None for one seed).

    `figure` takes the places of the seeds that count, and is called with all of them and with each one left out. Its
    standard error is sqrt((n - 1) / n * sum (left out - their mean)^2), which for a mean is that of `spread`.
    """
    every = range(n)
    whole = figure(every)
    if n < 2:
        return whole, None
    left = [figure([place for place in every if place != out]) for out in every]
    mean = math.fsum(left) / n
    error = math.sqrt((n - 1) / n * math.fsum((one - mean) ** 2 for one in left))
    return whole, float(stdtrit(n - 1, 0.5 + _LEVEL / 2.0)) * error


def _bootstrap(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % percentile interval of the mean, or None for one value; equal values give equal intervals."""
    if len(values) < 2:
        return None
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(values), size=(_RESAMPLES, len(values)))
    means = np.asarray(values, dtype=np.float64)[picks].mean(axis=1)
    low, high = np.percentile(means, (50.0 * (1.0 - _LEVEL), 50.0 * (1.0 + _LEVEL))).tolist()
    return low, high
