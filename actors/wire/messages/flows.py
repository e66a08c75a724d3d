"""Messages about KV flows: between a worker that reads KV and its node's agent, between agents, to a coordinator.

A flow is one read of KV, or one collective, from a node's egress to a node's ingress (`policies.flow.base.Flow`). The
worker that reads submits it to the agent of its own node and posts each chunk only when the agent permits it. Sizes are
in bytes and times are durations in seconds.
"""

from typing import Literal

import msgspec

from actors.wire.messages.base import Part, Wire
from policies.flow.base import Flow
from policies.state.views import NodeLoad

UnscheduledReason = Literal["no_agent", "agent_lost", "silent", "bound", "refused"]
"""Why a worker posts a read without a permit: it has no connection to an agent; it lost the connection while the read
was held; the agent was silent; the bound of the hold was reached; or the agent refused the flow."""


class JoinNode(Wire, frozen=True):
    """Worker -> agent, first message: the worker reads KV into `node`, and lends KV from it."""

    node: str


class SubmitFlow(Wire, frozen=True):
    """Worker -> agent: a read waits for permits. After a reconnect the worker submits each read again, with the size
    and the deadline that are left; `in_flight` are the bytes of each chunk that is on its way already. A read that was
    posted without a permit meanwhile is submitted, too, and Unscheduled follows.
    """

    flow: Flow
    in_flight: tuple[int, ...] = ()


class Permitted(Wire, frozen=True):
    """Agent -> worker: up to `size` more bytes of the flow may be posted, at `level` (1 is the highest). With `whole`
    the permit covers all that is left of it. It is for no less than the flow's `least`, unless less is left.
    """

    flow_id: str
    size: int
    level: int
    whole: bool = False


class ChunkPosted(Wire, frozen=True):
    """Agent -> agent of the source: the next permitted chunk of the flow is on its way. Until then its permit
    has waited for the reader's ingress.
    """

    flow_id: str


class ChunkDone(Wire, frozen=True):
    """Worker -> agent: `size` bytes of the flow, posted at once, have arrived `seconds` after they were posted: 0
    bytes if they have failed. With `last` nothing more follows, and the flow ends.
    """

    flow_id: str
    size: int
    seconds: float
    last: bool = False


class AdvanceFlow(Wire, frozen=True):
    """Worker -> agent: the computation has come nearer to the layer that needs the flow, whose relative layer index is
    `rli` now.
    """

    flow_id: str
    rli: int


class WithdrawFlow(Wire, frozen=True):
    """Worker -> agent: the flow posts nothing more, because its request was aborted or its read failed. `posted`
    of its bytes are in flight: with 0 it ends here; otherwise ChunkDone follows for them, the last one with `last`.
    """

    flow_id: str
    posted: int


class Unscheduled(Wire, frozen=True):
    """Worker -> agent: the worker has posted `size` bytes of the flow, all that was left, without a permit."""

    flow_id: str
    size: int
    reason: UnscheduledReason
    held_s: float = 0.0


class FlowRefused(Wire, frozen=True):
    """Agent -> worker: the flow is not scheduled (the agent has too many, or its source has left), so the worker posts
    it at once."""

    flow_id: str
    why: str


class Beat(Wire, frozen=True):
    """Agent -> worker, every 5 ms while it holds flows of this worker: the agent lives, and holds them on purpose.
    Coordinator -> agents, every 0.1 s while it has flows of any of them.
    """


# ------------------------------------------------------------------------------------------------------- coordinator


class BatchArrived(Wire, frozen=True):
    """Agent -> coordinator: flows of the prefill step `batch` were submitted to this agent. Of a flow that was named
    before, `size` and `due_s` are what is left now.

    `bytes_per_s` has for each flow what the agent has learned of its two ports, B(1-rho) of the slower one.
    """

    batch: str
    flows: tuple[Flow, ...]
    bytes_per_s: tuple[float, ...]


class BatchLeft(Wire, frozen=True):
    """Agent -> coordinator: flows of a batch have ended at this agent; their ids."""

    batch: str
    flows: tuple[str, ...]


class FlowOrder(Wire, frozen=True):
    """Coordinator -> agents: the order of batches across nodes, the most urgent first, and the requests that go to the
    scavenger level. It replaces the order before it.
    """

    batches: tuple[str, ...] = ()
    pruned: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------------ router


class FlowRecord(Part, frozen=True):
    """One transfer that has ended, as `explain` shows it: its level when it began and when it ended, its MLU at
    submission (None without a deadline), bytes, chunks, the seconds it was held and it was moved, and why it was
    unscheduled ("": it was not).
    """

    flow_id: str
    request_id: str
    stage: int
    source: str
    target: str
    size: int
    first_level: int
    last_level: int
    mlu: float | None
    due_s: float | None
    chunks: int
    held_s: float
    moved_s: float
    unscheduled: str = ""


MOST_NODES = 64
"""Most nodes of one agent of whose ports its report tells. ASSUMPTION: an agent has one node, and a test a few more."""


class FlowReport(Wire, frozen=True):
    """Agent -> router, once a second: the agent's policy with all its parameters (`params`, a JSON object), its totals
    and gauges, the transfers ended since the last report, and what is still to move at the ports of its nodes.
    """

    node: str
    policy: str
    totals: dict[str, float]
    gauges: dict[str, float]
    ended: tuple[FlowRecord, ...] = ()
    params: bytes = b"{}"
    loads: tuple[NodeLoad, ...] = ()


class FlowAgentStatus(Part, frozen=True):
    """One agent as `sluice status` shows it: its node, its policy, the reads that are open and those of them that are
    held with nothing in flight, the permits that it gave in all, the share of the reads that it has heard of which went
    without one, the learned bandwidth of its ports in bytes/s, by names as `ingress n1`, and the held reads by priority
    level.
    """

    node: str
    policy: str
    open: int
    held: int
    granted: int
    unscheduled_share: float
    bytes_per_s: dict[str, float]
    held_by_level: dict[str, int] = msgspec.field(default_factory=dict)


class SetFlowPolicy(Wire, frozen=True):
    """Router -> agent: use this policy from now on. `params` are a JSON object."""

    name: str
    params: bytes = b"{}"
