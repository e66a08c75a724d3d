"""The transfer of a request's KV from its prefill worker to its decode worker."""

from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.sim.engine import Worker
from benchmarks.sim.flow_driver import FlowDriver, Sent
from benchmarks.sim.links import KvNetwork
from policies.flow.base import Flow, Stage


class Transfer(Protocol):
    """The interface of a KV transfer in progress."""

    def release(self, groups: int) -> None:
        """Starts the flows of the first `groups` layer groups that have not left yet."""

    def cancel(self) -> None:
        """Ends all flows of the transfer; it is never reported as done."""


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
        key: str,
        groups: int,
        on_done: Callable[[], None],
    ) -> None:
        self._network, self._source, self._target = network, source, target
        self._key = key
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
                    0,
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


class ScheduledPull:
    """A transfer as flows of `stage` that a policy schedules: one for each layer group, from node to node.

    `terms()` returns what a flow needs to know when it is submitted: its batch, the seconds until its deadline (None:
    it has none) and the seconds of computation that its request still needs. `on_end` is called once: with True when
    the last byte has arrived, with False when the transfer is cancelled.
    """

    def __init__(
        self,
        driver: FlowDriver,
        source: str,
        target: str,
        n_bytes: int,
        key: str,
        groups: int,
        terms: Callable[[], tuple[str, float | None, float]],
        on_end: Callable[[bool], None],
        stage: Stage = Stage.P2D,
        rli: int = 0,
    ) -> None:
        self._stage, self._rli = stage, rli
        self._driver, self._source, self._target, self._key = driver, source, target, key
        self._parts = _split(max(n_bytes, groups), groups)
        self._terms, self._on_end = terms, on_end
        self._released = 0
        self._sent: dict[int, Sent] = {}

    def release(self, groups: int) -> None:
        while self._released < min(groups, len(self._parts)):
            number = self._released
            self._released += 1
            batch, due_s, compute_s = self._terms()
            flow = Flow(
                flow_id=f"{self._key}/{self._stage:d}/{number}",
                request_id=self._key,
                batch=batch,
                stage=self._stage,
                source=self._source,
                target=self._target,
                size=self._parts[number],
                rli=self._rli,
                due_s=due_s,
                compute_s=compute_s,
            )
            self._sent[number] = self._driver.send(flow, lambda n=number: self._flow_done(n))  # type: ignore[misc]

    def cancel(self) -> None:
        for sent in self._sent.values():
            self._driver.cancel(sent)
        self._sent.clear()
        self._released = len(self._parts)
        self._on_end(False)

    def _flow_done(self, number: int) -> None:
        del self._sent[number]
        if not self._sent and self._released == len(self._parts):
            self._on_end(True)


def _split(total: int, parts: int) -> list[int]:
    """Splits `total` into `parts` nearly equal whole numbers and returns them, the larger ones first."""
    base, rest = divmod(total, parts)
    return [base + (i < rest) for i in range(parts)]
