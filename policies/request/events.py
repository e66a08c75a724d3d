"""Everything that can happen to one request: the events that `life.Life.on` takes.

Events are values without a time; whoever feeds them says when. Drivers translate their own messages into them: the
ingress what comes over its sockets, the simulator what its engines and its router do.
"""

from dataclasses import dataclass

from policies.request.stage import Task


@dataclass(frozen=True, slots=True)
class Start:
    """The request begins. `router`: a router is connected and decides for it."""

    router: bool


@dataclass(frozen=True, slots=True)
class RoutePrefill:
    """The prompt is to be computed on `engine_id`, on its data-parallel `rank` (None: the engine chooses).

    `colocated`: it is decoded there as well. In POOLED it means that the lease ends before a slot is free: give that KV
    up and compute the prompt once more.
    """

    engine_id: str
    colocated: bool
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class RouteDecode:
    """`engine_id` is to pull the KV and decode, on its data-parallel `rank` (None: the engine chooses)."""

    engine_id: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """The router does not serve the request now and has given back all its charges. `status` as in HTTP."""

    status: int
    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt's KV is ready under `handle`, which the decode engine understands, for `lease_s` seconds.

    `queue_s` and `compute_s`: how long it waited inside the engine and how long it was computed.
    """

    lease_s: float
    kv_bytes: int
    cached_tokens: int
    handle: bytes = b""
    queue_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The engine that decodes has a slot and the KV; the engines have freed the prefill engine's copy."""

    transfer_bytes: int = 0
    transfer_s: float = 0.0
    descriptors: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """`tokens` more tokens of one choice, its `last` ones or not. The driver alone knows which."""

    tokens: int
    last: bool


ONE_TOKEN = Output(1, last=False)
"""The usual piece of output, made once, because it happens for every token of every stream."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """The decode engine took the slot back and hands the request to the router, prompt and output as its new prompt."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """`engine_id` has dropped the request. `retryable`: the same work may succeed elsewhere or later.

    `code` is "bad_request" where the request itself is at fault (`param` names its field), "kv_load" where the KV could
    not be pulled; all others are the engine's own words.
    """

    engine_id: str
    task: Task
    code: str
    message: str
    retryable: bool
    param: str | None = None


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The connection to `engine_id` is gone, and with it all that the request had there."""

    engine_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The router is gone: what it has not decided is decided here."""


@dataclass(frozen=True, slots=True)
class RouterUp:
    """A new router is connected, which does not know the request yet."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client has gone, or its answer failed elsewhere."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request's total time is over."""


@dataclass(frozen=True, slots=True)
class StageOverdue:
    """The time that the present stage may last is over: in POOLED, the lease less a margin."""


Event = (
    Start
    | RoutePrefill
    | RouteDecode
    | Reject
    | PrefillDone
    | Admitted
    | Output
    | Preempted
    | EngineFailed
    | EngineLost
    | RouterLost
    | RouterUp
    | Cancel
    | DeadlinePassed
    | StageOverdue
)
