"""Ray Serve's autoscaling by ongoing requests (ray.serve.config.AutoscalingConfig, Ray 2.60), for each role.

    ratio   = mean of (running + waiting) over look_back_s / (engines * target_ongoing)
    desired = ceil(engines * (1 + factor (ratio - 1))),  factor: 1 both ways
    more after `upscale_delay_s` of wanting more without a break, fewer after `downscale_delay_s`

Requests that wait at the router count for the role that they wait for. Defaults are Serve's: target 2, look-back 30 s,
30 s up, 600 s down. Deviation: the mean is an exponential one with that time constant, not one over a list of samples.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from policies.routing.params import Number, check
from policies.scaling.base import Counts, Limits, Step
from policies.scaling.observation import Duty, Observation
from policies.scaling.rivals.counting import Sustained, bound, first
from policies.state.views import Role


@dataclass(frozen=True, slots=True)
class OngoingState:
    """Smoothed ongoing requests by role, and how long each role has wanted more or fewer engines."""

    wanted: Counts | None = None
    at_s: float | None = None
    ongoing: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sustained: tuple[Sustained, Sustained, Sustained] = field(default=(Sustained(),) * 3)


@dataclass(frozen=True, slots=True)
class Ongoing:
    """Scales each role by its ongoing requests, as Ray Serve does."""

    limits: Limits = field(default_factory=Limits)
    target_ongoing: Annotated[float, Number(above=0.0)] = 2.0
    decode_target: Annotated[float, Number(above=0.0)] | None = None
    """Target of decode engines, which are a deployment of their own; None: the same."""
    upscale_delay_s: Annotated[float, Number(low=0.0, unit="s")] = 30.0
    downscale_delay_s: Annotated[float, Number(low=0.0, unit="s")] = 600.0
    look_back_s: Annotated[float, Number(above=0.0, unit="s")] = 30.0
    name: ClassVar[str] = "ongoing"

    def __post_init__(self) -> None:
        check(self)

    def initial(self) -> OngoingState:
        return OngoingState()

    def step(self, seen: Observation, state: OngoingState) -> Step:
        wanted = first(seen, self.limits, state.wanted)
        if seen.windows is None:
            held = OngoingState(wanted, state.at_s, state.ongoing, state.sustained)
            return bound(seen, self.limits, wanted, wanted, held, ("no report: hold",))
        ongoing = self._smoothed(seen, state)
        desired, sustained, reasons = list(wanted), list(state.sustained), []
        for i, number in enumerate(wanted):
            if not number and not ongoing[i] > 0.0:
                continue
            target = self.decode_target if i == 1 and self.decode_target is not None else self.target_ongoing
            wish = math.ceil(ongoing[i] / target - 1e-9)
            direction = (wish > number) - (wish < number)
            sustained[i] = sustained[i].seen(direction, seen.now_s)
            up = sustained[i].lasted(1, seen.now_s, self.upscale_delay_s)
            down = sustained[i].lasted(-1, seen.now_s, self.downscale_delay_s)
            if up or down:
                desired[i] = wish
                sustained[i] = Sustained(0, seen.now_s)
            reasons.append(f"{ongoing[i]:.3g} ongoing / {target:g} = {wish} (now {number})")
        step = bound(seen, self.limits, wanted, Counts(*desired), None, tuple(reasons))
        after = OngoingState(
            step.plan.serving, seen.now_s, ongoing, (sustained[0], sustained[1], sustained[2])
        )
        return step._replace(state=after)

    def _smoothed(self, seen: Observation, state: OngoingState) -> tuple[float, float, float]:
        now = [0.0, 0.0, 0.0]
        order = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
        for engine in seen.engines:
            if engine.duty is Duty.ACTIVE:
                now[order.index(engine.role)] += engine.running + engine.waiting
        shared = (state.wanted or Counts(1, 1, 0)).prefill == 0
        now[2 if shared else 0] += seen.queued
        now[1] += seen.pooled
        if state.at_s is None:
            return now[0], now[1], now[2]
        share = 1.0 - math.exp(-max(0.0, seen.now_s - state.at_s) / self.look_back_s)
        mixed = [old + share * (new - old) for old, new in zip(state.ongoing, now, strict=True)]
        return mixed[0], mixed[1], mixed[2]
