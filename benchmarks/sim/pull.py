"""The transfer of a request's KV from its prefill worker to its decode worker."""

from collections.abc import Callable
from typing import Any

from benchmarks.sim.engine import Worker
from benchmarks.sim.links import KvNetwork


class Pull:
    """One transfer of `n_bytes` in `groups` nearly equal layer groups.

    Each group is sent in as many parallel flows as the target's `transfer_flows`. A group leaves when `release` allows
    it; where the prefill has ended, all leave at once. Bytes that do not divide evenly go to the first groups and
    flows. `on_done` is called when the last byte has arrived.
    """

    def __init__(
        self,
        network: KvNetwork,
        source: Worker,
        target: Worker,
        n_bytes: int,
        priority: int,
        key: str,
        groups: int,
        on_done: Callable[[], None],
    ) -> None:
        self._network, self._source, self._target = network, source, target
        self._priority, self._key = priority, key
        self._parts = [_split(part, target.spec.transfer_flows) for part in _split(n_bytes, groups)]
        self._on_done = on_done
        self._released = 0
        self._flows: list[Any] = []

    def release(self, groups: int) -> None:
        """Starts the flows of the first `groups` groups that have not left yet."""
        while self._released < min(groups, len(self._parts)):
            part = self._parts[self._released]
            self._released += 1
            for index, n_bytes in enumerate(part):
                flow = self._network.start(
                    self._source.node,
                    self._target.node,
                    n_bytes,
                    self._priority,
                    self._flow_done,
                    source_nic=self._source.nic,
                    target_nic=self._target.nic,
                    path_key=f"{self._key}/{index}",
                )
                self._flows.append(flow)

    def cancel(self) -> None:
        """Ends all flows of the transfer; `on_done` is never called."""
        for flow in self._flows:
            self._network.cancel(flow)
        self._flows.clear()
        self._released = len(self._parts)

    def _flow_done(self, flow: Any) -> None:
        self._flows.remove(flow)
        if not self._flows and self._released == len(self._parts):
            self._on_done()


def _split(total: int, parts: int) -> list[int]:
    """Splits `total` into `parts` nearly equal whole numbers and returns them, the larger ones first."""
    base, rest = divmod(total, parts)
    return [base + (i < rest) for i in range(parts)]
