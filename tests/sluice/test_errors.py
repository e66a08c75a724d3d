"""Errors cross process borders intact, and what they say."""

from __future__ import annotations

import pickle

import pytest

from sluice import (
    BadRequestError,
    ConfigurationError,
    ConnectionFailedError,
    EngineFailedError,
    ErrorDetail,
    InvalidResponseError,
    RateLimitedError,
    RequestTimeoutError,
    SluiceError,
    StreamInterruptedError,
)

DETAIL = ErrorDetail("why", 429, "rate", "n", "queue_full", "req-1", 2.5)


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("a"),
        ConnectionFailedError("a", retryable=True),
        StreamInterruptedError("a"),
        RequestTimeoutError("a", phase="connect", retryable=True),
        InvalidResponseError("a"),
        BadRequestError(DETAIL),
        RateLimitedError(DETAIL),
        EngineFailedError(DETAIL),
    ],
)
def test_errors_can_be_pickled(error: SluiceError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert copy.retryable == error.retryable


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        (DETAIL, "429 queue_full: why (field: n) [request req-1]"),
        (ErrorDetail("why", 400, "bad_request"), "400 bad_request: why"),
        (ErrorDetail("why", 400), "400: why"),
        (ErrorDetail("why"), "stream error: why"),
    ],
)
def test_text(detail: ErrorDetail, text: str) -> None:
    assert str(BadRequestError(detail)) == text
