"""The reads of one worker and the permits for them, as a state machine without I/O, threads or clocks.

The owner calls in what happened (a read was submitted, a message came, a chunk arrived, time passed) and carries out
the actions that each call returns, in order:

    Post      post these chunks of the read to the transport now
    Send      send this message to the agent
    Finished  nothing of this read is in flight and nothing will be posted: its blocks may be used or freed

A read is **held** while it has chunks that are not posted. Held reads wait for the agent's permits, and fail open: all
that is left of a read is posted without a permit if there is no agent, if nothing is heard from the agent for
`ReaderConfig.silent_s` of the worker's own running time, or if the read's hold reaches its bound (the lease less a
margin, the request's deadline). The worker then says so with `Unscheduled`; an agent to which it connects later hears
so, too, of the reads that are not over. While an agent is silent, new reads are not held; the first message from it
puts later reads under permits again.

A posted chunk is never cancelled. After `abort` nothing more is posted, and Finished follows when the chunks in flight
have arrived.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.wire.messages import (
    AdvanceFlow,
    ChunkDone,
    FlowRefused,
    Message,
    Permitted,
    SubmitFlow,
    Unscheduled,
    UnscheduledReason,
    WithdrawFlow,
)
from policies.flow.base import Flow

SILENT_S = 0.020
"""How long an agent may be silent by default, in seconds: beats come every 5 ms, so four are missing in a row."""


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """`silent_s` is how long the agent may be silent, in seconds of the worker's own running time, before held reads
    are posted unscheduled.
    """

    silent_s: float = SILENT_S


@dataclass(frozen=True, slots=True)
class Post:
    """Post the `n_chunks` chunks from `first_chunk` on, `size` bytes in all. `level` is that of the permit, or None
    without one.
    """

    flow_id: str
    first_chunk: int
    n_chunks: int
    size: int
    level: int | None


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to the agent."""

    message: Message


@dataclass(frozen=True, slots=True)
class Finished:
    """The read is over. `aborted` says that it did not move all its bytes; `held_s` is how long it waited for permits
    with nothing in flight; `unscheduled` is why the rest was posted without one (None: it was not). `level` is the
    lowest one (the largest number) at which a part was permitted, None where none was."""

    flow_id: str
    aborted: bool
    held_s: float
    unscheduled: UnscheduledReason | None
    level: int | None = None


Action = Post | Send | Finished


@dataclass(slots=True)
class _Read:
    flow: Flow
    chunks: tuple[int, ...]
    submitted_s: float
    bound_s: float
    waits_since_s: float | None
    # whether the agent at the present connection knows the flow
    told: bool = False
    posted: int = 0  # chunks
    # bytes of each post on its way
    in_flight: list[int] = field(default_factory=list)
    aborted: bool = False
    held_s: float = 0.0
    unscheduled: UnscheduledReason | None = None
    # bytes on their way that were posted without a permit
    alone: int = 0
    level: int | None = None

    @property
    def held(self) -> bool:
        return self.posted < len(self.chunks) and not self.aborted

    def left(self) -> int:
        return sum(self.chunks[self.posted :])

    def waited(self, now_s: float) -> None:
        """Ends a time in which the read waited with nothing in flight, if there is one."""
        if self.waits_since_s is not None:
            self.held_s += now_s - self.waits_since_s
            self.waits_since_s = None


class Reader:
    """All reads of one worker that are not over."""

    def __init__(self, config: ReaderConfig | None = None) -> None:
        self._config = config or ReaderConfig()
        self._reads: dict[str, _Read] = {}
        self._held: dict[str, _Read] = {}
        self._connected = False
        self._silent = False
        self._silent_s = 0.0
        self.unscheduled: dict[UnscheduledReason, int] = {}
        """Number of reads of which a part was posted without a permit, by reason."""
        self.permits = 0
        """Number of permits that were used."""

    @property
    def waits(self) -> bool:
        """Whether a read is held, so that the owner must call `tick` every few milliseconds."""
        return bool(self._held)

    @property
    def held(self) -> tuple[str, ...]:
        """Ids of the reads that have chunks which are not posted yet."""
        return tuple(self._held)

    # ------------------------------------------------------------------------------------------------- the owner

    def submit(self, flow: Flow, chunks: Sequence[int], hold_bound_s: float, now_s: float) -> list[Action]:
        """Takes a read whose chunks have these sizes, in the order in which they are posted. It is held for at most
        `hold_bound_s` seconds. No permit is for less than its longest chunk. Raises ValueError if the id is in use, or
        if the sizes do not add up to the flow's.
        """
        if flow.flow_id in self._reads:
            raise ValueError(f"flow {flow.flow_id} is being read already: give each read an id of its own")
        if not chunks or min(chunks) <= 0 or sum(chunks) != flow.size:
            raise ValueError(
                f"flow {flow.flow_id}: chunks {list(chunks)[:8]} must be positive and add up to {flow.size}"
            )
        flow = dataclasses.replace(flow, least=max(chunks))
        read = _Read(flow, tuple(chunks), now_s, now_s + hold_bound_s, now_s)
        self._reads[flow.flow_id] = read
        if not self._held:
            # an agent beats only while it holds flows, so its silence counts from here on
            self._silent_s = 0.0
        self._held[flow.flow_id] = read
        if not self._connected:
            return self._post_unscheduled(read, "no_agent", now_s)
        actions: list[Action] = [self._submit(read, now_s)]
        if self._silent:
            actions += self._post_unscheduled(read, "silent", now_s)
        return actions

    def chunk_done(self, post: Post, seconds: float | None, now_s: float) -> list[Action]:
        """Notes that the chunks of `post` have arrived, `seconds` after they were posted. With None they have
        failed, so that none of their bytes count.
        """
        read = self._reads.get(post.flow_id)
        if read is None or not read.in_flight:
            raise ValueError(f"flow {post.flow_id} has no chunk in flight")
        read.in_flight.remove(post.size)
        if post.level is None:
            read.alone = 0
        if read.held and not read.in_flight:
            read.waits_since_s = now_s
        over = not read.in_flight and not read.held
        actions: list[Action] = []
        if read.told:
            moved, took_s = (0, 0.0) if seconds is None else (post.size, seconds)
            actions.append(Send(ChunkDone(post.flow_id, moved, took_s, over)))
        return actions + (self._finish(read) if over else [])

    def abort(self, flow_id: str, now_s: float) -> list[Action]:
        """Posts nothing more of the read, because its request was aborted or a chunk failed. Does nothing for a read
        that is over. Chunks in flight must still be reported by `chunk_done`, also failed ones.
        """
        read = self._reads.get(flow_id)
        if read is None or read.aborted:
            return []
        read.aborted = True
        read.waited(now_s)
        self._held.pop(flow_id, None)
        actions: list[Action] = []
        if read.told:
            actions.append(Send(WithdrawFlow(flow_id, sum(read.in_flight))))
        return actions + ([] if read.in_flight else self._finish(read))

    def advanced(self, flow_id: str, rli: int) -> list[Action]:
        """Notes that the computation has come nearer to the layer that needs the read. Does nothing for a read that is
        over, and for an index that is no less than before.
        """
        read = self._reads.get(flow_id)
        if read is None or rli >= read.flow.rli:
            return []
        read.flow = dataclasses.replace(read.flow, rli=rli)
        return [Send(AdvanceFlow(flow_id, rli))] if read.told and read.held else []

    def tick(self, now_s: float, lived_s: float) -> list[Action]:
        """Lets time pass: the worker itself ran for `lived_s` seconds since the last tick. The owner reads its socket
        before each tick, and does not count time for which it was stopped.
        """
        if not self._held:
            return []
        self._silent_s += lived_s
        actions: list[Action] = []
        if self._silent_s >= self._config.silent_s:
            self._silent = self._connected
            for read in list(self._held.values()):
                actions += self._post_unscheduled(read, "silent" if self._connected else "agent_lost", now_s)
        for read in [read for read in self._held.values() if now_s >= read.bound_s]:
            actions += self._post_unscheduled(read, "bound", now_s)
        return actions

    # ------------------------------------------------------------------------------------------------- the agent

    def joined(self, now_s: float) -> list[Action]:
        """Notes a new connection to an agent, to which all reads are submitted with what is left of them, and which is
        told of those that were posted without a permit.
        """
        self._connected, self._silent, self._silent_s = True, False, 0.0
        actions: list[Action] = []
        for read in [read for read in self._reads.values() if not read.aborted]:
            actions.append(self._submit(read, now_s))
            if read.unscheduled is not None:
                actions.append(self._say_unscheduled(read, read.unscheduled))
        return actions

    def lost(self) -> None:
        """Notes that the connection has ended. Held reads wait for another one as long as for a silent agent."""
        self._connected = self._silent = False
        for read in self._reads.values():
            read.told = False

    def received(self, message: Message, now_s: float) -> list[Action]:
        """Takes a message of the agent. Every message, also a Beat, is a sign of life."""
        self._silent, self._silent_s = False, 0.0
        match message:
            case Permitted():
                return self._permitted(message, now_s)
            case FlowRefused():
                read = self._held.get(message.flow_id)
                return [] if read is None else self._post_unscheduled(read, "refused", now_s)
        return []

    # ---------------------------------------------------------------------------------------------------- inside

    def _submit(self, read: _Read, now_s: float) -> Send:
        read.told = True
        flow, due_s = read.flow, read.flow.due_s
        if due_s is not None:
            due_s -= now_s - read.submitted_s
        size = read.left() + sum(read.in_flight)
        return Send(SubmitFlow(dataclasses.replace(flow, size=size, due_s=due_s), tuple(read.in_flight)))

    def _permitted(self, permit: Permitted, now_s: float) -> list[Action]:
        read = self._held.get(permit.flow_id)
        if read is None or not read.told:
            # it was posted or aborted while the permit was on its way, of which the agent hears
            return []
        first, size = read.posted, 0
        while read.posted < len(read.chunks):
            size += read.chunks[read.posted]
            if size > permit.size and read.posted > first and not permit.whole:
                size -= read.chunks[read.posted]
                break
            read.posted += 1
        self.permits += 1
        read.level = max(read.level or 0, permit.level)
        return [self._post(read, first, size, permit.level, now_s)]

    def _post_unscheduled(self, read: _Read, reason: UnscheduledReason, now_s: float) -> list[Action]:
        first, size = read.posted, read.left()
        read.posted = len(read.chunks)
        read.unscheduled, read.alone = reason, size
        self.unscheduled[reason] = self.unscheduled.get(reason, 0) + 1
        actions: list[Action] = [self._post(read, first, size, None, now_s)]
        if read.told:
            actions.append(self._say_unscheduled(read, reason))
        return actions

    def _say_unscheduled(self, read: _Read, reason: UnscheduledReason) -> Send:
        return Send(Unscheduled(read.flow.flow_id, read.alone, reason, read.held_s))

    def _post(self, read: _Read, first: int, size: int, level: int | None, now_s: float) -> Post:
        read.in_flight.append(size)
        read.waited(now_s)
        if read.posted == len(read.chunks):
            del self._held[read.flow.flow_id]
        return Post(read.flow.flow_id, first, read.posted - first, size, level)

    def _finish(self, read: _Read) -> list[Action]:
        del self._reads[read.flow.flow_id]
        return [Finished(read.flow.flow_id, read.aborted, read.held_s, read.unscheduled, read.level)]
