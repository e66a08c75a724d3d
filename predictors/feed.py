"""The feed connects a predictor to a router's events: it takes features when a request arrives, refreshes forecasts
in one batch, and reports the outcome at the end.

The same object serves the live router (with a `LivePredictor`, which keeps its own features) and the simulator
(with any predictor and a `FeatureTracker`). It has no clock, makes no events and does no I/O; its owner does all
three.
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
    """A predictor that also computes the features of arriving requests (`LivePredictor`, `Tracked`)."""

    def arrive(self, arrival: Arrival) -> Features: ...


class Tracked:
    """A predictor of any kind joined with a `FeatureTracker` that computes its features."""

    def __init__(self, predictor: Predictor, tracker: FeatureTracker | None = None) -> None:
        self.predictor = predictor
        self.name, self.windows = predictor.name, predictor.windows
        self._tracker = tracker or FeatureTracker()

    def arrive(self, arrival: Arrival) -> Features:
        """Returns the features of an arriving request. Call this exactly once per request."""
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
    """A new forecast of one request at `age` tokens. `finishes_in_tokens` is the expected number of tokens to come,
    or None for *stays*.
    """

    request_id: str
    age: int
    finishes_in_tokens: float | None


@dataclass(slots=True)
class ForecastFeed:
    """The feed of one router (see the module). Times are seconds on the owner's clock.

    `window_tokens` is H of a refresh that names no other window. A policy's own horizon is an argument of `refresh`, so
    that forecasts follow a change of policy.
    """

    predictor: Learner
    states: ForecastConfig
    window_tokens: int
    book: ForecastBook = field(init=False)
    _features: dict[str, Features] = field(default_factory=dict)
    _limits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.book = ForecastBook(self.states)

    def arrived(self, arrival: Arrival, max_tokens: int, total: bool = False) -> float | None:
        """Computes and keeps the request's features. With `total` it returns the expected output length in tokens,
        otherwise None.
        """
        features = self.predictor.arrive(arrival)
        self._features[arrival.request_id] = features
        self._limits[arrival.request_id] = max_tokens
        if not total:
            return None
        made = self.predictor.predict([features], np.zeros(1, dtype=np.int64), self.window_tokens, True)
        return None if made.total is None else float(made.total.mean_tokens[0])

    def progressed(self, request_id: str, tokens: int) -> None:
        """Records that the request has generated `tokens` tokens so far. A request of several sequences gets no
        forecast, because the ages of its sequences are not known separately.
        """
        features = self._features.get(request_id)
        if features is None or (features.arrival.sampling.choices or 1) > 1:
            return
        if request_id not in self.book:
            self.book.admit(features, tokens)
        else:
            self.book.progress(request_id, tokens)

    def closed(self, request_id: str, outcome: str, tokens: int, now_s: float) -> Outcome | None:
        """Removes a request that has ended. Unless it was rejected or is unknown, the predictor observes its
        outcome, which is returned; it is censored unless the request finished.
        """
        features, limit = self._features.pop(request_id, None), self._limits.pop(request_id, 0)
        if request_id in self.book:
            # A lost ingress reports no tokens, so the last known age is used instead.
            tokens = max(tokens, self.book.age(request_id))
            self.book.remove(request_id)
        if features is None or outcome == "rejected":
            return None
        ended = Outcome(features.arrival, tokens, now_s, finish_reason(outcome, tokens, limit))
        self.predictor.observe(ended)
        return ended

    def refresh(self, horizon: int | None = None) -> list[Refreshed]:
        """Refreshes all forecasts that are due in one predictor call, and returns the new ones. `horizon` is H of the
        policy that reads them. With None it is `window_tokens`; with 0 nobody reads them, and none is made. All
        forecasts are due when H has changed.
        """
        window_tokens = self.window_tokens if horizon is None else horizon
        due = self.book.due(window_tokens) if window_tokens else []
        if not due:
            return []
        self.book.refresh(self.predictor, window_tokens)
        return [self._refreshed(request_id) for request_id in due]

    def _refreshed(self, request_id: str) -> Refreshed:
        forecast = self.book.forecast(request_id)
        steps = forecast.steps if isinstance(forecast, FinishesIn) else None
        return Refreshed(request_id, self.book.age(request_id), steps)


def finish_reason(outcome: str, tokens: int, limit: int) -> FinishReason:
    """Returns the finish reason for a router's outcome. `limit` is the request's max_tokens."""
    if outcome == "finished":
        return FinishReason.LENGTH if tokens >= limit else FinishReason.STOP
    return FinishReason.ERROR if outcome == "failed" else FinishReason.CANCELLED
