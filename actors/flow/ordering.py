"""The order between requests at an agent: the coordinator's if one is connected, else one of the agent's own flows."""

import asyncio
from collections import Counter
from collections.abc import Callable

from actors.flow.orders import OrderBook
from actors.wire.channel import Channel, Identity
from actors.wire.link import Find, Link
from actors.wire.messages import BatchArrived, BatchLeft, FlowOrder, Message
from policies.flow.base import Flow, Ports
from policies.flow.events import Ordered

ORDER_S = 0.005
"""Least seconds between two orders; what arrives meanwhile is ordered together."""


class Ordering:
    """Keeps the book of an agent's flows. `apply` takes each new order."""

    def __init__(
        self,
        me: Identity,
        coordinator: str,
        drop_share: float,
        ports: Ports,
        clock: Callable[[], float],
        apply: Callable[[Ordered], None],
    ) -> None:
        self._book = OrderBook(drop_share)
        self._ports, self._clock, self._apply = ports, clock, apply
        self._requests: Counter[str] = Counter()
        self._of: dict[str, tuple[str, str]] = {}
        self._due: asyncio.TimerHandle | None = None
        self._last = Ordered(())
        self._link: Link | None = None
        if coordinator:
            self._link = Link(me, _at(coordinator), self._told, self._up, self._down, "coordinator")

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator is connected."""
        return self._link is not None and self._link.channel is not None

    def start(self) -> None:
        """Connects to the coordinator, if there is one."""
        if self._link is not None:
            self._link.start()

    async def stop(self) -> None:
        """Makes no more orders. Idempotent."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._link is not None:
            await self._link.stop()

    def arrived(self, flow: Flow, now_s: float) -> None:
        """Takes a submitted flow."""
        if flow.due_s is None:
            return
        self._book.arrived(flow, now_s)
        self._requests[flow.request_id] += 1
        self._of[flow.flow_id] = (flow.batch, flow.request_id)
        if not self._send(BatchArrived(flow.batch, (flow,))):
            self._plan()

    def left(self, flow_id: str) -> None:
        """Forgets a flow that has ended."""
        batch, request_id = self._of.pop(flow_id, ("", ""))
        if not batch:
            return
        self._book.left(flow_id)
        self._requests[request_id] -= 1
        if self._requests[request_id] > 0:
            return
        del self._requests[request_id]
        if not self._send(BatchLeft(batch, (request_id,))):
            self._plan()

    def _send(self, message: Message) -> bool:
        return self._link is not None and self._link.send(message)

    def _told(self, channel: Channel, message: Message) -> None:
        if not isinstance(message, FlowOrder):
            raise ValueError(f"an agent does not take {type(message).__name__} from a coordinator")
        self._use(Ordered(message.batches, message.pruned))

    def _up(self, channel: Channel) -> None:
        for flow in self._book.open_flows(self._clock()):
            channel.send(BatchArrived(flow.batch, (flow,)))

    def _down(self, reason: str) -> None:
        self._book.changed = True
        self._plan()

    def _plan(self) -> None:
        if self._book.changed and self._due is None:
            self._due = asyncio.get_running_loop().call_later(ORDER_S, self._order)

    def _order(self) -> None:
        self._due = None
        if not self.coordinated:
            self._use(self._book.order(self._ports, self._clock()))

    def _use(self, ordered: Ordered) -> None:
        if ordered != self._last:
            self._last = ordered
            self._apply(ordered)


def _at(address: str) -> Find:
    async def find() -> tuple[str, ...]:
        return (address,)

    return find
