"""Flows by permit: the live arbiter grants chunks, and posted chunks share the simulated network fairly.

    flow submitted -- delay --> arbiter -- delay --> chunk on the network -- delay --> arbiter: next permits

The arbiter is `policies.flow.arbiter.Arbiter`, the object of a node's agent; `Permits` has its window, the size of its
chunks and the delay of a message. One arbiter serves all nodes, as one coordinator with agents that need no time among
themselves; a flow is over for its reader when its last chunk arrives, before the arbiter hears of it.

Collectives are flows by permit like the others, or (`Permits.collectives`) go over the network at once, beside what is
posted, as with live engines, whose collectives nobody can hold.

Deviation: a chunk is any number of bytes, while a live one ends where a block ends.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.sim.config import FlowSetup
from benchmarks.sim.flow_driver import FlowStats, Sent, count_ended
from benchmarks.sim.kernel import Kernel, Timer
from benchmarks.sim.network.network import Network
from policies.flow import events as ev
from policies.flow.arbiter import Arbiter
from policies.flow.base import Flow, FlowState, Stage
from policies.flow.config import ArbiterConfig
from policies.flow.registry import flow_policy
from policies.state.views import NodeLoad


class ByPermit:
    """The driver of flows by permit (module docstring)."""

    def __init__(
        self, setup: FlowSetup, kernel: Kernel, network: Network, measuring: Callable[[], bool]
    ) -> None:
        permits = setup.permits
        assert permits is not None
        self.stats = FlowStats()
        self._kernel, self._network, self._measuring = kernel, network, measuring
        self._delay_s, self._gates_collectives = permits.delay_s, permits.collectives
        config = ArbiterConfig(
            window=permits.window,
            chunk_s=permits.chunk_s,
            whole_read_when_alone=permits.whole_reads,
            whole_at_most_s=permits.whole_at_most_s,
            port_bytes_per_s=network.topology.class_bytes_per_s["nic"],
        )
        self._arbiter = Arbiter(flow_policy(setup.policy[0], setup.policy[1]), config)
        self._number = 0
        self._live: dict[str, Sent] = {}
        self._tick: Timer | None = None

    def send(self, flow: Flow, on_done: Callable[[], None], weight: float = 1.0) -> Sent:
        self._number += 1
        sent = Sent(FlowState(flow, self._number, self._kernel.now_s), on_done, weight)
        self._live[flow.flow_id] = sent
        if flow.stage is Stage.COLLECTIVE and not self._gates_collectives:
            self._start(sent, flow.size, weight, partial(self._arrived, sent, flow.size))
        else:
            self._tell(ev.Submitted(flow, weight=weight))
        return sent

    def cancel(self, sent: Sent) -> None:
        """Withdraws a flow. Its chunks on their way still arrive, because a posted chunk is never cancelled."""
        if not sent.ended:
            sent.ended = True
            self._tell(ev.Withdrawn(sent.state.flow.flow_id))

    def advanced(self, sent: Sent, rli: int) -> None:
        if not sent.ended and rli < sent.state.rli:
            sent.state.rli = rli
            self._tell(ev.Advanced(sent.state.flow.flow_id, rli))

    def ordered(self, batches: tuple[str, ...], pruned: tuple[str, ...]) -> None:
        self.stats.pruned.update(pruned)
        self._tell(ev.Ordered(batches, pruned))

    def loads(self, nodes: Sequence[str]) -> list[NodeLoad]:
        return [self._arbiter.load_of(node) for node in nodes]

    def _tell(self, event: ev.FlowEvent) -> None:
        """Has the arbiter hear of an event after a message's delay."""
        self._kernel.after(self._delay_s, lambda: self._apply(event))

    def _apply(self, event: ev.FlowEvent) -> None:
        # A flow may end while a message about it is on its way.
        if isinstance(event, ev.Advanced | ev.Withdrawn | ev.Done) and event.flow_id not in self._arbiter:
            return
        for permit in self._arbiter.apply(event, self._kernel.now_s):
            self.stats.permits += self._measuring()
            self._kernel.after(self._delay_s, partial(self._post, permit))
        self._wake()

    def _wake(self) -> None:
        """Sets the one timer for the arbiter's next tick."""
        at_s = self._arbiter.next_tick_s()
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if at_s is not None:
            self._tick = self._kernel.at(max(at_s, self._kernel.now_s), lambda: self._apply(ev.Tick()))

    def _post(self, permit: ev.Permit) -> None:
        sent = self._live.get(permit.flow_id)
        if sent is None:
            # it was cancelled while the permit was on its way
            return
        since_s = self._kernel.now_s

        def arrived() -> None:
            self._arrived(sent, permit.size)
            seconds = self._kernel.now_s - since_s
            done = ev.Done(permit.flow_id, permit.size, max(seconds, math.ulp(1.0)), sent.state.left == 0)
            self._tell(done)

        self._start(sent, permit.size, 1.0, arrived)

    def _start(self, sent: Sent, size: int, weight: float, arrived: Callable[[], None]) -> None:
        """Sends bytes of a flow over the network, where they share fairly with all others."""
        flow = sent.state.flow
        self._network.start(
            flow.source,
            flow.target,
            size,
            0,
            lambda _: arrived(),
            weight=weight,
            path_key=f"{flow.flow_id}/{sent.state.left}",
        )

    def _arrived(self, sent: Sent, size: int) -> None:
        """Takes bytes of a flow that have arrived into account."""
        sent.state.left -= size
        last = sent.state.left == 0
        if last and not sent.ended:
            sent.ended = True
            count_ended(self.stats, sent, self._kernel.now_s, self._measuring())
            sent.on_done()
        if last:
            self._live.pop(sent.state.flow.flow_id, None)
