"""The collectives of a sim engine whose instance lies over several nodes (MFS stage 2).

After each layer group the nodes exchange activations: `collective_bytes_per_token` for each prompt token of the step,
evenly over a flow from each node to each other one (`policies.flow.stages`). The flows wait for permits as reads do,
move over the links of their sending node, and block the next group until the last of them has arrived.

A collective cannot fail: a flow that is held for too long, or whose agent is silent, is posted without a permit.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.flow import FlowMover
from actors.engine.sim.links import LinkPacer
from actors.flow.reader import Finished
from policies.engine_model.timing import TimingProfile
from policies.flow.base import Flow
from policies.flow.stages import collective


@dataclass(slots=True, eq=False)
class _Exchange:
    """One collective: its flows that have not arrived, and what goes on after the last one."""

    left: int
    begun_s: float
    go_on: Callable[[], None]


class Collectives:
    """The collectives of one engine. `pacers` are the links of its nodes. `ended` counts them, and `seconds` is the sum
    of their times.
    """

    def __init__(
        self,
        config: SimEngineConfig,
        timing: TimingProfile,
        mover: FlowMover,
        pacers: Mapping[str, LinkPacer],
    ) -> None:
        self._config, self._timing, self._mover, self._pacers = config, timing, mover, pacers
        self.ended = 0
        self.seconds = 0.0

    def exchange(
        self, batch: str, group: int, tokens: int, compute_s: float, go_on: Callable[[], None]
    ) -> None:
        """Moves the activations of layer group `group` of a step that computes `tokens` prompt tokens and still needs
        `compute_s` seconds, then calls `go_on`: at once where there is nothing to move.
        """
        n_bytes = self._config.collective_bytes_per_token * tokens
        if not n_bytes:
            go_on()
            return
        flows = collective(batch, group, self._config.nodes, n_bytes, compute_s).flows
        exchange = _Exchange(len(flows), time.monotonic(), go_on)
        for flow in flows:
            self._mover.submit(
                flow, self._config.step_hold_s, partial(self._move, flow), partial(self._arrived, exchange)
            )

    def _move(self, flow: Flow, number: int, n_bytes: int) -> float | None:
        sent = partial(self._mover.arrived, flow.flow_id, number)
        key = f"{flow.flow_id}+{number}"
        if self._pacers[flow.source].begin(key, self._config.engine_id, n_bytes, sent):
            return None
        return self._timing.transfer_s(n_bytes)

    def _arrived(self, exchange: _Exchange, busy_s: float, finished: Finished, reason: str | None) -> None:
        exchange.left -= 1
        if not exchange.left:
            self.ended += 1
            self.seconds += time.monotonic() - exchange.begun_s
            exchange.go_on()
