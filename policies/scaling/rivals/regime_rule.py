"""FlowKV's regime rule (algorithm 1, lines 13-31; appendix B.1): roles switch when load is imbalanced, counts change
when it is extreme.

    normal        nothing changes
    imbalanced    one idle engine of the role with the lower mean score gets the other role, if that is above its low
                  threshold
    extreme       one engine more for each role above its high threshold
    low load      all means below `low_load` for `low_after_s`: one engine fewer of the less loaded role

Where colocated engines alone serve a role, they are the ones that become more or fewer, by one a step; the last one
stays. The paper has no such fleet.

Scores and regimes are those of `policies.routing.flowkv.regimes`. The paper prints no thresholds, lets switches last
"for several scheduling cycles" and says nothing of the low case but that it is extreme, too; `switch_s` is the least
time between two switches, `change_s` between two changes of a count. ASSUMPTION: all of them.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from policies.routing.flowkv.regimes import Assessment, Regime, RegimeThresholds, assess
from policies.routing.params import Number, check
from policies.scaling.base import Counts, Limits, Step, serving_now
from policies.scaling.observation import Duty, Observation
from policies.scaling.rivals.counting import bound, first
from policies.state.views import Role


@dataclass(frozen=True, slots=True)
class RegimeState:
    """Since when a mean has been above its high threshold, and since when all have been low; when roles and counts
    changed last.
    """

    wanted: Counts | None = None
    over_since_s: float | None = None
    low_since_s: float | None = None
    switched_s: float | None = None
    changed_s: float | None = None


@dataclass(frozen=True, slots=True)
class RegimeRule:
    """Switches roles and changes counts by FlowKV's load regimes."""

    limits: Limits = field(default_factory=Limits)
    thresholds: RegimeThresholds = field(default_factory=RegimeThresholds)
    low_load: Annotated[float, Number(low=0.0)] = 0.2
    low_after_s: Annotated[float, Number(low=0.0, unit="s")] = 300.0
    switch_s: Annotated[float, Number(low=0.0, unit="s")] = 10.0
    change_s: Annotated[float, Number(low=0.0, unit="s")] = 60.0
    name: ClassVar[str] = "regime_rule"

    def __post_init__(self) -> None:
        check(self)

    def initial(self) -> RegimeState:
        return RegimeState()

    def step(self, seen: Observation, state: RegimeState) -> Step:
        wanted, now_s = first(seen, self.limits, state.wanted), seen.now_s
        if seen.windows is None:
            held = RegimeState(
                wanted, state.over_since_s, state.low_since_s, state.switched_s, state.changed_s
            )
            return bound(seen, self.limits, wanted, wanted, held, ("no report: hold",))
        found = self._assessed(seen, state)
        means = {Role.PREFILL: found.prefill_mean or 0.0, Role.DECODE: found.decode_mean or 0.0}
        low = max(means.values()) < self.low_load
        low_since_s = (state.low_since_s if state.low_since_s is not None else now_s) if low else None
        may_switch = state.switched_s is None or now_s - state.switched_s >= self.switch_s
        may_change = state.changed_s is None or now_s - state.changed_s >= self.change_s
        settled = wanted == serving_now(seen)
        desired, switched_s, changed_s = wanted, state.switched_s, state.changed_s
        if found.regime is Regime.EXTREME and may_change and settled:
            high = {Role.PREFILL: self.thresholds.prefill_high, Role.DECODE: self.thresholds.decode_high}
            for role in {_servers(wanted, role) for role, mean in means.items() if mean > high[role]}:
                desired = desired.plus(role, 1)
            changed_s = now_s
        elif low_since_s is not None and now_s - low_since_s >= self.low_after_s and may_change and settled:
            lowest = _servers(wanted, min(means, key=lambda role: (means[role], role)))
            least = self.limits.least.of(lowest)
            if lowest is Role.COLOCATED:
                least = max(1, least)
            desired = desired.plus(lowest, -1 if desired.of(lowest) > least else 0)
            changed_s = now_s
        elif found.regime is not Regime.NORMAL and may_switch and settled:
            desired = self._switched(seen, wanted, means, found)
            switched_s = now_s if desired != wanted else switched_s
        shown = f"{means[Role.PREFILL]:.2f}, {means[Role.DECODE]:.2f}"
        said = f"{found.regime.value}: means {shown}, {len(found.idle)} idle"
        step = bound(seen, self.limits, wanted, desired, None, (said,))
        after = RegimeState(step.plan.serving, found.over_since_s, low_since_s, switched_s, changed_s)
        return step._replace(state=after)

    def _assessed(self, seen: Observation, state: RegimeState) -> Assessment:
        active = seen.with_duty(Duty.ACTIVE)
        prefill = {e.engine: e.score for e in active if e.role is not Role.DECODE}
        decode = {e.engine: e.score for e in active if e.role is not Role.PREFILL}
        return assess(prefill, decode, self.thresholds, seen.now_s, state.over_since_s)

    def _switched(
        self, seen: Observation, wanted: Counts, means: dict[Role, float], found: Assessment
    ) -> Counts:
        """Returns the counts after one idle engine of the lower role has gone to the higher one, if that is busy."""
        lower, higher = sorted(means, key=lambda role: (means[role], role))
        low = {Role.PREFILL: self.thresholds.prefill_low, Role.DECODE: self.thresholds.decode_low}
        idle = set(found.idle)
        some = any(e.engine in idle and e.role is lower and e.duty is Duty.ACTIVE for e in seen.engines)
        most, least = self.limits.most.of(higher), self.limits.least.of(lower)
        if not some or means[higher] <= low[higher] or wanted.of(higher) >= most or wanted.of(lower) <= least:
            return wanted
        return wanted.plus(higher, 1).plus(lower, -1)


def _servers(wanted: Counts, role: Role) -> Role:
    """Returns the role of the engines that serve `role`: its own, or colocated where it has none."""
    return role if wanted.of(role) or not wanted.colocated else Role.COLOCATED
