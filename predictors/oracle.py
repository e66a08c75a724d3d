"""The oracle predictor reads the true output length from a table. It is for simulations only, as an upper bound for
any predictor.
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
    """A predictor that looks up the total output length of a request by its id."""

    name = "oracle"
    windows: WindowRange = ANY_WINDOW

    def __init__(self, lengths_tokens: Mapping[str, int]) -> None:
        """`lengths_tokens` maps a request id to its total output tokens. The mapping is not copied, so a simulator
        may add to it later.
        """
        self._lengths = lengths_tokens

    def observe(self, outcome: Outcome) -> None:
        """Ignores the outcome, because the oracle knows all lengths."""

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`. A row is invalid if its id is unknown or its age has reached the length."""
        self.windows.require(window_tokens, self.name)
        ages = check_batch(features, ages)
        # An unknown id gets the length 0, which every age has reached, so its row is invalid below.
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
