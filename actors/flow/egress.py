"""The egress ports of other nodes: their agents give the permits there, and this agent asks for them as a worker does.

    worker  -- SubmitFlow -->  agent of its node  -- SubmitFlow -->  agent of the source's node
            <-- Permitted --      (ingress)       <-- Permitted --      (egress)

A read from another node is *gated* in the arbiter here: each chunk is first permitted by the source's agent, and then
waits for a slot at the own ingress. Every agent keeps this order, and a slot at an ingress is held by posted chunks
only, so nothing waits in a circle.

A permit that waits here for the ingress is *parked*, and its slot at the source idles. At most `spare` permits are
parked for each own node. Further ones are given back, the last in the policy's order first: the read is withdrawn at
the source and asked for again when a slot is near. A read with a chunk in flight keeps its permits. Permits that wait
for a late chunk of the same engines do not count, so that others are asked for.

Agents fail open as workers do. While the source's agent is not connected, or silent for `silent_s` of our own running
time, reads from there are ordered at the ingress alone, and are counted as `alone_reads_<reason>`. A new connection
hears of all reads again, with what is in flight. Nothing here does I/O or knows a clock.
"""

import dataclasses
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.wire.messages import (
    AdvanceFlow,
    Beat,
    ChunkDone,
    ChunkPosted,
    FlowRefused,
    JoinNode,
    Message,
    Permitted,
    SubmitFlow,
    Unscheduled,
    UnscheduledReason,
    WithdrawFlow,
)
from policies.flow.arbiter import Arbiter
from policies.flow.base import Flow

ASKED_AGAIN = 4
"""Reads that are asked for again in one beat while too few permits are parked. ASSUMPTION: one is answered soon."""

Send = Callable[[Message], object]


@dataclass(slots=True, eq=False)
class Read:
    """One read from another node. `asked` is the id under which the source's agent knows it, None if it does not.
    `parked` permits wait for the ingress. `whole`: the source's agent has permitted all that is left, at one slot, of
    which one chunk after another may be posted.
    """

    key: str
    flow: Flow
    due_at: float | None
    gated: bool
    asked: str | None = None
    parked: int = 0
    whole: bool = False


@dataclass(slots=True, eq=False)
class Source:
    """Another node, the connection to its agent (None: there is none), and our reads from there."""

    node: str
    send: Send | None = None
    silent: bool = False
    silent_s: float = 0.0
    reads: dict[str, Read] = field(default_factory=dict)
    asked: dict[str, Read] = field(default_factory=dict)


class Egresses:
    """All other nodes from which this node's workers read.

    `clear(key, size, now_s)` tells the arbiter what a source's agent has permitted (`Cleared`). `opens(node)` is called
    for the first read from a node; the owner then connects to its agent, and calls `up`, `down` and `received`.
    """

    def __init__(
        self,
        node: str,
        arbiter: Arbiter,
        clear: Callable[[str, int | None, float], None],
        opens: Callable[[str], None],
        silent_s: float,
        totals: Counter[str],
    ) -> None:
        self._node, self._arbiter, self._clear, self._opens = node, arbiter, clear, opens
        self._silent_s = silent_s
        self._totals = totals
        self._spare = arbiter.config.window
        self._sources: dict[str, Source] = {}
        self._reads: dict[str, tuple[Source, Read]] = {}
        self._asks = 0
        # by target node
        self._parked: defaultdict[str, dict[str, Read]] = defaultdict(dict)
        self._unasked: defaultdict[str, dict[str, Read]] = defaultdict(dict)
        self._next: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def connected(self) -> tuple[str, ...]:
        """The nodes to whose agents there is a connection."""
        return tuple(source.node for source in self._sources.values() if source.send is not None)

    def parked(self, node: str) -> int:
        """Returns how many permits of other agents wait for this own node's ingress, without those that wait for a late
        chunk of the same engines.
        """
        return sum(read.parked for read in self._parked[node].values() if not self._arbiter.blocked(read.key))

    # -------------------------------------------------------------------------------------------------- own workers

    def gates(self, node: str) -> bool:
        """Returns whether a new read from this node waits for its agent's permits."""
        source = self._sources.get(node)
        if source is None:
            self._sources[node] = Source(node)
            self._opens(node)
            return False
        return source.send is not None and not source.silent

    def submitted(self, key: str, flow: Flow, gated: bool, now_s: float) -> None:
        """Takes a read that the arbiter has accepted under `key`, gated as `gates` said."""
        source = self._sources[flow.source]
        read = Read(key, flow, None if flow.due_s is None else now_s + flow.due_s, gated)
        self._reads[key] = (source, read)
        source.reads[key] = read
        if source.send is not None:
            self._ask(source, read, now_s)
        if not gated:
            self._count_alone("no_agent" if source.send is None else "silent")

    def posted(self, key: str) -> None:
        """Notes that the arbiter has permitted a chunk of the read."""
        if key not in self._reads:
            return
        source, read = self._reads[key]
        if read.parked:
            self._park(read, read.parked - 1)
            if read.asked is not None:
                self._send(source, ChunkPosted(read.asked))

    def done(self, key: str, size: int, seconds: float, last: bool, now_s: float) -> None:
        """Passes on that a chunk has arrived. The arbiter has heard of it already."""
        if key not in self._reads:
            return
        source, read = self._reads[key]
        if read.asked is not None:
            self._send(source, ChunkDone(read.asked, size, seconds, last))
        if last:
            self._forget(source, read)
        elif read.whole and read.gated and not read.parked:
            view = self._arbiter.view(key, now_s)
            if not view.posted:
                self._park(read, 1)
                self._clear(key, view.left, now_s)

    def advanced(self, key: str, rli: int) -> None:
        """Passes on a read's new relative layer index."""
        if key not in self._reads:
            return
        source, read = self._reads[key]
        read.flow = dataclasses.replace(read.flow, rli=rli)
        if read.asked is not None:
            self._send(source, AdvanceFlow(read.asked, rli))

    def withdrawn(self, key: str, posted: int) -> None:
        """Passes on that the read posts nothing more; `posted` of its bytes are in flight."""
        if key not in self._reads:
            return
        source, read = self._reads[key]
        read.gated = False
        self._park(read, 0)
        self._unask(read)
        if read.asked is not None:
            self._send(source, WithdrawFlow(read.asked, posted))
        if not posted:
            self._forget(source, read)

    def unscheduled(self, key: str, reason: UnscheduledReason, now_s: float) -> None:
        """Passes on that the worker has posted the rest without a permit. The arbiter has heard of it already."""
        if key not in self._reads:
            return
        source, read = self._reads[key]
        read.gated = False
        self._park(read, 0)
        if read.asked is not None:
            self._send(source, Unscheduled(read.asked, self._arbiter.view(key, now_s).left, reason))
        elif source.send is not None:
            self._ask(source, read, now_s)

    # ------------------------------------------------------------------------------------------------ their agents

    def up(self, node: str, send: Send, now_s: float) -> None:
        """Notes a connection to a node's agent, which hears of all reads."""
        source = self._sources[node]
        source.send, source.silent, source.silent_s = send, False, 0.0
        send(JoinNode(self._node))
        for read in list(source.reads.values()):
            if read.gated:
                # permits of an earlier life of the agent are unknown to this one
                self._park(read, 0)
                self._clear(read.key, 0, now_s)
            self._ask(source, read, now_s)

    def down(self, node: str) -> None:
        """Notes the end of the connection. Gated reads wait for another one as long as for a silent agent."""
        source = self._sources[node]
        source.send, source.silent, source.silent_s = None, False, 0.0
        source.asked.clear()
        for read in source.reads.values():
            read.asked = None
            self._unask(read)

    def dropped(self, node: str) -> bool:
        """Forgets a node from which nothing is read, and returns whether it has; the owner drops the connection."""
        if self._sources[node].reads:
            return False
        del self._sources[node]
        return True

    def received(self, node: str, message: Message, now_s: float) -> None:
        """Takes a message of a node's agent. Raises ValueError for one that no agent sends."""
        source = self._sources[node]
        source.silent, source.silent_s = False, 0.0
        if isinstance(message, Beat):
            return
        if not isinstance(message, Permitted | FlowRefused):
            raise ValueError(f"an agent does not take {type(message).__name__} from another")
        read = source.asked.get(message.flow_id)
        if read is None or not read.gated:
            # it was given back, posted or withdrawn while the permit was on its way, of which the agent hears
            return
        if isinstance(message, FlowRefused):
            read.gated = False
            self._count_alone("refused")
            self._park(read, 0)
            self._clear(read.key, None, now_s)
            return
        read.whole |= message.whole
        self._park(read, read.parked + 1)
        self._clear(read.key, message.size, now_s)
        self._give_back_excess(read.flow.target, now_s)

    # -------------------------------------------------------------------------------------------------------- time

    def tick(self, now_s: float, lived_s: float) -> None:
        """Lets time pass, once a beat: this agent itself ran for `lived_s` seconds since the last tick."""
        for source in self._sources.values():
            if source.asked:
                self._send(source, Beat())
            if source.silent or not source.reads or (source.send is not None and not source.asked):
                # an agent beats only while it holds reads of ours
                continue
            source.silent_s += lived_s
            if source.silent_s >= self._silent_s:
                source.silent = True
                self._free(source, now_s)
        for target, unasked in self._unasked.items():
            if unasked and self.parked(target) < self._spare:
                self._ask_next(target, ASKED_AGAIN, now_s)

    def settle(self, now_s: float) -> None:
        """Asks for another read where permits have been used. Called after each event."""
        for target, unasked in self._unasked.items():
            if unasked and self.parked(target) < self._spare:
                self._ask_next(target, 1, now_s)

    # ------------------------------------------------------------------------------------------------------ inside

    def _send(self, source: Source, message: Message) -> None:
        if source.send is not None:
            source.send(message)

    def _ask(self, source: Source, read: Read, now_s: float) -> None:
        """Submits what is left of a read under a new id, because permits for an earlier one may be on their way."""
        self._asks += 1
        self._unask(read)
        read.whole = False
        view = self._arbiter.view(read.key, now_s)
        if not source.asked:
            # nothing of ours was held there until now, so its silence counts from here on
            source.silent_s = 0.0
        read.asked = f"{read.key}#{self._asks}"
        source.asked[read.asked] = read
        due_s = None if read.due_at is None else read.due_at - now_s
        flow = dataclasses.replace(read.flow, flow_id=read.asked, size=view.left, due_s=due_s)
        in_flight = _within(view.permits, view.left) if read.gated else (view.left,)
        self._send(source, SubmitFlow(flow, in_flight))

    def _free(self, source: Source, now_s: float) -> None:
        """Lets all reads from a silent node go on by the own ingress alone."""
        reason: UnscheduledReason = "agent_lost" if source.send is None else "silent"
        for read in [read for read in source.reads.values() if read.gated]:
            view = self._arbiter.view(read.key, now_s)
            read.gated = False
            self._park(read, 0)
            self._unask(read)
            if view.left > view.posted:
                self._count_alone(reason)
                if read.asked is not None:
                    self._send(source, Unscheduled(read.asked, view.left - view.posted, reason))
            self._clear(read.key, None, now_s)

    def _give_back_excess(self, target: str, now_s: float) -> None:
        """Gives permits back as long as more than `spare` of them wait for the target's ingress."""
        while self.parked(target) > self._spare:
            idle = [
                read
                for read in self._parked[target].values()
                if not self._arbiter.view(read.key, now_s).posted
            ]
            if not idle:
                return
            read = max(idle, key=lambda each: self._arbiter.rank(each.key))
            source, _ = self._reads[read.key]
            if read.asked is not None:
                self._send(source, WithdrawFlow(read.asked, 0))
                del source.asked[read.asked]
                read.asked = None
                self._unasked[target][read.key] = read
            # else the connection has ended: the next one hears of the read
            self._park(read, 0)
            self._totals["returned_permits"] += 1
            self._clear(read.key, 0, now_s)

    def _ask_next(self, target: str, most: int, now_s: float) -> None:
        """Asks for the first reads in the policy's order among those that were given back."""
        unasked, following = self._unasked[target], self._next[target]
        for _ in range(min(most, len(unasked))):
            while following and following[-1] not in unasked:
                following.pop()
            if not following:
                first = heapq.nsmallest(2 * ASKED_AGAIN, unasked, key=self._arbiter.rank)
                following.extend(reversed(first))
            source, read = self._reads[following.pop()]
            self._ask(source, read, now_s)

    def _park(self, read: Read, parked: int) -> None:
        read.parked = parked
        if parked:
            self._parked[read.flow.target][read.key] = read
        else:
            self._parked[read.flow.target].pop(read.key, None)

    def _unask(self, read: Read) -> None:
        self._unasked[read.flow.target].pop(read.key, None)

    def lost(self, key: str) -> None:
        """Forgets a read whose worker has gone; its chunks no longer hold a port."""
        self.withdrawn(key, 0)

    def _forget(self, source: Source, read: Read) -> None:
        self._park(read, 0)
        self._unask(read)
        if read.asked is not None:
            source.asked.pop(read.asked, None)
        del source.reads[read.key], self._reads[read.key]

    def _count_alone(self, reason: str) -> None:
        self._totals[f"alone_reads_{reason}"] += 1


def _within(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Returns the sizes without what is over `most` in all: permits may cover more than is left."""
    kept = []
    for size in sizes:
        kept.append(min(size, most))
        most -= kept[-1]
    return tuple(size for size in kept if size)
