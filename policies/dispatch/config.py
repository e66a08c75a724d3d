"""The dispatcher's limits (`policies.dispatch.dispatcher` says what each does)."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from policies.flow.fetch_or_recompute import FetchConfig
from policies.routing.base import DecodePolicy, Overcommit, overcommit_of
from policies.routing.params import Number, OneOf, Whole, check
from policies.state.outliers import OutlierLimits
from policies.state.views import PoolEntry

BY_POLICY = "by_policy"
FETCH = FetchConfig()
"""The defaults of the `lend_` limits."""
StarvesFrom = Callable[[PoolEntry, float], float]
"""A function that returns the time after which a pool entry that fits nowhere is starving, as seen at a time."""


def _by_lease(entry: PoolEntry, now_s: float) -> float:
    return entry.starves_from_s


def _by_lease_or_slo(entry: PoolEntry, now_s: float) -> float:
    # an objective that is missed already is worth nobody's wait
    if now_s > entry.slo_until_s:
        return entry.starves_from_s
    return min(entry.starves_from_s, entry.slo_from_s)


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Limits of the dispatcher. Times are in seconds. Raises ValueError for a value out of range."""

    max_queue: Annotated[int, Whole(1, unit="sequences")] = 1024
    """Most sequences whose requests may wait for a prefill worker; a request has one for each of its choices. When more
    come, those that would be served last are rejected with 429, but none of a tenant that has less in the queue than
    that of the request which came. A request that waits alone is never too large.
    """
    # no default, because the right number is the speed of the prefill workers, which is not known before they have
    # served, times `queue_timeout_s`; the wait, and the memory of prompts (at the ingresses), are bounded without it
    max_queue_tokens: Annotated[int, Whole(1, unit="tokens")] | None = None
    """Most prompt tokens of requests that may wait for a prefill worker, by the rule of `max_queue`; null sets no
    bound.
    """
    queue_timeout_s: Annotated[float, Number(above=0, unit="s")] = 60.0
    """Longest wait for a prefill worker; after it a request is rejected with 503."""
    class_ageing_s: Annotated[float, Number(above=0, unit="s")] | None = None
    """Time in the queue, or in the pool, after which a request is served as one of the next more urgent class in which
    something waits there, and again after each further such time; null: never. It is for classes of which the more
    urgent one gets all; see also `class_ratio` of the fairness policy.
    """
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
    starvation_s: Annotated[float, Number(low=0, unit="s", endless=True)] | None = None
    """Age from which a pool entry that fits nowhere is starving: no entry behind it may be sent before it. With null it
    is two thirds of the entry's lease as granted (20 s with the default of 30 s). With `overdue_by_slo` it starves in
    the last third of its TTFT objective as well, if that comes sooner, but no longer once it has missed it. With
    infinity none ever starves, as in the papers, which have no such rule: a large prompt among small ones then waits
    for as long as these fill every gap at once (`tests/parity/test_pool_waits.py` has both).
    """
    # Whoever gives a class an objective wants it met; without one in `class_slo` nothing changes. Beyond the objective
    # an entry presses no more, so that an overloaded pool is not served first come, first served.
    overdue_by_slo: bool = True
    """Whether a pool entry is placed before all others of its class while it is about to miss its TTFT objective, in
    the last third of it. An objective that a client has named counts only if it is no shorter than that of its class in
    `class_slo`. Without this rule only entries go first whose lease is about to end (the papers have no such rule).
    """
    reserve_tokens: Annotated[int, Whole(0, unit="tokens")] = 16
    """Free KV that a decode worker must have for each sequence in addition to the prompt."""
    # `python -m benchmarks run overcommit`: each further one makes NetKV's first tokens later in a cluster of few slots
    overcommit_slots: Annotated[int, Whole(0, unit="slots")] = 1
    """Sequences that a decode worker may get beyond its slots, when `overcommit` allows it (NetKV IV, BalanceRoute
    D.6). A policy's own limit, as the `bypass_slots` of BR-0, may be smaller and is refused if it is larger.
    """
    overcommit: Annotated[str, OneOf((BY_POLICY, *Overcommit))] = BY_POLICY
    """When workers without a free slot are offered. By policy, it is those policies that weigh the queue there which
    want it; "always" makes a router that keeps no request back of any policy, as the papers' baselines are.
    """
    lend_prefixes: bool = False
    """Whether a prefill worker fetches a prefix that it lacks from a worker that has it cached, where that is expected
    to be faster than to compute it (`policies.flow.fetch_or_recompute`).
    """
    lend_margin: Annotated[float, Number(low=0.0)] = FETCH.margin
    """Share by which a fetch must be expected to be faster."""
    lend_least_tokens: Annotated[int, Whole(1, unit="tokens")] = FETCH.least_tokens
    """Fewest tokens by which the lender's prefix must be longer than the prefill worker's own."""
    lend_most_kv_used: Annotated[float, Number(low=0.0, high=1.0)] = FETCH.most_kv_used
    """Share of a worker's KV in use from which it lends nothing."""
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
    prefix_index_bytes: Annotated[int, Whole(1 << 20, unit="bytes")] = 1 << 30
    """Memory of the prefix indexes of all groups (`policies.state.prefix_index`), an eighth of it for batches of KV
    events that wait for a missing one. A block of one worker takes some 320 bytes, and 96 for each further worker that
    holds it. Blocks beyond are refused and counted; prompts are then routed as if no worker had cached them.
    """
    seed: int = 0
    """Seed of the random draws among workers of equal cost."""

    def __post_init__(self) -> None:
        check(self, "dispatch")
        if self.quarantine_max_s < self.quarantine_base_s:
            raise ValueError(
                f"dispatch: quarantine_max_s is {self.quarantine_max_s}: it must be >= quarantine_base_s"
            )

    @property
    def starves_from_s(self) -> StarvesFrom:
        """The rule that says when an entry starves."""
        limit_s = self.starvation_s
        if limit_s is None:
            return _by_lease_or_slo if self.overdue_by_slo else _by_lease
        return lambda entry, now_s: entry.entered_s + limit_s

    def overcommit_for(self, decode: DecodePolicy) -> Overcommit:
        """Returns when a decode policy is offered workers without a free slot."""
        return overcommit_of(decode) if self.overcommit == BY_POLICY else Overcommit(self.overcommit)

    def overcommit_slots_of(self, decode: DecodePolicy) -> int:
        """Returns the number of sequences that a worker may get beyond its slots under a decode policy."""
        return 0 if self.overcommit_for(decode) is Overcommit.NEVER else self.overcommit_slots

    @property
    def fetch_config(self) -> FetchConfig:
        """The limits by which prefixes are fetched."""
        return FetchConfig(self.lend_margin, self.lend_least_tokens, self.lend_most_kv_used)

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
