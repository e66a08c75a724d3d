"""What the dispatcher answers to an event: the actions that its caller carries out."""

from dataclasses import dataclass

from policies.network.oracle import TransferIntent
from policies.routing.base import Decision
from policies.state.views import RequestId


@dataclass(frozen=True, slots=True)
class RoutePrefill:
    """Compute `attempt_id` on the chosen worker. `colocated`: decode there as well. `degraded`: by a decode worker."""

    attempt_id: RequestId
    decision: Decision
    colocated: bool
    degraded: bool
    waited_s: float


@dataclass(frozen=True, slots=True)
class RouteDecode:
    """Decode `attempt_id` on the chosen worker, which pulls the KV. `intent`: what that puts on the network."""

    attempt_id: RequestId
    decision: Decision
    waited_s: float
    intent: TransferIntent


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not serve `attempt_id` now; its charges are given back already."""

    attempt_id: RequestId
    status: int
    reason: str
    retry_after_s: float


Action = RoutePrefill | RouteDecode | Reject
