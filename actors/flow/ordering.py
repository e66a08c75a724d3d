"""The order between requests at an agent: the coordinator's if one is connected and speaks, else one of the agent's own
flows.

A coordinator that has flows beats. One that was stopped keeps its connections for some seconds, in which no order would
name the batches that arrive; so an agent that has flows orders alone when it has heard nothing for `ALONE_S`. It goes
on telling, and takes the coordinator's order again as soon as it hears of it.
"""

import asyncio
import logging
from collections.abc import Callable

from actors.flow.orders import OrderBook, OrderMaker
from actors.loop_timeout import LoopTimeout
from actors.wire.channel import Channel, Identity
from actors.wire.link import Find, Link
from actors.wire.messages import BatchArrived, BatchLeft, Beat, FlowOrder, Message
from policies.flow.base import Flow, Ports
from policies.flow.events import Ordered

log = logging.getLogger(__name__)

LEFT_S = 0.1
"""Seconds after which the coordinator hears what is left of flows that have moved."""
ALONE_S = 0.5
"""Own running time after which an agent does without a coordinator that says nothing: five missing beats
(`coordinator.BEAT_S`). ASSUMPTION: longer than a busy machine keeps a process waiting, as `AgentConfig.lost_s` is.
"""


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
        # the latest order of the coordinator that is connected, and what ends the wait for its next word
        self._told_order: Ordered | None = None
        self._silence: LoopTimeout | None = None
        self._silent = False
        self._link: Link | None = None
        if find is not None:
            self._link = Link(me, find, self._told, self._up, self._down, "coordinator")

    @property
    def connected(self) -> bool:
        """Whether a coordinator is connected, silent or not."""
        return self._link is not None and self._link.channel is not None

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator is connected that is not silent."""
        return self.connected and not self._silent

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
        self._wait_no_more()
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
        else:
            self._batch_of[flow.flow_id] = flow.batch
            self._tell(flow)
        if self._silence is None and self.coordinated:
            # it beats only while it has flows, so its silence counts from here on
            self._wait()
        self._maker.plan()

    def moved(self, flow_id: str, size: int) -> None:
        """Notes that `size` bytes of a flow have arrived. The coordinator hears of it within `LEFT_S`."""
        self._book.moved(flow_id, size)
        if self.connected and flow_id in self._batch_of:
            self._moved[flow_id] = None
            if self._tells is None:
                self._tells = asyncio.get_running_loop().call_later(LEFT_S, self._tell_left)

    def left(self, flow_id: str) -> None:
        """Forgets a flow that has ended."""
        self._book.left(flow_id)
        self._lent.discard(flow_id)
        self._moved.pop(flow_id, None)
        batch = self._batch_of.pop(flow_id, None)
        if batch is not None:
            self._send(BatchLeft(batch, (flow_id,)))
        if not len(self._book):
            self._wait_no_more()
        self._maker.plan()

    def _tell_left(self) -> None:
        self._tells = None
        now_s = self._clock()
        for flow_id in self._moved:
            flow = self._book.flow(flow_id, now_s)
            if flow is not None:
                self._tell(flow)
        self._moved.clear()

    def _tell(self, flow: Flow) -> None:
        """Tells the coordinator of a flow, if there is one."""
        self._send(BatchArrived(flow.batch, (flow,), (self._ports.rate(flow.source, flow.target),)))

    def _tell_all(self) -> None:
        """Tells the coordinator of all flows but those of which it hears from other agents."""
        for flow in self._book.open_flows(self._clock()):
            if flow.flow_id not in self._lent:
                self._tell(flow)

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    # -------------------------------------------------------------------------------------------- the coordinator

    def _told(self, channel: Channel, message: Message) -> None:
        if isinstance(message, FlowOrder):
            self._told_order = Ordered(message.batches, message.pruned)
        elif not isinstance(message, Beat):
            raise ValueError(f"an agent does not take {type(message).__name__} from a coordinator")
        speaks_again, self._silent = self._silent, False
        self._wait()
        if speaks_again:
            log.info("the coordinator speaks again: its order counts")
        if self._told_order is not None and (speaks_again or isinstance(message, FlowOrder)):
            self._use(self._told_order)

    def _wait(self) -> None:
        """Waits for the coordinator's next word from now on, as long as this agent has flows."""
        self._wait_no_more()
        if len(self._book):
            self._silence = LoopTimeout(ALONE_S, self._unheard)

    def _wait_no_more(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = None

    def _unheard(self) -> None:
        log.info("the coordinator was silent for %g s: the order is made here alone", ALONE_S)
        self._silence, self._silent = None, True
        self._order_alone()

    def _up(self, channel: Channel) -> None:
        self._told_order, self._silent = None, False
        self._tell_all()
        self._wait()

    def _down(self, reason: str) -> None:
        self._silent = False
        self._wait_no_more()
        self._order_alone()

    def _order_alone(self) -> None:
        self._book.changed = True
        self._maker.plan()

    def _use(self, ordered: Ordered) -> None:
        if ordered != self._last:
            self._last = ordered
            self._apply(ordered)
