"""The links of live sim engines (`actors.engine.sim.links`) in virtual time, to repeat live measurements in simulation.

Every sender has its own link into each tier. The n transfers on a link each get 1/n of its bandwidth, and a transfer
arrives `latency_s` after its last byte has left. Links of different senders do not affect each other, nor do links of
one sender into different tiers. Receivers have no limit.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.sim.kernel import Kernel, Timer
from benchmarks.sim.links import Done
from policies.network.oracle import NodePlace, Oracle


class Flow:
    """One transfer. It ends when its link has served `served_at_end` bytes to each transfer since the link began.

    `arrival` is None until all its bytes have left.
    """

    __slots__ = ("arrival", "link", "on_done", "served_at_end")

    def __init__(self, link: "_Link", on_done: Done, served_at_end: float) -> None:
        self.link, self.on_done, self.served_at_end = link, on_done, served_at_end
        self.arrival: Timer | None = None


class _Link:
    """A link with processor sharing: between two changes each of the n flows gets bandwidth / n."""

    def __init__(self, kernel: Kernel, bytes_per_s: float, latency_s: float) -> None:
        self._kernel, self._bytes_per_s, self._latency_s = kernel, bytes_per_s, latency_s
        self._served = self._at_s = self._busy_s = 0.0
        # Cancelled flows stay in the heap until they reach its top.
        self._heap: list[tuple[float, int, Flow]] = []
        self._live: set[Flow] = set()
        self._number = 0
        self._timer: Timer | None = None

    def start(self, n_bytes: int, on_done: Done) -> Flow:
        self._advance()
        flow = Flow(self, on_done, self._served + n_bytes)
        self._number += 1
        self._live.add(flow)
        heapq.heappush(self._heap, (flow.served_at_end, self._number, flow))
        self._set_timer()
        return flow

    def cancel(self, flow: Flow) -> None:
        if flow.arrival is not None:
            flow.arrival.cancel()
        self._advance()
        self._live.discard(flow)
        self._set_timer()

    def busy_s(self) -> float:
        """Returns the seconds until now in which the link carried something."""
        self._advance()
        return self._busy_s

    def _advance(self) -> None:
        now_s = self._kernel.now_s
        if self._live:
            self._served += (now_s - self._at_s) * self._bytes_per_s / len(self._live)
            self._busy_s += now_s - self._at_s
        self._at_s = now_s

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        while self._heap and self._heap[0][2] not in self._live:
            heapq.heappop(self._heap)
        self._timer = None
        if self._heap:
            left = max(0.0, self._heap[0][0] - self._served)
            self._timer = self._kernel.after(left * len(self._live) / self._bytes_per_s, self._end_next)

    def _end_next(self) -> None:
        self._advance()
        _, _, flow = heapq.heappop(self._heap)
        self._live.discard(flow)
        flow.arrival = self._kernel.after(self._latency_s, lambda: flow.on_done(flow))
        self._set_timer()


class SenderLinkNetwork:
    """The `KvNetwork` whose senders each have their own links (module docstring)."""

    def __init__(self, kernel: Kernel, setup: "SenderLinks") -> None:
        self._kernel, self._setup = kernel, setup
        self._tiers = setup.oracle()
        self._links: dict[tuple[str, int], _Link] = {}
        self._marked_s: dict[tuple[str, int], float] = {}
        self._mark_s = 0.0

    def start(
        self,
        source: str,
        target: str,
        n_bytes: int,
        priority: int,
        on_done: Done,
        **path: Any,
    ) -> Flow:
        tier = self.tier(source, target)
        key = source, tier
        if key not in self._links:
            setup = self._setup
            self._links[key] = _Link(self._kernel, setup.bytes_per_s[tier], setup.latency_s[tier])
        return self._links[key].start(n_bytes, on_done)

    def cancel(self, flow: Flow) -> None:
        flow.link.cancel(flow)

    def tier(self, source: str, target: str) -> int:
        """Returns the tier of two nodes; for nodes without a place it is the farthest tier that has a bandwidth."""
        found = self._tiers.tier(source, source, target, target)
        assert found is not None  # SenderLinks has a tier
        return found

    def mark(self) -> None:
        self._mark_s = self._kernel.now_s
        self._marked_s = {key: link.busy_s() for key, link in self._links.items()}

    def link_use(self) -> dict[str, float]:
        """Returns the busy share since the last `mark` by tier, a mean over the links that have carried something."""
        wall_s = self._kernel.now_s - self._mark_s
        by_tier: dict[int, list[float]] = {}
        for key, link in self._links.items():
            by_tier.setdefault(key[1], []).append(link.busy_s() - self._marked_s.get(key, 0.0))
        if wall_s <= 0:
            return {}
        return {f"tier {tier}": sum(busy) / len(busy) / wall_s for tier, busy in sorted(by_tier.items())}


@dataclass(frozen=True, slots=True)
class SenderLinks:
    """The setup of a `SenderLinkNetwork`, for `benchmarks.sim.config.SimConfig.network`.

    `bytes_per_s` and `latency_s` are by tier, `places` by node. Every worker is on its own node. The oracle has these
    values and never changes, like a live router's network file.
    """

    bytes_per_s: Mapping[int, float]
    latency_s: Mapping[int, float]
    places: Mapping[str, NodePlace]
    oracle_s: float | None = 3600.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s or self.bytes_per_s.keys() != self.latency_s.keys():
            raise ValueError(
                "sender links: give a bandwidth and a latency for each of the same tiers, one at least"
            )
        self.oracle()

    def oracle(self) -> Oracle:
        """Returns the oracle of these tiers and places. Raises OracleError for impossible values."""
        return Oracle(self.bytes_per_s, self.latency_s, places=self.places)

    def build(self, kernel: Kernel, seed: int) -> tuple[SenderLinkNetwork, Callable[[float], Oracle]]:
        """Returns a new network on `kernel`, and a function from a time to the oracle, which is always the same."""
        told = self.oracle()
        return SenderLinkNetwork(kernel, self), lambda now_s: told
