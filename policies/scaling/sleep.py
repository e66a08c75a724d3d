"""Scale to zero: any scaling policy, and sleep where nothing comes.

    idle    windows were reported and have no arrivals, nothing waits at the router or an engine, nothing runs
    asleep  begins when it has been idle for `idle_s` without a break; ends with the first request that waits, or that
            an engine serves all the same
    plan    asleep: `floor`, nothing warm;  awake: the policy's own, within its limits, whose least numbers hold then

The policy beneath goes on learning while its fleet sleeps, and its plan is taken from the first step of a wake on: a
wake is by arrival and not by forecast. One whose plans depend on what an engine carries is not asked before that is
known (`Observation.fitted`); until then the present numbers are kept, at least the least. A window without report is
not idle, as everywhere here.

`phase_after` is the fleet's phase for those who wait for an engine (`policies.state.standby`):

    an engine that decodes is active           awake
    else asleep by the policy                  asleep
    else after asleep, waking or failed        waking; failed from `wake_limit_s` after the beginning of the wake
    else                                       awake: engines were lost, and none is started because of a request

Not claimed: a sleep of one group beside others that serve its role; a role sleeps as a whole. Sleeping longer because a
forecast knows when the next request comes, or waking before it.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

from policies.routing.params import Number, Whole, check
from policies.scaling.base import Counts, Limits, Plan, ScalingPolicy, Step, serving_now
from policies.scaling.moves import moves
from policies.scaling.observation import Duty, Observation
from policies.state.standby import Phase
from policies.state.views import Role

NEEDS_CAPACITY = frozenset({"joint", "demand_rate"})
"""Policies whose plans depend on what one engine carries, which is not known before an engine's profile is fitted."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """When a fleet sleeps, how long a wake may take, and the engines by role that stay (the floor)."""

    # ASSUMPTION: a start of a large engine from disk takes minutes; idling for ten times as long is worth one.
    idle_s: Annotated[float, Number(above=0.0, unit="s")] = 900.0
    """Time without any request after which the fleet sleeps."""
    wake_limit_s: Annotated[float, Number(above=0.0, unit="s")] = 300.0
    """Time from the first request after which a wake without an engine that decodes has failed."""
    prefill: Annotated[int, Whole(0)] = 0
    decode: Annotated[int, Whole(0)] = 0
    colocated: Annotated[int, Whole(0)] = 0
    name: ClassVar[str] = "sleep"

    def __post_init__(self) -> None:
        check(self)

    @property
    def floor(self) -> Counts:
        return Counts(self.prefill, self.decode, self.colocated)


@dataclass(frozen=True, slots=True)
class SleepState:
    """The state of the policy beneath, whether the fleet sleeps, and since when nothing has come."""

    inner: Any
    asleep: bool = False
    idle_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class MaySleep:
    """A policy whose fleet may sleep. `limits` are the policy's own, which hold while the fleet is awake."""

    policy: ScalingPolicy
    sleep: Sleep

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def limits(self) -> Limits:
        return self.policy.limits

    def initial(self) -> SleepState:
        return SleepState(self.policy.initial())

    def step(self, seen: Observation, state: SleepState) -> Step:
        if self.name in NEEDS_CAPACITY and not seen.fitted:
            step = Step(self._kept(seen), state.inner, (UNFITTED,))
        else:
            step = self.policy.step(seen, state.inner)
        asleep, idle_since_s, why = self._looked(seen, state)
        plan = step.plan
        if asleep:
            plan = Plan(self.sleep.floor, 0, moves(seen, self.sleep.floor, 0))
        return Step(plan, SleepState(step.state, asleep, idle_since_s), (why, *step.reasons))

    def _kept(self, seen: Observation) -> Plan:
        """Returns the plan of the present numbers, at least the least."""
        serving, warm = self.limits.kept(serving_now(seen), len(seen.with_duty(Duty.WARM)))
        return Plan(serving, warm, moves(seen, serving, warm))

    def _looked(self, seen: Observation, state: SleepState) -> tuple[bool, float | None, str]:
        """Returns whether the fleet sleeps from now on, since when nothing has come, and both in words."""
        idle_s, wait = self.sleep.idle_s, seen.queued + seen.pooled
        if wait:
            woken = "wake" if state.asleep else "awake"
            return False, None, f"{wait} waiting: {woken}"
        in_engines = sum(e.running + e.waiting for e in seen.engines)
        if state.asleep:
            # Engines may serve while the policy has the fleet asleep: somebody's numbers rule, or they do not go yet.
            served = in_engines + sum(min(w.arrived, w.ended) for w in seen.windows or ())
            if served:
                return False, None, f"{served} served although asleep: wake"
            return True, state.idle_since_s, "asleep: the next request wakes"
        if seen.windows is None:
            return False, None, "no report: awake"
        work = seen.arrived + in_engines
        if work:
            return (
                False,
                None,
                f"{seen.arrived} came in the last window, {work - seen.arrived} run or wait: awake",
            )
        since_s = seen.now_s if state.idle_since_s is None else state.idle_since_s
        passed_s = seen.now_s - since_s
        if passed_s < idle_s:
            return False, since_s, f"nothing for {passed_s:.0f} s of {idle_s:g} s: awake"
        return True, since_s, f"nothing for {passed_s:.0f} s of {idle_s:g} s: sleep"


UNFITTED = "no engine has reported enough work yet to know what one carries"


class PhaseSince(NamedTuple):
    """A fleet's phase, and since when on the observations' clock; a wake that has failed began at that time, too."""

    phase: Phase = Phase.AWAKE
    since_s: float = 0.0


def phase_after(before: PhaseSince, seen: Observation, asleep: bool, wake_limit_s: float) -> PhaseSince:
    """Returns the phase of a fleet that was in the phase `before`; `asleep` is the policy's word. Where the
    observations' clock is behind the beginning of the phase, because a new router's is, the phase begins anew.
    """
    before = before._replace(since_s=min(before.since_s, seen.now_s))
    decodes = any(e.duty is Duty.ACTIVE and e.role is not Role.PREFILL for e in seen.engines)
    if decodes or (before.phase is Phase.AWAKE and not asleep):
        now = Phase.AWAKE
    elif asleep:
        now = Phase.ASLEEP
    elif before.phase is Phase.ASLEEP:
        now = Phase.WAKING
    else:
        now = Phase.FAILED if seen.now_s - before.since_s >= wake_limit_s else Phase.WAKING
    same = now is before.phase or (before.phase, now) == (Phase.WAKING, Phase.FAILED)
    return PhaseSince(now, before.since_s if same else seen.now_s)


def awake_limits(limits: Limits, sleep: Sleep) -> Limits:
    """Returns limits whose least numbers are those of an awake fleet: at least one engine of each role that the limits
    allow beyond the floor.
    """
    least = {
        f"{role.value}_min": max(limits.least.of(role), int(limits.most.of(role) > sleep.floor.of(role)))
        for role in Role
    }
    return replace(limits, **least)
