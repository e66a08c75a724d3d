"""A driver for tests: an arbiter and ports whose posted chunks share bandwidth max-min fairly, in exact event order."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from policies.flow.arbiter import Arbiter
from policies.flow.base import Flow, Stage
from policies.flow.events import Done, FlowEvent, Permit, Submitted, Tick

SOON = 1e-9


def flow(name: str, size: int, **given: object) -> Flow:
    """Returns a flow from node a to node b; what is not given is a P2D transfer of its own request and batch."""
    fields = {
        "flow_id": name,
        "request_id": name,
        "batch": name,
        "stage": Stage.P2D,
        "source": "a",
        "target": "b",
        "size": size,
    }
    return Flow(**(fields | given))  # type: ignore[arg-type]


@dataclass(slots=True)
class Chunk:
    """A posted chunk on the wire."""

    flow: Flow
    size: int
    posted_at: float
    left: float
    level: int


class Link:
    """Runs an arbiter against ports of fixed bytes/s. Chunks of one port share it equally; a report takes `delay_s`."""

    def __init__(self, arbiter: Arbiter, bytes_per_s: float = 1000.0) -> None:
        self.arbiter = arbiter
        self.bytes_per_s = bytes_per_s
        self.now_s = 0.0
        self.flows: dict[str, Flow] = {}
        self.left: dict[str, int] = {}
        self.chunks: list[Chunk] = []
        self.ended: dict[str, float] = {}
        self.granted: list[tuple[float, Permit]] = []
        self._plan: list[tuple[float, int, Callable[[], FlowEvent]]] = []
        self.on_end: Callable[[str], None] = lambda name: None
        self.still: set[str] = set()
        """Nodes that stand still: chunks from and to them do not move."""

    def at(self, at_s: float, event: Callable[[], FlowEvent]) -> None:
        """Plans an event."""
        self._plan.append((at_s, len(self._plan), event))
        self._plan.sort(key=lambda entry: entry[:2])

    def submit(self, submitted: Flow, at_s: float | None = None) -> None:
        """Submits a flow now or later."""
        self.flows[submitted.flow_id] = submitted
        self.left[submitted.flow_id] = submitted.size
        if at_s is None:
            self.tell(Submitted(submitted))
        else:
            self.at(at_s, lambda: Submitted(submitted))

    def tell(self, event: FlowEvent) -> list[Permit]:
        """Lets the arbiter hear an event now and posts what it permits."""
        permits = self.arbiter.apply(event, self.now_s)
        for permit in permits:
            self.granted.append((self.now_s, permit))
            self.chunks.append(
                Chunk(self.flows[permit.flow_id], permit.size, self.now_s, float(permit.size), permit.level)
            )
        return permits

    def rates(self) -> list[float]:
        """Returns each chunk's bytes/s: its equal share of the fuller of its two ports, 0 where it stands still."""
        out: dict[str, int] = {}
        into: dict[str, int] = {}
        moves = [self.still.isdisjoint((chunk.flow.source, chunk.flow.target)) for chunk in self.chunks]
        for chunk in itertools.compress(self.chunks, moves):
            out[chunk.flow.source] = out.get(chunk.flow.source, 0) + 1
            into[chunk.flow.target] = into.get(chunk.flow.target, 0) + 1
        return [
            self.bytes_per_s / max(out[chunk.flow.source], into[chunk.flow.target]) if moving else 0.0
            for chunk, moving in zip(self.chunks, moves, strict=True)
        ]

    def run(self, until_s: float = 1e6) -> None:
        """Runs until nothing is left to do, or until a time. Fails if flows wait while nothing can happen."""
        while True:
            rates = self.rates()
            ends = [chunk.left / rate for chunk, rate in zip(self.chunks, rates, strict=True) if rate]
            tick = self.arbiter.next_tick_s()
            coming = [self.now_s + min(ends)] if ends else []
            coming += [self._plan[0][0]] if self._plan else []
            coming += [max(tick, self.now_s)] if tick is not None else []
            if not coming:
                assert self.still or not len(self.arbiter), "flows wait for ever"
                self.now_s = until_s if self.still else self.now_s
                return
            next_s = min(coming)
            if next_s > until_s:
                for chunk, rate in zip(self.chunks, rates, strict=True):
                    chunk.left -= rate * (until_s - self.now_s)
                self.now_s = until_s
                return
            passed = next_s - self.now_s
            self.now_s = next_s
            for chunk, rate in zip(self.chunks, rates, strict=True):
                chunk.left -= rate * passed
            self._end_chunks()
            while self._plan and self._plan[0][0] <= self.now_s:
                self.tell(self._plan.pop(0)[2]())
            if tick is not None and tick <= self.now_s:
                self.tell(Tick())

    def _end_chunks(self) -> None:
        for chunk in [chunk for chunk in self.chunks if chunk.left <= SOON * self.bytes_per_s]:
            self.chunks.remove(chunk)
            name = chunk.flow.flow_id
            self.left[name] -= chunk.size
            last = not self.left[name]
            if last:
                self.ended[name] = self.now_s
            self.tell(Done(name, chunk.size, self.now_s - chunk.posted_at, last))
            if last:
                self.on_end(name)
