"""The desk of an agent: it turns the messages of workers into events of the arbiter, and permits into messages.

The desk does no I/O and knows no clock. Each worker's flows are named apart, so that two workers, or two connections of
one worker, may use the same id. A message that no worker in order would send raises `BadMessage`; the agent then ends
that connection, whose flows `left` gives back, and nothing else changes.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Protocol

from actors.wire.messages import (
    ChunkDone,
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


@dataclass(slots=True, eq=False)
class Worker:
    """One connection of a worker. `send` queues a message to it."""

    number: int
    name: str
    send: Callable[[Message], object]
    node: str | None = None
    flows: dict[str, Open] = field(default_factory=dict)


class Applies(Protocol):
    """An arbiter, or the journal around one."""

    def apply(self, event: ev.FlowEvent, now_s: float) -> list[ev.Permit]: ...


class Book(Protocol):
    """Hears of the flows, of which it makes the order between requests."""

    def arrived(self, flow: Flow, now_s: float) -> None: ...
    def left(self, flow_id: str) -> None: ...


class Desk:
    """All workers of one agent and the arbiter that orders their flows.

    `nodes` are the names of nodes that exist; a worker that joins another one, or submits a flow from another one, is
    refused. The agent may change the set.
    """

    def __init__(self, arbiter: Arbiter, nodes: Set[str], journal: Applies | None = None) -> None:
        self.arbiter = arbiter
        self.nodes = nodes
        self.totals: Counter[str] = Counter()
        self.held_s = 0.0
        self.ended: list[FlowRecord] = []
        self.book: Book | None = None
        # the journal, if there is one, hears each event before the arbiter
        self._arbiter: Applies = journal or arbiter
        self._numbers = 0
        self._owners: dict[str, tuple[Worker, str]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    # ----------------------------------------------------------------------------------------------------- workers

    def came(self, name: str, send: Callable[[Message], object]) -> Worker:
        """Takes a new connection of a worker."""
        self._numbers += 1
        return Worker(self._numbers, name, send)

    def left(self, worker: Worker, now_s: float) -> None:
        """Ends all flows of a worker whose connection has ended; what they held of the ports is free again."""
        keys = tuple(flow.key for flow in worker.flows.values() if not flow.refused)
        self.totals["lost"] += len(worker.flows)
        for key in keys:
            del self._owners[key]
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
            case SubmitFlow():
                self._submitted(worker, message, now_s)
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
        if worker.node is None or flow.target != worker.node:
            raise BadMessage(
                f"flow {flow.flow_id!r} goes to {flow.target!r}, the worker joined {worker.node!r}"
            )
        self._known(flow.source)
        if flow.flow_id in worker.flows:
            raise BadMessage(f"flow {flow.flow_id!r} is open already: each read needs an id of its own")
        if len(worker.flows) >= MOST_FLOWS_A_WORKER:
            raise BadMessage(f"{len(worker.flows)} flows are open: more than any engine's queue holds")
        key = f"{worker.number}/{flow.flow_id}"
        opened = Open(key, flow, 0, 0, None, now_s)
        worker.flows[flow.flow_id] = opened
        self._owners[key] = (worker, flow.flow_id)
        submitted = ev.Submitted(dataclasses.replace(flow, flow_id=key), message.posted)
        try:
            self.apply(submitted, now_s, opened)
        except TooManyFlows as error:
            opened.refused = True
            del self._owners[key]
            self.totals["refused"] += 1
            worker.send(FlowRefused(flow.flow_id, str(error)))
        except FlowError:
            del self._owners[key], worker.flows[flow.flow_id]
            raise
        self.totals["submitted"] += 1
        if self.book is not None and not opened.refused:
            self.book.arrived(submitted.flow, now_s)

    def _chunk_done(self, worker: Worker, message: ChunkDone, now_s: float) -> None:
        opened = self._open(worker, message.flow_id)
        if not math.isfinite(message.seconds) or message.seconds < 0 or message.size < 0:
            raise BadMessage(f"{message}: bytes and seconds must be finite and at least 0")
        opened.chunks += 1
        opened.moved_bytes += message.size
        opened.moved_s += message.seconds
        if opened.refused:
            if message.last:
                self._end(worker, opened, 0.0)
            return
        held_s = self.arbiter.view(opened.key, now_s).held_s
        self.apply(ev.Done(opened.key, message.size, message.seconds, message.last), now_s)
        if message.last:
            self._end(worker, opened, held_s)

    def _withdrawn(self, worker: Worker, message: WithdrawFlow, now_s: float) -> None:
        opened = self._open(worker, message.flow_id)
        opened.withdrawn = True
        self.totals["withdrawn"] += 1
        held_s = 0.0
        if not opened.refused:
            held_s = self.arbiter.view(opened.key, now_s).held_s
            self.apply(ev.Withdrawn(opened.key, message.posted), now_s)
        if not message.posted:
            self._end(worker, opened, held_s)

    def _unscheduled(self, worker: Worker, message: Unscheduled, now_s: float) -> None:
        opened = self._open(worker, message.flow_id)
        opened.unscheduled = message.reason
        self.totals[f"unscheduled_reads_{message.reason}"] += 1
        self.totals["unscheduled_bytes"] += message.size
        if not opened.refused:
            self.apply(ev.Unscheduled(opened.key), now_s)

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
        self._owners.pop(opened.key, None)
        if self.book is not None:
            self.book.left(opened.key)
        self.held_s += held_s
        self.totals["ended"] += 1
        self.totals["moved_bytes"] += opened.moved_bytes
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
        self.totals["permits"] += 1
        self.totals[f"bytes_level_{permit.level}"] += permit.size
        worker, flow_id = self._owners[permit.flow_id]
        opened = worker.flows[flow_id]
        opened.level = permit.level
        worker.send(Permitted(flow_id, permit.size, permit.level, permit.whole))

    def set_policy(self, name: str, params: dict[str, object], now_s: float) -> None:
        """Changes the policy. Raises ValueError for an unknown one or a wrong parameter; nothing has changed then."""
        self.apply(ev.PolicySet(PolicyChoice(name, params)), now_s)
