"""The batches in progress of a simulated cluster, ordered by Algorithm 1 whenever one arrives or departs (MFS 4.4.2).

A batch is the requests of one prefill step. Its load is what its flows will move: collectives evenly over the ports of
its instance, reused KV from the lender to the request's home, and P2D transfers out of the home; the decode node is not
known yet. A request departs when its KV has arrived at its decode node or it is cancelled, a batch with its last one.
"""

from collections.abc import Mapping

from benchmarks.sim.flow_driver import FlowDriver
from benchmarks.sim.kernel import Kernel
from policies.flow.base import Port
from policies.flow.inter_request import Batch, RequestLoad, schedule

NO_SLO_S = 600.0
"""Deadline of a request without an SLO, in seconds after its batch begins: behind all others."""


class Batches:
    """Tells the driver a new order whenever a batch arrives or departs. All ports have `port_bytes_per_s`. An order
    prunes at most the share `drop_share` of the requests in it.
    """

    def __init__(
        self, driver: FlowDriver, kernel: Kernel, port_bytes_per_s: float, drop_share: float
    ) -> None:
        self._driver, self._kernel = driver, kernel
        self._port_bytes_per_s, self._drop_share = port_bytes_per_s, drop_share
        # The bandwidth of each port that has borne load.
        self._bandwidth: dict[Port, float] = {}
        self._loads: dict[str, dict[str, RequestLoad]] = {}
        # The batch of each request, and the end of each batch's computation in virtual time.
        self._of: dict[str, str] = {}
        self._ends_s: dict[str, float] = {}

    def began(
        self, batch: str, loads: Mapping[str, tuple[float | None, Mapping[Port, int]]], compute_s: float
    ) -> None:
        """Notes a batch that begins to compute: its requests with their deadlines and bytes by port."""
        now_s = self._kernel.now_s
        for request_id in loads:
            self._drop(request_id)
        self._loads[batch] = {
            request_id: RequestLoad(request_id, now_s + NO_SLO_S if due_at is None else due_at, load)
            for request_id, (due_at, load) in loads.items()
        }
        for _, load in loads.values():
            self._bandwidth.update(dict.fromkeys(load, self._port_bytes_per_s))
        self._of.update(dict.fromkeys(loads, batch))
        self._ends_s[batch] = now_s + compute_s
        self._order()

    def departed(self, request_id: str) -> None:
        """Notes that a request needs the network no more, or that it was cancelled."""
        if self._drop(request_id):
            self._order()

    def _drop(self, request_id: str) -> bool:
        batch = self._of.pop(request_id, None)
        if batch is None:
            return False
        del self._loads[batch][request_id]
        if not self._loads[batch]:
            del self._loads[batch], self._ends_s[batch]
        return True

    def _order(self) -> None:
        now_s = self._kernel.now_s
        batches = [
            Batch(batch, tuple(loads.values()), max(0.0, self._ends_s[batch] - now_s))
            for batch, loads in self._loads.items()
        ]
        budget = int(self._drop_share * len(self._of))
        order = schedule(batches, self._bandwidth, budget, now_s)
        self._driver.ordered(tuple(each.batch for each in order.batches), order.pruned)
