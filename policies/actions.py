"""What the dispatcher answers to an event: the actions that its caller carries out."""

from dataclasses import dataclass

from policies.routing.base import Decision
from policies.routing.oracle import TransferIntent
from policies.state.views import RequestId


@dataclass(frozen=True, slots=True)
class RoutePrefill:
    """Compute `rid` on the chosen worker. `colocated`: decode there as well. `degraded`: by a decode worker."""

    rid: RequestId
    decision: Decision
    colocated: bool
    degraded: bool
    waited_s: float


@dataclass(frozen=True, slots=True)
class RouteDecode:
    """Decode `rid` on the chosen worker, which pulls the KV. `intent`: what that puts on the network."""

    rid: RequestId
    decision: Decision
    waited_s: float
    intent: TransferIntent


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not serve `rid` now; its charges are given back already."""

    rid: RequestId
    status: int
    reason: str
    retry_after_s: float


Action = RoutePrefill | RouteDecode | Reject
