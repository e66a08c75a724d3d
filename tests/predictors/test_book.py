"""Forecasts of many running requests: batched, refreshed when due."""

import numpy as np
import pytest

from predictors.book import ForecastBook
from predictors.features import FeatureTracker
from predictors.forecast import STAYS, FinishesIn, ForecastConfig
from predictors.oracle import Oracle
from predictors.protocol import Arrival, WindowNotCovered


def features(request_id):
    return FeatureTracker().arrive(Arrival(request_id, 0.0, 100))


class Counting(Oracle):
    """The oracle, noting the ages of every call."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.calls = []

    def predict(self, features, ages, window_tokens, with_total=False):
        self.calls.append([(f.arrival.request_id, a) for f, a in zip(features, ages.tolist(), strict=True)])
        return super().predict(features, ages, window_tokens, with_total)


def test_an_oracle_run_is_asked_in_batches_and_counts_down_to_the_end():
    book, oracle = ForecastBook(ForecastConfig(refresh_tokens=16)), Counting({"a": 30, "b": 100})
    book.admit(features("a"))
    book.admit(features("b"))
    seen = []
    for age in range(30):
        book.progress("a", age)
        book.progress("b", age)
        book.refresh(oracle, 24)
        seen.append(book.forecast("a"))
        assert book.forecast("b") == STAYS
    # a: 30 left at 0 (more than 24), 14 left at 16, then down to 1 at 29
    assert seen[:16] == [STAYS] * 16
    assert seen[16:] == [FinishesIn(float(30 - age)) for age in range(16, 30)]
    assert oracle.calls == [[("a", 0), ("b", 0)], [("a", 16), ("b", 16)]]


def test_another_window_asks_everyone_again_and_zero_asks_nobody():
    book, oracle = ForecastBook(ForecastConfig()), Counting({"a": 10})
    book.admit(features("a"))
    assert book.refresh(oracle, 0) == 0
    assert book.forecast("a") == STAYS
    assert book.refresh(oracle, 8) == 1
    assert book.forecast("a") == STAYS  # 10 > 8
    assert book.refresh(oracle, 8) == 0
    assert book.refresh(oracle, 24) == 1
    assert book.forecast("a") == FinishesIn(10.0)


def test_admission_departure_and_misuse():
    book = ForecastBook(ForecastConfig())
    book.admit(features("a"), age=7)
    assert "a" in book
    assert list(book) == ["a"]
    with pytest.raises(ValueError, match="already"):
        book.admit(features("a"))
    with pytest.raises(ValueError, match="went back"):
        book.progress("a", 6)
    book.remove("a")
    assert len(book) == 0
    for call in (book.remove, book.forecast):
        with pytest.raises(KeyError):
            call("a")


def test_a_refused_window_changes_nothing(fitted):
    book = ForecastBook(ForecastConfig())
    book.admit(features("a"))
    with pytest.raises(WindowNotCovered):
        book.refresh(fitted, 97)
    assert book.due(24) == ["a"]
    assert isinstance(np.asarray(book.refresh(fitted, 24)).item(), int)
