"""A flow, and the bundle of flows that share its path and level: how many bytes each still has to send.

All flows of a bundle have the same rate per weight, so one number, `served` (bytes per weight since the bundle began),
tells the state of all: a flow that joins at served = v ends when served = v + bytes / weight. The next to end is the
top of a heap, and the bundle's own clock moves only when its rate or its weight changes.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.sim.kernel import Timer
from benchmarks.sim.network.fairshare import Bundle


class FlowError(ValueError):
    """A flow that cannot be started or changed; the message names it and says why."""


class FlowState(StrEnum):
    """`SENDING` until the last byte has left, `LANDING` for the latency after it."""

    SENDING = "sending"
    LANDING = "landing"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class Flow:
    """One transfer of `n_bytes`; times in seconds of virtual time, None = not yet. Level 0 is the most urgent."""

    id: int
    source: str
    target: str
    n_bytes: int
    level: int
    weight: float
    tier: int
    links: tuple[int, ...]
    # Seconds alone on its path: bytes / B_tier + L_tier.
    ideal_s: float
    latency_s: float
    started_s: float
    on_done: "Callable[[Flow], None] | None"
    state: FlowState = FlowState.SENDING
    done_s: float | None = None
    bundle: "FlowBundle | None" = None
    # Value of `bundle.served` at which the last byte leaves.
    ends_at: float = 0.0
    entry: int = 0  # the one heap entry that counts
    landing: Timer | None = None

    @property
    def active(self) -> bool:
        return self.state in (FlowState.SENDING, FlowState.LANDING)

    @property
    def duration_s(self) -> float | None:
        """From start to the last byte's arrival; None until then."""
        return None if self.done_s is None else self.done_s - self.started_s


class FlowBundle(Bundle):
    """See the module's docstring. `moved_bytes` counts what the bundle has sent so far."""

    __slots__ = ("_heap", "count", "generation", "moved_bytes", "served", "served_at_s", "tier")

    def __init__(self, bundle_id: int, links: tuple[int, ...], level: int, tier: int, now_s: float) -> None:
        super().__init__(bundle_id, links, level)
        self.tier, self.served, self.served_at_s, self.moved_bytes = tier, 0.0, now_s, 0.0
        self.count = 0
        # The entry in the network's heap of due times that counts.
        self.generation = 0
        self._heap: list[tuple[float, int, Flow]] = []

    def settle(self, now_s: float) -> None:
        """Brings `served` and `moved_bytes` to now."""
        if now_s > self.served_at_s:
            self._serve(self.rate * (now_s - self.served_at_s), now_s)

    def set_rate(self, rate: float, now_s: float) -> None:
        self.settle(now_s)
        self.rate = rate

    def join(self, flow: Flow, remaining_bytes: float, entry: int, now_s: float) -> None:
        self.settle(now_s)
        flow.bundle, flow.entry = self, entry
        flow.ends_at = self.served + remaining_bytes / flow.weight
        heapq.heappush(self._heap, (flow.ends_at, entry, flow))
        self.count += 1
        self.weight += flow.weight

    def leave(self, flow: Flow, now_s: float) -> float:
        """Takes a flow out; returns the bytes it had still to send."""
        self.settle(now_s)
        remaining = self.remaining_bytes(flow, now_s)
        self._forget(flow)
        return remaining

    def remaining_bytes(self, flow: Flow, now_s: float) -> float:
        served = self.served + self.rate * (now_s - self.served_at_s)
        return min(float(flow.n_bytes), max(0.0, (flow.ends_at - served) * flow.weight))

    def due_s(self) -> float:
        """When the next flow's last byte leaves at the present rate; infinity when none sends."""
        heap = self._heap
        while heap and heap[0][2].entry != heap[0][1]:
            heapq.heappop(heap)
        if not heap or self.rate <= 0.0:
            return math.inf
        return self.served_at_s + max(0.0, heap[0][0] - self.served) / self.rate

    def pop_due(self, now_s: float) -> list[Flow]:
        """The flows whose last byte leaves now; none if a change of this instant has put the end off."""
        if self.due_s() > now_s:
            return []
        ends_at = self._heap[0][0]
        # Serving rate * time instead could leave a rest, by rounding.
        self._serve(max(0.0, ends_at - self.served), now_s)
        done = []
        while self._heap and self._heap[0][0] <= ends_at:
            _, entry, flow = heapq.heappop(self._heap)
            if flow.entry == entry:
                self._forget(flow)
                done.append(flow)
        return done

    def _serve(self, per_weight: float, now_s: float) -> None:
        self.served += per_weight
        self.moved_bytes += per_weight * self.weight
        self.served_at_s = now_s

    def _forget(self, flow: Flow) -> None:
        flow.bundle, flow.entry = None, 0
        self.count -= 1
        self.weight = self.weight - flow.weight if self.count else 0.0
