"""A bound on the traces that clients force: by `traceparent` with the sampled flag, by a trace id that a sampler takes,
or by asking for the request's times. Without it any client could have everything traced, at every process.

    free(t)    what is free at t: `rate_per_s` a second, at most one second's or 1; each forced trace takes 1
"""


class ForcedTraces:
    """The room for traces that clients force. `rate_per_s` None: no bound; 0: none may be forced."""

    def __init__(self, rate_per_s: float | None) -> None:
        self._rate_per_s = rate_per_s
        self._most = max(1.0, rate_per_s) if rate_per_s else 0.0
        self._free, self._at_s = self._most, 0.0

    def take(self, now_s: float) -> bool:
        """Returns whether one more trace may be forced, and then counts it."""
        if self._rate_per_s is None:
            return True
        self._free = min(self._most, self._free + self._rate_per_s * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        if self._free < 1.0:
            return False
        self._free -= 1.0
        return True
