"""Empirical survival (BalanceRoute C.2.1) computes both stages from the distribution F of finished lengths, in
O(log n).

    p(a, H)  = (F(a + H) - F(a)) / (1 - F(a))
    mu(a, H) = sum over a < t <= a + H of (t - a) dF(t)  /  (F(a + H) - F(a))

F is the Kaplan-Meier estimate, so a cancelled request counts as "at least that long" and causes no bias. Without
such requests F is the plain empirical distribution. With prefix sums of dF and t dF an answer takes two binary
searches.

For a cold start `weak_prior` adds pseudo-observations of a small total weight, which real ones soon outweigh. At
ages beyond the longest length with mass the answer is invalid.

The model does not claim that only age determines the remaining length; the other predictors use more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from predictors.caps import apply_caps, cap_total, row_windows
from predictors.protocol import (
    ANY_WINDOW,
    QUANTILE_LEVELS,
    BoolArray,
    Features,
    FloatArray,
    IntArray,
    Outcome,
    Prediction,
    TotalLength,
    WindowRange,
    check_batch,
)

# Below this survivor mass a conditional probability would be a quotient of rounding errors.
_MIN_SURVIVORS = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalCurve:
    """A distribution of total lengths. `times` (m,) are the distinct lengths, ascending. `mass` and `moment` (m +
    1,) are the prefix sums of dF and t dF, each starting at 0. `alive` (m + 1,) is the share of survivors *after*
    the first i times. `weight` is the number of (pseudo-)observations behind the curve, and `at_risk` (m + 1,) the
    number of them that outlived the first i times.
    """

    times: FloatArray
    mass: FloatArray
    moment: FloatArray
    alive: FloatArray
    at_risk: FloatArray
    weight: float

    @classmethod
    def fit(
        cls, lengths: FloatArray, weights: FloatArray | None = None, censored: BoolArray | None = None
    ) -> SurvivalCurve:
        """Returns the Kaplan-Meier curve of `lengths` (n,) in tokens. An empty input gives a curve that abstains
        everywhere. Raises ValueError for a negative or non-finite length.
        """
        values = np.asarray(lengths, dtype=np.float64)
        if values.size and not (np.isfinite(values).all() and values.min() >= 0):
            raise ValueError("lengths must be finite and >= 0")
        w = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
        ended = np.ones_like(values, dtype=bool) if censored is None else ~np.asarray(censored, dtype=bool)
        times, where = np.unique(values, return_inverse=True)
        deaths = np.bincount(where, weights=w * ended, minlength=times.size).astype(np.float64)
        leaving = np.bincount(where, weights=w, minlength=times.size).astype(np.float64)
        total = float(w.sum())
        # Summing from the far end makes the count of the last survivors exact; a running subtraction would leave a
        # rounding error there.
        at_risk = np.concatenate((np.cumsum(leaving[::-1])[::-1], [0.0])) if times.size else np.zeros(1)
        hazard = np.divide(deaths, at_risk[:-1], out=np.zeros_like(deaths), where=at_risk[:-1] > 0)
        before = np.concatenate(([1.0], np.cumprod(1.0 - np.minimum(hazard, 1.0))))
        step = before[:-1] * hazard
        return cls(
            times=times,
            mass=np.concatenate(([0.0], np.cumsum(step))),
            moment=np.concatenate(([0.0], np.cumsum(step * times))),
            alive=before,
            at_risk=at_risk,
            weight=total,
        )

    def survivors(self, ages: IntArray) -> FloatArray:
        """Returns the number (n,) of (pseudo-)observations that outlived each age, which is the evidence behind an
        answer.
        """
        return self.at_risk[np.searchsorted(self.times, ages, side="right")]

    def window(self, ages: IntArray, windows: IntArray) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Returns (p, mu, valid), each (n,), for ages and windows (n,). Invalid rows have p = 0 and mu = their
        window.
        """
        low = np.searchsorted(self.times, ages, side="right")
        high = np.searchsorted(self.times, ages + windows, side="right")
        alive = self.alive[low]
        valid = (alive > _MIN_SURVIVORS) & (self.at_risk[low] > 0.0)
        inside = self.mass[high] - self.mass[low]
        p = np.divide(inside, alive, out=np.zeros_like(inside), where=valid)
        has = valid & (inside > _MIN_SURVIVORS)
        moment = self.moment[high] - self.moment[low]
        mu = np.divide(moment, inside, out=(ages + windows).astype(np.float64), where=has) - ages
        return np.clip(p, 0.0, 1.0), np.clip(mu, 1.0, windows), valid

    def typical_lengths(self, count: int = 500) -> list[int]:
        """Returns `count` evenly spaced quantiles of the distribution, which stand in for the lengths themselves.
        An empty curve gives an empty list.
        """
        if not self.times.size or self.mass[-1] <= 0.0:
            return []
        goals = (np.arange(count) + 0.5) / count * self.mass[-1]
        at = np.searchsorted(self.mass[1:], goals, side="left").clip(max=self.times.size - 1)
        return [int(t) for t in self.times[at]]

    def total(self, ages: IntArray, levels: tuple[float, ...] = QUANTILE_LEVELS) -> TotalLength:
        """Returns the mean and the quantiles of the total length given total > age. Both are age + 1 where no
        longer length is known.
        """
        low = np.searchsorted(self.times, ages, side="right")
        rest = self.mass[-1] - self.mass[low]
        known = rest > _MIN_SURVIVORS
        mean = np.divide(self.moment[-1] - self.moment[low], rest, out=ages + 1.0, where=known)
        quantiles = np.repeat((ages + 1.0)[:, None], len(levels), axis=1)
        if self.times.size:
            for column, level in enumerate(levels):
                goal = self.mass[low] + level * rest
                at = np.searchsorted(self.mass[1:], goal - 1e-12, side="left")
                found = self.times[np.clip(at, low.clip(max=self.times.size - 1), self.times.size - 1)]
                quantiles[:, column] = np.where(known, found, quantiles[:, column])
        return TotalLength(np.maximum(mean, ages + 1.0), quantiles, levels)


def weak_prior(
    weight: float = 8.0, median_tokens: float = 150.0, sigma: float = 1.5, points: int = 64
) -> tuple[FloatArray, FloatArray]:
    """Returns pseudo-observations (lengths, weights), each (points,): quantiles of a lognormal, whose weights sum
    to `weight`.

    ASSUMPTION: median and spread are between those of the published chat and code traces (Azure 2023,
    ServeGen).
    """
    normal = NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / points) for i in range(points)])
    lengths = np.maximum(1.0, np.rint(median_tokens * np.exp(sigma * z)))
    return lengths, np.full(points, weight / points)


class EmpiricalSurvival:
    """A predictor that answers from the survival curve of the last `capacity` lengths. It rebuilds the curve after
    every 2 % of new lengths.
    """

    name = "survival"
    windows: WindowRange = ANY_WINDOW

    def __init__(self, capacity: int = 50_000, prior_weight: float = 8.0, frozen: bool = False) -> None:
        """`prior_weight` 0 switches the prior off; `frozen` makes `observe` a no-op, for a fitted reference."""
        if capacity < 1:
            raise ValueError(f"capacity {capacity} must be at least 1")
        self._lengths: deque[tuple[int, bool]] = deque(maxlen=capacity)
        self._prior = weak_prior(prior_weight) if prior_weight > 0 else (np.empty(0), np.empty(0))
        self._frozen = frozen
        self._pending = 0
        self._curve = self._build()

    @classmethod
    def fit(
        cls, outcomes: Iterable[Outcome], prior_weight: float = 8.0, frozen: bool = True
    ) -> EmpiricalSurvival:
        """Returns a predictor that has learned from `outcomes`. By default it is frozen and ignores later outcomes."""
        lengths = [(o.output_tokens, o.censored) for o in outcomes]
        made = cls(capacity=max(len(lengths), 1), prior_weight=prior_weight, frozen=frozen)
        made._lengths.extend(lengths)
        made._curve = made._build()
        return made

    @property
    def curve(self) -> SurvivalCurve:
        """The curve from which the predictor answers."""
        return self._curve

    def _build(self) -> SurvivalCurve:
        self._pending = 0
        lengths = np.fromiter((n for n, _ in self._lengths), dtype=np.float64, count=len(self._lengths))
        cut = np.fromiter((c for _, c in self._lengths), dtype=bool, count=len(self._lengths))
        prior_lengths, prior_weights = self._prior
        return SurvivalCurve.fit(
            np.concatenate((lengths, prior_lengths)),
            np.concatenate((np.ones_like(lengths), prior_weights)),
            np.concatenate((cut, np.zeros(prior_lengths.size, dtype=bool))),
        )

    def observe(self, outcome: Outcome) -> None:
        """Adds the outcome's length, unless the predictor is frozen. The curve is rebuilt when the new lengths
        since the last time are 2 % of all (at least 1, at most 1,000).
        """
        if self._frozen:
            return
        self._lengths.append((outcome.output_tokens, outcome.censored))
        self._pending += 1
        if self._pending >= min(1_000, max(1, len(self._lengths) // 50)):
            self._curve = self._build()

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`. Of the features only max_tokens is used."""
        self.windows.require(window_tokens, self.name)
        ages = check_batch(features, ages)
        windows, capped = row_windows(features, ages, window_tokens)
        p, mu, valid = self._curve.window(ages, windows)
        total = cap_total(self._curve.total(ages), features) if with_total else None
        return apply_caps(Prediction(p, mu, valid, total), windows, capped)
