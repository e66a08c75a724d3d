"""FlowKV's sliding window over an engine's reports (appendix B.2: one sample of a bursty engine says little)."""

from collections.abc import Iterable, Sequence

from policies.state.events import EngineStatus
from policies.state.views import Indicators


def mean_indicators(reports: Iterable[tuple[EngineStatus, int]]) -> Indicators:
    """The mean of each figure over the reports that have it; `reports` are (report, sending queue at that time)."""
    kept = list(reports)
    statuses = [status for status, _ in kept]
    return Indicators(
        running=sum(s.running for s in statuses) / len(kept),
        waiting=sum(s.waiting for s in statuses) / len(kept),
        swapped=_mean([s.swapped for s in statuses]),
        sending=sum(sending for _, sending in kept) / len(kept),
        token_budget=_mean([s.token_budget for s in statuses]),
        compute=_mean([s.compute for s in statuses]),
        memory_bandwidth=_mean([s.memory_bandwidth for s in statuses]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
