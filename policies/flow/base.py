"""Flows, ports and the contract of a flow policy (MFS 3.1, 4.2).

A flow is one transfer of KV or activations from a node's egress port to another node's ingress port. A flow policy is a
frozen dataclass of parameters. Its method `place` says where one flow stands now: at which level (1 is the highest),
in which order within the level, and when it must be asked again. All flows together have one total order,

    rank = (level, *key, number of submission)

and the arbiter (`policies.flow.arbiter`) serves the flow of least rank first, at every port alike. The simulator asks
the same policies for levels, which its network then enforces ideally.

Times are seconds on the caller's own monotonic clock. A deadline is explicit where the flow's own end is bounded
(stage 3); stages 1 and 2 have an implicit one, which only their relative layer index tells.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import ClassVar, NamedTuple, Protocol


class FlowError(ValueError):
    """An event or a flow was refused. Nothing has changed; the message says what is wrong and what to do."""


class BadFlow(FlowError):
    """A flow's description is not valid: a size that is no positive whole number, an unnamed node, a NaN."""


class UnknownFlow(FlowError):
    """An event names a flow that was never submitted, has ended, or was withdrawn."""


class DuplicateFlow(FlowError):
    """A flow is submitted under the id of one that has not ended."""


class BadEvent(FlowError):
    """An event is not valid for its flow or port: more bytes than were left, negative seconds, time running back."""


class TooManyFlows(FlowError):
    """The arbiter holds as many flows as its configuration allows."""


class Stage(IntEnum):
    """The stage of a request's prefill that a flow belongs to (MFS 3.1)."""

    REUSE = 1
    """KV of a cached prefix, fetched from another engine."""
    COLLECTIVE = 2
    """Activations exchanged within an instance; they block its next computation."""
    P2D = 3
    """The prompt's KV on its way from prefill to decode. Only these flows have explicit deadlines."""
    WEIGHTS = 4
    """Ours: weights of a model on their way to an engine that starts. They wait for all others (`standing`)."""


class Side(StrEnum):
    """The direction of a port, seen from its node."""

    EGRESS = "egress"
    INGRESS = "ingress"


class Port(NamedTuple):
    """One direction of one node's link."""

    node: str
    side: Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One transfer as it is submitted. Raises BadFlow for a field that is not valid."""

    flow_id: str
    request_id: str
    batch: str
    """The prefill step that made the KV: its requests are a batch for RED. The request's id where no step is known."""
    stage: Stage
    source: str
    """Name of the node whose egress port the bytes leave by."""
    target: str
    """Name of the node whose ingress port the bytes arrive by."""
    size: int
    """Bytes to move, at least 1."""
    due_s: float | None = None
    """Explicit deadline in seconds after submission; None: the deadline is implicit."""
    rli: int = 0
    """Relative layer index: layers between the one that computes and the one that needs the data (MFS 4.4.1); for a
    prefix that is loaded whole, the number of requests before its own in the engine's queue.
    """
    compute_s: float = 0.0
    """Seconds of computation that its request still needs; Algorithm 1's estimated finish contains them."""
    least: int = 1
    """Bytes of its largest part that cannot be divided: no permit is for less, unless less is left."""
    engines: str = ""
    """The lender and the reader, by one name for both; while a chunk between them is late, no further one is permitted.
    Empty: unknown, so that the two nodes stand for them.
    """

    def __post_init__(self) -> None:
        wrong = self._wrong()
        if wrong:
            raise BadFlow(f"flow {self.flow_id!r}: {wrong}")

    def _wrong(self) -> str:
        for name in ("flow_id", "request_id", "batch", "source", "target"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                return f"{name} is {value!r}: it must be a name that is not empty"
        if self.stage not in _STAGES:
            return f"stage is {self.stage!r}: it must be 1, 2, 3 or 4"
        if type(self.size) is not int or self.size <= 0:
            return f"size is {self.size!r}: it must be a whole number of bytes, at least 1"
        if type(self.rli) is not int or self.rli < 0:
            return f"rli is {self.rli!r}: it must be a whole number, at least 0"
        if type(self.least) is not int or self.least <= 0:
            return f"least is {self.least!r}: it must be a whole number of bytes, at least 1"
        if type(self.engines) is not str:
            return f"engines is {self.engines!r}: it must be a name, or empty"
        if self.due_s is not None and not is_finite(self.due_s):
            return f"due_s is {self.due_s!r}: it must be a finite number of seconds or None"
        if not is_finite(self.compute_s) or self.compute_s < 0:
            return f"compute_s is {self.compute_s!r}: it must be a finite number of seconds, at least 0"
        return ""


_STAGES = frozenset(Stage)


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Place(NamedTuple):
    """Where a flow stands now, by a policy."""

    level: int
    """1 is the highest; `levels` + 1 is the scavenger."""
    key: tuple[float, ...]
    """The order within the level; smaller goes first. Keys of one policy have one length."""
    until_s: float = math.inf
    """The time at which the place changes if nothing happens to the flow until then; the policy is asked again."""
    rate: float | None = None
    """Bytes/s that the flow may use at most; None: as much as its ports give (Karuna's least rate otherwise)."""
    shares: bool = False
    """True where all flows of the level share their ports fairly. A network that enforces levels ideally then ignores
    the key, which only makes permits take turns; else it serves the level in the order of the key.
    """


class FlowState:
    """A submitted flow and how far it has come. Only its owner, an arbiter or a simulator, changes it."""

    __slots__ = (
        "due_at",
        "flow",
        "left",
        "level",
        "number",
        "place",
        "posted",
        "pruned",
        "rank",
        "red",
        "rli",
        "submitted_at",
        "turn",
    )

    def __init__(self, flow: Flow, number: int, now_s: float, turn: float = 0.0) -> None:
        self.flow = flow
        self.number = number
        """Number of its submission, which breaks the last tie of the order."""
        self.submitted_at = now_s
        self.due_at: float | None = None if flow.due_s is None else now_s + flow.due_s
        self.left = flow.size
        """Bytes that have not arrived, those on their way included."""
        self.posted = 0
        """Bytes that were permitted and have not arrived."""
        self.rli = flow.rli
        """The present relative layer index; it falls as the computation advances."""
        self.red = math.inf
        """Rank of its batch in the order by RED; infinite where no order names the batch."""
        self.pruned = False
        """True where Algorithm 1 has pruned its request."""
        self.turn = turn
        """Fair sharing's virtual start tag in bytes: the flow of least tag has had the least service."""
        self.level: int | None = None
        """The level of its last place; None before the first."""
        self.place: Place | None = None
        self.rank: tuple[float, ...] = ()

    @property
    def waiting(self) -> int:
        """The bytes that no permit covers yet."""
        return self.left - self.posted

    def stand(self, place: Place) -> None:
        """Takes a policy's answer over."""
        self.place = place
        self.level = place.level
        self.rank = (place.level, *place.key, self.number)


class Ports(Protocol):
    """The network as a policy knows it."""

    def rate(self, source: str, target: str) -> float:
        """Returns B(1-rho) in bytes/s: what the slower of the two ports gives to flows that are scheduled here."""


class FlowPolicy(Protocol):
    """The contract of a flow policy: `place` is a pure function of its arguments and the parameters."""

    paper: ClassVar[str]
    formula: ClassVar[str]
    turns: ClassVar[bool]
    """True where the place depends on `FlowState.turn` or on what is posted, so that each permit changes it."""

    @property
    def name(self) -> str: ...

    def place(self, state: FlowState, ports: Ports, now_s: float) -> Place:
        """Returns where the flow stands at `now_s`."""


WEIGHTS_LEVEL = 66
"""The level of weights, whatever the policy: policies have at most 64 levels and a scavenger (`MFS.levels`)."""


def standing(policy: FlowPolicy, state: FlowState, ports: Ports, now_s: float) -> Place:
    """Returns where a flow stands at `now_s`: weights below everything that a policy places, first come, first
    served, and all else where the policy says.
    """
    if state.flow.stage is Stage.WEIGHTS:
        return Place(WEIGHTS_LEVEL, (state.submitted_at,))
    return policy.place(state, ports, now_s)


def ranking(policy: FlowPolicy, flows: Iterable[FlowState], ports: Ports, now_s: float) -> list[FlowState]:
    """Places every flow anew and returns them in the policy's total order, the most urgent first."""
    states = list(flows)
    for state in states:
        state.stand(standing(policy, state, ports, now_s))
    return sorted(states, key=lambda state: state.rank)


def mlu(state: FlowState, ports: Ports, now_s: float) -> float | None:
    """Returns the minimal link utilisation of a flow with an explicit deadline, None for one without (MFS 4.3).

    MLU = bytes left / (time left * B(1-rho)); infinite where no time is left.
    """
    if state.due_at is None:
        return None
    rate = ports.rate(state.flow.source, state.flow.target)
    left_s = state.due_at - now_s
    return state.left / (left_s * rate) if left_s > 0 else math.inf


class FixedPorts:
    """Ports of known bandwidth, for simulations and tests."""

    __slots__ = ("_known", "_usual")

    def __init__(self, usual: float, known: dict[Port, float] | None = None) -> None:
        self._usual = usual
        self._known = known or {}

    def rate(self, source: str, target: str) -> float:
        """Returns the bytes/s of the slower of the two ports."""
        return min(
            self._known.get(Port(source, Side.EGRESS), self._usual),
            self._known.get(Port(target, Side.INGRESS), self._usual),
        )
