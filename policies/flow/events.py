"""The events that an arbiter hears, and the permits that it answers with.

    Submitted -> Permit -> Done -> Permit -> .. -> Done(last)

A permit for a chunk is answered by exactly one `Done`, whose size is what was really moved: it may differ from the
permitted size, because a chunk ends where a block ends. A `whole` permit covers all that was left; it is answered by
any number of `Done`s, the last of which says `last`.
"""

from dataclasses import dataclass

from policies.flow.base import Flow, Port
from policies.state.events import PolicyChoice


@dataclass(frozen=True, slots=True)
class Submitted:
    """A flow asks for permits. `posted` of its bytes are on their way already (a restarted agent learns them so)."""

    flow: Flow
    posted: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """A permitted chunk has arrived. `seconds` run from its posting to its arrival; `last` ends the flow."""

    flow_id: str
    size: int
    seconds: float
    last: bool = False


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
    Submitted | Done | Advanced | Unscheduled | Withdrawn | Lost | Ordered | PolicySet | Bandwidth | Tick
)


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to post the next `size` bytes of a flow, as traffic of this level; `whole`: all that is left of it."""

    flow_id: str
    size: int
    level: int
    whole: bool = False
