"""The functions here compute the metrics of both stages and of the total length. A function returns None if the
data cannot define its metric.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictors.protocol import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Reliability:
    """One bin of the reliability curve: the number of rows, their mean prediction, and their share of positives."""

    rows: int
    predicted: float
    observed: float


def roc_auc(p: FloatArray, positive: BoolArray) -> float | None:
    """Returns the area under the ROC curve (rank statistic, ties count half), or None if only one class occurs."""
    n_pos = int(positive.sum())
    n_neg = positive.size - n_pos
    if n_pos == 0 or n_neg == 0:
        return None
    _, where, counts = np.unique(p, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - (counts - 1) / 2.0
    return float((mean_rank[where][positive].sum() - n_pos * (n_pos + 1) / 2.0) / (n_pos * n_neg))


def brier(p: FloatArray, positive: BoolArray) -> float | None:
    """Returns the mean squared error of the probability (the Brier score)."""
    return float(np.mean((p - positive) ** 2)) if p.size else None


def reliability(p: FloatArray, positive: BoolArray, bins: int = 15) -> tuple[Reliability, ...]:
    """Returns the reliability curve over `bins` bins of equal width in p, without the empty bins."""
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    rows = np.bincount(index, minlength=bins)
    predicted = np.bincount(index, weights=p, minlength=bins)
    observed = np.bincount(index, weights=positive.astype(np.float64), minlength=bins)
    return tuple(
        Reliability(int(n), float(predicted[i] / n), float(observed[i] / n)) for i, n in enumerate(rows) if n
    )


def expected_calibration_error(p: FloatArray, positive: BoolArray, bins: int = 15) -> float | None:
    """Returns the mean over rows of |predicted - observed| of the row's bin; bins have equal width."""
    if not p.size:
        return None
    return sum(r.rows * abs(r.predicted - r.observed) for r in reliability(p, positive, bins)) / p.size


def ece_by_chance(p: FloatArray, bins: int = 15, draws: int = 10, seed: int = 0) -> float | None:
    """Returns the calibration error that a perfectly calibrated predictor with these p would show on p.size rows,
    as the mean over `draws` sets of labels drawn from p. It is a lower bound, because rows of one request are
    treated as independent.
    """
    rng = np.random.default_rng(seed)
    found = [expected_calibration_error(p, rng.random(p.size) < p, bins) for _ in range(draws)]
    return None if None in found else float(np.mean([e for e in found if e is not None]))


def conditional_mae(mu: FloatArray, remaining: IntArray, positive: BoolArray) -> float | None:
    """Returns the mean absolute error of stage 2 in tokens, on the rows that did finish within the window."""
    return float(np.mean(np.abs(mu - remaining)[positive])) if positive.any() else None


def pinball(quantiles: FloatArray, actual: IntArray | FloatArray, levels: tuple[float, ...]) -> float | None:
    """Returns the mean quantile (pinball) loss over rows and levels in tokens, for quantiles (n, q) and actual
    lengths (n,).
    """
    if not actual.size:
        return None
    error = actual[:, None] - quantiles
    tau = np.asarray(levels)
    return float(np.mean(np.maximum(tau * error, (tau - 1.0) * error)))
