"""Ports of an arbiter: which flows wait there, what is posted there, and the bandwidth B(1-rho) that is learned there.

    share = integral over a chunk's time of dt / n(t)      n(t): own chunks moving at the port, this one included
    B(1-rho) = sum of bytes / sum of shares                over the port's latest chunks

The shares of chunks that overlap add up to the time in which the port was busy with own chunks. So own concurrency is
divided out, and so is the time for which permits wait for the port of another node's arbiter. The estimate is a
throughput that the port has really reached: it cannot exceed the port, only fall short of it where the other ports of
its flows were slower. A chunk that was alone takes the seconds that its worker measured, which contain no delay of a
permit; one that was not takes the arbiter's clock, because a report that comes late would make its seconds look short.
"""

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from policies.flow.base import Flow, FlowState, Port, Side

NOTICED = 0.02
"""Relative change of a learned bandwidth from which flows are placed anew."""
SCANNED = 48
"""Pairs of a port up to which a look at each is faster than the heap, from which every head that does not suit has to
be taken and put back (`python -m benchmarks.permits`).
"""
VOID, VOID_LEAST = 4, 64
"""A heap is cleared of void entries when it has more than 4 n + 64 entries for n valid ones at most."""
LEAST_CHUNKS = 3
"""Chunks from which a bandwidth is learned; before that the nominal one counts."""
SLOWEST_BYTES_PER_S = 50e6
"""Bandwidth below which a read counts as stuck. ASSUMPTION: no network on which moving KV pays is slower."""


class OpenPermit:
    """A permit that its worker has not answered in full. While its chunk is `moving` it has both ports' clocks of busy
    time as they were when that began.

    A `whole` one covers all that no other permit of its flow covers, also what a chunk leaves of its own permit, and
    stays open until the flow ends. One `in_flight` stands for any number of chunks, and is over with its last byte. One
    that the arbiter of the reader's ingress holds back does not move yet. A `late` one takes no slot of its ports.
    """

    __slots__ = (
        "at_s",
        "egress_clock",
        "in_flight",
        "ingress_clock",
        "late",
        "look",
        "moving",
        "size",
        "whole",
    )

    def __init__(self, size: int, whole: bool, in_flight: bool) -> None:
        self.size = size
        self.whole = whole
        self.in_flight = in_flight
        self.moving = False
        self.late = False
        self.look = 0
        """Number of the alarm at which it is looked at (`alarms`); 0 if it is not."""
        self.at_s = self.egress_clock = self.ingress_clock = 0.0

    def begin(self, at_s: float, egress_clock: float, ingress_clock: float) -> None:
        """Notes that its chunk, or its next one, moves from now on."""
        self.moving = True
        self.at_s = at_s
        self.egress_clock = egress_clock
        self.ingress_clock = ingress_clock


class Held(FlowState):
    """A flow's state with what only the arbiter needs."""

    __slots__ = (
        "cleared",
        "counted",
        "entry",
        "held_s",
        "lent",
        "pair",
        "passed",
        "permits",
        "ready_at",
        "stalled_at",
        "unscheduled",
        "weight",
        "withdrawn",
    )

    def __init__(
        self, flow: Flow, number: int, now_s: float, turn: float, pair: "Pair", weight: float = 1.0
    ) -> None:
        super().__init__(flow, number, now_s, turn)
        self.pair = pair
        self.weight = weight
        self.permits: list[OpenPermit] = []
        self.entry = 0
        """Number of its valid entry in the pair's heap; 0 while it does not wait there."""
        self.counted = False
        """Whether its ports count it as waiting: it waits in the heap, or its rate lets it rest."""
        self.passed = 0
        """Permits to others of its level since it came to be first at a port without getting one."""
        self.ready_at = now_s
        """Time before which its rate gives it no further chunk."""
        self.stalled_at: float | None = now_s
        """The time since which none of its chunks is on its way; None while one is."""
        self.held_s = 0.0
        """Seconds for which none of its chunks was on its way, up to `stalled_at`."""
        self.withdrawn = False
        self.unscheduled = False
        self.lent = False
        """Whether its reader is another node's, whose arbiter says when each permitted chunk is posted."""
        self.cleared: list[int] | None = None
        """Sizes of the chunks that its source's arbiter has permitted and that are not posted, oldest first; None where
        the source's egress is this arbiter's own.
        """

    @property
    def blocked(self) -> bool:
        """Whether a chunk between its engines is late, so that it gets no permit."""
        return self.flow.engines in self.pair.late

    @property
    def waiting(self) -> int:
        """The bytes that the next permit may cover."""
        if self.blocked:
            return 0
        left = self.left - self.posted
        if self.cleared is None:
            return left
        return min(left, self.cleared[0]) if self.cleared else 0


class Pair:
    """The flows from one node to another, which share both ports: a heap by rank with lazy deletion.

    `head` is the waiting flow of least rank. Both ports keep the pair in a heap under its head's rank.
    """

    __slots__ = ("_heap", "_pushed", "egress", "flows", "head", "head_entry", "ingress", "late")

    def __init__(self, egress: "PortState", ingress: "PortState") -> None:
        self.egress = egress
        self.ingress = ingress
        self.flows: dict[str, Held] = {}
        """Flows between the two nodes that have not ended."""
        self.late: dict[str, int] = {}
        """Number of late chunks by their flows' `engines`, where there are any."""
        self.head: Held | None = None
        self.head_entry = 0
        self._heap: list[tuple[tuple[float, ...], int, Held]] = []
        self._pushed = 0

    def push(self, state: Held) -> None:
        """Lets a flow wait under its present rank; its entries under other ranks become void."""
        self._pushed += 1
        state.entry = self._pushed
        heappush(self._heap, (state.rank, self._pushed, state))
        if len(self._heap) > VOID * len(self.flows) + VOID_LEAST:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapify(self._heap)
        self._find_head()

    def drop(self, state: Held) -> None:
        """Lets a flow no longer wait."""
        state.entry = 0
        if state is self.head:
            self._find_head()

    def _find_head(self) -> None:
        heap = self._heap
        while heap:
            rank, number, state = heap[0]
            if state.entry == number:
                if number != self.head_entry:
                    self.head, self.head_entry = state, number
                    self.egress.add(rank, self)
                    self.ingress.add(rank, self)
                return
            heappop(heap)
        self.head, self.head_entry = None, 0


class PortState:
    """One port: the pairs whose flows may wait at it, what is posted, and what has been learned of it."""

    __slots__ = (
        "_heads",
        "_integral",
        "_integral_at",
        "_samples",
        "_sum_bytes",
        "_sum_shares",
        "late",
        "late_in_a_row",
        "moving",
        "nominal",
        "pairs",
        "port",
        "posted",
        "published",
        "turn",
        "waiting",
    )

    def __init__(self, port: Port, usual: float) -> None:
        self.port = port
        self.nominal: float | None = None
        """Bandwidth that the port has at most; None where nobody has said so."""
        self.published = usual
        """The bandwidth that policies see."""
        self.pairs: dict[str, Pair] = {}
        """Pairs by the other node, as long as flows of theirs may wait."""
        self.posted = 0
        """Chunks that are permitted and have not arrived, without those that are late."""
        self.late = 0
        """Chunks that are late."""
        self.late_in_a_row = 0
        """Chunks that came late since the last one that did not."""
        self.moving = 0
        """Permitted chunks that are posted: the arbiter of another node may hold permits back for its ingress."""
        self.waiting = 0
        """Flows with bytes that no permit covers, whether they wait here or for their source's arbiter."""
        self.turn = 0.0
        """Virtual time of fair sharing, in bytes."""
        self._heads: list[tuple[tuple[float, ...], int, Pair]] = []
        self._integral = 0.0
        self._integral_at = 0.0
        self._samples: deque[tuple[int, float]] = deque()
        self._sum_bytes = 0
        self._sum_shares = 0.0

    def add(self, rank: tuple[float, ...], pair: Pair) -> None:
        """Takes a pair in under its new head's rank."""
        heads = self._heads
        heappush(heads, (rank, pair.head_entry, pair))
        if len(heads) > VOID * len(self.pairs) + VOID_LEAST:
            self._heads = [entry for entry in heads if entry[2].head_entry == entry[1]]
            heapify(self._heads)

    def first(self) -> Held | None:
        """Returns the waiting flow of least rank, whether its other port has room or not; None if none waits."""
        heads = self._heads
        while heads:
            _, number, pair = heads[0]
            if pair.head_entry == number:
                return pair.head
            heappop(heads)
        return None

    def first_with(self, suits: Callable[[Held], bool]) -> Held | None:
        """Returns the flow of least rank among the heads of the port's pairs that suits, None if none does."""
        if len(self.pairs) <= SCANNED:
            best: Held | None = None
            for pair in self.pairs.values():
                head = pair.head
                if head is not None and (best is None or head.rank < best.rank) and suits(head):
                    best = head
            return best
        passed = []
        found = self.first()
        while found is not None and not suits(found):
            passed.append(heappop(self._heads))
            found = self.first()
        for entry in passed:
            heappush(self._heads, entry)
        return found

    def integral(self, now_s: float) -> float:
        """Returns the integral of dt / n(t) over all time in which own chunks were posted."""
        if self.moving:
            self._integral += (now_s - self._integral_at) / self.moving
        self._integral_at = now_s
        return self._integral

    def learn(self, size: int, share: float, keep: int) -> bool:
        """Takes one chunk's bytes and share into account. Returns whether the published bandwidth has changed."""
        if share <= 0.0 or size <= 0:
            return False
        samples = self._samples
        samples.append((size, share))
        self._sum_bytes += size
        self._sum_shares += share
        if len(samples) > keep:
            old_size, old_share = samples.popleft()
            self._sum_bytes -= old_size
            self._sum_shares -= old_share
        learned = self.learned()
        if learned is None or abs(learned - self.published) < NOTICED * self.published:
            return False
        self.published = learned
        return True

    def learned(self) -> float | None:
        """Returns the learned B(1-rho) in bytes/s, None while too few chunks have been seen."""
        if len(self._samples) < LEAST_CHUNKS:
            return None
        learned = self._sum_bytes / self._sum_shares
        return learned if self.nominal is None else min(learned, self.nominal)

    def known(self) -> float | None:
        """Returns the bandwidth in bytes/s that policies see; None while it is only assumed."""
        known = self.nominal is not None or len(self._samples) >= LEAST_CHUNKS
        return self.published if known else None

    def certain(self) -> float:
        """Returns the bandwidth in bytes/s by which chunks are late: the one that policies see, but
        `SLOWEST_BYTES_PER_S` at most while that is only assumed.
        """
        known = self.known()
        return min(self.published, SLOWEST_BYTES_PER_S) if known is None else known

    def set_nominal(self, bytes_per_s: float) -> None:
        """Takes a nominal bandwidth over; what was learned stays, bounded by it."""
        self.nominal = bytes_per_s
        self.published = self.learned() or bytes_per_s


class PortTable:
    """All ports by node; a port exists from its first flow on."""

    __slots__ = ("_egress", "_ingress", "_usual")

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._egress: dict[str, PortState] = {}
        self._ingress: dict[str, PortState] = {}

    def at(self, port: Port) -> PortState:
        """Returns the port's state; the port is made if it is new."""
        table = self._egress if port.side is Side.EGRESS else self._ingress
        found = table.get(port.node)
        if found is None:
            found = table[port.node] = PortState(port, self._usual)
        return found

    def pair(self, source: str, target: str) -> Pair:
        """Returns the pair of two nodes' ports; ports and pair are made if they are new."""
        egress = self.at(Port(source, Side.EGRESS))
        found = egress.pairs.get(target)
        if found is None:
            ingress = self.at(Port(target, Side.INGRESS))
            found = egress.pairs[target] = ingress.pairs[source] = Pair(egress, ingress)
        return found

    def leave(self, pair: Pair, state: Held) -> None:
        """Says that a flow of the pair has ended; a pair without flows is dropped, its ports stay."""
        del pair.flows[state.flow.flow_id]
        if not pair.flows:
            del pair.egress.pairs[pair.ingress.port.node]
            del pair.ingress.pairs[pair.egress.port.node]

    def rate(self, source: str, target: str) -> float:
        """Returns B(1-rho) in bytes/s of the slower of two nodes' ports."""
        egress, ingress = self._egress.get(source), self._ingress.get(target)
        return min(
            self._usual if egress is None else egress.published,
            self._usual if ingress is None else ingress.published,
        )
