"""Permutation tests show whether the features carry any signal about lengths, with and without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from predictors.evaluate import HeldOut
from predictors.features import CLOCK_FEATURES, SCALAR_FEATURES, TIME_FEATURES, stack
from predictors.protocol import FeatureArray, Features, FloatArray, IntArray, Outcome, Prediction


@dataclass(frozen=True, slots=True)
class SignalTest:
    """The result of `signal_test`. `statistic` is the largest |rank correlation| of any feature with the output
    length, and `feature` is that feature's name. `p_value` is the share of circular shifts of the lengths for which
    the statistic is at least as large.
    """

    statistic: float
    feature: str
    p_value: float
    shifts: int

    @property
    def found(self) -> bool:
        """True if the features carry a signal at the 1 % level."""
        return self.p_value <= 0.01


def signal_test(
    outcomes: Sequence[Outcome], features: Sequence[Features], shifts: int = 999, seed: int = 0
) -> SignalTest:
    """Tests all features at once for a signal about the output length, so that a large number of features does not
    produce a false positive. Raises ValueError for fewer than 100 finished requests.

    The lengths are shifted circularly against the features. A shift breaks the link between a request and its
    length but keeps the drift of both over time, which free shuffling would mistake for signal. Absent values are
    replaced by the feature's median.
    """
    kept = [i for i, o in enumerate(outcomes) if not o.censored]
    if len(kept) < 100:
        raise ValueError(f"{len(kept)} finished requests are too few for a permutation test (100 needed)")
    target = _standard_ranks(np.array([outcomes[i].output_tokens for i in kept], dtype=np.float64))
    names, columns = _ranked_columns(stack([features[i] for i in kept]))
    if not names or target is None:
        return SignalTest(0.0, "none", 1.0, 0)
    observed = np.abs(columns @ target) / target.size
    rng = np.random.default_rng(seed)
    beaten = 0
    for shift in rng.integers(1, target.size, shifts):
        beaten += float(np.abs(columns @ np.roll(target, shift)).max() / target.size) >= float(observed.max())
    best = int(np.argmax(observed))
    return SignalTest(float(observed[best]), names[best], (1 + beaten) / (1 + shifts), shifts)


def _ranked_columns(values: FeatureArray) -> tuple[list[str], FloatArray]:
    names, columns = [], []
    for column, name in enumerate(SCALAR_FEATURES):
        there = np.isfinite(values[:, column])
        if name in TIME_FEATURES | CLOCK_FEATURES or not there.any():
            continue
        filled = np.where(there, values[:, column], np.median(values[there, column])).astype(np.float64)
        ranks = _standard_ranks(filled)
        if ranks is not None:
            names.append(name)
            columns.append(ranks)
    return names, np.array(columns)


def _standard_ranks(values: FloatArray) -> FloatArray | None:
    """Returns the ranks of `values` (ties share their mean rank), scaled to mean 0 and variance 1, or None if all
    values are equal.
    """
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    if counts.size < 2:
        return None
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[where]
    return np.asarray((ranks - ranks.mean()) / ranks.std())


def permuted_brier(
    rows_of: Callable[[FeatureArray, IntArray, IntArray], Prediction],
    held: HeldOut,
    rounds: int = 39,
    max_rows: int = 5_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Returns the model's Brier score, and its mean Brier score when each request gets another request's features.
    The difference is the worth of the features to the model. `rows_of(values, ages, windows)` predicts rows.
    """
    rng = np.random.default_rng(seed)
    values = stack(held.features[held.first :])
    picked = rng.permutation(len(held.rows))[:max_rows]
    request, ages = held.rows.request[picked], held.rows.ages[picked]
    window = np.full(picked.size, max(held.windows), dtype=np.int64)
    label = held.rows.remaining[picked] <= window

    def loss(order: IntArray) -> float:
        return float(np.mean((rows_of(values[order[request]], ages, window).p_finish - label) ** 2))

    own = loss(np.arange(values.shape[0]))
    return own, float(np.mean([loss(rng.permutation(values.shape[0])) for _ in range(rounds)]))
