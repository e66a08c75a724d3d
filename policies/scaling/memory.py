"""The part of a policy's state that stays valid when its parameters change, or when nobody has looked for a while.

A state depends on the policy's kind and on its parameters. Bounds (`limits`) only cut the wanted counts. What `joint`
has learned of the load (forecast, lengths, attainment) depends on less: the forecast's levels and residuals on the
forecast's own parameters, lengths and attainment on none that would make them wrong. The rest of another state (since
when something has lasted, the last change) begins anew, and so do all states of the other policies, which are means
over minutes.
"""

import dataclasses
from typing import Any, cast

from policies.scaling.base import ScalingPolicy
from policies.scaling.joint import Joint, JointState
from policies.scaling.sleep import MaySleep, SleepState


def carried_over(former: ScalingPolicy, state: Any, policy: ScalingPolicy) -> Any:
    """Returns the state with which `policy` goes on where `former` had `state`; None where nothing of it holds."""
    if former.name != policy.name or state is None:
        return None
    if isinstance(former, MaySleep) or isinstance(policy, MaySleep):
        return _beneath(former, state, policy)
    if _without_limits(former) == _without_limits(policy):
        return _within(policy, state)
    if isinstance(former, Joint) and isinstance(policy, Joint):
        return _within(policy, _learned(former, state, policy))
    return None


def rested(policy: ScalingPolicy, state: Any) -> Any:
    """Returns the state with which a policy goes on after a time in which it saw nothing. What it has learned of the
    load, what it wants and that its fleet sleeps stay. What must last without a break begins anew, since nobody knows
    what came meanwhile; windows are counted from the next one on, also where the clock was set back.
    """
    if isinstance(policy, MaySleep):
        return SleepState(rested(policy.policy, state.inner), state.asleep)
    if isinstance(policy, Joint):
        return dataclasses.replace(_learned(policy, state, policy), window=-1)
    return dataclasses.replace(cast(Any, policy.initial()), wanted=state.wanted)


def _beneath(former: ScalingPolicy, state: Any, policy: ScalingPolicy) -> Any:
    """Returns what is carried over between policies of which one or both may sleep; a fleet that sleeps goes on."""
    slept = state if isinstance(former, MaySleep) else None
    below = former.policy if isinstance(former, MaySleep) else former
    if not isinstance(policy, MaySleep):
        return carried_over(below, state.inner, policy)
    inner = carried_over(below, state if slept is None else state.inner, policy.policy)
    asleep = slept is not None and slept.asleep
    if inner is None and not asleep:
        return None
    first = policy.policy.initial() if inner is None else inner
    return SleepState(first, asleep, None if slept is None else slept.idle_since_s)


def _without_limits(policy: ScalingPolicy) -> dict[str, Any]:
    own = {field.name: getattr(policy, field.name) for field in dataclasses.fields(cast(Any, policy))}
    del own["limits"]
    return own


def _within(policy: ScalingPolicy, state: Any) -> Any:
    """Returns the state with wanted counts within the policy's bounds."""
    if state.wanted is None:
        return state
    wanted, warm = policy.limits.kept(state.wanted, getattr(state, "warm", 0))
    warmed = {"warm": warm} if hasattr(state, "warm") else {}
    return dataclasses.replace(state, wanted=wanted, **warmed)


def _learned(former: Joint, state: JointState, policy: Joint) -> JointState:
    """Returns a first state of `policy` with what `former` had learned of the load, and what it wanted."""
    begun = policy.initial()
    return dataclasses.replace(
        begun,
        window=state.window,
        forecast=state.forecast if former.forecast == policy.forecast else begun.forecast,
        lengths=state.lengths,
        attained=state.attained,
        headroom=min(state.headroom, policy.headroom_most),
        judged=state.judged,
        wanted=state.wanted,
        warm=state.warm,
    )
