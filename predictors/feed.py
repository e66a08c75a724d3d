"""A router's predictor at work, without a clock: features at arrival, one batched refresh, outcomes at the end.

The same object serves the live router (with a `LivePredictor`, which keeps its own features) and the simulator (with
any predictor and a `FeatureTracker`). It makes no events and does no I/O: its owner does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from predictors.book import ForecastBook
from predictors.features import FeatureTracker
from predictors.forecast import FinishesIn, ForecastConfig
from predictors.protocol import Arrival, Features, FinishReason, IntArray, Outcome, Prediction, Predictor


class Learner(Predictor, Protocol):
    """A predictor that makes the features itself (`LivePredictor`, `Tracked`)."""

    def arrive(self, arrival: Arrival) -> Features: ...


class Tracked:
    """Any predictor with a `FeatureTracker` before it."""

    def __init__(self, predictor: Predictor, tracker: FeatureTracker | None = None) -> None:
        self.predictor = predictor
        self.name, self.windows = predictor.name, predictor.windows
        self._tracker = tracker or FeatureTracker()

    def arrive(self, arrival: Arrival) -> Features:
        """The request's features; call once, when it arrives."""
        return self._tracker.arrive(arrival)

    def observe(self, outcome: Outcome) -> None:
        """Learns from a request that has ended."""
        self._tracker.finish(outcome)
        self.predictor.observe(outcome)

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`."""
        return self.predictor.predict(features, ages, window_tokens, with_total)


@dataclass(frozen=True, slots=True)
class Refreshed:
    """A new forecast at `age` tokens: *finishes in* this many more, or (None) *stays*."""

    request_id: str
    age: int
    finishes_in_tokens: float | None


@dataclass(slots=True)
class ForecastFeed:
    """See the module's docstring. Times are the owner's clock, s; `window_tokens` is H."""

    predictor: Learner
    states: ForecastConfig
    window_tokens: int
    book: ForecastBook = field(init=False)
    _features: dict[str, Features] = field(default_factory=dict)
    _limits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.book = ForecastBook(self.states)

    def arrived(self, arrival: Arrival, max_tokens: int, total: bool = False) -> float | None:
        """Takes the features; the expected output length where that is asked for (`total`)."""
        features = self.predictor.arrive(arrival)
        self._features[arrival.request_id] = features
        self._limits[arrival.request_id] = max_tokens
        if not total:
            return None
        made = self.predictor.predict([features], np.zeros(1, dtype=np.int64), self.window_tokens, True)
        return None if made.total is None else float(made.total.mean_tokens[0])

    def progressed(self, request_id: str, tokens: int) -> None:
        """`tokens` generated so far. A request of several sequences has no forecast: its ages are not told apart."""
        features = self._features.get(request_id)
        if features is None or (features.arrival.sampling.choices or 1) > 1:
            return
        if request_id not in self.book:
            self.book.admit(features, tokens)
        else:
            self.book.progress(request_id, tokens)

    def closed(self, request_id: str, outcome: str, tokens: int, now_s: float) -> Outcome | None:
        """The request is over. A rejected one taught nothing; any other is an outcome, cut short unless it finished."""
        features, limit = self._features.pop(request_id, None), self._limits.pop(request_id, 0)
        if request_id in self.book:
            # A lost ingress cannot say how far the request got.
            tokens = max(tokens, self.book.age(request_id))
            self.book.remove(request_id)
        if features is None or outcome == "rejected":
            return None
        ended = Outcome(features.arrival, tokens, now_s, finish_reason(outcome, tokens, limit))
        self.predictor.observe(ended)
        return ended

    def refresh(self) -> list[Refreshed]:
        """One predictor call for all that are due."""
        due = self.book.due(self.window_tokens)
        if not due:
            return []
        self.book.refresh(self.predictor, self.window_tokens)
        return [self._refreshed(request_id) for request_id in due]

    def _refreshed(self, request_id: str) -> Refreshed:
        forecast = self.book.forecast(request_id)
        steps = forecast.steps if isinstance(forecast, FinishesIn) else None
        return Refreshed(request_id, self.book.age(request_id), steps)


def finish_reason(outcome: str, tokens: int, limit: int) -> FinishReason:
    """The finish reason that a router's outcome stands for; `limit` is the request's max_tokens."""
    if outcome == "finished":
        return FinishReason.LENGTH if tokens >= limit else FinishReason.STOP
    return FinishReason.ERROR if outcome == "failed" else FinishReason.CANCELLED
