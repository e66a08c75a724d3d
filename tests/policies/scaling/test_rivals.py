"""The published rules by hand, and what every policy promises."""

import dataclasses
from typing import Any

import pytest

from policies.routing.params import BadParameter
from policies.scaling.base import Limits, ScalingPolicy, Step
from policies.scaling.observation import EngineView, Observation
from policies.scaling.registry import SCALING, make, params_of
from policies.scaling.rivals.demand_rate import DemandRate
from policies.scaling.rivals.fixed import Fixed
from policies.scaling.rivals.latency_ratio import LatencyRatio
from policies.scaling.rivals.ongoing import Ongoing
from policies.scaling.rivals.regime_rule import RegimeRule
from policies.state.views import Role
from tests.policies.scaling.fixtures import engines, seen

LIMITS = Limits(prefill_max=20, decode_max=20, budget=40)


def loaded(fleet: tuple[EngineView, ...], role: Role, **more: Any) -> tuple[EngineView, ...]:
    """Returns the engines with the fields of those of one role replaced."""
    return tuple(dataclasses.replace(e, **more) if e.role is role else e for e in fleet)


def over(policy: ScalingPolicy, observations: list[Observation]) -> list[Step]:
    """Returns the steps of a policy on these observations."""
    steps, state = [], policy.initial()
    for observation in observations:
        steps.append(policy.step(observation, state))
        state = steps[-1].state
    return steps


def test_fixed_keeps_what_it_has_or_what_it_is_given() -> None:
    assert over(Fixed(LIMITS), [seen(50.0, engines(3, 4))])[0].plan.serving == (3, 4, 0)
    assert over(Fixed(LIMITS, prefill=5), [seen(50.0, engines(3, 4))])[0].plan.serving == (5, 4, 0)


def test_ongoing_waits_30_s_up_and_600_s_down() -> None:
    """Four decode engines with five requests each: 20 / 2 wants ten, after 30 s. Idle, they want one, after 600 s
    more.
    """
    busy = loaded(engines(2, 4), Role.DECODE, running=4, waiting=1)
    steps = over(Ongoing(LIMITS), [seen(1.0, busy, i, now_s=10.0 * i) for i in range(4)])
    assert [s.plan.serving.decode for s in steps] == [4, 4, 4, 10]
    idle = engines(2, 4)
    after = steps[-1].state
    counts = []
    for i in range(4, 80):
        step = Ongoing(LIMITS).step(seen(1.0, idle, i, now_s=10.0 * i), after)
        after = step.state
        counts.append(step.plan.serving.decode)
    changed = [30.0 + 10.0 * (i + 1) for i, n in enumerate(counts) if n != 10]
    # the mean falls below 18 at once, and has to stay there for ten minutes
    assert 630.0 <= changed[0] <= 650.0


def test_the_latency_ratio_is_at_most_two() -> None:
    """P90 TTFT 10 s of 2 s allowed: twice the engines. 1.0 s: half of them, after 300 s. 2.1 s: within the
    tolerance.
    """
    policy = LatencyRatio(LIMITS)
    assert over(policy, [seen(8.0, engines(4, 3), ttft_p90_s=10.0)])[0].plan.serving == (8, 6, 0)
    assert over(policy, [seen(8.0, engines(4, 3), ttft_p90_s=2.1)])[0].plan.serving == (4, 3, 0)
    steps = over(policy, [seen(8.0, engines(4, 3), i, ttft_p90_s=1.0) for i in range(32)])
    assert steps[29].plan.serving == (4, 3, 0)
    assert steps[30].plan.serving == (2, 2, 0)


def test_demand_over_the_engines_rate() -> None:
    """A prompt takes 0.2 s: 20/s need 4.004 engines at 99.9 %. A stream takes 2 s, and 16 fit: 20/s need 2.5."""
    policy = DemandRate(LIMITS)
    steps = over(policy, [seen(20.0, engines(2, 2), 0), seen(90.0, engines(2, 2), 1)])
    prefill, decode, _ = steps[0].plan.serving
    assert prefill in (4, 5) and decode == 3
    # nothing changes between two intervals while engines are on their way
    assert steps[1].plan.serving == (prefill, decode, 0)
    full = loaded(engines(prefill, decode), Role.DECODE, kv_usage=0.99)
    assert policy.step(seen(20.0, full, 2), steps[1].state).plan.serving == (prefill, decode + 1, 0)
    queue = seen(20.0, engines(prefill, decode), 2, queued=10)
    assert policy.step(queue, steps[1].state).plan.serving == (prefill + 1, decode, 0)


def test_regimes_switch_then_grow_then_shrink() -> None:
    policy = RegimeRule(LIMITS)
    busy = loaded(engines(2, 3), Role.PREFILL, score=0.7)
    switched = over(policy, [seen(1.0, busy)])[0]
    assert switched.plan.serving == (3, 2, 0) and "imbalanced" in switched.reasons[0]
    full = loaded(loaded(engines(2, 2), Role.PREFILL, score=1.5), Role.DECODE, score=0.5)
    steps = over(policy, [seen(1.0, full, i) for i in range(2)])
    assert [s.plan.serving for s in steps] == [(2, 2, 0), (3, 2, 0)]
    idle = over(policy, [seen(0.0, engines(2, 3), i) for i in range(33)])
    assert idle[29].plan.serving.total == 5 and idle[-1].plan.serving.total == 4


def test_regimes_change_the_number_of_colocated_engines_where_these_alone_serve() -> None:
    policy = RegimeRule(Limits(0, 20, 0, 20, colocated_max=20, budget=40))
    full = loaded(engines(0, 0, 2), Role.COLOCATED, score=1.5)
    alone = RegimeRule(Limits(0, 0, 0, 0, colocated_max=20, budget=40))
    # both means are high: one engine more serves both roles
    for one in (policy, alone):
        steps = over(one, [seen(1.0, full, i) for i in range(2)])
        assert [s.plan.serving for s in steps] == [(0, 0, 2), (0, 0, 3)]
    # the last engine stays
    idle = over(alone, [seen(0.0, engines(0, 0, 2), i) for i in range(33)])
    assert [idle[29].plan.serving, idle[-1].plan.serving] == [(0, 0, 2), (0, 0, 1)]
    last = over(alone, [seen(0.0, engines(0, 0, 1), i) for i in range(33)])
    assert last[-1].plan.serving == (0, 0, 1)
    # a role with engines of its own gets these
    own = loaded(engines(1, 0, 2), Role.PREFILL, score=9.0)
    steps = over(RegimeRule(Limits(1, 20, 0, 20, colocated_max=20)), [seen(1.0, own, i) for i in range(2)])
    assert steps[1].plan.serving == (2, 0, 2)


@pytest.mark.parametrize("name", SCALING)
def test_every_policy_holds_without_reports_and_decides_alike(name: str) -> None:
    policy = make(name, {"limits": {"prefill_max": 9, "decode_max": 9, "budget": 12}})
    silent = dataclasses.replace(seen(90.0, engines(3, 4), queued=500), windows=None)
    state = policy.initial()
    for i in range(5):
        step = policy.step(dataclasses.replace(silent, now_s=1_000.0 * i), state)
        assert step.plan.serving == (3, 4, 0) and step.plan.moves == ()
        state = step.state
    loud = seen(90.0, engines(3, 4), 3, queued=500)
    assert policy.step(loud, state) == policy.step(loud, state)
    assert make(name, params_of(policy)) == policy


def test_unknown_names_and_parameters_are_refused() -> None:
    with pytest.raises(BadParameter, match="no scaling policy is called 'magic'; there are: joint"):
        make("magic", {})
    with pytest.raises(BadParameter, match="unknown parameter 'speed'"):
        make("joint", {"speed": 1})
    with pytest.raises(BadParameter, match="limits has no parameter 'max'"):
        make("joint", {"limits": {"max": 3}})
    with pytest.raises(BadParameter, match="give a mapping"):
        make("joint", {"limits": 3})
    with pytest.raises(BadParameter, match="quantile"):
        make("joint", {"quantile": 2.0})
