"""Training and evaluation rows are made by walking finished requests at age points (BalanceRoute C.2.2).

A request of T tokens gives one row per age a = 0, k, 2k, ... < T. A router asks at these ages when it refreshes
forecasts, so rows have the distribution that a predictor meets in use; long requests give more rows. Censored
requests give no rows, because their label is unknown (the survival curve does use them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from predictors.protocol import BoolArray, FloatArray, IntArray, Outcome


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """Rows (n,): the index of the request, its age, and the tokens that remain at that age (>= 1)."""

    request: IntArray
    ages: IntArray
    remaining: IntArray

    def __len__(self) -> int:
        return int(self.ages.size)

    def finishes(self, windows: IntArray | int) -> BoolArray:
        """Returns the label of stage 1 for each row: whether it finishes within its window."""
        return self.remaining <= windows


def walk(outcomes: Sequence[Outcome], stride_tokens: int, max_rows: int, seed: int) -> Walk:
    """Returns all age points of `outcomes`, or a uniform sample of `max_rows` if there are more."""
    if stride_tokens < 1 or max_rows < 1:
        raise ValueError(f"stride {stride_tokens} and max_rows {max_rows} must be at least 1")
    lengths = np.array([0 if o.censored else o.output_tokens for o in outcomes], dtype=np.int64)
    # The number of multiples of the stride in [0, T), for each request.
    points = -(-lengths // stride_tokens)
    ends = np.cumsum(points)
    total = int(ends[-1]) if ends.size else 0
    picked = np.arange(total)
    if total > max_rows:
        picked = np.sort(np.random.default_rng(seed).choice(total, size=max_rows, replace=False))
    request = np.searchsorted(ends, picked, side="right")
    ages = (picked - (ends[request] - points[request])) * stride_tokens
    return Walk(request, ages, lengths[request] - ages)


def walk_tails(
    outcomes: Sequence[Outcome], stride_tokens: int, horizon_tokens: int, max_rows: int, seed: int
) -> Walk:
    """Returns the rows of `walk` with at most `horizon_tokens` left, or a uniform sample of `max_rows` if there are
    more.

    Stage 2 learns only from these rows, and they are rare among all rows of long outputs.
    """
    if stride_tokens < 1 or horizon_tokens < 1 or max_rows < 1:
        raise ValueError("stride, horizon and max_rows must be at least 1")
    lengths = np.array([0 if o.censored else o.output_tokens for o in outcomes], dtype=np.int64)
    steps = np.arange(-(-horizon_tokens // stride_tokens))
    # The last multiple of the stride below T.
    last = (lengths - 1) // stride_tokens * stride_tokens
    ages = last[:, None] - steps[None, :] * stride_tokens
    request, step = np.nonzero(
        (ages >= 0) & (lengths[:, None] - ages <= horizon_tokens) & (lengths[:, None] > 0)
    )
    if request.size > max_rows:
        kept = np.sort(np.random.default_rng(seed).choice(request.size, size=max_rows, replace=False))
        request, step = request[kept], step[kept]
    at = ages[request, step]
    return Walk(request.astype(np.int64), at, lengths[request] - at)


def draw_windows(n: int, low: int, high: int, seed: int) -> IntArray:
    """Returns n windows drawn log-uniformly from low..high, so that a classifier with H as an input sees short and
    long windows equally often.
    """
    u = np.random.default_rng(seed).random(n)
    drawn: FloatArray = low * np.exp(u * np.log((high + 1) / low))
    return np.clip(np.floor(drawn), low, high).astype(np.int64)
