"""The flows that an order between requests is made of (MFS 4.4.2, Algorithm 1), of one agent or of many.

A flow with a deadline counts from its submission to its end. Whoever keeps the book makes the order anew when a batch
has arrived or left (`changed`).
"""

import dataclasses
from dataclasses import dataclass, field

from policies.flow.base import Flow, Port, Ports
from policies.flow.events import Ordered
from policies.flow.inter_request import Batch, RequestLoad, load_of, schedule


@dataclass(slots=True)
class OrderBook:
    """All open flows with deadlines, by their ids. At most the share `drop_share` of their requests is pruned."""

    drop_share: float
    changed: bool = False
    _open: dict[str, tuple[Flow, float]] = field(default_factory=dict)
    _batches: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def arrived(self, flow: Flow, now_s: float) -> None:
        """Takes a submitted flow. One without a deadline has no part in the order."""
        if flow.due_s is None:
            return
        self._open[flow.flow_id] = (flow, now_s + flow.due_s)
        self._batches[flow.batch] = self._batches.get(flow.batch, 0) + 1
        self.changed = True

    def left(self, flow_id: str) -> None:
        """Forgets a flow that has ended, or that never had a deadline."""
        flow, _ = self._open.pop(flow_id, (None, 0.0))
        if flow is None:
            return
        self._batches[flow.batch] -= 1
        if not self._batches[flow.batch]:
            del self._batches[flow.batch]
            self.changed = True

    def open_flows(self, now_s: float) -> list[Flow]:
        """Returns all flows, each with the deadline that is left at `now_s`."""
        return [dataclasses.replace(flow, due_s=due_at - now_s) for flow, due_at in self._open.values()]

    def order(self, ports: Ports, now_s: float) -> Ordered:
        """Returns the order of all batches by RED, with the requests that Algorithm 1 prunes."""
        self.changed = False
        members: dict[str, dict[str, _Request]] = {}
        taken: dict[str, str] = {}
        bandwidth: dict[Port, float] = {}
        for flow, due_at in self._open.values():
            # a request belongs to one batch, that of its first flow
            batch = taken.setdefault(flow.request_id, flow.batch)
            request = members.setdefault(batch, {}).setdefault(flow.request_id, _Request(due_at))
            request.due_at = min(request.due_at, due_at)
            request.compute_s = max(request.compute_s, flow.compute_s)
            rate = ports.rate(flow.source, flow.target)
            for port, size in load_of(flow).items():
                request.load[port] = request.load.get(port, 0) + size
                bandwidth[port] = max(bandwidth.get(port, 0.0), rate)
        batches = [
            Batch(
                name,
                tuple(RequestLoad(each, one.due_at, one.load) for each, one in requests.items()),
                max(one.compute_s for one in requests.values()),
            )
            for name, requests in members.items()
        ]
        return schedule(batches, bandwidth, int(self.drop_share * len(taken)), now_s).event()


@dataclass(slots=True)
class _Request:
    due_at: float
    compute_s: float = 0.0
    load: dict[Port, int] = field(default_factory=dict)
