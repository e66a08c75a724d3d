"""Dynamo's planner (ai-dynamo/dynamo, components/planner): demand over an engine's rate, and load thresholds.

Throughput mode, every `interval_s`:

    prefill = ceil(next rate * prompt tokens / (tokens/s of one prefill engine))
    decode  = ceil(next rate * output tokens / (tokens/s of one decode engine at the TPOT objective))

Load mode between them, each engine count one up or down: prefill + 1 while the queued requests of an engine reach
`queue_high`; decode + 1 while KV use is above `kv_high`, - 1 while it is below `kv_low`. The counts of the throughput
mode are the floor. No change is made while an engine is on its way ("holds while scaling").

Deviations: the next rate is the last window's (its constant predictor); requests a second in place of tokens a second
of an interpolated profile, which is the same for one length; KV above 100 % cannot be seen here, so `kv_high` is
0.95.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from policies.routing.params import Number, check
from policies.scaling.base import Counts, Limits, Step, serving_now
from policies.scaling.capacity import Demand, Margins, table
from policies.scaling.observation import Duty, Observation
from policies.scaling.rivals.counting import bound, first
from policies.state.views import Role


@dataclass(frozen=True, slots=True)
class DemandRateState:
    """The floor of the throughput mode and when it and the load mode looked last."""

    wanted: Counts | None = None
    window: int = -1
    floor: Counts = field(default_factory=lambda: Counts(0, 0, 0))
    looked_s: float | None = None


@dataclass(frozen=True, slots=True)
class DemandRate:
    """Divides the demand by an engine's rate, with load thresholds above that floor, as Dynamo's planner does."""

    limits: Limits = field(default_factory=Limits)
    interval_s: Annotated[float, Number(above=0.0, unit="s")] = 180.0
    queue_high: Annotated[float, Number(above=0.0)] = 1.0
    kv_high: Annotated[float, Number(above=0.0, high=1.0)] = 0.95
    kv_low: Annotated[float, Number(low=0.0, high=1.0)] = 0.6
    name: ClassVar[str] = "demand_rate"

    def __post_init__(self) -> None:
        check(self)

    def initial(self) -> DemandRateState:
        return DemandRateState()

    def step(self, seen: Observation, state: DemandRateState) -> Step:
        wanted = first(seen, self.limits, state.wanted)
        floor, looked_s = state.floor, state.looked_s
        if seen.windows is None or seen.window <= state.window:
            why = "no report: hold" if seen.windows is None else "no new window: hold"
            held = DemandRateState(wanted, state.window, floor, looked_s)
            return bound(seen, self.limits, wanted, wanted, held, (why,))
        due = looked_s is None or seen.now_s - looked_s >= self.interval_s
        reasons, desired = [], wanted
        if due:
            floor, looked_s = self._floor(seen, floor), seen.now_s
            desired = floor
            reasons.append(
                f"{seen.rate_per_s or 0.0:.3g}/s need {floor.prefill}P {floor.decode}D {floor.colocated}C"
            )
        elif wanted != serving_now(seen):
            reasons.append("engines are on their way: hold")
        else:
            desired = self._by_load(seen, wanted, floor)
            reasons.append("load thresholds")
        step = bound(seen, self.limits, wanted, desired, None, tuple(reasons))
        after = DemandRateState(step.plan.serving, seen.window, floor, looked_s)
        return step._replace(state=after)

    def _floor(self, seen: Observation, before: Counts) -> Counts:
        windows = seen.windows or ()
        if not seen.arrived:
            return self.limits.least
        prompt = sum(w.prompt_tokens for w in windows) / seen.arrived
        context = sum(w.prompt_tokens + w.hit_tokens for w in windows) / seen.arrived
        ended = sum(w.ended for w in windows)
        output = sum(w.output_tokens for w in windows) / ended if ended else 0.0
        output = output or sum(w.forecast_tokens for w in windows) / seen.arrived
        tpots = [w.tpot_slo_s for w in windows if w.tpot_slo_s is not None]
        # An engine's own rate knows no queue, so no TTFT and no room for variation.
        demand = Demand(prompt, context, max(1.0, output), None, min(tpots) if tpots else None)
        margins = Margins(most_rho=0.999, kv_share=1.0, deviations=0.0)
        one, rate = table(seen.capability, demand, 1, margins), seen.rate_per_s or 0.0
        if self.limits.prefill_max and self.limits.decode_max:
            return Counts(
                math.ceil(rate / one.prefill[1] - 1e-9),
                math.ceil(rate / one.decode[1] - 1e-9),
                self.limits.colocated_min,
            )
        return Counts(0, 0, math.ceil(rate / one.colocated[1] - 1e-9))

    def _by_load(self, seen: Observation, wanted: Counts, floor: Counts) -> Counts:
        active = seen.with_duty(Duty.ACTIVE)
        decoders = [e for e in active if e.role is not Role.PREFILL]
        kv = sum(e.kv_usage for e in decoders) / len(decoders) if decoders else 0.0
        role = Role.DECODE if wanted.decode else Role.COLOCATED
        changed = wanted
        if wanted.prefill:
            busy = seen.prompts_waiting / wanted.prefill >= self.queue_high
            more = 1 if busy else (-1 if wanted.prefill > floor.prefill and not seen.prompts_waiting else 0)
            changed = changed.plus(Role.PREFILL, more)
        if kv > self.kv_high or (
            not wanted.prefill and seen.prompts_waiting >= self.queue_high * wanted.of(role)
        ):
            return changed.plus(role, 1)
        return changed.plus(role, -1) if kv < self.kv_low and wanted.of(role) > floor.of(role) else changed
