"""Statistics over seeds: the mean of one variant, and the difference of two variants, with their uncertainty.

Intervals are Student's t at 95 %. A paired comparison takes the difference seed by seed, so the effect that a seed has
on both variants cancels. Its bootstrap interval resamples seeds and assumes no distribution. With few seeds the t
interval is wide, and the bootstrap interval is too narrow (five seeds have only 126 distinct resamples).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def met(low: float, high: float, least: float | None = None, most: float | None = None) -> bool | None:
    """Returns whether an aim is met: True or False if the whole 95 % interval says so, None if it says neither."""
    if least is not None:
        return True if low >= least else False if high < least else None
    assert most is not None
    return True if high <= most else False if low > most else None


def _bootstrap(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % percentile interval of the mean, or None for one value; equal values give equal intervals."""
    if len(values) < 2:
        return None
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(values), size=(_RESAMPLES, len(values)))
    means = np.asarray(values, dtype=np.float64)[picks].mean(axis=1)
    low, high = np.percentile(means, (50.0 * (1.0 - _LEVEL), 50.0 * (1.0 + _LEVEL))).tolist()
    return low, high
