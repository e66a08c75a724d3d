"""The flows that an order between requests is made of (MFS 4.4.2, Algorithm 1), of one agent or of many.

A flow with a deadline counts from its submission to its end, with the bytes that are left of it. Whoever keeps the book
makes the order anew when a batch has arrived or left (`changed`), at the times that a `Pace` allows.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.flow.base import Flow, Port, Ports, Side
from policies.flow.events import Ordered
from policies.flow.inter_request import Batch, RequestLoad, schedule_steps

log = logging.getLogger(__name__)

ORDER_S = 0.005
"""Least seconds between two orders; what arrives meanwhile is ordered together."""
MOST_SHARE = 0.05
"""Most of its process's time that the making of orders takes. `python -m benchmarks.permits` times one: 10 ms of CPU
for 1,000 flows and 180 for 10,000, on 2 busy cores.
"""
SLICE_S = 0.001
"""Seconds for which an order is made at a time; for as long the agent then does other work. It is the aim for the
median of a permit's delay (`python -m benchmarks.permits`).
"""


@dataclass(slots=True)
class Pace:
    """The times of orders: at least `ORDER_S` apart, and so far that they take `MOST_SHARE` of the time at most."""

    took_s: float = 0.0
    """Seconds that the latest order took."""

    def wait_s(self) -> float:
        """Returns the seconds from the end of the latest order, or from now, to the next one."""
        return max(ORDER_S, self.took_s * (1.0 / MOST_SHARE - 1.0))


class _Ends(NamedTuple):
    """The two ports of a flow."""

    egress: Port
    ingress: Port


@dataclass(slots=True)
class _Open:
    flow: Flow
    due_at: float
    left: int
    ends: _Ends


@dataclass(slots=True)
class OrderBook:
    """All open flows with deadlines, by their ids. At most the share `drop_share` of their requests is pruned."""

    drop_share: float
    changed: bool = False
    _open: dict[str, _Open] = field(default_factory=dict)
    _batches: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def arrived(self, flow: Flow, now_s: float) -> None:
        """Takes a submitted flow. One without a deadline has no part in the order.

        A flow that is open already is the same one, of which `flow.size` bytes are left.
        """
        if flow.due_s is None:
            return
        known = self._open.get(flow.flow_id)
        if known is not None:
            known.left, known.due_at = flow.size, now_s + flow.due_s
            return
        ends = _Ends(Port(flow.source, Side.EGRESS), Port(flow.target, Side.INGRESS))
        self._open[flow.flow_id] = _Open(flow, now_s + flow.due_s, flow.size, ends)
        self._batches[flow.batch] = self._batches.get(flow.batch, 0) + 1
        self.changed = True

    def moved(self, flow_id: str, size: int) -> None:
        """Notes that `size` bytes of a flow have arrived. Does nothing for a flow that has no part in the order."""
        known = self._open.get(flow_id)
        if known is not None:
            known.left = max(0, known.left - size)

    def left(self, flow_id: str) -> None:
        """Forgets a flow that has ended, or that never had a deadline."""
        known = self._open.pop(flow_id, None)
        if known is None:
            return
        batch = known.flow.batch
        self._batches[batch] -= 1
        if not self._batches[batch]:
            del self._batches[batch]
            self.changed = True

    def flow(self, flow_id: str, now_s: float) -> Flow | None:
        """Returns an open flow with the bytes and the time that are left of it; None if no byte is left."""
        known = self._open.get(flow_id)
        if known is None or not known.left:
            return None
        return dataclasses.replace(known.flow, size=known.left, due_s=known.due_at - now_s)

    def open_flows(self, now_s: float) -> list[Flow]:
        """Returns all flows as `flow` does."""
        found = (self.flow(flow_id, now_s) for flow_id in self._open)
        return [flow for flow in found if flow is not None]

    def order(self, ports: Ports, now_s: float) -> Ordered:
        """Returns the order of all batches by RED, with the requests that Algorithm 1 prunes."""
        steps = self.order_steps(ports, now_s)
        while True:
            try:
                next(steps)
            except StopIteration as made:
                ordered: Ordered = made.value
                return ordered

    def order_steps(self, ports: Ports, now_s: float) -> Generator[None, None, Ordered]:
        """Makes the order in small steps, between which flows may come and go; they count in the next order."""
        self.changed = False
        members: dict[str, dict[str, _Request]] = {}
        taken: dict[str, str] = {}
        bandwidth: dict[Port, float] = {}
        rates: dict[_Ends, float] = {}
        for each in list(self._open.values()):
            flow, ends = each.flow, each.ends
            # a request belongs to one batch, that of its first flow
            batch = taken.setdefault(flow.request_id, flow.batch)
            requests = members.get(batch)
            if requests is None:
                requests = members[batch] = {}
            request = requests.get(flow.request_id)
            if request is None:
                request = requests[flow.request_id] = _Request(each.due_at)
            request.due_at = min(request.due_at, each.due_at)
            request.compute_s = max(request.compute_s, flow.compute_s)
            rate = rates.get(ends)
            if rate is None:
                rate = rates[ends] = ports.rate(flow.source, flow.target)
            for port in ends:
                request.load[port] = request.load.get(port, 0) + each.left
                bandwidth[port] = max(bandwidth.get(port, 0.0), rate)
            yield
        batches = []
        for name, requests in members.items():
            loads = tuple(RequestLoad(each, one.due_at, one.load) for each, one in requests.items())
            batches.append(Batch(name, loads, max(one.compute_s for one in requests.values())))
            yield
        order = yield from schedule_steps(batches, bandwidth, int(self.drop_share * len(taken)), now_s)
        return order.event()


class OrderMaker:
    """Makes the orders of a book on the event loop, in slices, at a pace. `use` gets each order; none is begun while
    `wanted` returns False.
    """

    def __init__(
        self,
        book: OrderBook,
        ports: Ports,
        clock: Callable[[], float],
        use: Callable[[Ordered], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._book, self._ports, self._clock, self._use, self._wanted = book, ports, clock, use, wanted
        self._pace = Pace()
        self._due: asyncio.TimerHandle | None = None
        self._steps: Generator[None, None, Ordered] | None = None
        self._took_s = 0.0

    def next_s(self) -> float | None:
        """Returns the seconds until it works on; None if nothing is due."""
        return None if self._due is None else self._due.when() - asyncio.get_running_loop().time()

    def plan(self) -> None:
        """Sees to it that an order is made soon if the book has changed and one is wanted."""
        if self._book.changed and self._due is None and self._wanted():
            self._due = asyncio.get_running_loop().call_later(self._pace.wait_s(), self._begin)

    def stop(self) -> None:
        """Makes no more orders, until `plan` is called. Idempotent."""
        if self._due is not None:
            self._due.cancel()
        self._due = self._steps = None

    def _begin(self) -> None:
        self._due = None
        if self._wanted():
            self._took_s = 0.0
            self._steps = self._book.order_steps(self._ports, self._clock())
            self._go_on()

    def _go_on(self) -> None:
        self._due = None
        assert self._steps is not None
        began_s = now_s = self._clock()
        made: Ordered | None = None
        try:
            while now_s < began_s + SLICE_S:
                next(self._steps)
                now_s = self._clock()
        except StopIteration as end:
            made = end.value
        except Exception:
            # an error in here is ours; the agent goes on with the order before
            log.exception("no order between requests this time")
        else:
            self._took_s += now_s - began_s
            self._due = asyncio.get_running_loop().call_later(SLICE_S, self._go_on)
            return
        self._pace.took_s = self._took_s + self._clock() - began_s
        self._steps = None
        if made is not None and self._wanted():
            self._use(made)
        self.plan()


@dataclass(slots=True)
class _Request:
    due_at: float
    compute_s: float = 0.0
    load: dict[Port, int] = field(default_factory=dict)
