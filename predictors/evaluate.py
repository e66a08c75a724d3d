"""The evaluation judges predictors on held-out requests, in the way a router would use them.

A predictor is asked about each request at the ages 0, k, 2k, ... and for every window. Before each answer it may
learn only from outcomes that had ended when the request arrived. The metrics of `metrics.py` are computed for each
window, for each range of ages, and over all rows.

Whether the features say anything about lengths at all is tested separately and without a model
(`permutation.signal_test`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from predictors import metrics
from predictors.protocol import (
    ANY_WINDOW,
    QUANTILE_LEVELS,
    BoolArray,
    Features,
    FloatArray,
    IntArray,
    Outcome,
    Prediction,
    Predictor,
    TotalLength,
    WindowRange,
    check_batch,
)
from predictors.samples import Walk, walk

# The ranges of ages are 0, 1-64, 65-256, 257-1,024 and above.
AGE_EDGES = (0, 1, 65, 257, 1_025)
_CHUNK = 32


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """The data to judge on: all outcomes and features in order of arrival. Predictors are asked about the requests
    from index `first` on.
    """

    outcomes: Sequence[Outcome]
    features: Sequence[Features]
    first: int
    rows: Walk  # Request indices count from `first`.
    windows: tuple[int, ...]

    @classmethod
    def of(
        cls,
        outcomes: Sequence[Outcome],
        features: Sequence[Features],
        first: int,
        windows: tuple[int, ...],
        stride_tokens: int = 16,
        max_rows: int = 40_000,
        seed: int = 0,
    ) -> HeldOut:
        """Returns the held-out data with the age points of the requests from `first` on, of which at most
        `max_rows` are drawn. Raises ValueError if `first` or the lengths do not fit.
        """
        if not 0 <= first < len(outcomes) or len(outcomes) != len(features):
            raise ValueError(f"{len(outcomes)} outcomes, {len(features)} features, held out from {first}")
        return cls(outcomes, features, first, walk(outcomes[first:], stride_tokens, max_rows, seed), windows)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """A predictor's answers. `p`, `mu` and `valid` are (rows, windows). `first_total` has each request's total
    length as predicted at age 0, `row_total` that predicted at each row's age.
    """

    p: FloatArray
    mu: FloatArray
    valid: BoolArray
    first_total: TotalLength
    row_total: TotalLength


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one set of rows: stage 1, stage 2, the reliability curve, and the calibration error due to
    chance. A number that the rows cannot define is None.
    """

    rows: int
    positives: float
    roc_auc: float | None
    brier: float | None
    ece: float | None
    conditional_mae_tokens: float | None
    reliability: tuple[metrics.Reliability, ...]
    ece_by_chance: float | None = None


@dataclass(frozen=True, slots=True)
class TotalScores:
    """The scores of the total length: pinball loss, mean absolute error of the mean, and the share of lengths at or
    below each quantile.
    """

    rows: int
    pinball_tokens: float | None
    mean_mae_tokens: float | None
    coverage: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All metrics of one predictor on one held-out set."""

    name: str
    overall: Scores
    by_window: dict[int, Scores]
    by_age: dict[str, Scores]
    total_at_arrival: TotalScores
    total_at_rows: TotalScores

    def as_json(self) -> dict[str, Any]:
        """Returns the evaluation as data that `json` can write."""
        return asdict(self)


def answers(predictor: Predictor, held: HeldOut) -> Answers:
    """Asks `predictor` about the held-out requests in order of arrival and feeds it each outcome once it is known.
    The outcomes before `held.first` are fed too, so give a predictor that has not seen them.
    """
    n, many = len(held.rows), len(held.windows)
    p, mu, valid = np.zeros((n, many)), np.zeros((n, many)), np.zeros((n, many), dtype=bool)
    levels = len(QUANTILE_LEVELS)
    requests = len(held.outcomes) - held.first
    first = TotalLength(np.zeros(requests), np.zeros((requests, levels)))
    at_rows = TotalLength(np.zeros(n), np.zeros((n, levels)))
    finishing = sorted(range(len(held.outcomes)), key=lambda i: held.outcomes[i].finish_s)
    done = 0
    for start in range(0, requests, _CHUNK):
        now_s = held.outcomes[held.first + start].arrival.arrival_s
        while done < len(finishing) and held.outcomes[finishing[done]].finish_s < now_s:
            predictor.observe(held.outcomes[finishing[done]])
            done += 1
        end = min(start + _CHUNK, requests)
        batch = held.features[held.first + start : held.first + end]
        _put(first, slice(start, end), predictor.predict(batch, np.zeros(end - start, np.int64), 1, True))
        rows = slice(*np.searchsorted(held.rows.request, (start, end)))
        asked = [held.features[held.first + i] for i in held.rows.request[rows]]
        for column, window in enumerate(held.windows):
            made = predictor.predict(asked, held.rows.ages[rows], window, with_total=column == 0)
            p[rows, column], mu[rows, column] = made.p_finish, made.mean_remaining_tokens
            valid[rows, column] = made.valid
            if column == 0:
                _put(at_rows, rows, made)
    return Answers(p, mu, valid, first, at_rows)


def _put(total: TotalLength, rows: slice, made: Prediction) -> None:
    assert made.total is not None
    total.mean_tokens[rows] = made.total.mean_tokens
    total.quantiles_tokens[rows] = made.total.quantiles_tokens


def evaluate(name: str, predictor: Predictor, held: HeldOut) -> Evaluation:
    """Returns all metrics of `predictor`, which learns from the outcomes in order of time."""
    return score(name, answers(predictor, held), held)


def score(name: str, given: Answers, held: HeldOut) -> Evaluation:
    """Returns all metrics of the answers `given` on the data `held`."""
    remaining, windows = held.rows.remaining, np.array(held.windows)
    label = remaining[:, None] <= windows[None, :]
    every = np.broadcast_to(remaining[:, None], label.shape)
    edges = (*AGE_EDGES, 1 << 60)
    by_age = {}
    for low, high in pairwise(edges):
        rows = (held.rows.ages >= low) & (held.rows.ages < high)
        if rows.any():
            by_age[_age_name(low, high)] = _scores(given.p[rows], given.mu[rows], every[rows], label[rows])
    lengths = np.array([o.output_tokens for o in held.outcomes[held.first :]], dtype=np.int64)
    known = np.array([not o.censored for o in held.outcomes[held.first :]])
    return Evaluation(
        name=name,
        overall=_scores(given.p, given.mu, every, label),
        by_window={
            w: _scores(given.p[:, i], given.mu[:, i], remaining, label[:, i])
            for i, w in enumerate(held.windows)
        },
        by_age=by_age,
        total_at_arrival=_total_scores(given.first_total, lengths, known),
        total_at_rows=_total_scores(
            given.row_total, held.rows.ages + remaining, np.ones(remaining.size, dtype=bool)
        ),
    )


def _age_name(low: int, high: int) -> str:
    return "0" if high == 1 else f"{low}-{high - 1}" if high < 1 << 60 else f"{low}+"


def _scores(p: FloatArray, mu: FloatArray, remaining: IntArray, label: BoolArray) -> Scores:
    p, mu, remaining, label = p.ravel(), mu.ravel(), remaining.ravel(), label.ravel()
    return Scores(
        rows=int(p.size),
        positives=float(label.mean()) if p.size else 0.0,
        roc_auc=metrics.roc_auc(p, label),
        brier=metrics.brier(p, label),
        ece=metrics.expected_calibration_error(p, label),
        conditional_mae_tokens=metrics.conditional_mae(mu, remaining, label),
        reliability=metrics.reliability(p, label),
        ece_by_chance=metrics.ece_by_chance(p),
    )


def _total_scores(total: TotalLength, actual: IntArray, known: BoolArray) -> TotalScores:
    quantiles, actual = total.quantiles_tokens[known], actual[known]
    if not actual.size:
        return TotalScores(0, None, None, ())
    return TotalScores(
        rows=int(actual.size),
        pinball_tokens=metrics.pinball(quantiles, actual, total.levels),
        mean_mae_tokens=float(np.abs(total.mean_tokens[known] - actual).mean()),
        coverage=tuple(float(c) for c in (actual[:, None] <= quantiles).mean(axis=0)),
    )


class Constant:
    """A reference predictor that knows only averages. For each window it answers with the training rows' share and
    mean remainder, whatever the age.
    """

    name = "constant"
    windows: WindowRange = ANY_WINDOW

    def __init__(self, outcomes: Sequence[Outcome], stride_tokens: int = 16, max_rows: int = 200_000) -> None:
        self._rows = walk(outcomes, stride_tokens, max_rows, seed=0)
        lengths = np.array([o.output_tokens for o in outcomes if not o.censored], dtype=np.float64)
        if not lengths.size or not len(self._rows):
            raise ValueError("a constant needs at least one finished request")
        self._mean, self._quantiles = float(lengths.mean()), np.quantile(lengths, QUANTILE_LEVELS)
        self._known: dict[int, tuple[float, float]] = {}

    def observe(self, outcome: Outcome) -> None:
        """Ignores the outcome, because the predictor is constant."""

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`."""
        self.windows.require(window_tokens, self.name)
        n = check_batch(features, ages).size
        if window_tokens not in self._known:
            ends = self._rows.finishes(window_tokens)
            mu = float(self._rows.remaining[ends].mean()) if ends.any() else float(window_tokens)
            self._known[window_tokens] = (float(ends.mean()), mu)
        p, mu = self._known[window_tokens]
        total = TotalLength(np.full(n, self._mean), np.tile(self._quantiles, (n, 1))) if with_total else None
        return Prediction(np.full(n, p), np.full(n, mu), np.ones(n, dtype=bool), total)
