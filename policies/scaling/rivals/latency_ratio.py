"""llm-d's rule by latency (its KEDA recipe): the worse of TTFT and TPOT against their objectives.

    ratio   = min(2, max(P90 TTFT / SLO, P90 TPOT / SLO)), mean over 45 s
    desired = ceil(engines * ratio),  no change within `tolerance` (Kubernetes' HPA: 0.1)
    fewer after `stabilise_s` of wanting fewer (HPA: 300 s)

llm-d has one pair of objectives and one scaled variant. Deviations: the worst class decides, the mean is an exponential
one with that time constant, and the ratio is applied to every role that has engines, as llm-d does not say which role a
missed TTFT belongs to.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from policies.routing.params import Number, check
from policies.scaling.base import Counts, Limits, Step
from policies.scaling.observation import Observation
from policies.scaling.rivals.counting import Sustained, bound, by_role, first


@dataclass(frozen=True, slots=True)
class LatencyRatioState:
    """The smoothed ratio, the window that it has seen last, and how long fewer engines have been wanted."""

    wanted: Counts | None = None
    window: int = -1
    at_s: float | None = None
    ratio: float | None = None
    sustained: Sustained = field(default_factory=Sustained)


@dataclass(frozen=True, slots=True)
class LatencyRatio:
    """Scales every role by the worse of TTFT and TPOT over their objectives, as llm-d does."""

    limits: Limits = field(default_factory=Limits)
    most_ratio: Annotated[float, Number(low=1.0)] = 2.0
    mean_s: Annotated[float, Number(above=0.0, unit="s")] = 45.0
    tolerance: Annotated[float, Number(low=0.0, high=1.0)] = 0.1
    stabilise_s: Annotated[float, Number(low=0.0, unit="s")] = 300.0
    name: ClassVar[str] = "latency_ratio"

    def __post_init__(self) -> None:
        check(self)

    def initial(self) -> LatencyRatioState:
        return LatencyRatioState()

    def step(self, seen: Observation, state: LatencyRatioState) -> Step:
        wanted = first(seen, self.limits, state.wanted)
        new = seen.window > state.window and seen.windows is not None
        if not new:
            why = "no report: hold" if seen.windows is None else "no new window: hold"
            held = LatencyRatioState(wanted, state.window, state.at_s, state.ratio, state.sustained)
            return bound(seen, self.limits, wanted, wanted, held, (why,))
        ratio = self._smoothed(seen, state)
        desired, sustained = wanted, state.sustained
        if ratio is not None:
            factor = 1.0 if abs(ratio - 1.0) <= self.tolerance else ratio
            wish = by_role(wanted, lambda _, n: math.ceil(n * factor - 1e-9))
            direction = (wish.total > wanted.total) - (wish.total < wanted.total)
            sustained = sustained.seen(direction, seen.now_s)
            if direction > 0 or sustained.lasted(-1, seen.now_s, self.stabilise_s):
                desired, sustained = wish, Sustained(0, seen.now_s)
        said = (
            "no latency: hold" if ratio is None else f"ratio {ratio:.3g}: {wanted.total} -> {desired.total}"
        )
        step = bound(seen, self.limits, wanted, desired, None, (said,))
        after = LatencyRatioState(step.plan.serving, seen.window, seen.now_s, ratio, sustained)
        return step._replace(state=after)

    def _smoothed(self, seen: Observation, state: LatencyRatioState) -> float | None:
        pairs = [
            pair
            for w in seen.windows or ()
            for pair in ((w.ttft_p90_s, w.ttft_slo_s), (w.tpot_p90_s, w.tpot_slo_s))
        ]
        ratios = [value / slo for value, slo in pairs if value is not None and slo]
        if not ratios:
            # Nothing has ended: without arrivals the load is 0, else the ratio stays.
            now = 0.0 if not seen.arrived and not seen.queued and not seen.pooled else None
        else:
            now = min(self.most_ratio, max(ratios))
        if now is None or state.ratio is None or state.at_s is None:
            return state.ratio if now is None else now
        share = 1.0 - math.exp(-max(0.0, seen.now_s - state.at_s) / self.mean_s)
        return state.ratio + share * (now - state.ratio)
