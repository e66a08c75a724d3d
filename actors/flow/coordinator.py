"""The coordinator of several nodes: agents tell it their batches, and it sends all of them one order between requests.

It runs in a process of its own (`python -m actors.flow.host --coordinate`, or the Ray actor of `app.flow_agent`). On
one node the agent makes the order itself, and so does every agent without a connection to the coordinator, or with one
that is silent: an order of its own flows alone. While there are flows all agents hear a beat. An agent that connects
hears the latest order, because the flows that it holds may all be known from other agents.
"""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.flow.orders import OrderBook, OrderMaker
from actors.wire.channel import Channel, Identity
from actors.wire.messages import BatchArrived, BatchLeft, Beat, FlowOrder, Message
from actors.wire.sockets import listen, remove_sockets
from policies.flow.base import Flow
from policies.flow.config import ArbiterConfig
from policies.flow.events import Ordered

log = logging.getLogger(__name__)

BEAT_S = 0.1
"""Seconds between two beats while there are flows."""


class ToldPorts:
    """The network as agents have learned it: for each pair of nodes what the reader's agent said last, in bytes/s, and
    `usual` for one of which nothing was said.
    """

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._told: dict[tuple[str, str], float] = {}

    def rate(self, source: str, target: str) -> float:
        """Returns B(1-rho) of the slower of the two ports."""
        return self._told.get((source, target), self._usual)

    def tell(self, source: str, target: str, bytes_per_s: float) -> None:
        """Notes what an agent has learned. Raises ValueError for what is no bandwidth."""
        if not 0.0 < bytes_per_s < math.inf:
            raise ValueError(f"a bandwidth is finite and above 0, not {bytes_per_s} bytes/s")
        self._told[source, target] = bytes_per_s

    def forget(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Forgets what was said of pairs of nodes."""
        for pair in pairs:
            self._told.pop(pair, None)


@dataclass(slots=True)
class _Agent:
    """A connected agent: the keys of its open flows in the book, and the pairs of nodes it has spoken of."""

    flows: set[str] = field(default_factory=set)
    pairs: set[tuple[str, str]] = field(default_factory=set)


class Coordinator:
    """The server. It estimates when flows end by the bandwidth that agents tell with them; `port_bytes_per_s` is that
    of a pair of nodes whose agent has gone. An agent that tells of more than `most_flows` open flows at once, which is
    more than its own arbiter holds, or of as many pairs of nodes, is parted from.
    """

    def __init__(
        self,
        me: Identity,
        drop_share: float,
        port_bytes_per_s: float,
        most_flows: int = ArbiterConfig().most_flows,
    ) -> None:
        self.me = me
        self._most_flows = most_flows
        self.addresses: tuple[str, ...] = ()
        self._book = OrderBook(drop_share)
        loop = asyncio.get_running_loop()
        self._ports = ToldPorts(port_bytes_per_s)
        self._maker = OrderMaker(self._book, self._ports, loop.time, self._tell)
        self._agents: dict[Channel, _Agent] = {}
        self._last = Ordered(())
        self._beats: asyncio.TimerHandle | None = None
        self._servers: list[asyncio.Server] = []

    @property
    def agents(self) -> int:
        """The number of agents that are connected."""
        return len(self._agents)

    def open_flows(self) -> list[Flow]:
        """Returns all flows of the order, each with the bytes and the time that are left of it."""
        return self._book.open_flows(asyncio.get_running_loop().time())

    async def start(self, addresses: list[str]) -> None:
        """Listens on all `addresses`."""
        for address in addresses:
            server, bound = await listen(address, self._new_channel, self.me.tls)
            self._servers.append(server)
            self.addresses += (bound,)

    async def stop(self) -> None:
        """Closes every connection; agents then order alone. Idempotent."""
        for server in self._servers:
            server.close()
        for channel in list(self._agents):
            channel.close("the coordinator stops")
        self._maker.stop()
        if self._beats is not None:
            self._beats.cancel()
        self._beats = None
        remove_sockets(self.addresses)
        self._servers = []

    def _new_channel(self) -> Channel:
        return Channel(self.me, self._on_message, self._on_open, self._on_close)

    def _on_open(self, channel: Channel) -> None:
        assert channel.peer is not None
        if channel.peer.kind != "agent":
            channel.abort(f"a coordinator serves agents, and {channel.peer.id} is none")
            return
        self._agents[channel] = _Agent()
        if self._last.batches:
            channel.send(FlowOrder(self._last.batches, self._last.pruned))

    def _on_close(self, channel: Channel, reason: str) -> None:
        agent = self._agents.pop(channel, _Agent())
        if agent.flows:
            log.info("an agent left (%s) with %d open flows", reason, len(agent.flows))
        # an agent that connects again tells before its old connection ends
        self._ports.forget(agent.pairs.difference(*(other.pairs for other in self._agents.values())))
        self._forget(agent.flows)

    def _on_message(self, channel: Channel, message: Message) -> None:
        agent = self._agents[channel]
        number = id(channel)
        now_s = asyncio.get_running_loop().time()
        match message:
            case BatchArrived():
                self._check(agent, number, message)
                for flow, bytes_per_s in zip(message.flows, message.bytes_per_s, strict=True):
                    self._ports.tell(flow.source, flow.target, bytes_per_s)
                    agent.pairs.add((flow.source, flow.target))
                    key = f"{number}/{flow.flow_id}"
                    agent.flows.add(key)
                    self._book.arrived(dataclasses.replace(flow, flow_id=key), now_s)
            case BatchLeft():
                ended = agent.flows & {f"{number}/{flow_id}" for flow_id in message.flows}
                agent.flows -= ended
                self._forget(ended)
            case _:
                raise ValueError(f"a coordinator does not take {type(message).__name__}")
        self._maker.plan()
        if self._beats is None and len(self._book):
            self._beats = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _check(self, agent: _Agent, number: int, message: BatchArrived) -> None:
        """Raises ValueError if the agent then had more flows or pairs of nodes than any agent has; nothing is taken."""
        flows = len(agent.flows) + sum(
            f"{number}/{flow.flow_id}" not in agent.flows for flow in message.flows
        )
        pairs = len(agent.pairs.union([(flow.source, flow.target) for flow in message.flows]))
        if max(flows, pairs) > self._most_flows:
            raise ValueError(
                f"an agent has at most {self._most_flows} open flows and as many pairs of nodes (most_flows of its"
                f" arbiter), not {flows} and {pairs}"
            )

    def _forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._book.left(key)
        self._maker.plan()

    def _beat(self) -> None:
        self._beats = None
        if not len(self._book):
            return
        for channel in self._agents:
            channel.send(Beat())
        self._beats = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _tell(self, ordered: Ordered) -> None:
        self._last = ordered
        message = FlowOrder(ordered.batches, ordered.pruned)
        for channel in self._agents:
            channel.send(message)
