"""Measures the arbiter's events among many waiting flows: a chunk that ends and the permit that follows, an arrival,
an order between requests and its making.

The flows of a row keep their number: whichever ends is replaced by another, outside the measured time. Their sizes,
stages and deadlines are drawn, so that they are of all levels and are promoted under way.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from actors.flow.orders import OrderBook
from benchmarks.decisions.measure import Timing, timed
from policies.flow.arbiter import Arbiter
from policies.flow.base import FixedPorts, Flow, Stage
from policies.flow.config import ArbiterConfig
from policies.flow.events import Done, FlowEvent, Ordered, Permit, Submitted
from policies.flow.registry import flow_policy
from policies.journal.flows import FlowJournal

PORT_BYTES_PER_S = 1.25e9


@dataclass(frozen=True, slots=True)
class Shape:
    """How the flows of a row spread over nodes."""

    name: str
    sources: int
    targets: int


SHAPES = (
    Shape("16 nodes to 16", 16, 16),
    Shape("1 hot sender to 16", 1, 16),
    Shape("1 hot sender to 1000", 1, 1000),
)


class Load:
    """An arbiter with a constant number of flows, and the permits that wait for their answer."""

    def __init__(self, policy: str, flows: int, shape: Shape, seed: int, journal: bool = False) -> None:
        config = ArbiterConfig(port_bytes_per_s=PORT_BYTES_PER_S)
        arbiter = Arbiter(flow_policy(policy), config)
        self.written = 0
        self.apply = FlowJournal(self._write, arbiter, "bench").apply if journal else arbiter.apply
        self._rng = random.Random(seed)
        self._shape = shape
        self.submitted = 0
        self._now_s = 0.0
        # the clock is simulated: each port ends a chunk in the time of a chunk
        self._step_s = config.chunk_s / min(shape.sources, shape.targets)
        self._posted: deque[Permit] = deque()
        self._left: dict[str, int] = {}
        for _ in range(flows):
            self._submit()

    def __len__(self) -> int:
        return len(self._left)

    def _write(self, line: str) -> None:
        self.written += len(line)

    def _flow(self) -> Flow:
        rng = self._rng
        self.submitted += 1
        stage = rng.choice(list(Stage))
        size = int(rng.lognormvariate(17.0, 1.0))  # median 24 MB
        return Flow(
            flow_id=f"f{self.submitted}",
            request_id=f"r{self.submitted}",
            batch=f"b{self.submitted // 8}",
            stage=stage,
            source=f"s{rng.randrange(self._shape.sources)}",
            target=f"t{rng.randrange(self._shape.targets)}",
            size=size,
            due_s=rng.uniform(0.5, 30.0) if stage is Stage.P2D else None,
            rli=rng.randrange(8) if stage is Stage.REUSE else 0,
        )

    def _submit(self) -> None:
        flow = self._flow()
        self._left[flow.flow_id] = flow.size
        self._hear(Submitted(flow))

    def _hear(self, event: FlowEvent) -> None:
        self._now_s += self._step_s
        self._posted.extend(self.apply(event, self._now_s))

    def chunks(self, calls: int) -> Iterator[Callable[[], object]]:
        """Yields calls that end one chunk each; the permits that follow are part of the call."""
        for _ in range(calls):
            permit = self._posted.popleft()
            self._left[permit.flow_id] -= permit.size
            last = not self._left[permit.flow_id]
            seconds = permit.size / PORT_BYTES_PER_S
            event = Done(permit.flow_id, permit.size, seconds, last)
            yield partial(self._hear, event)
            if last:
                del self._left[permit.flow_id]
                self._submit()

    def arrivals(self, calls: int) -> Iterator[Callable[[], object]]:
        """Yields calls that submit one flow each; a chunk ends between them."""
        for _ in range(calls):
            flow = self._flow()
            self._left[flow.flow_id] = flow.size
            yield partial(self._hear, Submitted(flow))
            for end in self.chunks(1):
                end()

    def orders(self, calls: int) -> Iterator[Callable[[], object]]:
        """Yields calls that change the order of all batches."""
        for _ in range(calls):
            batches = [f"b{number // 8}" for number in range(self.submitted)]
            self._rng.shuffle(batches)
            event = Ordered(tuple(dict.fromkeys(batches)))
            yield partial(self._hear, event)


def orders_made(flows: int, calls: int, seed: int) -> Iterator[Callable[[], object]]:
    """Yields calls that make an order of P2D transfers alone by Algorithm 1, more than their ports can move in time."""
    rng, book, ports = random.Random(seed), OrderBook(drop_share=0.1), FixedPorts(PORT_BYTES_PER_S)
    for number in range(flows):
        flow = Flow(
            flow_id=f"f{number}",
            request_id=f"r{number}",
            batch=f"b{number // 8}",
            stage=Stage.P2D,
            source=f"s{rng.randrange(16)}",
            target=f"t{rng.randrange(16)}",
            size=int(rng.lognormvariate(17.0, 1.0)),
            due_s=rng.uniform(0.01, 0.001 * flows),
        )
        book.arrived(flow, 0.0)
    for _ in range(calls):
        yield partial(book.order, ports, 0.0)


def rows(flows: int, calls: int, seed: int) -> Iterator[Timing]:
    """Yields the timing of each row."""
    for policy in ("mfs", "fair", "sjf", "edf"):
        for shape in SHAPES:
            load = Load(policy, flows, shape, seed)
            yield timed(f"chunk ends, {policy}, {flows} flows, {shape.name}", load.chunks(calls))
    usual = SHAPES[0]
    yield timed(f"flow arrives, mfs, {flows} flows", Load("mfs", flows, usual, seed).arrivals(calls))
    yield timed(f"requests ordered, mfs, {flows} flows", Load("mfs", flows, usual, seed).orders(calls // 10))
    yield timed(f"order made, {flows} flows", orders_made(flows, max(5, calls // 100), seed))
    journalled = Load("mfs", flows, usual, seed, journal=True)
    yield timed(f"chunk ends, with journal, mfs, {flows} flows", journalled.chunks(calls))
