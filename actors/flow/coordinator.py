"""The coordinator of several nodes: agents tell it their batches, and it sends all of them one order between requests.

It runs in a process of its own (`python -m actors.flow.host --coordinate`, or the Ray actor of `app.flow_agent`). On
one node the agent makes the order itself, and so does every agent without a connection to the coordinator: an order of
its own flows alone.
"""

import asyncio
import dataclasses
import logging

from actors.flow.orders import OrderBook, OrderMaker
from actors.wire.channel import Channel, Identity
from actors.wire.messages import BatchArrived, BatchLeft, FlowOrder, Message
from actors.wire.sockets import listen, remove_sockets
from policies.flow.base import FixedPorts, Flow
from policies.flow.events import Ordered

log = logging.getLogger(__name__)


class Coordinator:
    """The server. `port_bytes_per_s` is the bandwidth of a port, by which it estimates when flows end."""

    def __init__(self, me: Identity, drop_share: float, port_bytes_per_s: float) -> None:
        self.me = me
        self.addresses: tuple[str, ...] = ()
        self._book = OrderBook(drop_share)
        loop = asyncio.get_running_loop()
        self._maker = OrderMaker(self._book, FixedPorts(port_bytes_per_s), loop.time, self._tell)
        self._agents: dict[Channel, dict[str, set[str]]] = {}
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
        remove_sockets(self.addresses)
        self._servers = []

    def _new_channel(self) -> Channel:
        return Channel(self.me, self._on_message, self._on_open, self._on_close)

    def _on_open(self, channel: Channel) -> None:
        assert channel.peer is not None
        if channel.peer.kind != "agent":
            channel.abort(f"a coordinator serves agents, and {channel.peer.id} is none")
            return
        self._agents[channel] = {}

    def _on_close(self, channel: Channel, reason: str) -> None:
        requests = self._agents.pop(channel, {})
        if requests:
            log.info("an agent left (%s) with %d open requests", reason, len(requests))
        for keys in requests.values():
            self._forget(keys)

    def _on_message(self, channel: Channel, message: Message) -> None:
        open_requests = self._agents[channel]
        number = id(channel)
        now_s = asyncio.get_running_loop().time()
        match message:
            case BatchArrived():
                for flow in message.flows:
                    key = f"{number}/{flow.flow_id}"
                    open_requests.setdefault(flow.request_id, set()).add(key)
                    self._book.arrived(dataclasses.replace(flow, flow_id=key), now_s)
            case BatchLeft():
                for request_id in message.requests:
                    self._forget(open_requests.pop(request_id, set()))
            case _:
                raise ValueError(f"a coordinator does not take {type(message).__name__}")
        self._maker.plan()

    def _forget(self, keys: set[str]) -> None:
        for key in keys:
            self._book.left(key)
        self._maker.plan()

    def _tell(self, ordered: Ordered) -> None:
        message = FlowOrder(ordered.batches, ordered.pruned)
        for channel in self._agents:
            channel.send(message)
