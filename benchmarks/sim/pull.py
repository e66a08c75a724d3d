"""One KV transfer from a prefill to a decode worker: its flows, of which there may be several, by layer group."""

from collections.abc import Callable
from typing import Any

from benchmarks.sim.engine import Worker
from benchmarks.sim.links import KvNetwork


class Pull:
    """One transfer of `n_bytes` in `groups` equal layer groups, each of the target's `transfer_flows` parallel flows.

    Groups leave as they are released (`release`), all at once where the prefill has ended. The first flows of a group
    carry the bytes that do not divide. `on_done` runs after the last byte.
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
        """Lets the first `groups` groups leave."""
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
        """Ends all its flows; `on_done` never runs."""
        for flow in self._flows:
            self._network.cancel(flow)
        self._flows.clear()
        self._released = len(self._parts)

    def _flow_done(self, flow: Any) -> None:
        self._flows.remove(flow)
        if not self._flows and self._released == len(self._parts):
            self._on_done()


def _split(total: int, parts: int) -> list[int]:
    """`total` in `parts` nearly equal whole numbers, the larger ones first."""
    base, rest = divmod(total, parts)
    return [base + (i < rest) for i in range(parts)]
