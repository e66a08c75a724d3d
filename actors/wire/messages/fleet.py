"""Router -> ingress: which engines there are, and how they and the router do."""

import msgspec

from actors.wire.messages.base import Wire
from actors.wire.messages.engines import EngineInfo, Status


class Fleet(Wire, frozen=True):
    """Router -> ingress: the whole list of live engines, sent at connect and at every change; plus the policy names.

    `block_tokens`: hash prompts in blocks of so many tokens, because the policies look at prefix hits; None: do not.
    """

    engines: list[EngineInfo]
    prefill_policy: str
    decode_policy: str
    wants_hints: bool = False
    block_tokens: int | None = None
    wants_transfers: bool = False


class FleetStatus(Wire, frozen=True):
    """Router -> ingress about once a second: the engines' last statuses, the router's own gauges and monotonic totals.

    `statuses[i].totals` holds the engine's EngineMetrics fields. `decision_buckets` are cumulative counts of decision
    times at the upper bounds (s) in `decision_bounds_s`, +Inf last.
    """

    statuses: list[Status]
    queued: int
    pool: int
    in_flight: int
    leases: int
    totals: dict[str, float]
    decision_bounds_s: tuple[float, ...] = ()
    decision_buckets: tuple[int, ...] = ()
    decision_sum_s: float = 0.0
    gauges: dict[str, float] = msgspec.field(default_factory=dict)
