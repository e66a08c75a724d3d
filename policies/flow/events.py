"""The events that an arbiter hears, and the permits that it answers with.

    Submitted -> Permit -> Done -> Permit -> .. -> Done(last)

A permit for a chunk is answered by exactly one `Done`, whose size is what was really moved: it may differ from the
permitted size, because a chunk ends where a block ends. A `whole` permit covers all that was left; it is answered by
any number of `Done`s, the last of which says `last`. What a chunk before it leaves of its own permit is its part too.

Where the source's egress belongs to another node's arbiter, the flow is submitted `gated`: it waits for that arbiter's
permits first (`Cleared`), and then for the ports here. Every arbiter gives a chunk its egress before its ingress, and
only posted chunks hold an ingress, so nothing waits in a circle. The source's arbiter hears of it when such a chunk is
`Posted`, because only from then on its port is busy with it.
"""

from dataclasses import dataclass

from policies.flow.base import Flow, Port
from policies.state.events import PolicyChoice


@dataclass(frozen=True, slots=True)
class Submitted:
    """A flow asks for permits. `in_flight` are the bytes of each of its chunks that are on their way already (a
    restarted agent learns them so). A `gated` flow gets no permit before it is `Cleared`. A `lent` one is read by
    another node, whose arbiter says when each permitted chunk is `Posted`. Where flows share fairly, it gets as much as
    `weight` others (1: as any other; more where it stands for several).
    """

    flow: Flow
    in_flight: tuple[int, ...] = ()
    gated: bool = False
    lent: bool = False
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Done:
    """A permitted chunk has arrived. `seconds` run from its posting to its arrival; `last` ends the flow."""

    flow_id: str
    size: int
    seconds: float
    last: bool = False


@dataclass(frozen=True, slots=True)
class Posted:
    """The next permitted chunk of a lent flow is on its way: the arbiter of its reader had room at the ingress."""

    flow_id: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """The source's arbiter permits a gated flow one more chunk of up to `size` bytes. None: all that is left, and the
    flow is gated no more. 0: what was cleared and is not posted is taken back, and the flow is gated.
    """

    flow_id: str
    size: int | None


@dataclass(frozen=True, slots=True)
class Advanced:
    """The computation has come nearer to the layer that needs the flow: its relative layer index is `rli` now."""

    flow_id: str
    rli: int


@dataclass(frozen=True, slots=True)
class Unscheduled:
    """A worker has posted the rest of a flow without a permit, because it heard nothing in time.

    Any number of `Done`s follow; the last says `last`. Permits that crossed this message are void.
    """

    flow_id: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A flow posts nothing more. `posted` of its bytes are on their way still and hold the ports until their `Done`s,
    the last of which says `last`; with 0 the flow has ended. Permits that crossed this message are void.
    """

    flow_id: str
    posted: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker (its flows) or a whole node (all flows from and to it) is gone; their chunks no longer hold a port.

    Ids of flows that have ended are ignored.
    """

    flow_ids: tuple[str, ...] = ()
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Ordered:
    """The order between requests (Algorithm 1): batches by RED, the most urgent first, and the pruned requests.

    It replaces the order before it; requests that it does not list as pruned are no longer pruned.
    """

    batches: tuple[str, ...]
    pruned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The flow policy is changed; every flow is placed anew."""

    choice: PolicyChoice


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The nominal bytes/s of a port, which the learned bandwidth starts from and never exceeds."""

    port: Port
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Only time has passed."""


FlowEvent = (
    Submitted
    | Done
    | Posted
    | Cleared
    | Advanced
    | Unscheduled
    | Withdrawn
    | Lost
    | Ordered
    | PolicySet
    | Bandwidth
    | Tick
)


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to post the next `size` bytes of a flow, as traffic of this level; `whole`: all that is left of it."""

    flow_id: str
    size: int
    level: int
    whole: bool = False
