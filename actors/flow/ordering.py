"""The order between requests at an agent: the coordinator's if one is connected, else one of the agent's own flows."""

import asyncio
from collections.abc import Callable

from actors.flow.orders import OrderBook, OrderMaker
from actors.wire.channel import Channel, Identity
from actors.wire.link import Find, Link
from actors.wire.messages import BatchArrived, BatchLeft, FlowOrder, Message
from policies.flow.base import Flow, Ports
from policies.flow.events import Ordered

LEFT_S = 0.1
"""Seconds after which the coordinator hears what is left of flows that have moved."""


class Ordering:
    """Keeps the book of an agent's flows. `find` finds the coordinator (None: there is none); `apply` takes each new
    order.
    """

    def __init__(
        self,
        me: Identity,
        find: Find | None,
        drop_share: float,
        ports: Ports,
        clock: Callable[[], float],
        apply: Callable[[Ordered], None],
    ) -> None:
        self._book = OrderBook(drop_share)
        self._clock, self._apply = clock, apply
        self._maker = OrderMaker(self._book, ports, clock, self._use, lambda: not self.coordinated)
        self._ports = ports
        self._batch_of: dict[str, str] = {}
        self._lent: set[str] = set()
        self._moved: dict[str, None] = {}
        self._tells: asyncio.TimerHandle | None = None
        self._last = Ordered(())
        self._link: Link | None = None
        if find is not None:
            self._link = Link(me, find, self._told, self._up, self._down, "coordinator")

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator is connected."""
        return self._link is not None and self._link.channel is not None

    def next_order_s(self) -> float | None:
        """Returns the seconds until the next order that the agent makes itself; None if none is due."""
        return self._maker.next_s()

    def start(self) -> None:
        """Connects to the coordinator, if there is one."""
        if self._link is not None:
            self._link.start()

    async def stop(self) -> None:
        """Makes no more orders. Idempotent."""
        self._maker.stop()
        if self._tells is not None:
            self._tells.cancel()
        self._tells = None
        if self._link is not None:
            await self._link.stop()

    def arrived(self, flow: Flow, now_s: float, lent: bool = False) -> None:
        """Takes a submitted flow. The coordinator hears of a `lent` one from the agent that submitted it here."""
        if flow.due_s is None:
            return
        self._book.arrived(flow, now_s)
        if lent:
            self._lent.add(flow.flow_id)
            self._maker.plan()
            return
        self._batch_of[flow.flow_id] = flow.batch
        if not self._tell(flow):
            self._maker.plan()

    def moved(self, flow_id: str, size: int) -> None:
        """Notes that `size` bytes of a flow have arrived. The coordinator hears of it within `LEFT_S`."""
        self._book.moved(flow_id, size)
        if self.coordinated and flow_id in self._batch_of:
            self._moved[flow_id] = None
            if self._tells is None:
                self._tells = asyncio.get_running_loop().call_later(LEFT_S, self._tell_left)

    def left(self, flow_id: str) -> None:
        """Forgets a flow that has ended."""
        if flow_id in self._lent:
            self._lent.discard(flow_id)
            self._book.left(flow_id)
            self._maker.plan()
            return
        batch = self._batch_of.pop(flow_id, None)
        self._moved.pop(flow_id, None)
        if batch is None:
            return
        self._book.left(flow_id)
        if not self._send(BatchLeft(batch, (flow_id,))):
            self._maker.plan()

    def _tell_left(self) -> None:
        self._tells = None
        now_s = self._clock()
        for flow_id in self._moved:
            flow = self._book.flow(flow_id, now_s)
            if flow is not None:
                self._tell(flow)
        self._moved.clear()

    def _tell(self, flow: Flow) -> bool:
        """Tells the coordinator of a flow, and returns whether there is one."""
        if not self.coordinated:
            return False
        return self._send(BatchArrived(flow.batch, (flow,), (self._ports.rate(flow.source, flow.target),)))

    def _send(self, message: Message) -> bool:
        return self._link is not None and self._link.send(message)

    def _told(self, channel: Channel, message: Message) -> None:
        if not isinstance(message, FlowOrder):
            raise ValueError(f"an agent does not take {type(message).__name__} from a coordinator")
        self._use(Ordered(message.batches, message.pruned))

    def _up(self, channel: Channel) -> None:
        for flow in self._book.open_flows(self._clock()):
            if flow.flow_id in self._lent:
                continue
            self._tell(flow)

    def _down(self, reason: str) -> None:
        self._book.changed = True
        self._maker.plan()

    def _use(self, ordered: Ordered) -> None:
        if ordered != self._last:
            self._last = ordered
            self._apply(ordered)
