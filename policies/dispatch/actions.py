"""Actions: the dispatcher's answers to an event, which its caller carries out."""

from dataclasses import dataclass

from policies.network.oracle import TransferIntent
from policies.routing.base import Decision
from policies.state.views import RequestId


@dataclass(frozen=True, slots=True)
class RoutePrefill:
    """Compute the prompt of `attempt_id` on the chosen worker."""

    attempt_id: RequestId
    decision: Decision
    colocated: bool
    """The worker also decodes the request."""
    degraded: bool
    """The worker is a decode worker that stands in, because no prefill or colocated worker is left."""
    waited_s: float


@dataclass(frozen=True, slots=True)
class RouteDecode:
    """Decode `attempt_id` on the chosen worker, which pulls the KV."""

    attempt_id: RequestId
    decision: Decision
    waited_s: float
    intent: TransferIntent
    """The transfer that this puts on the network."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not serve `attempt_id` now; its charges are given back already."""

    attempt_id: RequestId
    status: int
    reason: str
    retry_after_s: float


Action = RoutePrefill | RouteDecode | Reject
