"""Predictions account for max_tokens here: no request generates more tokens than that.

A request has cap = max_tokens - age tokens left. If cap <= H, it certainly finishes within H. Let p, mu be the
answers for the window `cap` that ignore max_tokens. The capped request stops at min(remaining, cap), so its answers
are exactly

    p' = 1,    mu' = p * mu + (1 - p) * cap

Predictors therefore answer for each row's own window min(H, cap), and `apply_caps` applies this formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from predictors.protocol import BoolArray, Features, FloatArray, IntArray, Prediction, TotalLength


def row_windows(
    features: Sequence[Features], ages: IntArray, window_tokens: int
) -> tuple[IntArray, BoolArray]:
    """Returns two arrays (n,): each row's window min(H, cap), and whether its cap lies within H."""
    no_cap = 1 << 40
    caps = np.fromiter(
        (no_cap if f.arrival.max_tokens is None else f.arrival.max_tokens for f in features),
        dtype=np.int64,
        count=len(features),
    )
    left = np.maximum(caps - ages, 1)
    return np.minimum(left, window_tokens), left <= window_tokens


def apply_caps(prediction: Prediction, windows: IntArray, capped: BoolArray) -> Prediction:
    """Turns the answers for each row's own window into those for the call's window H, by the formula above.
    `windows` and `capped` come from `row_windows`.
    """
    if not capped.any():
        return prediction
    p, mu = prediction.p_finish, prediction.mean_remaining_tokens
    return replace(
        prediction,
        p_finish=np.where(capped, 1.0, p),
        mean_remaining_tokens=np.where(capped, p * mu + (1.0 - p) * windows, mu),
        valid=prediction.valid | capped,
    )


def cap_total(total: TotalLength, features: Sequence[Features]) -> TotalLength:
    """Returns `total` with every length cut at the request's max_tokens. The cut mean is an upper bound of the mean
    of the capped length.
    """
    caps: FloatArray = np.fromiter(
        (np.inf if f.arrival.max_tokens is None else f.arrival.max_tokens for f in features),
        dtype=np.float64,
        count=len(features),
    )
    return TotalLength(
        mean_tokens=np.minimum(total.mean_tokens, caps),
        quantiles_tokens=np.minimum(total.quantiles_tokens, caps[:, None]),
        levels=total.levels,
    )
