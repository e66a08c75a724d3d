"""Actions: the dispatcher's answers to an event, which its caller carries out."""

from collections.abc import Mapping

from policies.admission.base import Judgement
from policies.fairness.base import Turn
from policies.flow.fetch_or_recompute import FetchReason
from policies.network.oracle import TransferIntent
from policies.record import record
from policies.routing.base import Decision
from policies.state.views import RequestId, WorkerId


@record
class PrefixFetch:
    """Whether the chosen prefill worker is to fetch the prompt's head from `lender`, or to compute it (MFS 2.2).

    `tokens` are those of the prompt's head that the lender has cached. `fetch_s` and `recompute_s` are the seconds
    that either way is expected to take, and `terms` the parts of `fetch_s` (`policies.flow.fetch_or_recompute`). For
    the lender's lease the request waits at most `patience_s`.
    """

    lender: WorkerId
    tokens: int
    fetch: bool
    reason: FetchReason
    fetch_s: float
    recompute_s: float
    terms: Mapping[str, float]
    patience_s: float


@record
class Aged:
    """The change of a request's priority because it has waited long (`DispatchConfig.class_ageing_s`): the one that it
    came with, and the one as which it is served.
    """

    asked: int
    served_as: int


@record
class RoutePrefill:
    """The order to compute the prompt of `attempt_id` on the chosen worker."""

    attempt_id: RequestId
    decision: Decision
    colocated: bool
    """Whether the worker also decodes the request."""
    degraded: bool
    """Whether the worker is a decode worker that replaces one, because no prefill or colocated worker is left."""
    waited_s: float
    """Seconds from the request's arrival to this decision."""
    prefix: PrefixFetch | None = None
    """The decision about a prefix that another worker holds; None: there is none, or none is ever lent."""
    admission: Judgement | None = None
    """The judgement by which the request had its turn; None where the admission policy takes everything."""
    turn: Turn | None = None
    """The shares by which it had its turn; None where no other tenant waited in the queue, and with the fairness policy
    `none`. Where classes have counters, other classes count as other tenants do.
    """
    aged: Aged | None = None
    """The change of its priority by ageing; None where there was none."""


@record
class RouteDecode:
    """The order to decode `attempt_id` on the chosen worker, which pulls the KV."""

    attempt_id: RequestId
    decision: Decision
    waited_s: float
    """Seconds that the request spent in the pool."""
    intent: TransferIntent
    """The KV transfer that this decision puts on the network."""
    kv_due_s: float | None = None
    """Seconds from the decision in which the KV must be on the chosen worker (`policies.dispatch.kv_deadline`)."""
    turn: Turn | None = None
    """The shares by which it had its turn, as in `RoutePrefill`; None where no other tenant waited in the pool."""
    aged: Aged | None = None
    """The change of its priority by ageing; None where there was none."""


@record
class Reject:
    """The order not to serve `attempt_id` now. Its charges have been given back. `status` is an HTTP status, and
    `detail` says more than `reason` where there is more to say. `admission` is the judgement of the admission policy
    that refused it; None where another rule did. `turn` says which tenants were before it, and `aged` how its priority
    has changed, as in `RoutePrefill`.
    """

    attempt_id: RequestId
    status: int
    reason: str
    retry_after_s: float
    detail: str = ""
    admission: Judgement | None = None
    turn: Turn | None = None
    aged: Aged | None = None


Action = RoutePrefill | RouteDecode | Reject
