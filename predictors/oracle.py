"""The oracle: reads the length that will be from a table. For simulations only, as the upper bound of any
predictor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from predictors.protocol import (
    ANY_WINDOW,
    QUANTILE_LEVELS,
    Features,
    IntArray,
    Outcome,
    Prediction,
    TotalLength,
    WindowRange,
    check_batch,
)


class Oracle:
    """Knows the total output length of every request id that it is given."""

    name = "oracle"
    windows: WindowRange = ANY_WINDOW

    def __init__(self, lengths_tokens: Mapping[str, int]) -> None:
        """`lengths_tokens`: request id -> total output tokens. Kept by reference: a simulator may add to it."""
        self._lengths = lengths_tokens

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing: the oracle knew."""

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`. Invalid where the id is unknown or the age is past the length."""
        self.windows.require(window_tokens, self.name)
        ages = check_batch(features, ages)
        # A length of 0 for an unknown id is past any age, hence invalid below.
        total = np.fromiter(
            (self._lengths.get(f.arrival.request_id, 0) for f in features), np.int64, count=len(features)
        )
        remaining = total - ages
        valid = remaining > 0
        finishes = valid & (remaining <= window_tokens)
        known = np.maximum(total, ages + 1).astype(np.float64)
        return Prediction(
            p_finish=finishes.astype(np.float64),
            mean_remaining_tokens=np.where(finishes, remaining, window_tokens).astype(np.float64),
            valid=valid,
            total=TotalLength(known, np.repeat(known[:, None], len(QUANTILE_LEVELS), axis=1))
            if with_total
            else None,
        )
