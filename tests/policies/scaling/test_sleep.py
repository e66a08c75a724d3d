"""Scale to zero: idle time by hand, the wake by an arrival, phases, and that every policy wakes and replays."""

import dataclasses

import pytest

from policies.routing.params import BadParameter
from policies.scaling.base import Counts, Way
from policies.scaling.journal import header_line, replay, step_line
from policies.scaling.observation import Duty, EngineView, Observation
from policies.scaling.registry import SCALING, make, params_of
from policies.scaling.sleep import MaySleep, PhaseSince, Sleep, SleepState, awake_limits, phase_after
from policies.state.standby import Phase
from policies.state.views import Role
from tests.policies.scaling.fixtures import engines, seen

LIMITS = {"prefill_min": 0, "decode_min": 0, "prefill_max": 4, "decode_max": 4, "warm_max": 1, "budget": 9}


def policy(name: str = "fixed", **sleep: float) -> MaySleep:
    made = make(name, {"limits": LIMITS, "sleep": {"idle_s": 60.0, **sleep}})
    assert isinstance(made, MaySleep)
    return made


def quiet(at_s: float, fleet: tuple[EngineView, ...] | None = None, queued: int = 0) -> Observation:
    """Returns an observation at `at_s` whose last window had no request and in which nothing has ended."""
    fleet = engines(1, 1) if fleet is None else fleet
    return seen(0.0, fleet, int(at_s // 10), at_s, met=0, queued=queued, ttft_p90_s=None)


def test_sleep_begins_after_the_idle_time_and_not_before() -> None:
    """Idle from 5 s on; 60 s later, at 65 s, the engines go."""
    may, state = policy(), policy().initial()
    for at_s in (5.0, 30.0, 64.9):
        step = may.step(quiet(at_s), state)
        state = step.state
        assert step.plan.serving == Counts(1, 1)
        assert step.plan.moves == ()
    step = may.step(quiet(65.0), state)
    assert (step.plan.serving, step.plan.warm) == (Counts(0, 0), 0)
    assert {(m.way, m.engine) for m in step.plan.moves} == {(Way.STOP, "p0"), (Way.STOP, "d0")}
    assert step.reasons[0] == "nothing for 60 s of 60 s: sleep"
    asleep = may.step(quiet(66.0, ()), step.state)
    assert asleep.plan.moves == () and asleep.reasons[0] == "asleep: the next request wakes"


@pytest.mark.parametrize(
    "disturbed",
    [
        seen(0.1, engines(1, 1), 4, 40.0),
        quiet(40.0, (*engines(1, 0), EngineView("d0", Role.DECODE, Duty.ACTIVE, running=1))),
        quiet(40.0, (*engines(1, 0), EngineView("d0", Role.DECODE, Duty.ACTIVE, waiting=1))),
        quiet(40.0, queued=1),
        dataclasses.replace(quiet(40.0), pooled=1),
        # no report is not zero load
        dataclasses.replace(quiet(40.0), windows=None),
    ],
)
def test_whatever_comes_runs_or_is_not_reported_begins_the_idle_time_anew(disturbed: Observation) -> None:
    may = policy()
    state = may.step(quiet(0.0), may.initial()).state
    state = may.step(disturbed, state).state
    assert state.idle_since_s is None
    state = may.step(quiet(50.0), state).state
    assert not may.step(quiet(109.0), state).state.asleep
    assert may.step(quiet(110.0), state).state.asleep


@pytest.mark.parametrize(
    "now",
    [
        seen(0.1, engines(1, 1), 100, met=1),
        quiet(1_010.0, (*engines(1, 0), EngineView("d0", Role.DECODE, Duty.ACTIVE, running=1))),
        quiet(1_010.0, (*engines(0, 1), EngineView("p0", Role.PREFILL, Duty.WARM, waiting=1))),
    ],
)
def test_a_request_that_is_served_although_the_fleet_is_to_sleep_wakes_it(now: Observation) -> None:
    """None waits, because an engine serves that does not go yet, or that somebody's numbers keep."""
    may = policy()
    step = may.step(now, SleepState(may.policy.initial(), asleep=True, idle_since_s=0.0))
    assert (step.state.asleep, step.state.idle_since_s) == (False, None)
    assert step.reasons[0] == "1 served although asleep: wake"
    assert step.plan.serving == Counts(1, 1)


def test_a_request_that_is_refused_or_has_ended_after_an_idle_window_does_not_wake() -> None:
    may = policy()
    asleep = SleepState(may.policy.initial(), asleep=True, idle_since_s=0.0)
    for now in (seen(0.1, (), 100, met=0, missed=0), seen(0.0, (), 100, met=1)):
        assert may.step(now, asleep).state.asleep


@pytest.mark.parametrize("name", SCALING)
def test_every_policy_is_woken_by_one_request_that_waits_also_before_anything_is_known(name: str) -> None:
    """A router that has just restarted reports no windows and no fitted profile."""
    may = policy(name)
    asleep = SleepState(may.policy.initial(), asleep=True, idle_since_s=0.0)
    one = dataclasses.replace(quiet(1_000.0, (), queued=1), windows=None, fitted=False)
    step = may.step(one, asleep)
    assert not step.state.asleep
    assert step.reasons[0] == "1 waiting: wake"
    assert step.plan.serving == Counts(1, 1)
    assert [(m.way, m.role) for m in step.plan.moves] == [(Way.START, Role.PREFILL), (Way.START, Role.DECODE)]


def test_a_policy_that_needs_the_capacity_of_an_engine_is_not_asked_before_that_is_known_and_sleeps_anyway() -> (
    None
):
    may = policy("joint")
    state = may.initial()
    for at_s in (0.0, 60.0):
        step = may.step(dataclasses.replace(quiet(at_s, engines(2, 1, warm=1)), fitted=False), state)
        assert step.state.inner == may.policy.initial()
        state = step.state
        if not at_s:
            assert (step.plan.serving, step.plan.warm, step.plan.moves) == (Counts(2, 1), 1, ())
    assert step.plan.serving == Counts(0, 0)


def test_the_floor_stays_and_awake_every_role_has_an_engine() -> None:
    made = make("fixed", {"limits": {**LIMITS, "decode_min": 1}, "sleep": {"idle_s": 1.0, "decode": 1}})
    assert made.limits.least == Counts(1, 1, 0)
    step = made.step(quiet(9.0), SleepState(made.policy.initial(), idle_since_s=0.0))  # type: ignore[attr-defined]
    assert step.plan.serving == Counts(0, 1)
    only = awake_limits(dataclasses.replace(made.limits, prefill_min=0, decode_min=0), Sleep())
    assert only.least == Counts(1, 1, 0)


def test_parameters_make_the_policy_again_and_wrong_ones_are_refused() -> None:
    may = policy("joint", wake_limit_s=7.0)
    assert make(may.name, params_of(may)) == may
    with pytest.raises(BadParameter, match="idle_s"):
        policy(idle_s=0.0)
    with pytest.raises(BadParameter, match="sleep has no parameter 'after_s'"):
        policy(after_s=1.0)


@pytest.mark.parametrize("name", SCALING)
@pytest.mark.parametrize("first", [0, 9])
def test_a_journal_of_sleep_and_wake_replays(name: str, first: int) -> None:
    may = policy(name, idle_s=30.0)
    state, lines = may.initial(), []
    for i in range(20):
        if i == first:
            lines.append(header_line(may, state, "1.0"))
        now = seen(2.0, engines(1, 1), i) if i < 3 else quiet(10.0 * (i + 1), () if 6 < i < 15 else None)
        now = dataclasses.replace(now, queued=int(i in (12, 13)))
        step = may.step(now, state)
        state = step.state
        if i >= first:
            lines.append(step_line(now, step))
    replayed = list(replay(lines))
    assert [one.same for one in replayed] == [True] * (20 - first)
    assert sum(one.decided.serving.total == 0 for one in replayed) >= 3


def test_the_phases_of_a_fleet_in_their_order() -> None:
    """(time, engines, asleep) -> phase and its beginning; a wake may take 30 s."""
    table = [
        (0.0, (), False, Phase.AWAKE, 0.0),
        (1.0, engines(1, 1), False, Phase.AWAKE, 0.0),
        # told to sleep, and still active
        (2.0, engines(1, 1), True, Phase.AWAKE, 0.0),
        (3.0, engines(1, 0, warm=1), True, Phase.ASLEEP, 3.0),
        (9.0, (), True, Phase.ASLEEP, 3.0),
        (10.0, (), False, Phase.WAKING, 10.0),
        # a prefill engine alone answers nobody
        (39.0, engines(1, 0, starting=1), False, Phase.WAKING, 10.0),
        (40.0, engines(1, 0, starting=1), False, Phase.FAILED, 10.0),
        (99.0, engines(1, 0, starting=1), False, Phase.FAILED, 10.0),
        (100.0, (), True, Phase.ASLEEP, 100.0),
        (101.0, (), False, Phase.WAKING, 101.0),
        (102.0, engines(0, 1), False, Phase.AWAKE, 102.0),
        # engines that are lost are not asleep
        (103.0, (), False, Phase.AWAKE, 102.0),
        # the clock of a new router is behind: a wake under way has its whole time by that clock
        (104.0, engines(1, 0), True, Phase.ASLEEP, 104.0),
        (105.0, (), False, Phase.WAKING, 105.0),
        (5.0, (), False, Phase.WAKING, 5.0),
        (34.0, (), False, Phase.WAKING, 5.0),
        (35.0, (), False, Phase.FAILED, 5.0),
    ]
    phase = PhaseSince()
    for at_s, fleet, asleep, wanted, since_s in table:
        phase = phase_after(phase, quiet(at_s, fleet), asleep, 30.0)
        assert phase == (wanted, since_s), at_s
