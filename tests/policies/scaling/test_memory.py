"""A policy's state holds for another policy as far as it does not depend on what differs."""

import dataclasses

import pytest

from policies.scaling.base import Counts, Limits
from policies.scaling.forecast import Forecast
from policies.scaling.joint import Joint, JointState
from policies.scaling.memory import carried_over, rested
from policies.scaling.registry import SCALING, make
from policies.scaling.rivals.ongoing import Ongoing, OngoingState
from policies.scaling.sleep import MaySleep, Sleep, SleepState
from tests.policies.scaling.fixtures import engines, seen

LIMITS = Limits(prefill_max=8, decode_max=8, warm_max=4, budget=20)
JOINT = Joint(limits=LIMITS)


@pytest.fixture(scope="module")
def learned() -> JointState:
    """The state after five windows in which two requests a second came and some were late."""
    state = JOINT.initial()
    for window in range(5):
        state = JOINT.step(seen(2.0, engines(2, 3), window, missed=10), state).state
    assert state.forecast.seen == 5
    assert state.wanted is not None
    return state


def test_the_same_parameters_go_on_in_the_same_state(learned: JointState) -> None:
    assert carried_over(JOINT, learned, Joint(limits=LIMITS)) == learned


def test_other_bounds_cut_only_what_is_wanted(learned: JointState) -> None:
    state = dataclasses.replace(learned, wanted=Counts(4, 6), warm=3)
    narrow = Joint(limits=Limits(prefill_max=3, decode_max=8, warm_max=1, budget=20))
    assert carried_over(JOINT, state, narrow) == dataclasses.replace(state, wanted=Counts(3, 6), warm=1)
    # and the policy decides with them
    narrow.step(seen(2.0, engines(3, 6), 5), carried_over(JOINT, state, narrow))


def test_the_load_is_known_to_a_policy_with_other_parameters(learned: JointState) -> None:
    cautious = Joint(limits=LIMITS, quantile=0.99, calm_s=60.0, headroom_most=0.0)
    state = carried_over(JOINT, dataclasses.replace(learned, calm_since_s=40.0), cautious)
    assert (state.forecast, state.lengths, state.attained) == (
        learned.forecast,
        learned.lengths,
        learned.attained,
    )
    assert (state.wanted, state.window) == (learned.wanted, learned.window)
    # these are bounded by its own parameters, or last since a moment that meant something else
    assert (state.headroom, state.calm_since_s) == (0.0, None)


def test_another_forecast_begins_anew_and_lengths_stay(learned: JointState) -> None:
    other = Joint(limits=LIMITS, forecast=Forecast(level_gain=0.5))
    state = carried_over(JOINT, learned, other)
    assert state.forecast == other.initial().forecast
    assert state.lengths == learned.lengths


def test_the_means_of_other_policies_hold_for_the_same_parameters_only() -> None:
    former, state = Ongoing(limits=LIMITS), OngoingState(Counts(9, 9), 5.0, (1.0, 2.0, 3.0))
    kept = carried_over(former, state, Ongoing(limits=LIMITS))
    assert kept == dataclasses.replace(state, wanted=Counts(8, 8))
    assert carried_over(former, state, Ongoing(limits=LIMITS, target_ongoing=7.0)) is None
    assert carried_over(former, state, JOINT) is None


def test_a_fleet_that_sleeps_goes_on_sleeping_and_what_lies_beneath_is_carried_over_alike(
    learned: JointState,
) -> None:
    may = MaySleep(JOINT, Sleep(idle_s=60.0))
    state = SleepState(learned, asleep=True, idle_since_s=3.0)
    sooner = MaySleep(Joint(limits=LIMITS, calm_s=60.0), Sleep(idle_s=30.0))
    carried = carried_over(may, state, sooner)
    assert (carried.asleep, carried.idle_since_s) == (True, 3.0)
    assert carried.inner == carried_over(JOINT, learned, sooner.policy)
    # one that may not sleep any more, and one that begins to
    assert carried_over(may, state, JOINT) == learned
    assert carried_over(JOINT, learned, may) == SleepState(learned)
    # other parameters of a policy that begins anew with them
    former, other = Ongoing(limits=LIMITS), Ongoing(limits=LIMITS, target_ongoing=9.0)
    anew = carried_over(
        MaySleep(former, Sleep()), SleepState(OngoingState(at_s=1.0), True), MaySleep(other, Sleep())
    )
    assert anew == SleepState(other.initial(), True)


def test_after_a_break_the_load_is_known_and_what_must_last_begins_anew(learned: JointState) -> None:
    calm = dataclasses.replace(learned, calm_since_s=40.0, idle_since_s=40.0, grown_s=9.0, switched_s=9.0)
    state = rested(JOINT, calm)
    kept = ("forecast", "lengths", "attained", "headroom", "wanted", "warm")
    assert [getattr(state, name) for name in kept] == [getattr(learned, name) for name in kept]
    begun = JOINT.initial()
    anew = ("window", "calm_since_s", "idle_since_s", "grown_s", "switched_s", "looked_s")
    assert [getattr(state, name) for name in anew] == [getattr(begun, name) for name in anew]
    for asleep in (False, True):
        slept = rested(MaySleep(JOINT, Sleep()), SleepState(calm, asleep, 3.0))
        assert slept == SleepState(state, asleep, None)


@pytest.mark.parametrize("name", SCALING)
def test_every_policy_goes_on_after_a_break_and_wants_what_it_wanted(name: str) -> None:
    policy = make(name, {"limits": {"prefill_max": 8, "decode_max": 8, "budget": 20}})
    state = policy.step(seen(2.0, engines(2, 3), 0), policy.initial()).state
    after = rested(policy, state)
    assert after.wanted == state.wanted is not None
    # a window whose number is lower, because the clock was set back
    policy.step(seen(2.0, engines(2, 3), 0, 1.0), after)
