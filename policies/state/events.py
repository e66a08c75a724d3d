"""Everything that can happen to the cluster, as values. The live router feeds them, and so shall the simulator.

Each carries `now_s`, the only time there is. An event that makes no sense in the current state (a `PrefillDone` for an
unknown request, say) is refused by the reducer with `StaleEvent` and changes nothing: after a crash or a race it is
normal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from policies.engine_model.blocks import Change, Stored
from policies.network.oracle import Oracle
from policies.state.views import Health, Request, RequestId, Role, WorkerId

Outcome = Literal["finished", "cancelled", "failed", "rejected", "expired"]
AdoptedStage = Literal["prefilling", "pooled", "decoding"]


@dataclass(frozen=True, slots=True)
class EngineUp:
    """A worker announced itself (again: facts are replaced, charges stay)."""

    now_s: float
    worker: WorkerId
    role: Role
    group: str
    node: str
    slots: int
    kv_capacity_tokens: int
    health: Health = Health.READY
    barrier: str = ""


@dataclass(frozen=True, slots=True)
class EngineDown:
    """A worker is gone. Its requests stay until their owner closes or resubmits them; nothing is routed to it."""

    now_s: float
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine itself counts. `kv_tokens` includes leased blocks. Shares are 0..1; None = no such figure."""

    now_s: float
    worker: WorkerId
    running: int
    waiting: int
    kv_tokens: int
    health: Health = Health.READY
    swapped: int | None = None
    token_budget: float | None = None
    compute: float | None = None
    memory_bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request wants a prefill worker; a known attempt_id arrives again when its owner retries: old charges are given
    back.
    """

    now_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class PrefillRouted:
    """Decision carried out: the request computes on `worker`; `colocated`: it will also decode there."""

    now_s: float
    attempt_id: RequestId
    worker: WorkerId
    colocated: bool


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The request's KV waits on its prefill worker: it enters the pool."""

    now_s: float
    attempt_id: RequestId
    lease_until_s: float
    kv_bytes: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeRouted:
    """Decision carried out: `worker` pulls the KV and decodes."""

    now_s: float
    attempt_id: RequestId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Admitted:
    """The decode worker holds the KV; the prefill worker's copy is free."""

    now_s: float
    attempt_id: RequestId


@dataclass(frozen=True, slots=True)
class Progressed:
    """`tokens` generated so far, all sequences together."""

    now_s: float
    attempt_id: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class ProgressedMany:
    """`Progressed` for many at once: pairs (attempt_id, tokens generated so far). An item that does not fit (its
    request is closed, say) is passed over and counted (`ClusterState.refused_items`); the others count.
    """

    now_s: float
    items: tuple[tuple[RequestId, int], ...]


@dataclass(frozen=True, slots=True)
class ForecastMade:
    """The predictor's view of a request when it had generated `tokens`: it *finishes in* so many more tokens (a
    sequence), or it *stays* (None: not expected to finish in the window). Holds until the next one; counts down.
    """

    now_s: float
    attempt_id: RequestId
    tokens: int
    finishes_in_tokens: float | None


@dataclass(frozen=True, slots=True)
class OracleRefreshed:
    """What is known of the network from now on; None: nothing any more."""

    now_s: float
    oracle: Oracle | None


@dataclass(frozen=True, slots=True)
class KvBatch:
    """One batch of an engine's own KV events, in the order in which it published them (`prefix_index`)."""

    now_s: float
    worker: WorkerId
    epoch: str
    seq: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All that a worker holds before batch `next_seq`, as chains: the answer to a gap that cannot be replayed."""

    now_s: float
    worker: WorkerId
    epoch: str
    next_seq: int
    chains: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A request that an ingress has under way and that this router does not know (it was restarted)."""

    now_s: float
    request: Request
    stage: AdoptedStage
    prefill_worker: WorkerId | None
    decode_worker: WorkerId | None
    tokens: int
    lease_until_s: float
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The request is over; every charge is given back."""

    now_s: float
    attempt_id: RequestId
    outcome: Outcome
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy by its registered name; parameters that are not given take their defaults. Plain JSON data."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoliciesChanged:
    """From now on these policies decide (None: as before), and these fields of DispatchConfig hold.

    `Dispatcher.handle` checks all of it first and raises ValueError with what is allowed: then nothing has changed.
    """

    now_s: float
    prefill: PolicyChoice | None = None
    decode: PolicyChoice | None = None
    dispatch: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: leases and deadlines are looked at."""

    now_s: float


Event = (
    EngineUp
    | EngineDown
    | EngineStatus
    | Arrived
    | PrefillRouted
    | PrefillDone
    | DecodeRouted
    | Admitted
    | Progressed
    | ProgressedMany
    | ForecastMade
    | OracleRefreshed
    | KvBatch
    | KvSnapshot
    | Adopted
    | Closed
    | PoliciesChanged
    | Tick
)


class StaleEvent(Exception):
    """The event does not fit the state (unknown request or worker, wrong stage); nothing was changed."""
