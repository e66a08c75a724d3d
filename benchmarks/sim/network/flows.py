"""Flows, and bundles of flows that share a path and a level; they know how many bytes each flow still has to send.

All flows of a bundle have the same rate per weight. So one number, `served` (bytes per weight since the bundle began),
gives the state of every flow: a flow that joins at served = v ends when served = v + bytes / weight. The next flow to
end is the top of a heap. `served` is updated only when the bundle's rate or weight changes.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.sim.kernel import Timer
from benchmarks.sim.network.fairshare import Bundle


class FlowError(ValueError):
    """The error of a flow that cannot be started or changed; the message names the flow and says why."""


class FlowState(StrEnum):
    """The states of a flow: it is `SENDING` until its last byte has left, then `LANDING` for the latency."""

    SENDING = "sending"
    LANDING = "landing"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class Flow:
    """One transfer of `n_bytes`. Times are seconds of virtual time, None until they are known. Level 0 goes first."""

    id: int
    source: str
    target: str
    n_bytes: int
    level: int
    weight: float
    tier: int
    links: tuple[int, ...]
    # `ideal_s` is the seconds that the flow takes alone on its path: bytes / B_tier + L_tier.
    ideal_s: float
    latency_s: float
    started_s: float
    on_done: "Callable[[Flow], None] | None"
    state: FlowState = FlowState.SENDING
    done_s: float | None = None
    bundle: "FlowBundle | None" = None
    # `ends_at` is the value of `bundle.served` at which the last byte leaves.
    ends_at: float = 0.0
    # The number of the flow's one valid entry in its bundle's heap.
    entry: int = 0
    landing: Timer | None = None
    # The private link that holds the flow to its `rate_cap`; it is the last of `links`. None for a flow without a cap.
    cap_link: int | None = None

    @property
    def active(self) -> bool:
        return self.state in (FlowState.SENDING, FlowState.LANDING)

    @property
    def duration_s(self) -> float | None:
        """The seconds from the start to the arrival of the last byte, or None before that."""
        return None if self.done_s is None else self.done_s - self.started_s


class FlowBundle(Bundle):
    """A bundle that knows how many bytes its flows still have to send (module docstring).

    `moved_bytes` counts the bytes that it has sent.
    """

    __slots__ = ("_heap", "count", "generation", "moved_bytes", "served", "served_at_s", "tier")

    def __init__(self, bundle_id: int, links: tuple[int, ...], level: int, tier: int, now_s: float) -> None:
        super().__init__(bundle_id, links, level)
        self.tier, self.served, self.served_at_s, self.moved_bytes = tier, 0.0, now_s, 0.0
        self.count = 0
        # The number of the bundle's one valid entry in the network's heap of due times.
        self.generation = 0
        self._heap: list[tuple[float, int, Flow]] = []

    def settle(self, now_s: float) -> None:
        """Updates `served` and `moved_bytes` to `now_s`."""
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
        """Removes a flow; returns the bytes that it had still to send."""
        self.settle(now_s)
        remaining = self.remaining_bytes(flow, now_s)
        self._forget(flow)
        return remaining

    def remaining_bytes(self, flow: Flow, now_s: float) -> float:
        served = self.served + self.rate * (now_s - self.served_at_s)
        return min(float(flow.n_bytes), max(0.0, (flow.ends_at - served) * flow.weight))

    def due_s(self) -> float:
        """Returns the time (s) when the next flow's last byte leaves at the present rate, or infinity if none sends."""
        heap = self._heap
        while heap and heap[0][2].entry != heap[0][1]:
            heapq.heappop(heap)
        if not heap or self.rate <= 0.0:
            return math.inf
        return self.served_at_s + max(0.0, heap[0][0] - self.served) / self.rate

    def pop_due(self, now_s: float) -> list[Flow]:
        """Removes and returns the flows whose last byte leaves now.

        The list is empty if a change at this instant has postponed the end.
        """
        if self.due_s() > now_s:
            return []
        ends_at = self._heap[0][0]
        # Serving rate * time instead could leave a remainder by rounding.
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
