"""The live half of the network oracle: it learns B*(1-c) of (source node, destination node) from observed transfers.

    share = integral over the transfer of dt / n(t)    n(t): own flows of that sender on that tier, this one included;
                                                       over U equal links 1 + (n - 1) / U of them (`Oracle.uplinks`)
    B*(1-c) = median over the last `window` transfers of bytes / (share - L)
    c[tau] = 1 - median over the tier's pairs of B*(1-c) / B[tau], within [0, MAX_CONGESTION]

The division by n inverts NetKV's own sharing rule (III-C), so the estimates are the ones that `netkv.network_term`
needs. A finished transfer counts only after every own flow that may have overlapped it has ended as well (or after
`settle_s`), so n(t) is known, not guessed. Without tiers it is not known which flows share a link. Then n is taken as
1, the learned congestion includes our own (NetKV III-D), and `Oracle.own_flows_excluded` must be False.

L is the tier's latency where the operator gives one. Otherwise it is the intercept of a Theil-Sen line through the
window, or 0 where the window's transfers are too alike in size.

The median was chosen on synthetic transfers with 30 % lognormal noise. The table shows 95th percentiles: the error in
the steady state / the number of transfers, after a fourfold change, until the estimate is within 1.5x of the truth.
Each method has two such pairs: the first without outliers, the second with 15 % of the transfers five times too slow.
    median of 9    24 % /  7      31 % /  9           EWMA of the logarithm, 0.2    20 % /  8      47 % / 15
    median of 15   19 % / 11      26 % / 14           EWMA of the logarithm, 0.3    26 % /  6      52 % / 10
Not claimed: a cost for each descriptor; links shared with other senders of ours (their flows count as congestion).
"""

import bisect
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from policies.network.oracle import PairEstimate
from policies.record import record

MAX_CONGESTION = 0.95
"""Largest congestion c that is learned: c must stay below 1, and policies avoid a tier this slow anyway."""
MOST_LATENCY = 0.5
"""Largest share of a transfer's time that may count as latency; a wrong intercept then errs by 2x at most."""
SIZES_DIFFER = 2.0
"""Least ratio of the largest to the smallest transfer for which the intercept of a line is used."""
SECONDS = (1e-6, 1e6)
"""Shortest and longest time of a transfer that counts; in a shorter one, Unix time as a float cannot tell the begin
from the end.
"""
MAX_FLOWS = 4096
"""Most open flows, and most remembered intervals of a link: a bound in case messages are lost, far above any number of
transfers in flight.
"""

Pair = tuple[str, str]


@record
class EstimatorConfig:
    """Limits of the estimator. The last `window` transfers of a pair count, but none older than `forget_after_s`; fewer
    than `min_samples` give no estimate. `settle_s` is the longest wait for flows that may have overlapped a transfer.
    """

    window: int = 9
    min_samples: int = 3
    forget_after_s: float = 60.0
    settle_s: float = 2.0

    def __post_init__(self) -> None:
        checks = [
            (1 <= self.min_samples <= self.window <= 1000, "min_samples <= window <= 1000, both >= 1"),
            (0 < self.forget_after_s < math.inf, "forget_after_s in (0, inf)"),
            (0 <= self.settle_s < math.inf, "settle_s in [0, inf)"),
        ]
        for ok, allowed in checks:
            if not ok:
                raise ValueError(f"network estimator: allowed is {allowed}; got {self}")


@record
class _Flow:
    """A transfer of ours that was decided; its end is not known yet."""

    pair: Pair
    link: tuple[str, int] | None
    """(sender, tier): flows with the same pair share a link. None: the tier is not known."""
    latency_s: float | None
    routed_s: float
    uplinks: int


@record
class _Ended:
    """A transfer that has ended, while flows that overlapped it may still be open."""

    flow: _Flow
    n_bytes: int
    start_s: float
    end_s: float


@record
class _Sample:
    """One transfer from which the estimator learns; `share_s` is the time that it would have taken alone."""

    n_bytes: int
    share_s: float
    latency_s: float | None
    at_s: float


@dataclass(slots=True)
class _Link:
    """A link's open flows, the ended transfers that wait for them, and the (start, end) times of recent transfers,
    which may have overlapped those.
    """

    open: dict[str, _Flow] = field(default_factory=dict)
    unsettled: list[_Ended] = field(default_factory=list)
    intervals: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_FLOWS))


class BandwidthEstimator:
    """The estimates of one router. Its caller reports each transfer by `routed`, and its end by `transferred` or
    `dropped`; `pairs` and `congestion` return the estimates.
    """

    def __init__(self, config: EstimatorConfig) -> None:
        self.config = config
        self.transfers = 0
        self.n_bytes = 0
        self.unusable = 0
        self._flows: dict[str, _Flow] = {}
        self._links: dict[tuple[str, int], _Link] = {}
        self._samples: dict[Pair, deque[_Sample]] = {}
        # the tiers of the pairs that have samples
        self._tiers: dict[Pair, int] = {}

    def routed(
        self,
        attempt_id: str,
        source: str,
        pair: Pair,
        tier: int | None,
        latency_s: float | None,
        now_s: float,
        uplinks: int = 1,
    ) -> None:
        """Notes that a transfer from worker `source` between the two nodes of `pair` was decided.

        `tier` and `latency_s`, the tier's latency, are None where they are not known.
        """
        if len(self._flows) >= MAX_FLOWS:
            self.dropped(next(iter(self._flows)))
        self.dropped(attempt_id)
        flow = _Flow(pair, None if tier is None else (source, tier), latency_s, now_s, uplinks)
        self._flows[attempt_id] = flow
        if flow.link is not None:
            self._links.setdefault(flow.link, _Link()).open[attempt_id] = flow

    def dropped(self, attempt_id: str) -> None:
        """Forgets a transfer that was cancelled, failed, or had nothing to move. Unknown ids are no error."""
        flow = self._flows.pop(attempt_id, None)
        if flow is not None and flow.link is not None:
            del self._links[flow.link].open[attempt_id]

    def transferred(
        self, attempt_id: str, n_bytes: int, seconds: float, ended_s: float, held_s: float = 0.0
    ) -> None:
        """Notes that a transfer ended at `ended_s` after `seconds`, of which a scheduler held it back for `held_s`.

        A transfer that was not `routed`, moved nothing or has an impossible duration is counted in `unusable`.
        """
        flow = self._flows.get(attempt_id)
        self.dropped(attempt_id)
        took_s = seconds - held_s
        measured = SECONDS[0] <= took_s <= SECONDS[1] and math.isfinite(ended_s)
        if flow is None or n_bytes <= 0 or not measured:
            self.unusable += 1
            return
        self.transfers += 1
        self.n_bytes += n_bytes
        ended = _Ended(flow, n_bytes, ended_s - took_s, ended_s)
        if flow.link is None:
            self._learn(ended, took_s)
        else:
            link = self._links[flow.link]
            link.unsettled.append(ended)
            link.intervals.append((ended.start_s, ended.end_s))

    def pairs(self, now_s: float) -> dict[Pair, PairEstimate]:
        """Returns the estimates of all pairs at `now_s`; `at_s` of an estimate is the end of its newest transfer."""
        self._settle(now_s)
        found: dict[Pair, PairEstimate] = {}
        for pair, samples in list(self._samples.items()):
            for sample in [s for s in samples if now_s - s.at_s > self.config.forget_after_s]:
                samples.remove(sample)
            if not samples:
                del self._samples[pair]
                self._tiers.pop(pair, None)
            elif len(samples) >= self.config.min_samples:
                found[pair] = _estimate(samples)
        return found

    def by_tier(self, pairs: Mapping[Pair, PairEstimate]) -> dict[int, float]:
        """Returns the median bytes/s over the pairs of each tier, by tier. `pairs` is the result of `self.pairs`."""
        tiers: dict[int, list[float]] = {}
        for pair, estimate in pairs.items():
            if pair in self._tiers:
                tiers.setdefault(self._tiers[pair], []).append(estimate.bytes_per_s)
        return {tier: statistics.median(found) for tier, found in sorted(tiers.items())}

    def congestion(
        self, pairs: Mapping[Pair, PairEstimate], bandwidth_bytes_per_s: Mapping[int, float]
    ) -> dict[int, float]:
        """Returns the congestion c of each tier that has a bandwidth and estimates, by tier. It is meant for pairs on
        the tier that have no estimate of their own.
        """
        return {
            tier: min(MAX_CONGESTION, max(0.0, 1.0 - learned / bandwidth_bytes_per_s[tier]))
            for tier, learned in self.by_tier(pairs).items()
            if tier in bandwidth_bytes_per_s
        }

    # ------------------------------------------------------------------------------------------------ internals

    def _settle(self, now_s: float) -> None:
        for key, link in list(self._links.items()):
            earliest_s = min((flow.routed_s for flow in link.open.values()), default=math.inf)
            intervals = _Intervals(link.intervals) if link.unsettled else None
            left: list[_Ended] = []
            for ended in link.unsettled:
                if ended.end_s <= earliest_s or now_s - ended.end_s >= self.config.settle_s:
                    from_s = min(ended.end_s, ended.start_s + (ended.flow.latency_s or 0.0))
                    assert intervals is not None
                    near = intervals.over(from_s, ended.end_s)
                    share_s = _share_s(from_s, ended.end_s, near, ended.flow.uplinks)
                    self._learn(ended, share_s + (from_s - ended.start_s))
                else:
                    left.append(ended)
            link.unsettled = left
            needed_s = min([earliest_s, *(ended.start_s for ended in left)])
            while link.intervals and link.intervals[0][1] < min(needed_s, now_s - self.config.settle_s):
                link.intervals.popleft()
            if not (link.open or link.intervals or link.unsettled):
                del self._links[key]

    def _learn(self, ended: _Ended, share_s: float) -> None:
        samples = self._samples.setdefault(ended.flow.pair, deque(maxlen=self.config.window))
        samples.append(_Sample(ended.n_bytes, share_s, ended.flow.latency_s, ended.end_s))
        if ended.flow.link is not None:
            self._tiers[ended.flow.pair] = ended.flow.link[1]


class _Intervals:
    """A link's intervals sorted by their ends, so that a transfer is only compared with those near it."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self._sorted = sorted(intervals, key=lambda interval: interval[1])
        self._ends = [end_s for _, end_s in self._sorted]
        self._longest_s = max((end_s - start_s for start_s, end_s in self._sorted), default=0.0)

    def over(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Returns the intervals that may overlap [start_s, end_s]."""
        first = bisect.bisect_right(self._ends, start_s)
        return self._sorted[first : bisect.bisect_right(self._ends, end_s + self._longest_s)]


def _share_s(start_s: float, end_s: float, intervals: Iterable[tuple[float, float]], uplinks: int) -> float:
    """Returns the integral of dt / (1 + (n(t) - 1) / uplinks) over [start_s, end_s], in seconds.

    n(t) is the number of `intervals` that contain t; the transfer itself is one of them.
    """
    changes = [(start_s, 0), (end_s, 0)]
    for from_s, to_s in intervals:
        if from_s < end_s and to_s > start_s:
            changes += [(max(from_s, start_s), 1), (min(to_s, end_s), -1)]
    changes.sort(key=lambda change: change[0])
    flows, share_s = 0, 0.0
    for (at_s, step), (next_s, _) in itertools.pairwise(changes):
        flows += step
        share_s += (next_s - at_s) / (1 + max(0, flows - 1) / uplinks)
    return share_s


def _estimate(samples: deque[_Sample]) -> PairEstimate:
    """Returns the estimate from a window of transfers: the median rate, and the latency unless the operator gave it."""
    given = samples[-1].latency_s is not None
    learned_s = None if given else _latency_s(samples)
    rates = []
    for sample in samples:
        latency_s = sample.latency_s if sample.latency_s is not None else learned_s or 0.0
        rates.append(sample.n_bytes / (sample.share_s - min(latency_s, MOST_LATENCY * sample.share_s)))
    return PairEstimate(statistics.median(rates), max(s.at_s for s in samples), learned_s)


def _latency_s(samples: deque[_Sample]) -> float | None:
    """Returns the Theil-Sen intercept, in seconds, of time over bytes; None where the sizes are too alike or the line
    does not rise.
    """
    sizes = [sample.n_bytes for sample in samples]
    if max(sizes) < SIZES_DIFFER * min(sizes):
        return None
    slopes = [
        (b.share_s - a.share_s) / (b.n_bytes - a.n_bytes)
        for a, b in itertools.combinations(samples, 2)
        if max(a.n_bytes, b.n_bytes) >= SIZES_DIFFER * min(a.n_bytes, b.n_bytes)
    ]
    slope = statistics.median(slopes)
    if slope <= 0:
        return None
    return max(0.0, statistics.median(s.share_s - slope * s.n_bytes for s in samples))
