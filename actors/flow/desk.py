"""The desk of an agent: it turns the messages of workers into events of the arbiter, and permits into messages.

The desk does no I/O and knows no clock. Each worker's flows are named apart, so that two workers, or two connections of
one worker, may use the same id. The agent of another node is a worker too, which asks for this node's egress only; its
flows are counted as `lent_` ones, because their own agent counts and reports them.

A message that no worker in order would send raises `BadMessage`; the agent then ends that connection, whose flows
`left` gives back, and nothing else changes.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Protocol

from actors.flow.egress import Egresses
from actors.wire.messages import (
    AdvanceFlow,
    ChunkDone,
    ChunkPosted,
    FlowRecord,
    FlowRefused,
    JoinNode,
    Message,
    Permitted,
    SubmitFlow,
    Unscheduled,
    WithdrawFlow,
)
from policies.flow import events as ev
from policies.flow.arbiter import Arbiter
from policies.flow.base import Flow, FlowError, TooManyFlows
from policies.state.events import PolicyChoice

MOST_FLOWS_A_WORKER = 8192
"""Open flows of one worker beyond which it is taken for broken. ASSUMPTION: more than an engine's queue ever holds."""
MOST_RECORDS = 4096
"""Ended transfers that wait for the next report to the router; the oldest are dropped."""


class BadMessage(Exception):
    """A worker broke the protocol. The message says how."""


@dataclass(slots=True)
class Open:
    """One flow that has not ended: its name at the arbiter, and what will be recorded of it."""

    key: str
    flow: Flow
    first_level: int
    level: int
    mlu: float | None
    submitted_s: float
    refused: bool = False
    withdrawn: bool = False
    chunks: int = 0
    moved_bytes: int = 0
    moved_s: float = 0.0
    unscheduled: str = ""


@dataclass(slots=True)
class Ended:
    """Flows that have ended, and the time for which they waited for permits and moved nothing."""

    flows: int = 0
    held_s: float = 0.0


@dataclass(slots=True, eq=False)
class Worker:
    """One connection of a worker, or of another node's `agent`. `send` queues a message to it."""

    number: int
    name: str
    send: Callable[[Message], object]
    agent: bool = False
    node: str | None = None
    flows: dict[str, Open] = field(default_factory=dict)


class Applies(Protocol):
    """An arbiter, or the journal around one."""

    def apply(self, event: ev.FlowEvent, now_s: float) -> list[ev.Permit]: ...


class Book(Protocol):
    """Hears of the flows and their chunks, of which it makes the order between requests. Another agent tells the
    coordinator of `lent` ones.
    """

    def arrived(self, flow: Flow, now_s: float, lent: bool = False) -> None: ...
    def moved(self, flow_id: str, size: int) -> None: ...
    def left(self, flow_id: str) -> None: ...


class Desk:
    """All workers of one agent and the arbiter that orders their flows.

    `nodes` are the names of nodes that exist; a worker that joins another one, or submits a flow from another one, is
    refused. The agent may change the set. `owned` are the nodes whose ports are the arbiter's own; `egresses` has the
    agents of others, None where there are none.
    """

    def __init__(self, arbiter: Arbiter, nodes: Set[str], journal: Applies | None = None) -> None:
        self.arbiter = arbiter
        self.nodes = nodes
        self.totals: Counter[str] = Counter()
        self.open = 0
        """Flows that are open, those that were refused included."""
        self.ended_at: dict[int, Ended] = {}
        """Own workers' flows that have ended, without those that were refused, by the level at which each was last
        permitted, or else submitted.
        """
        self.ended: list[FlowRecord] = []
        self.book: Book | None = None
        self.owned: set[str] = set()
        self.egresses: Egresses | None = None
        # the journal, if there is one, hears each event before the arbiter
        self._arbiter: Applies = journal or arbiter
        self._numbers = 0
        self._owners: dict[str, tuple[Worker, str]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    # ----------------------------------------------------------------------------------------------------- workers

    def came(self, name: str, send: Callable[[Message], object], agent: bool = False) -> Worker:
        """Takes a new connection of a worker, or of another node's agent."""
        self._numbers += 1
        return Worker(self._numbers, name, send, agent)

    def left(self, worker: Worker, now_s: float) -> None:
        """Ends all flows of a worker whose connection has ended; what they held of the ports is free again."""
        keys = tuple(flow.key for flow in worker.flows.values() if not flow.refused)
        self._count(worker, "lost", len(worker.flows))
        self.open -= len(worker.flows)
        for key in keys:
            del self._owners[key]
            if self.egresses is not None:
                self.egresses.lost(key)
            if self.book is not None:
                self.book.left(key)
        worker.flows.clear()
        if keys:
            self.apply(ev.Lost(keys), now_s)

    def take(self, worker: Worker, message: Message, now_s: float) -> None:
        """Takes one message of a worker. Raises BadMessage if no worker in order would send it."""
        try:
            self._take(worker, message, now_s)
        except FlowError as error:
            raise BadMessage(str(error)) from None

    def _take(self, worker: Worker, message: Message, now_s: float) -> None:
        match message:
            case JoinNode():
                if worker.node is not None:
                    raise BadMessage(
                        f"joins {message.node} after {worker.node}: a worker joins one node once"
                    )
                self._known(message.node)
                worker.node = message.node
                if not worker.agent:
                    self.owned.add(message.node)
            case SubmitFlow():
                self._submitted(worker, message, now_s)
            case AdvanceFlow():
                self._advanced(worker, message, now_s)
            case ChunkPosted():
                self._chunk_posted(worker, message, now_s)
            case ChunkDone():
                self._chunk_done(worker, message, now_s)
            case WithdrawFlow():
                self._withdrawn(worker, message, now_s)
            case Unscheduled():
                self._unscheduled(worker, message, now_s)
            case _:
                raise BadMessage(f"an agent does not take {type(message).__name__} from a worker")

    # ------------------------------------------------------------------------------------------------------- flows

    def _submitted(self, worker: Worker, message: SubmitFlow, now_s: float) -> None:
        flow = message.flow
        self._known(flow.source)
        self._known(flow.target)
        opened = self._opened(worker, flow, now_s)
        key = opened.key
        if worker.agent and flow.source not in self.owned:
            self._refuse(worker, opened, f"the agent owns no port of {flow.source!r}")
            return
        if worker.agent and len(worker.flows) > self.arbiter.config.most_flows // 2:
            self._refuse(worker, opened, "its node has as many flows here as all others together may have")
            return
        self._owners[key] = (worker, flow.flow_id)
        remote = None if flow.source in self.owned or worker.agent else self.egresses
        gated = remote is not None and remote.gates(flow.source)
        submitted = ev.Submitted(
            dataclasses.replace(flow, flow_id=key), message.in_flight, gated, worker.agent
        )
        try:
            self.apply(submitted, now_s, opened)
        except TooManyFlows as error:
            del self._owners[key]
            self._refuse(worker, opened, str(error))
            return
        except FlowError:
            del self._owners[key], worker.flows[flow.flow_id]
            self.open -= 1
            raise
        if remote is not None:
            remote.submitted(key, flow, gated, now_s)
        if self.book is not None:
            self.book.arrived(submitted.flow, now_s, worker.agent)

    def _opened(self, worker: Worker, flow: Flow, now_s: float) -> Open:
        """Opens a flow. Raises BadMessage for one that is open already, and for more than any worker has."""
        if worker.node is None or (flow.target != worker.node and not worker.agent):
            raise BadMessage(
                f"flow {flow.flow_id!r} goes to {flow.target!r}, the worker joined {worker.node!r}"
            )
        if flow.flow_id in worker.flows:
            raise BadMessage(f"flow {flow.flow_id!r} is open already: each read needs an id of its own")
        most = self.arbiter.config.most_flows if worker.agent else MOST_FLOWS_A_WORKER
        if len(worker.flows) >= most:
            raise BadMessage(f"{len(worker.flows)} flows are open: more than any engine's queue holds")
        opened = Open(f"{worker.number}/{flow.flow_id}", flow, 0, 0, None, now_s)
        worker.flows[flow.flow_id] = opened
        self._count(worker, "submitted")
        self.open += 1
        return opened

    def refuse(self, worker: Worker, message: SubmitFlow, why: str, now_s: float) -> None:
        """Refuses a flow, so that its worker posts it at once. Raises BadMessage as `take` does."""
        self._refuse(worker, self._opened(worker, message.flow, now_s), why)

    def _refuse(self, worker: Worker, opened: Open, why: str) -> None:
        opened.refused = True
        self._count(worker, "refused")
        worker.send(FlowRefused(opened.flow.flow_id, why))

    def _count(self, worker: Worker, name: str, number: int = 1) -> None:
        self.totals[f"lent_{name}" if worker.agent else name] += number

    def _chunk_posted(self, worker: Worker, message: ChunkPosted, now_s: float) -> None:
        opened = self._open(worker, message.flow_id)
        if not worker.agent:
            raise BadMessage("a worker posts by permit and does not say so: only another agent does")
        if not opened.refused:
            self.apply(ev.Posted(opened.key), now_s)

    def _chunk_done(self, worker: Worker, message: ChunkDone, now_s: float) -> None:
        opened = self._open(worker, message.flow_id)
        if not math.isfinite(message.seconds) or message.seconds < 0 or message.size < 0:
            raise BadMessage(f"{message}: bytes and seconds must be finite and at least 0")
        if opened.refused:
            self._moved(opened, message)
            if message.last:
                self._end(worker, opened, 0.0)
            return
        held_s = self.arbiter.view(opened.key, now_s).held_s
        self.apply(ev.Done(opened.key, message.size, message.seconds, message.last), now_s)
        self._moved(opened, message)
        if self.book is not None:
            self.book.moved(opened.key, message.size)
        if self.egresses is not None:
            self.egresses.done(opened.key, message.size, message.seconds, message.last, now_s)
        if message.last:
            self._end(worker, opened, held_s)

    def _advanced(self, worker: Worker, message: AdvanceFlow, now_s: float) -> None:
        opened = self._open(worker, message.flow_id)
        if opened.refused:
            return
        self.apply(ev.Advanced(opened.key, message.rli), now_s)
        if self.egresses is not None:
            self.egresses.advanced(opened.key, message.rli)

    def _moved(self, opened: Open, message: ChunkDone) -> None:
        opened.chunks += 1
        opened.moved_bytes += message.size
        opened.moved_s += message.seconds

    def _withdrawn(self, worker: Worker, message: WithdrawFlow, now_s: float) -> None:
        opened = self._open(worker, message.flow_id)
        opened.withdrawn = True
        self._count(worker, "withdrawn")
        held_s = 0.0
        if not opened.refused:
            held_s = self.arbiter.view(opened.key, now_s).held_s
            self.apply(ev.Withdrawn(opened.key, message.posted), now_s)
            if self.egresses is not None:
                self.egresses.withdrawn(opened.key, message.posted)
        if not message.posted:
            self._end(worker, opened, held_s)

    def _unscheduled(self, worker: Worker, message: Unscheduled, now_s: float) -> None:
        opened = self._open(worker, message.flow_id)
        if not 0 <= message.size <= opened.flow.size:
            raise BadMessage(f"{message}: bytes must be at least 0, and at most the flow's")
        if opened.unscheduled:
            # another agent said so when we were silent, and says it again for its worker
            return
        opened.unscheduled = message.reason
        self._count(worker, f"unscheduled_reads_{message.reason}")
        self._count(worker, "unscheduled_bytes", message.size)
        if not opened.refused:
            self.apply(ev.Unscheduled(opened.key), now_s)
            if self.egresses is not None:
                self.egresses.unscheduled(opened.key, message.reason, now_s)

    def _open(self, worker: Worker, flow_id: str) -> Open:
        opened = worker.flows.get(flow_id)
        if opened is None:
            raise BadMessage(f"flow {flow_id!r} is not open: it was never submitted, or has ended")
        return opened

    def _known(self, node: str) -> None:
        if node not in self.nodes:
            known = ", ".join(sorted(self.nodes)[:8]) or "none"
            raise BadMessage(f"node {node!r} is unknown: the agent knows {known}")

    def _end(self, worker: Worker, opened: Open, held_s: float) -> None:
        del worker.flows[opened.flow.flow_id]
        self.open -= 1
        self._owners.pop(opened.key, None)
        if self.book is not None:
            self.book.left(opened.key)
        self._count(worker, "ended")
        self._count(worker, "moved_bytes", opened.moved_bytes)
        if worker.agent:
            return
        if not opened.refused:
            at_level = self.ended_at.setdefault(opened.level, Ended())
            at_level.flows += 1
            at_level.held_s += held_s
        if opened.withdrawn:
            return
        flow = opened.flow
        record = FlowRecord(
            flow.flow_id,
            flow.request_id,
            int(flow.stage),
            flow.source,
            flow.target,
            flow.size,
            opened.first_level,
            opened.level,
            opened.mlu,
            flow.due_s,
            opened.chunks,
            held_s,
            opened.moved_s,
            opened.unscheduled,
        )
        self.ended.append(record)
        if len(self.ended) > MOST_RECORDS:
            del self.ended[0]

    # ----------------------------------------------------------------------------------------------------- arbiter

    def held(self, now_s: float) -> Counter[int]:
        """Returns how many flows of own workers wait with nothing in flight, by their levels."""
        views = (
            self.arbiter.view(key, now_s) for key, (worker, _) in self._owners.items() if not worker.agent
        )
        return Counter(view.level for view in views if not view.posted)

    def apply(self, event: ev.FlowEvent, now_s: float, opened: Open | None = None) -> None:
        """Has the arbiter take an event, and sends the permits that follow. `opened` is the flow that the event
        submits. Raises FlowError for an event that is refused; nothing has changed then.
        """
        permits = self._arbiter.apply(event, now_s)
        if opened is not None:
            view = self.arbiter.view(opened.key, now_s)
            opened.first_level = opened.level = view.level
            opened.mlu = view.mlu
        for permit in permits:
            self._permit(permit)

    def _permit(self, permit: ev.Permit) -> None:
        worker, flow_id = self._owners[permit.flow_id]
        self._count(worker, "permits")
        self._count(worker, f"bytes_level_{permit.level}", permit.size)
        if self.egresses is not None:
            self.egresses.posted(permit.flow_id)
        opened = worker.flows[flow_id]
        opened.level = permit.level
        worker.send(Permitted(flow_id, permit.size, permit.level, permit.whole))

    def cleared(self, key: str, size: int | None, now_s: float) -> None:
        """Takes a permit of another node's agent for a flow that is open here (`policies.flow.events.Cleared`)."""
        self.apply(ev.Cleared(key, size), now_s)

    def set_policy(self, name: str, params: dict[str, object], now_s: float) -> None:
        """Changes the policy. Raises ValueError for an unknown one or a wrong parameter; nothing has changed then."""
        self.apply(ev.PolicySet(PolicyChoice(name, params)), now_s)
