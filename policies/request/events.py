"""Everything that can happen to one request: the events that `life.Life.on` takes.

Events are values without a time; whoever feeds them says when. They are tuples, since one is made for every message of
every request, and making a tuple takes half as long as making a frozen dataclass (`python -m timeit`).

Drivers translate their own messages into events: the ingress what comes over its sockets, the simulator what its
engines and its router do.
"""

from typing import NamedTuple

from policies.request.stage import Task


class Start(NamedTuple):
    """The request begins. `router`: a router is connected and decides for it."""

    router: bool


class RoutePrefill(NamedTuple):
    """The prompt is to be computed on `engine_id`, on its data-parallel `rank` (None: the engine chooses).

    `colocated`: it is decoded there as well. In POOLED it means that the lease ends before a slot is free: give that KV
    up and compute the prompt once more.
    """

    engine_id: str
    colocated: bool
    rank: int | None = None


class RouteDecode(NamedTuple):
    """`engine_id` is to pull the KV and decode, on its data-parallel `rank` (None: the engine chooses)."""

    engine_id: str
    rank: int | None = None


class Reject(NamedTuple):
    """The router does not serve the request now and has given back all its charges. `status` as in HTTP."""

    status: int
    reason: str
    retry_after_s: float


class PrefillDone(NamedTuple):
    """The prompt's KV is ready under `handle`, which the decode engine understands, for `lease_s` seconds.

    `queue_s` and `compute_s`: how long it waited inside the engine and how long it was computed.
    """

    lease_s: float
    kv_bytes: int
    cached_tokens: int
    handle: bytes = b""
    queue_s: float = 0.0
    compute_s: float = 0.0


class Admitted(NamedTuple):
    """The engine that decodes has a slot and the KV; the engines have freed the prefill engine's copy."""

    transfer_bytes: int = 0
    transfer_s: float = 0.0
    descriptors: int = 0
    cached_tokens: int = 0


class Output(NamedTuple):
    """`tokens` more tokens of one choice, its `last` ones or not. The driver alone knows which."""

    tokens: int
    last: bool


ONE_TOKEN = Output(1, last=False)
"""The usual piece of output, made once, because it happens for every token of every stream."""


class Preempted(NamedTuple):
    """The decode engine took the slot back and hands the request to the router, prompt and output as its new prompt."""


class EngineFailed(NamedTuple):
    """`engine_id` has dropped the request. `retryable`: the same work may succeed elsewhere or later.

    `code` is "bad_request" where the request itself is at fault (`param` names its field); others are the engine's own.
    """

    engine_id: str
    task: Task
    code: str
    message: str
    retryable: bool
    param: str | None = None


class EngineLost(NamedTuple):
    """The connection to `engine_id` is gone, and with it all that the request had there."""

    engine_id: str
    reason: str


class RouterLost(NamedTuple):
    """The router is gone: what it has not decided is decided here."""


class RouterUp(NamedTuple):
    """A new router is connected, which does not know the request yet."""


class Cancel(NamedTuple):
    """The client has gone, or its answer failed elsewhere."""


class DeadlinePassed(NamedTuple):
    """The request's total time is over."""


class StageOverdue(NamedTuple):
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
