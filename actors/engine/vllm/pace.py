"""How often an engine core looks around while it only waits for KV to be fetched or pulled.

vLLM's core steps its workers hundreds of times a second as long as a lease or a transfer is open, even when it computes
nothing: on a CPU engine that is a whole core for the worker and a third of another for the core process. A transfer
ends within milliseconds, a lease may last for seconds: so the pauses grow with the time that nothing has happened.
"""

LONGEST_S = 0.005  # what a request may wait that arrives while the core only keeps leases
GROWTH = 0.05  # pause as a share of the time without an event: the longest after 0.1 s


class Pace:
    """Pauses between idle steps. Times are from any monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._quiet_since_s: float | None = None

    def event(self) -> None:
        """Something was computed, or a transfer or lease ended: look often again."""
        self._quiet_since_s = None

    def pause_s(self, now_s: float) -> float:
        """How long to pause before the next idle step."""
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        return min(LONGEST_S, (now_s - self._quiet_since_s) * GROWTH)
