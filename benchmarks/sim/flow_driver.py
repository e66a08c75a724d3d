"""The scheduling of a simulation's flows by a policy of `policies.flow`, on ideal switches or by permits.

    IdealSwitches   the policy's whole order (level, key) is a strict priority in the network, and flows of equal rank
                    share max-min fairly; a rate that the policy sets caps the flow. Changes take effect at once.
    ByPermit        the live arbiter posts chunks: the same `policies.flow.arbiter.Arbiter` as in a node's agent, with
                    its window and the delay of its messages; posted chunks share the network fairly.

A flow is submitted when its data exists (stages 2 and 3) or is known to be needed (stage 1). A place that changes with
time is computed again at the first multiple of `FlowSetup.promote_s` after that, and when its group of layers ends, as
MFS promotes at layer boundaries and at fixed intervals (4.5).

The ideal switches know B(1-rho) of a port (`KnownPorts`); the arbiter learns it from its chunks.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.sim.config import FlowSetup
from benchmarks.sim.kernel import Kernel, Timer
from benchmarks.sim.network.flows import Flow as NetworkFlow
from benchmarks.sim.network.network import Network
from benchmarks.sim.network.topology import Link
from policies.flow.ahead import bands_of
from policies.flow.base import Flow, FlowState, Place, Port, Side, Stage
from policies.flow.registry import flow_policy
from policies.state.views import NodeLoad, PortLoad

KV_STAGES = (Stage.REUSE, Stage.COLLECTIVE, Stage.P2D)
"""The stages that are simulated; a fork of weights is simulated by itself (`benchmarks.sim.fork`)."""


@dataclass(slots=True)
class StageStats:
    """Flows and bytes of one stage that ended while measuring, and the sum of their times from submission to end."""

    flows: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class FlowStats:
    """The measurements of a run's flows in its window: `stages` by `Stage`, and the times that computation stood still.

    `collective_s` is the time of collectives, none of which overlaps with its instance's computation, and `collectives`
    their number. `stalled_s` is the time that groups of layers waited for reused KV. `pruned` are the ids of the
    requests that any order of the run has pruned.
    """

    stages: dict[Stage, StageStats] = field(
        default_factory=lambda: {stage: StageStats() for stage in KV_STAGES}
    )
    collectives: int = 0
    collective_s: float = 0.0
    stalled_s: float = 0.0
    permits: int = 0
    pruned: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Sent:
    """One submitted flow: its state for the policy, `on_done`, and what is on the network for it now."""

    state: FlowState
    on_done: Callable[[], None]
    weight: float
    moving: dict[int, NetworkFlow] = field(default_factory=dict)
    timer: Timer | None = None
    ended: bool = False


class FlowDriver(Protocol):
    """The interface through which engines and transfers of a simulation send their flows."""

    stats: FlowStats

    def send(self, flow: Flow, on_done: Callable[[], None], weight: float = 1.0) -> Sent:
        """Submits a flow; `on_done` is called once, when its last byte has arrived."""

    def cancel(self, sent: Sent) -> None:
        """Ends a flow early; its `on_done` is never called. A flow that has ended stays as it is."""

    def advanced(self, sent: Sent, rli: int) -> None:
        """Notes that the computation has come nearer to the layer that needs the flow."""

    def ordered(self, batches: tuple[str, ...], pruned: tuple[str, ...]) -> None:
        """Takes a new order between requests (Algorithm 1)."""

    def loads(self, nodes: Sequence[str]) -> list[NodeLoad]:
        """Returns what is still to move at the ports of each node, as the flow agent of a node reports it."""


class KnownPorts:
    """B(1-rho) of a pair of nodes: what the slower of their ports gives to scheduled flows.

    rho is the share of other tenants (`network.background`). Scheduled flows are no part of it, as in the live arbiter,
    which learns the throughput that a port has reached and divides own concurrency out (`policies.flow.ports`). Its
    estimate comes to the same where a flow's own ports are the bottleneck; it falls short where others are, which only
    `ByPermit` shows.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._links: dict[tuple[str, str], tuple[tuple[Link, ...], tuple[Link, ...]]] = {}

    def rate(self, source: str, target: str) -> float:
        """Returns B(1-rho) in bytes/s; a flow has one NIC of each node, so the mean of a node's NICs counts."""
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = self._between(source, target)
        return min(sum(map(self._residual, links)) / len(links) for links in found)

    def of(self, port: Port) -> float:
        """Returns B(1-rho) in bytes/s of a node's NICs together, in one direction: what drains all that waits there."""
        node = self._network.topology.node(port.node)
        nics = node.nics_up if port.side is Side.EGRESS else node.nics_down
        links = self._network.topology.links
        return sum(self._residual(links[i]) for i in nics if i is not None)

    def _residual(self, link: Link) -> float:
        return link.bytes_per_s * (1.0 - self._network.background_share(link.name))

    def _between(self, source: str, target: str) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
        topology = self._network.topology
        here, there = topology.node(source), topology.node(target)
        if source == target:
            made = ([here.nvlink], [here.nvlink])
        else:
            made = (list(here.nics_up), list(there.nics_down))
        up, down = (tuple(topology.links[i] for i in links if i is not None) for links in made)
        return up, down


class IdealSwitches:
    """Flows on switches with as many strict priorities as the policy tells apart (module docstring)."""

    def __init__(
        self, setup: FlowSetup, kernel: Kernel, network: Network, measuring: Callable[[], bool]
    ) -> None:
        self.stats = FlowStats()
        self._policy = flow_policy(setup.policy[0], setup.policy[1])
        self._promote_s, self._kernel, self._network = setup.promote_s, kernel, network
        self._measuring, self._ports = measuring, KnownPorts(network)
        self._number = 0
        self._live: dict[int, Sent] = {}
        self._red: dict[str, float] = {}
        self._pruned: frozenset[str] = frozenset()

    def send(self, flow: Flow, on_done: Callable[[], None], weight: float = 1.0) -> Sent:
        now_s = self._kernel.now_s
        self._number += 1
        state = FlowState(flow, self._number, now_s)
        state.red = self._red.get(flow.batch, math.inf)
        state.pruned = flow.request_id in self._pruned
        sent = Sent(state, on_done, weight)
        self._live[state.number] = sent
        place = self._policy.place(state, self._ports, now_s)
        state.stand(place)
        sent.moving[0] = self._network.start(
            flow.source,
            flow.target,
            flow.size,
            strict_level(state),
            lambda _: self._done(sent),
            weight=weight,
            path_key=flow.flow_id,
        )
        self._obey(sent, place)
        return sent

    def cancel(self, sent: Sent) -> None:
        if not sent.ended:
            self._network.cancel(sent.moving[0])
            self._end(sent)

    def advanced(self, sent: Sent, rli: int) -> None:
        if not sent.ended and rli < sent.state.rli:
            sent.state.rli = rli
            self._place(sent)

    def ordered(self, batches: tuple[str, ...], pruned: tuple[str, ...]) -> None:
        self._red = {batch: float(rank) for rank, batch in enumerate(batches)}
        self._pruned = frozenset(pruned)
        self.stats.pruned.update(pruned)
        for sent in list(self._live.values()):
            state = sent.state
            red, is_pruned = self._red.get(state.flow.batch, math.inf), state.flow.request_id in self._pruned
            if (red, is_pruned) != (state.red, state.pruned):
                state.red, state.pruned = red, is_pruned
                self._place(sent)

    def loads(self, nodes: Sequence[str]) -> list[NodeLoad]:
        at: dict[Port, list[tuple[tuple[float, ...], int]]] = {
            Port(node, side): [] for node in nodes for side in Side
        }
        for sent in self._live.values():
            flow, left = sent.state.flow, math.ceil(self._network.remaining_bytes(sent.moving[0]))
            # a flow within a node passes none of its NICs
            if flow.source == flow.target:
                continue
            for port in (Port(flow.source, Side.EGRESS), Port(flow.target, Side.INGRESS)):
                if port in at:
                    at[port].append((sent.state.rank[:-1], left))

        def load(port: Port) -> PortLoad:
            return PortLoad(self._ports.of(port), bands_of(at[port]))

        return [
            NodeLoad(node, load(Port(node, Side.EGRESS)), load(Port(node, Side.INGRESS))) for node in nodes
        ]

    def _place(self, sent: Sent) -> None:
        """Asks the policy again, and has the network follow."""
        state, now_s = sent.state, self._kernel.now_s
        left = math.ceil(self._network.remaining_bytes(sent.moving[0]))
        # The last byte has left; the flow only needs to land.
        if left == 0:
            return
        state.left = min(state.left, left)
        place = self._policy.place(state, self._ports, now_s)
        state.stand(place)
        self._network.set_priority(sent.moving[0], strict_level(state))
        self._obey(sent, place)

    def _obey(self, sent: Sent, place: Place) -> None:
        """Sets the cap of the flow's rate, and the timer for its next place."""
        self._network.set_rate_cap(sent.moving[0], place.rate)
        if sent.timer is not None:
            sent.timer.cancel()
            sent.timer = None
        if place.until_s < math.inf:
            step = self._promote_s
            at_s = (math.floor(max(place.until_s, self._kernel.now_s) / step) + 1) * step
            sent.timer = self._kernel.at(at_s, lambda: self._place(sent))

    def _done(self, sent: Sent) -> None:
        self._end(sent)
        count_ended(self.stats, sent, self._kernel.now_s, self._measuring())
        sent.on_done()

    def _end(self, sent: Sent) -> None:
        sent.ended = True
        if sent.timer is not None:
            sent.timer.cancel()
        del self._live[sent.state.number]


def strict_level(state: FlowState) -> int:
    """Returns the network's level of a placed flow: a whole number that keeps the order of (level, key).

    Flows of equal level and key have equal numbers. The bits of a double that is not negative, read as a whole number,
    keep its order; a negative one (a start that lies before the run) counts as 0.
    """
    place = state.place
    assert place is not None
    made = place.level
    for part in place.key:
        made = made << 64 | struct.unpack(">Q", struct.pack(">d", max(0.0, part)))[0]
    return made


def count_ended(stats: FlowStats, sent: Sent, now_s: float, measuring: bool) -> None:
    if measuring:
        of = stats.stages[sent.state.flow.stage]
        of.flows += 1
        of.bytes += sent.state.flow.size
        of.seconds += now_s - sent.state.submitted_at
