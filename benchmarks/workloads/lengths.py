"""Distributions of the lengths of prompts and outputs in tokens, drawn by inverse transform.

Each distribution has `quantile(u)`, which maps uniforms (n,) in [0, 1) to token counts (n,) >= 1, and `mean_tokens`.
One uniform makes one length, for two reasons. Two distributions drawn with the same uniforms can be compared request by
request. And dependent uniforms make dependent lengths (a prompt that recurs, the turns of one session) without changing
the distribution of any single length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri

from benchmarks.workloads.record import WorkloadError
from predictors.protocol import FloatArray, IntArray


class Lengths(Protocol):
    """The interface of a distribution over token counts."""

    @property
    def mean_tokens(self) -> float:
        """The mean of the counts before they are rounded to whole tokens."""

    def quantile(self, u: FloatArray) -> IntArray:
        """Returns token counts (n,) >= 1 for uniforms (n,) in [0, 1)."""


def draw(lengths: Lengths, rng: np.random.Generator, count: int) -> IntArray:
    """Draws `count` token counts; returns them as an array (count,)."""
    return lengths.quantile(rng.random(count))


def _whole(values: FloatArray) -> IntArray:
    return np.maximum(np.rint(values), 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The distribution whose every draw is `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise WorkloadError(f"a length of {self.tokens} tokens: give at least 1")

    @property
    def mean_tokens(self) -> float:
        return float(self.tokens)

    def quantile(self, u: FloatArray) -> IntArray:
        return np.full(u.shape, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Empirical:
    """The distribution of observed token counts `values`, each of which is equally likely.

    The values must come from the part of a trace that may be used for fitting (`transform.split_by_time`).
    """

    values: Sequence[int]
    _sorted: IntArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.values) == 0 or min(self.values) < 1:
            raise WorkloadError("an empirical distribution needs lengths, each of at least 1 token")
        object.__setattr__(self, "_sorted", np.sort(np.asarray(self.values, dtype=np.int64)))

    @property
    def mean_tokens(self) -> float:
        return float(self._sorted.mean())

    def quantile(self, u: FloatArray) -> IntArray:
        at: IntArray = np.minimum((u * self._sorted.size).astype(np.int64), self._sorted.size - 1)
        return np.asarray(self._sorted[at], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """The lognormal distribution exp(N(ln median, sigma^2)), cut at `cap_tokens`: greater counts become the cap."""

    median_tokens: float
    sigma: float
    cap_tokens: int | None = None

    def __post_init__(self) -> None:
        if not (
            self.median_tokens > 0 and self.sigma > 0 and (self.cap_tokens is None or self.cap_tokens >= 1)
        ):
            raise WorkloadError(f"{self}: median and sigma must be above 0, a cap at least 1")

    @classmethod
    def of_mean(cls, mean_tokens: float, cv: float, cap_tokens: int | None = None) -> Lognormal:
        """Returns the distribution with this mean and coefficient of variation, both measured before the cut."""
        variance = math.log1p(cv * cv)
        return cls(mean_tokens * math.exp(-variance / 2.0), math.sqrt(variance), cap_tokens)

    @property
    def mean_tokens(self) -> float:
        mu, s = math.log(self.median_tokens), self.sigma
        whole = math.exp(mu + s * s / 2.0)
        if self.cap_tokens is None:
            return whole
        z = (math.log(self.cap_tokens) - mu) / s
        return float(whole * ndtr(z - s) + self.cap_tokens * ndtr(-z))

    def quantile(self, u: FloatArray) -> IntArray:
        values = self.median_tokens * np.exp(self.sigma * ndtri(np.maximum(u, 1e-300)))
        return _whole(values if self.cap_tokens is None else np.minimum(values, self.cap_tokens))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The distribution whose quantile function passes through `knots`, pairs (probability, tokens) from 0 to 1.

    Between two knots it is linear in the probability. With `logarithmic` the logarithm of the count is linear instead.
    """

    knots: tuple[tuple[float, float], ...]
    logarithmic: bool = True

    def __post_init__(self) -> None:
        p, v = [k[0] for k in self.knots], [k[1] for k in self.knots]
        rising = all(a < b for a, b in pairwise(p))
        if len(p) < 2 or p[0] != 0.0 or p[-1] != 1.0 or not rising or v != sorted(v) or v[0] < 0:
            raise WorkloadError(
                f"knots {self.knots}: give probabilities that rise from 0 to 1, and counts that rise"
            )
        if self.logarithmic and v[0] <= 0:
            raise WorkloadError("the lowest knot must be above 0 tokens where logarithms are interpolated")

    @classmethod
    def of_margins(
        cls, mean_tokens: float, known: Sequence[tuple[float, float]], free: float, cap_tokens: float
    ) -> Quantiles:
        """Returns the distribution with the published quantiles `known` and the mean `mean_tokens`.

        `known` are pairs ((0, least), (0.5, median), ...). `cap_tokens` is the quantile at probability 1. The quantile
        at probability `free` is chosen so that the distribution has the mean. Raises WorkloadError where no value does.
        """
        fixed = (*known, (1.0, float(cap_tokens)))
        low = max(v for p, v in fixed if p < free)
        high = min(v for p, v in fixed if p > free)

        def placed(value: float) -> Quantiles:
            return cls(tuple(sorted((*fixed, (free, value)))))

        if not placed(low).mean_tokens <= mean_tokens <= placed(high).mean_tokens:
            raise WorkloadError(
                f"a mean of {mean_tokens} lies outside {placed(low).mean_tokens:.0f}..{placed(high).mean_tokens:.0f},"
                f" which these quantiles allow; change the cap or the free knot"
            )
        for _ in range(60):
            middle = (low + high) / 2.0
            low, high = (middle, high) if placed(middle).mean_tokens < mean_tokens else (low, middle)
        return placed(low)

    @property
    def mean_tokens(self) -> float:
        total = 0.0
        for (p, v), (q, w) in pairwise(self.knots):
            level = (w - v) / math.log(w / v) if self.logarithmic and w > v else (v + w) / 2.0
            total += (q - p) * level
        return total

    def quantile(self, u: FloatArray) -> IntArray:
        p, v = np.array(self.knots).T
        return _whole(np.exp(np.interp(u, p, np.log(v))) if self.logarithmic else np.interp(u, p, v))
