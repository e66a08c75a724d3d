"""Decides when to send a request again, and after how long: exponential back-off with full jitter.

delay = U(0, 1) * min(max_delay_s, base_delay_s * 2^attempt) ("full jitter", Brooker, AWS Architecture Blog, 2015)

A Retry-After of the server is a lower bound: the delay is that long plus the jittered part, so that clients that were
refused together do not come back together. A request is repeated only if the server did no work for it, or if a repeat
changes nothing (a GET).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ._errors import ApiError, ConnectionFailedError, SluiceError, StreamInterruptedError


@dataclass(frozen=True)
class RetryPolicy:
    """Parameters of the back-off.

    `max_retries` is the number of attempts after the first; 0 switches retries off. The module's formula has
    `base_delay_s` and `max_delay_s`. If the server asks for a wait above `max_retry_after_s`, the error is raised at
    once; the default is the longest that Sluice asks for in an overload.
    """

    max_retries: int = 3
    base_delay_s: float = 0.25
    max_delay_s: float = 8.0
    max_retry_after_s: float = 75.0

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"RetryPolicy: max_retries must be 0 or more, got {self.max_retries}")
        for name in ("base_delay_s", "max_delay_s", "max_retry_after_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"RetryPolicy: {name} must be a finite number of seconds, 0 or more, got {value!r}"
                )

    def delay_s(
        self, error: SluiceError, attempt: int, rng: random.Random, *, idempotent: bool = False
    ) -> float | None:
        """Returns the seconds to wait before the attempt after `attempt` (0 is the first), or None to raise the error.

        `idempotent` (a GET) also allows a repeat after a connection that broke while the answer was awaited.
        """
        broken = isinstance(error, ConnectionFailedError) and not isinstance(error, StreamInterruptedError)
        if attempt >= self.max_retries or not (error.retryable or (idempotent and broken)):
            return None
        backoff_s = rng.random() * min(self.max_delay_s, self.base_delay_s * 2.0 ** min(attempt, 60))
        asked_s = error.retry_after_s if isinstance(error, ApiError) else None
        if asked_s is None:
            return backoff_s
        return None if asked_s > self.max_retry_after_s else asked_s + backoff_s
