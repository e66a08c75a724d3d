"""Metrics of both stages and of the total length. Pure numpy; all return None where the data cannot define
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictors.protocol import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Reliability:
    """One bin of the reliability curve: rows, mean prediction, share of positives."""

    rows: int
    predicted: float
    observed: float


def roc_auc(p: FloatArray, positive: BoolArray) -> float | None:
    """Area under the ROC curve (rank statistic, ties count half); None with a single class."""
    n_pos = int(positive.sum())
    n_neg = positive.size - n_pos
    if n_pos == 0 or n_neg == 0:
        return None
    _, where, counts = np.unique(p, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - (counts - 1) / 2.0
    return float((mean_rank[where][positive].sum() - n_pos * (n_pos + 1) / 2.0) / (n_pos * n_neg))


def brier(p: FloatArray, positive: BoolArray) -> float | None:
    """Mean squared error of the probability."""
    return float(np.mean((p - positive) ** 2)) if p.size else None


def reliability(p: FloatArray, positive: BoolArray, bins: int = 15) -> tuple[Reliability, ...]:
    """Equal-width bins of p; empty ones are left out."""
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    rows = np.bincount(index, minlength=bins)
    predicted = np.bincount(index, weights=p, minlength=bins)
    observed = np.bincount(index, weights=positive.astype(np.float64), minlength=bins)
    return tuple(
        Reliability(int(n), float(predicted[i] / n), float(observed[i] / n)) for i, n in enumerate(rows) if n
    )


def expected_calibration_error(p: FloatArray, positive: BoolArray, bins: int = 15) -> float | None:
    """Mean over rows of |predicted - observed| of the row's bin (equal width)."""
    if not p.size:
        return None
    return sum(r.rows * abs(r.predicted - r.observed) for r in reliability(p, positive, bins)) / p.size


def ece_by_chance(p: FloatArray, bins: int = 15, draws: int = 10, seed: int = 0) -> float | None:
    """The calibration error that a perfectly calibrated predictor with these p would show on this many rows:
    the mean over `draws` sets of labels drawn from p. A lower bound: rows of one request are taken as
    independent.
    """
    rng = np.random.default_rng(seed)
    found = [expected_calibration_error(p, rng.random(p.size) < p, bins) for _ in range(draws)]
    return None if None in found else float(np.mean([e for e in found if e is not None]))


def conditional_mae(mu: FloatArray, remaining: IntArray, positive: BoolArray) -> float | None:
    """Mean absolute error of stage 2 on the rows that did finish within the window, tokens."""
    return float(np.mean(np.abs(mu - remaining)[positive])) if positive.any() else None


def pinball(quantiles: FloatArray, actual: IntArray | FloatArray, levels: tuple[float, ...]) -> float | None:
    """Mean quantile (pinball) loss over rows and levels, tokens; quantiles (n, q), actual (n,)."""
    if not actual.size:
        return None
    error = actual[:, None] - quantiles
    tau = np.asarray(levels)
    return float(np.mean(np.maximum(tau * error, (tau - 1.0) * error)))
