"""Traffic over the network: bytes by tier and by link, and the use of links between two moments.

In every tier bytes are conserved: started = delivered + cancelled + in flight. A cancelled flow's unsent bytes count as
cancelled. The bytes that it had sent count as delivered, because they did use the links.
"""

from dataclasses import dataclass, field

from benchmarks.sim.network.flows import Flow
from benchmarks.sim.network.topology import LINK_CLASSES, Topology


@dataclass(slots=True)
class TierTotals:
    """Flows and bytes of one tier since the beginning; `duration_s` and `ideal_s` are sums over the finished flows."""

    started: int = 0
    finished: int = 0
    cancelled: int = 0
    started_bytes: int = 0
    delivered_bytes: float = 0.0
    cancelled_bytes: float = 0.0
    duration_s: float = 0.0
    ideal_s: float = 0.0


@dataclass(slots=True)
class Totals:
    """Flows and bytes by tier; a tier that had no flow is absent."""

    tiers: dict[int, TierTotals] = field(default_factory=dict)

    def start(self, flow: Flow) -> None:
        tier = self.tiers.setdefault(flow.tier, TierTotals())
        tier.started += 1
        tier.started_bytes += flow.n_bytes

    def finish(self, flow: Flow) -> None:
        assert flow.duration_s is not None
        tier = self.tiers[flow.tier]
        tier.finished += 1
        tier.delivered_bytes += flow.n_bytes
        tier.duration_s += flow.duration_s
        tier.ideal_s += flow.ideal_s

    def cancel(self, flow: Flow, remaining_bytes: float) -> None:
        tier = self.tiers[flow.tier]
        tier.cancelled += 1
        tier.delivered_bytes += flow.n_bytes - remaining_bytes
        tier.cancelled_bytes += remaining_bytes

    def delivered(self) -> dict[int, int]:
        """Returns the delivered bytes by tier, for `RunResult.tier_bytes`."""
        return {tier: round(totals.delivered_bytes) for tier, totals in sorted(self.tiers.items())}


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes that simulated flows have sent over each link (by index) from the beginning to `at_s`."""

    at_s: float
    link_bytes: tuple[float, ...]


def link_use(topology: Topology, begin: Usage, end: Usage) -> dict[str, float]:
    """Returns by link name the mean share of its nominal capacity that simulated flows used between the two moments.

    Raises ValueError where no time lies between them.
    """
    seconds = end.at_s - begin.at_s
    if not seconds > 0:
        raise ValueError(
            f"link use from {begin.at_s} s to {end.at_s} s: the end must lie behind the beginning"
        )
    return {
        link.name: (end.link_bytes[link.index] - begin.link_bytes[link.index]) / seconds / link.bytes_per_s
        for link in topology.links
    }


def class_use(topology: Topology, begin: Usage, end: Usage) -> dict[str, float]:
    """Returns the mean of `link_use` over each class of links that the topology has, for `RunResult.link_use`."""
    by_name = link_use(topology, begin, end)
    shares: dict[str, list[float]] = {kind: [] for kind in LINK_CLASSES}
    for link in topology.links:
        shares[link.kind].append(by_name[link.name])
    return {kind: sum(values) / len(values) for kind, values in shares.items() if values}
