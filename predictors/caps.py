"""max_tokens as certain knowledge: a request never outlives it.

A request with cap = max_tokens - age tokens left and cap <= H finishes within H for sure. Let p, mu be the
uncapped answers for the window `cap`; the capped request stops at min(remaining, cap), so exactly

    p' = 1,    mu' = p * mu + (1 - p) * cap

Realisations therefore answer for the row's own window min(H, cap) and let `apply_caps` do the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from predictors.protocol import BoolArray, Features, FloatArray, IntArray, Prediction, TotalLength


def row_windows(
    features: Sequence[Features], ages: IntArray, window_tokens: int
) -> tuple[IntArray, BoolArray]:
    """The windows (n,) that the rows are to be answered for, and where the cap decides (n,)."""
    no_cap = 1 << 40
    caps = np.fromiter(
        (no_cap if f.arrival.max_tokens is None else f.arrival.max_tokens for f in features),
        dtype=np.int64,
        count=len(features),
    )
    left = np.maximum(caps - ages, 1)
    return np.minimum(left, window_tokens), left <= window_tokens


def apply_caps(prediction: Prediction, windows: IntArray, capped: BoolArray) -> Prediction:
    """Turns the answers for `windows` into those for the call's window: see the module's formula."""
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
    """Total lengths cut at each request's max_tokens (the mean too: an upper bound of the capped mean)."""
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
