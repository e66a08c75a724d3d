"""Everything that can happen to one request: the events that `life.Life.on` takes.

Events are values without a time; the driver passes the time with each event. They are tuples, because one is made for
every message of every request, and making a tuple takes half as long as making a frozen dataclass (`python -m timeit`).

Drivers translate their own messages into events: the ingress translates what comes over its sockets, the simulator what
its engines and its router do.
"""

from typing import NamedTuple

from policies.request.stage import Task


class Start(NamedTuple):
    """The request begins."""


class Lend(NamedTuple):
    """The engine `engine_id` is to lend the first `tokens` tokens of the prompt, on its data-parallel `rank` (None: the
    engine chooses), unless its lease takes longer than `patience_s` to stand.
    """

    engine_id: str
    tokens: int
    patience_s: float
    rank: int | None = None


class RoutePrefill(NamedTuple):
    """The prompt is to be computed on `engine_id`, on its data-parallel `rank` (None: the engine chooses). With `lend`
    another engine first lends it the prompt's prefix.

    With `colocated` the request is decoded there as well. In POOLED the event means that the lease would end before a
    slot is free: the KV is given up and the prompt is computed once more.
    """

    engine_id: str
    colocated: bool
    rank: int | None = None
    lend: Lend | None = None


class RouteDecode(NamedTuple):
    """The engine `engine_id` is to pull the KV and decode, on its data-parallel `rank` (None: the engine chooses). The
    KV must be there `kv_due_s` seconds from now (None: no time is set).
    """

    engine_id: str
    rank: int | None = None
    kv_due_s: float | None = None


class Reject(NamedTuple):
    """The router does not serve the request now and has given back all its charges. `status` is an HTTP status, and
    `detail` says more than `reason` where there is more to say.
    """

    status: int
    reason: str
    retry_after_s: float
    detail: str = ""


class PrefillDone(NamedTuple):
    """The prompt's KV is ready under `handle`, which the decode engine understands, for `lease_s` seconds.

    The prompt waited for `queue_s` inside the engine and was computed for `compute_s`. `engine_id` is the engine that
    says so ("": the driver does not tell). In LENDING the event is about the lent prefix.
    """

    lease_s: float
    kv_bytes: int
    cached_tokens: int
    handle: bytes = b""
    queue_s: float = 0.0
    compute_s: float = 0.0
    engine_id: str = ""


class RenewalDue(NamedTuple):
    """A pooled request has waited for a part of its lease, which must be renewed if it is to wait on."""


class Renewed(NamedTuple):
    """The prefill engine `engine_id` has renewed the lease on the prompt's KV, which now lasts for `lease_s` more
    seconds; 0 means that it was not renewed and ends when it would have ended.
    """

    lease_s: float
    engine_id: str


class Reading(NamedTuple):
    """The decode engine has a slot and KV blocks for the request, and begins to read the KV. Until then the request
    waits there for its turn.
    """


class Admitted(NamedTuple):
    """The engine that decodes has a slot and the KV, and the prefill engine's copy has been freed.

    `transfer_bytes`, `transfer_s` and `descriptors` measure the pull of the KV; they are 0 where nothing was pulled.
    A flow scheduler held the pull back for `held_s`, which `transfer_s` leaves out, and permitted it at `level`.
    """

    transfer_bytes: int = 0
    transfer_s: float = 0.0
    descriptors: int = 0
    cached_tokens: int = 0
    held_s: float = 0.0
    level: int | None = None


class Output(NamedTuple):
    """The engine generated `tokens` more tokens of one choice; `last` says whether they are the choice's last tokens.
    Only the driver knows which choice it is.
    """

    tokens: int
    last: bool


ONE_TOKEN = Output(1, last=False)
"""The usual piece of output, made once, because it happens for every token of every stream."""


class Preempted(NamedTuple):
    """The decode engine took the slot back. The request goes to the router again; its prompt and output together are
    its new prompt.
    """


class EngineFailed(NamedTuple):
    """The engine `engine_id` has dropped the request. `retryable`: the same work may succeed elsewhere or later.

    `code` is "bad_request" where the request itself is at fault, and `param` then names its field. Other codes are
    defined by the engine. An engine that stalls had stood still for `silent_s` seconds before it said so.
    """

    engine_id: str
    task: Task
    code: str
    message: str
    retryable: bool
    param: str | None = None
    silent_s: float = 0.0


class EngineLost(NamedTuple):
    """The connection to `engine_id` is gone, and with it everything that the request had on that engine. Nothing had
    come from the engine for `silent_s` seconds before (infinity: it was never connected).
    """

    engine_id: str
    reason: str
    silent_s: float = 0.0


class EngineUnfit(NamedTuple):
    """The engine `engine_id` is connected and may still work, but the router calls it unfit: `code` is "stalled",
    "engine_dead" or "quarantined". What the request has there is to be had elsewhere.
    """

    engine_id: str
    code: str
    reason: str


class Unknown(NamedTuple):
    """The router does not know the attempt, or not in its present stage: another router decides from now on, or the
    router has restarted.
    """


class Cancel(NamedTuple):
    """The client has gone, or another part of its answer has failed."""


class DeadlinePassed(NamedTuple):
    """The request's total time is over."""


class IdleTooLong(NamedTuple):
    """No further token of a request that has output has come for too long, over all its attempts."""


class StageOverdue(NamedTuple):
    """The present stage has lasted too long: in POOLED a margin before the lease ends, in DECODING since the last
    token.
    """


Event = (
    Start
    | RoutePrefill
    | RouteDecode
    | Reject
    | PrefillDone
    | RenewalDue
    | Renewed
    | Reading
    | Admitted
    | Output
    | Preempted
    | EngineFailed
    | EngineLost
    | EngineUnfit
    | Unknown
    | Cancel
    | DeadlinePassed
    | IdleTooLong
    | StageOverdue
)
