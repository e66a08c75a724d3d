"""Events: everything that can happen to the cluster, as values. The live router and the simulator make them.

Every event carries `now_s`, the only time that the state knows. The reducer refuses an event that makes no sense in the
current state (a `PrefillDone` for an unknown request, say) with `StaleEvent`, and changes nothing. After a crash or a
race such events are normal.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from policies.engine_model.blocks import Change, Stored
from policies.network.oracle import Oracle
from policies.record import record
from policies.request.ended import RequestEnd
from policies.request.stage import Outcome, Task
from policies.state.standby import Standby
from policies.state.views import Health, NodeLoad, Request, RequestId, Role, WorkerId

AdoptedStage = Literal["prefilling", "pooled", "transferring", "decoding"]


@record
class EngineUp:
    """A worker announced itself. When it does so again, its facts are replaced and its charges stay."""

    now_s: float
    worker: WorkerId
    role: Role
    group: str
    node: str
    slots: int
    kv_capacity_tokens: int
    health: Health = Health.READY
    barrier: str = ""


@record
class EngineDown:
    """A worker is gone. Its requests stay until their owner closes or resubmits them; nothing is routed to it.

    When a worker of this name comes again, it is charged what its requests still hold.
    """

    now_s: float
    worker: WorkerId


@record
class EngineStatus:
    """An engine's report of its own counts. `kv_tokens` includes leased blocks.

    `token_budget`, `compute` and `memory_bandwidth` are shares in use, 0..1. A value of None was not reported.
    """

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


@record
class Arrived:
    """A request needs a prefill worker. A known attempt_id may arrive again (after a preemption, say); then its charges
    are given back first.
    """

    now_s: float
    request: Request


@record
class PrefillRouted:
    """A prefill decision was carried out: the request computes on `worker`, and also decodes there if `colocated`.

    A request that `fetches` waits for a prefix of another worker before it computes.
    """

    now_s: float
    attempt_id: RequestId
    worker: WorkerId
    colocated: bool
    fetches: bool = False


@record
class PrefillDone:
    """The prompt's KV is ready on the prefill worker until `lease_until_s`, and the request enters the pool.

    `worker` is the prefill worker where the messenger names it (None: the one to which the request was routed). It need
    not be known yet; then the request enters the pool when the worker comes. The engine computed the prompt for
    `compute_s` (0: the messenger does not say).
    """

    now_s: float
    attempt_id: RequestId
    lease_until_s: float
    kv_bytes: int
    cached_tokens: int
    worker: WorkerId | None = None
    compute_s: float = 0.0


@record
class LeaseRenewed:
    """The prefill worker holds the KV of a request in the pool until `lease_until_s`, which is later than before."""

    now_s: float
    attempt_id: RequestId
    lease_until_s: float


@record
class DecodeRouted:
    """A decode decision was carried out: `worker` pulls the KV and decodes."""

    now_s: float
    attempt_id: RequestId
    worker: WorkerId


@record
class Aged:
    """A request that waits in the queue or in the pool is served as one of another priority from now on, because it has
    waited long (`DispatchConfig.class_ageing_s`).
    """

    now_s: float
    attempt_id: RequestId
    priority: int


@record
class Admitted:
    """The worker that decodes the request has a slot and the KV; a prefill worker's copy has been freed."""

    now_s: float
    attempt_id: RequestId


@record
class Progressed:
    """A request has generated `tokens` tokens until now, summed over its sequences."""

    now_s: float
    attempt_id: RequestId
    tokens: int


@record
class ProgressedMany:
    """`Progressed` for many requests at once: `items` are pairs (attempt_id, tokens generated until now).

    An item that does not fit (because its request is closed, say) is skipped and counted in
    `ClusterState.refused_items`; the other items take effect.
    """

    now_s: float
    items: tuple[tuple[RequestId, int], ...]


@record
class ForecastMade:
    """The predictor made a forecast for a request that had generated `tokens` tokens. Each of its sequences *finishes
    in* `finishes_in_tokens` more tokens, or it *stays* (None: not expected to finish in the window). The forecast
    counts down with each token and holds until the next one.
    """

    now_s: float
    attempt_id: RequestId
    tokens: int
    finishes_in_tokens: float | None


@record
class OracleRefreshed:
    """The network oracle was replaced by `oracle`; None: the network is no longer known."""

    now_s: float
    oracle: Oracle | None


@record
class KvBatch:
    """Batch number `seq` of a worker's own KV events, with its changes in order. `epoch` is explained in
    `prefix_index`.
    """

    now_s: float
    worker: WorkerId
    epoch: str
    seq: int
    changes: tuple[Change, ...]


@record
class KvSnapshot:
    """All blocks that a worker held before batch `next_seq`, as chains. Engines send it where a gap in the batches
    cannot be replayed.
    """

    now_s: float
    worker: WorkerId
    epoch: str
    next_seq: int
    chains: tuple[Stored, ...]


@record
class Adopted:
    """An ingress has a request under way that this router does not know, because the router was restarted, or knows in
    another stage. What was known of the request is replaced. Its workers need not be known yet.

    A pooled request has waited since `entered_s` (None: since now). Its lease was granted for `lease_s` seconds at
    first, and last renewed at `renewed_s` (None: never).
    """

    now_s: float
    request: Request
    stage: AdoptedStage
    prefill_worker: WorkerId | None
    decode_worker: WorkerId | None
    tokens: int
    lease_until_s: float
    kv_bytes: int
    entered_s: float | None = None
    renewed_s: float | None = None
    lease_s: float | None = None


@record
class AttemptFailed:
    """An engine has failed a request, whose attempt ends. It counts for outlier detection (`outliers`) and changes no
    charge.

    `workers` are the workers of the engine that its ingress names, `task` what the engine was doing, and `code` the
    code of the failure: that of the engine, "engine_lost" where its connection was lost, or None.
    """

    now_s: float
    attempt_id: RequestId
    workers: tuple[WorkerId, ...]
    task: Task | None
    code: str | None


@record
class Closed:
    """The attempt has ended; all its charges are given back. `ended` says how its request went, as its client saw it;
    None where the request goes on in another attempt, or where its ingress was lost.
    """

    now_s: float
    attempt_id: RequestId
    outcome: Outcome
    output_tokens: int = 0
    ended: RequestEnd | None = None


@record
class PolicyChoice:
    """A policy by its registered name, as plain JSON data; parameters that are not given take their defaults."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@record
class PoliciesChanged:
    """The policies change (None: this policy stays), and so do the fields of DispatchConfig that `dispatch` names.

    `Dispatcher.handle` checks everything before it changes anything, and raises ValueError naming what is allowed.
    """

    now_s: float
    prefill: PolicyChoice | None = None
    decode: PolicyChoice | None = None
    dispatch: Mapping[str, Any] = field(default_factory=dict)
    admission: PolicyChoice | None = None
    fairness: PolicyChoice | None = None


@record
class StandbyChanged:
    """The fleet fell asleep, or is woken (`policies.state.standby`)."""

    now_s: float
    standby: Standby


@record
class FlowsReported:
    """The flow agent of a node tells what is still to move at the node's ports, in the order of its flow policy
    `policy`. The report replaces that node's report before it.
    """

    now_s: float
    policy: PolicyChoice
    load: NodeLoad


@record
class Tick:
    """Time has passed; the dispatcher checks leases and deadlines."""

    now_s: float


Event = (
    EngineUp
    | EngineDown
    | EngineStatus
    | Arrived
    | PrefillRouted
    | PrefillDone
    | LeaseRenewed
    | DecodeRouted
    | Aged
    | Admitted
    | Progressed
    | ProgressedMany
    | ForecastMade
    | OracleRefreshed
    | KvBatch
    | KvSnapshot
    | Adopted
    | AttemptFailed
    | Closed
    | PoliciesChanged
    | StandbyChanged
    | FlowsReported
    | Tick
)


class StaleEvent(Exception):
    """The event does not fit the state (unknown request or worker, wrong stage); nothing was changed."""
