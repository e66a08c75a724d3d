"""The back-off's arithmetic and which errors it repeats."""

from __future__ import annotations

import random

import pytest

from sluice import (
    AuthenticationError,
    BadRequestError,
    ConnectionFailedError,
    EngineFailedError,
    ErrorDetail,
    InvalidResponseError,
    NotFoundError,
    RateLimitedError,
    RequestTimeoutError,
    RetryPolicy,
    ServerError,
    SluiceError,
    StreamInterruptedError,
    UnavailableError,
)
from sluice._errors import parse_retry_after

POLICY = RetryPolicy(max_retries=5, base_delay_s=0.5, max_delay_s=3.0, max_retry_after_s=10.0)


class Fixed(random.Random):
    """Always draws the same number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def random(self) -> float:
        return self._value


# base 0.5 s doubles: 0.5, 1, 2, then the cap 3 instead of 4; half of each with a draw of 0.5.
@pytest.mark.parametrize(
    ("attempt", "delay_s"), [(0, 0.25), (1, 0.5), (2, 1.0), (3, 1.5), (4, 1.5), (5, None)]
)
def test_delay_doubles_up_to_the_cap_and_ends(attempt: int, delay_s: float | None) -> None:
    assert POLICY.delay_s(ConnectionFailedError("x", retryable=True), attempt, Fixed(0.5)) == delay_s


# Retry-After plus the jittered back-off 0.5 * 0.5 = 0.25; above 10 s it is the caller's.
@pytest.mark.parametrize(
    ("asked_s", "delay_s"), [(0.0, 0.25), (4.0, 4.25), (10.0, 10.25), (10.1, None), (None, 0.25)]
)
@pytest.mark.parametrize("kind", [RateLimitedError, UnavailableError])
def test_retry_after_is_a_lower_bound(
    kind: type[RateLimitedError], asked_s: float | None, delay_s: float | None
) -> None:
    error = kind(ErrorDetail("busy", retry_after_s=asked_s))
    assert POLICY.delay_s(error, 0, Fixed(0.5)) == delay_s


DETAIL = ErrorDetail("x")


@pytest.mark.parametrize(
    ("error", "repeated", "repeated_if_idempotent"),
    [
        (ConnectionFailedError("x", retryable=True), True, True),
        (ConnectionFailedError("x"), False, True),
        (StreamInterruptedError("x"), False, False),
        (RequestTimeoutError("x", phase="connect", retryable=True), True, True),
        (RequestTimeoutError("x", phase="read"), False, False),
        (RequestTimeoutError("x", phase="total"), False, False),
        (RateLimitedError(DETAIL), True, True),
        (UnavailableError(DETAIL), True, True),
        (ServerError(DETAIL), False, False),
        (BadRequestError(DETAIL), False, False),
        (AuthenticationError(DETAIL), False, False),
        (NotFoundError(DETAIL), False, False),
        (EngineFailedError(DETAIL), False, False),
        (InvalidResponseError("x"), False, False),
    ],
)
def test_only_what_is_safe_is_repeated(
    error: SluiceError, repeated: bool, repeated_if_idempotent: bool
) -> None:
    assert (POLICY.delay_s(error, 0, Fixed(0.0)) is not None) == repeated
    assert (POLICY.delay_s(error, 0, Fixed(0.0), idempotent=True) is not None) == repeated_if_idempotent


def test_many_attempts_do_not_overflow() -> None:
    policy = RetryPolicy(max_retries=10**6, max_delay_s=2.0)
    assert policy.delay_s(ConnectionFailedError("x", retryable=True), 10**5, Fixed(0.5)) == 1.0


@pytest.mark.parametrize(
    "bad",
    [
        {"max_retries": -1},
        {"base_delay_s": -1.0},
        {"max_delay_s": float("nan")},
        {"max_retry_after_s": float("inf")},
    ],
)
def test_impossible_parameters_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RetryPolicy(**bad)  # type: ignore[arg-type]


# 1994-11-06 08:49:37 GMT (the date of RFC 9110's example) is 784111777 s after the epoch.
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 7.0),
        ("Sun, 06 Nov 1994 08:49:07 GMT", 0.0),
        ("soon", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("", None),
    ],
)
def test_retry_after_header(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, 784111770.0) == seconds
