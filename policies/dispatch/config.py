"""The dispatcher's limits (`policies.dispatch.dispatcher` says what each does)."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

from policies.routing.base import Overcommit
from policies.routing.params import Number, OneOf, Whole, check
from policies.state.outliers import OutlierLimits
from policies.state.views import PoolEntry

BY_POLICY = "by_policy"
_OVERDUE_FROM_S: Callable[[PoolEntry], float] = attrgetter("overdue_from_s")


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Limits of the dispatcher. Times are in seconds. Raises ValueError for a value out of range."""

    max_queue: Annotated[int, Whole(1, unit="requests")] = 1024
    """Most requests that may wait for a prefill worker. When one more comes, the least urgent is rejected with 429."""
    queue_timeout_s: Annotated[float, Number(above=0, unit="s")] = 60.0
    """Longest wait for a prefill worker; after it a request is rejected with 503."""
    # ASSUMPTION: BalanceRoute D.1 has "a configurable threshold" and gives no value
    kv_high_water: Annotated[float, Number(above=0, high=1)] = 0.9
    """Share of a prefill worker's KV above which no prompt is sent to it."""
    status_stale_s: Annotated[float, Number(above=0, unit="s")] = 3.0
    """Age of an engine's last report from which the engine gets no new work."""
    # ASSUMPTION: a router that stood still has lost all connections when it goes on; its engines find it again within
    # their longest back-off (`actors.wire.link`) and an answer of Serve, some 3 s on a busy machine.
    absence_s: Annotated[float, Number(low=0, unit="s")] = 5.0
    """Time for which requests wait for an engine to come back when none is ready any more, before they are rejected."""
    # ASSUMPTION: the slowest pull that shall still succeed within vLLM's lease of 30 s
    lease_margin_s: Annotated[float, Number(low=0, unit="s")] = 8.0
    """A pool entry is rescued this long before its lease ends, but not before two thirds of the lease have passed."""
    starvation_s: Annotated[float, Number(low=0, unit="s")] | None = None
    """Age from which a pool entry that fits nowhere is starving: no entry behind it may be sent before it. With null it
    starves when it is overdue: its lease is about to end because it is renewed no more (the papers have no such rule).
    """
    reserve_tokens: Annotated[int, Whole(0, unit="tokens")] = 16
    """Free KV that a decode worker must have for each sequence in addition to the prompt."""
    # `python -m benchmarks run overcommit`: each further one makes NetKV's first tokens later in a cluster of few slots
    overcommit_slots: Annotated[int, Whole(0, unit="slots")] = 1
    """Sequences that a decode worker may get beyond its slots, when `overcommit` allows it (NetKV IV, BalanceRoute
    D.6).
    """
    overcommit: Annotated[str, OneOf((BY_POLICY, *Overcommit))] = BY_POLICY
    """When workers without a free slot are offered. By policy, it is those policies that weigh the queue there which
    want it; "always" makes a router that keeps no request back of any policy, as the papers' baselines are.
    """
    max_prefills: Annotated[int, Whole(1)] = 2
    """Most times that one request may be prefilled."""
    tick_entries: Annotated[int, Whole(1, unit="entries")] = 512
    """Most pool entries that one event may scan."""
    tick_admissions: Annotated[int, Whole(1, unit="entries")] = 128
    """Most pool entries that one event may send to decode workers, and most that it may rescue."""
    outlier_failure_rate: Annotated[float, Number(above=0, high=1)] = 0.5  # ASSUMPTION
    """Failure rate from which a worker is quarantined: with 0.5, after two failures in a row."""
    # ASSUMPTION: a full batch of an engine steps about twice as slowly as a small one; twice that is no load any more
    outlier_slow_factor: Annotated[float, Number(above=1)] = 4.0
    """A worker that is slower than the median of its tier by more than this factor is quarantined."""
    # ASSUMPTION: Envoy waits 30 s, because its host then gets all its traffic again; here one request is at risk
    quarantine_base_s: Annotated[float, Number(above=0, unit="s")] = 2.0
    """Time from the beginning of a quarantine to its first probe; each probe that fails doubles it."""
    quarantine_max_s: Annotated[float, Number(above=0, unit="s")] = 60.0
    """Longest time between two probes. A worker that was well for longer than this begins with the shortest again."""
    # ASSUMPTION: Envoy's max_ejection_percent is 10; 0.8 leaves one worker of four if three are bad
    quarantine_max_share: Annotated[float, Number(low=0, high=1)] = 0.8
    """Largest share of the workers of one role and group in quarantine; 0 turns quarantine off. One always serves."""
    seed: int = 0
    """Seed of the random draws among workers of equal cost."""

    def __post_init__(self) -> None:
        check(self, "dispatch")
        if self.quarantine_max_s < self.quarantine_base_s:
            raise ValueError(
                f"dispatch: quarantine_max_s is {self.quarantine_max_s}: it must be >= quarantine_base_s"
            )

    @property
    def starves_from_s(self) -> Callable[[PoolEntry], float]:
        """A function that returns the time after which a pool entry that fits nowhere is starving."""
        limit_s = self.starvation_s
        return _OVERDUE_FROM_S if limit_s is None else lambda entry: entry.entered_s + limit_s

    @property
    def outlier_limits(self) -> OutlierLimits:
        """The limits that the reducer needs to find outliers."""
        return OutlierLimits(
            self.outlier_failure_rate,
            self.outlier_slow_factor,
            self.quarantine_base_s,
            self.quarantine_max_s,
            self.quarantine_max_share,
        )

    def changed(self, fields: Mapping[str, Any]) -> "DispatchConfig":
        """Returns a copy with `fields` changed. Raises ValueError naming an unknown, mistyped or out-of-range field."""
        now = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "seed"}
        for name in fields:
            if name not in now:
                raise ValueError(f"dispatch: {name!r} cannot be changed at run time; {', '.join(now)} can")
        return dataclasses.replace(self, **fields)
