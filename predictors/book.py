"""The book holds the forecasts of all running requests and refreshes them in batches, by the rules of
`forecast.py`.

The book's owner (`ForecastFeed`) reports admissions, ages and departures. It calls `refresh` before it decides,
which makes one predictor call for all forecasts that are due. Generating a token costs no more than storing the
request's new age.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from predictors.forecast import (
    STAYS,
    Forecast,
    ForecastConfig,
    ForecastState,
    forecast_at,
    refresh,
    refresh_due,
)
from predictors.protocol import Features, Predictor


@dataclass(slots=True)
class _Entry:
    features: Features
    age: int
    state: ForecastState | None
    window: int | None  # H of the last refresh


class ForecastBook:
    """The book maps a request id to its forecast. It keeps the order of admission, so a run is reproducible."""

    def __init__(self, config: ForecastConfig) -> None:
        self._config = config
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def admit(self, features: Features, age: int = 0) -> None:
        """Adds a request that starts at `age`, which is above 0 if it has migrated. Raises ValueError if the book
        has the request already.
        """
        request_id = features.arrival.request_id
        if request_id in self._entries:
            raise ValueError(f"request {request_id!r} is in the book already; remove it first")
        self._entries[request_id] = _Entry(features, age, None, None)

    def progress(self, request_id: str, age: int) -> None:
        """Records that the request has generated `age` tokens in all. Raises KeyError for an unknown id and
        ValueError for an age that goes back.
        """
        entry = self._entries[request_id]
        if age < entry.age:
            raise ValueError(f"request {request_id!r} went back from age {entry.age} to {age}")
        entry.age = age

    def remove(self, request_id: str) -> None:
        """Removes a request that has ended for any reason. Raises KeyError for an unknown id."""
        del self._entries[request_id]

    def due(self, window_tokens: int) -> list[str]:
        """Returns the ids of the requests whose forecast is due, either by `refresh_due` or because the last
        forecast was for another window.
        """
        return [
            request_id
            for request_id, e in self._entries.items()
            if e.window != window_tokens or refresh_due(self._config, e.state, e.age)
        ]

    def refresh(self, predictor: Predictor, window_tokens: int) -> int:
        """Refreshes all forecasts that are due in one call of `predictor`, and returns their number. A window of H
        = 0 needs no forecast, so nothing is refreshed then.
        """
        if window_tokens == 0:
            return 0
        ids = self.due(window_tokens)
        if not ids:
            return 0
        entries = [self._entries[i] for i in ids]
        ages = np.array([e.age for e in entries], dtype=np.int64)
        made = predictor.predict([e.features for e in entries], ages, window_tokens)
        rows = zip(
            entries,
            made.p_finish.tolist(),
            made.mean_remaining_tokens.tolist(),
            made.valid.tolist(),
            strict=True,
        )
        for entry, p, mu, valid in rows:
            entry.state = refresh(self._config, entry.age, p, mu, valid, window_tokens)
            entry.window = window_tokens
        return len(ids)

    def age(self, request_id: str) -> int:
        """Returns the number of tokens that the request had generated at its last reported progress. Raises
        KeyError for an unknown id.
        """
        return self._entries[request_id].age

    def forecast(self, request_id: str) -> Forecast:
        """Returns the request's forecast at its present age, which is *stays* before the first refresh. Raises
        KeyError for an unknown id.
        """
        entry = self._entries[request_id]
        return STAYS if entry.state is None else forecast_at(self._config, entry.state, entry.age)
