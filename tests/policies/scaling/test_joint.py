"""Sluice's scaling policy, one decision at a time; the closed loops are in `test_closed_loop`."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing.params import BadParameter
from policies.scaling.base import Counts, Limits, Way, stepped
from policies.scaling.joint import Evidence, Joint, JointState
from policies.scaling.observation import Observation
from policies.state.views import Role
from tests.policies.scaling.fixtures import engines, seen

LIMITS = Limits(prefill_max=12, decode_max=12, budget=24)


def steady(policy: Joint, rate: float, prefill: int, decode: int, windows: int = 30) -> JointState:
    """Returns the state after a steady load, with the counts that it began with wanted still."""
    state, fleet = policy.initial(), engines(prefill, decode)
    for window in range(windows):
        state = policy.step(seen(rate, fleet, window), state).state
        state = dataclasses.replace(state, wanted=Counts(prefill, decode), calm_since_s=None)
    return state


def test_enough_is_left_alone() -> None:
    policy = Joint(limits=LIMITS)
    step = policy.step(seen(8.0, engines(4, 3), 30), steady(policy, 8.0, 4, 3))
    assert step.plan.serving == (4, 3, 0) and step.plan.moves == ()
    assert "2000 + 100 tokens; level 8/s" in step.reasons[0]


def test_a_role_switch_is_cheaper_than_a_start() -> None:
    """Prefill lacks engines and decode has many more than it needs: no engine is added."""
    policy = Joint(limits=LIMITS)
    state = steady(policy, 12.0, 2, 8)
    step = policy.step(seen(12.0, engines(2, 8, warm=3), 30), state)
    assert step.plan.serving.total == 10 and step.plan.serving.prefill > 2
    assert {move.way for move in step.plan.moves if move.way is not Way.STOP} == {Way.SWITCH}
    assert any("0 activate, 0 start" in reason for reason in step.reasons)


def test_a_warm_engine_goes_before_a_new_one() -> None:
    """14/s need four prefill engines, of 12.6 and 17.3/s."""
    policy = Joint(limits=dataclasses.replace(LIMITS, warm_max=4))
    step = policy.step(seen(14.0, engines(2, 3, warm=1), 30), steady(policy, 14.0, 2, 3))
    ways = [move.way for move in step.plan.moves]
    assert ways[0] is Way.ACTIVATE and ways.count(Way.ACTIVATE) == 1 and ways.count(Way.START) >= 1
    assert step.plan.moves[0].engine == "w0"


def test_no_report_holds_and_no_arrivals_shrink() -> None:
    policy = Joint(limits=LIMITS, calm_s=60.0, cool_down_s=0.0)
    state = steady(policy, 8.0, 6, 6)
    silent = dataclasses.replace(seen(0.0, engines(6, 6), 40), windows=None)
    held = policy.step(silent, state)
    assert held.plan.serving == (6, 6, 0) and held.reasons == ("no report: hold",)
    for window in range(40, 80):
        step = policy.step(seen(0.0, engines(6, 6), window), state)
        state = step.state
    assert step.plan.serving == (1, 1, 0)
    assert {move.way for move in step.plan.moves} == {Way.STOP}


@pytest.mark.parametrize("reported", [True, False])
def test_a_report_that_is_no_number_is_refused_also_without_a_window(reported: bool) -> None:
    """The mean of what decode engines hold would never be a number again."""
    prefill, decode = engines(1, 1)
    broken = dataclasses.replace(decode, running=1, kv_usage=math.inf)
    now = seen(1.0, (prefill, broken))
    now = now if reported else dataclasses.replace(now, windows=None)
    policy = Joint()
    with pytest.raises(BadParameter, match="drop this report"):
        policy.step(now, policy.initial())


def test_one_window_is_learned_once() -> None:
    policy = Joint(limits=LIMITS)
    state = steady(policy, 8.0, 4, 3)
    once = policy.step(seen(8.0, engines(4, 3), 30), state).state
    again = policy.step(seen(8.0, engines(4, 3), 30, now_s=311.0), once).state
    assert again.forecast == once.forecast and again.lengths == once.lengths


def test_requests_that_wait_are_demand() -> None:
    """336 queued prompts are 300 more than four engines compute in the slack of 1.8 s (0.2 s each): in 30 s 10/s more
    for prefill alone, and four engines carry 17.3/s; decode has one engine to give.
    """
    policy = Joint(limits=LIMITS)
    state = steady(policy, 8.0, 4, 3)
    # 30 wait at the engines, which compute 36 in time: nothing changes
    some = tuple(dataclasses.replace(e, waiting=10 if e.role is Role.PREFILL else 0) for e in engines(3, 3))
    in_time = policy.step(seen(8.0, some, 30), dataclasses.replace(state, wanted=Counts(3, 3)))
    assert in_time.plan.serving.prefill <= 3
    late = tuple(dataclasses.replace(e, waiting=100) for e in engines(3, 0))
    more = policy.step(seen(8.0, late + engines(0, 3), 30), dataclasses.replace(state, wanted=Counts(3, 3)))
    assert more.plan.serving.prefill > 3
    step = policy.step(seen(8.0, engines(4, 3), 30, queued=336), state)
    assert step.plan.serving == (5, 2, 0)
    pooled = policy.step(seen(8.0, engines(4, 3), 30, pooled=600), state)
    assert pooled.plan.serving.prefill == 3 and pooled.plan.serving.decode > 3


def test_prompts_that_are_wholly_cached_are_not_late_on_a_profile_without_a_base() -> None:
    policy, state = Joint(limits=LIMITS), JointState()
    for window in range(3):
        found = seen(8.0, engines(3, 3), window, queued=5)
        profile = dataclasses.replace(found.capability.profile, prefill_base_s=0.0)
        (one,) = found.windows or ()
        cached = dataclasses.replace(one, prompt_tokens=0, hit_tokens=one.prompt_tokens)
        capability = dataclasses.replace(found.capability, profile=profile)
        step = policy.step(dataclasses.replace(found, windows=(cached,), capability=capability), state)
        state = step.state
        assert "(+ 0 queued" in step.reasons[0] and step.plan.serving.prefill <= 3


def test_a_short_budget_is_shared_by_need() -> None:
    """100/s need 25 engines for prefill alone; nine are allowed. Five and four carry 21.8/s; four and five would carry
    17.3/s, six and three 18.3/s.
    """
    policy = Joint(limits=dataclasses.replace(LIMITS, budget=9))
    busy = tuple(dataclasses.replace(e, running=11) if e.role is Role.DECODE else e for e in engines(4, 5))
    step = policy.step(seen(100.0, busy, 30), steady(policy, 100.0, 4, 5))
    assert step.plan.serving == (5, 4, 0)
    assert any("at most" in reason for reason in step.reasons)


def test_missed_objectives_raise_a_bounded_headroom() -> None:
    """A fifth of 100 requests a window is late: two windows prove it, and 19 % are beyond what is allowed."""
    policy = Joint(limits=LIMITS, headroom_most=0.3)
    state, fleet = steady(policy, 8.0, 4, 3), engines(4, 3)
    rooms = [state.headroom]
    for window in range(30, 60):
        state = policy.step(seen(8.0, fleet, window, met=80, missed=20), state).state
        state = dataclasses.replace(state, wanted=Counts(4, 3))
        rooms.append(state.headroom)
    assert rooms[:5] == pytest.approx([0.0, 0.0, 0.5 * 0.19, 0.5 * 0.19, 0.19])
    assert rooms == sorted(rooms) and rooms[-1] == 0.3
    relaxed = policy.step(seen(8.0, fleet, 60), dataclasses.replace(state, attained=1.0)).state
    assert relaxed.headroom < 0.3


@pytest.mark.parametrize(("every", "raises"), [(50, False), (5, True)])
def test_single_late_requests_raise_no_headroom_and_many_do(every: int, raises: bool) -> None:
    """Five requests end in a window. One late one in 50 windows is a fifth of its window and 0.4 % of all; one in five
    windows is 4 % of all.
    """
    policy = Joint(limits=LIMITS)
    state, fleet = steady(policy, 8.0, 4, 3), engines(4, 3)
    for window in range(30, 430):
        missed = int(window % every == 0)
        state = policy.step(seen(8.0, fleet, window, met=5 - missed, missed=missed), state).state
        state = dataclasses.replace(state, wanted=Counts(4, 3), calm_since_s=None)
    assert (state.headroom > 0.0) is raises


def test_the_rare_lateness_of_one_class_is_not_added_to_that_of_another() -> None:
    """Ten classes take turns with a late request in 20, so each window has one, and each class 0.5 % late."""
    policy = Joint(limits=LIMITS)
    state, fleet = steady(policy, 8.0, 4, 3), engines(4, 3)
    for window in range(30, 230):
        now = seen(8.0, fleet, window)
        assert now.windows is not None
        classes = tuple(
            dataclasses.replace(
                now.windows[0], name=f"c{i}", met=20 - (window % 10 == i), missed=int(window % 10 == i)
            )
            for i in range(10)
        )
        state = policy.step(dataclasses.replace(now, windows=classes), state).state
        state = dataclasses.replace(state, wanted=Counts(4, 3), calm_since_s=None)
    assert state.headroom == 0.0


def first_rooms(policy: Joint, late_window: int | None) -> list[float]:
    """Returns the headroom after each of the first ten windows; all 100 requests of `late_window` are late."""
    state, rooms = policy.initial(), list[float]()
    for window in range(10):
        missed = 100 if window == late_window else 0
        now: Observation = seen(8.0, engines(4, 3), window, met=100 - missed, missed=missed)
        state = policy.step(now, state).state
        rooms.append(state.headroom)
    return rooms


def test_the_first_headroom_falls_with_the_first_requests_in_time() -> None:
    """Requests are judged 35 s after the first look, at 10 s: 30 s to serve what had waited, and a stream of 100 tokens
    of 50 ms. Windows of 10 s lie behind that from the sixth on, and each takes a quarter of 0.1.
    """
    rooms = first_rooms(Joint(limits=LIMITS), None)
    assert rooms[4:] == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0, 0.0], abs=2e-3)
    # what is left when lateness is proven is needed, too: 0.05, and a tenth of 99 % more
    rooms = first_rooms(Joint(limits=LIMITS, headroom_gain=0.1), 6)
    assert rooms[5:] == pytest.approx([0.075, 0.149, 0.149, 0.149, 0.149], abs=2e-3)


def test_requests_that_came_to_another_fleet_are_not_judged() -> None:
    """All are late. The fourth prefill engine serves from 320 s on, so requests are judged from 355 s on; the first
    window that begins behind that ends at 370 s.
    """
    policy = Joint(limits=LIMITS)
    state, rooms = steady(policy, 8.0, 4, 3), list[float]()
    for window in range(30, 37):
        fleet = engines(3 if window == 30 else 4, 3)
        state = policy.step(seen(8.0, fleet, window, met=0, missed=100), state).state
        state = dataclasses.replace(state, wanted=Counts(4, 3))
        rooms.append(state.headroom)
    assert rooms[:-1] == [0.0] * 6 and rooms[-1] > 0.0


def test_lateness_that_a_shortage_explains_raises_no_headroom() -> None:
    """Five times the load: requests are late because engines are missing, and not because they carry less than is
    known of them.
    """
    policy = Joint(limits=LIMITS)
    state, fleet = steady(policy, 8.0, 4, 3), engines(4, 3)
    for window in range(30, 40):
        step = policy.step(seen(40.0, fleet, window, met=0, missed=400), state)
        assert step.plan.serving.total > 7
        assert step.state.headroom == 0.0
        state = dataclasses.replace(step.state, wanted=Counts(4, 3))
    assert state.late == ()


def test_an_infeasible_objective_adds_no_engines() -> None:
    """Prompts take 0.2 s and TTFT is 0.1 s: no number of engines helps, and the reasons say so."""
    policy = Joint(limits=LIMITS)
    state = steady(policy, 4.0, 3, 3)
    observation = seen(4.0, engines(3, 3), 30)
    assert observation.windows is not None
    tight = dataclasses.replace(observation.windows[0], ttft_slo_s=0.1)
    step = policy.step(dataclasses.replace(observation, windows=(tight,)), state)
    assert step.plan.serving == (3, 3, 0)
    assert any("more engines do not help" in reason for reason in step.reasons)


@pytest.mark.parametrize("slo", [{"ttft_slo_s": 0.1}, {"tpot_slo_s": 0.01}])
def test_an_infeasible_objective_raises_no_headroom(slo: dict[str, float]) -> None:
    """Prompts take 0.2 s and steps 20 ms: all requests are late, and headroom would add half as many engines again."""
    policy = Joint(limits=LIMITS)
    state = steady(policy, 4.0, 3, 3)
    for window in range(30, 90):
        observation = seen(4.0, engines(3, 3), window, met=0, missed=40)
        assert observation.windows is not None
        tight = dataclasses.replace(observation.windows[0], **slo)
        step = policy.step(dataclasses.replace(observation, windows=(tight,)), state)
        assert step.state.headroom <= state.headroom
        state = dataclasses.replace(step.state, wanted=Counts(3, 3))


@settings(max_examples=40, deadline=None)
@given(
    low=st.floats(0.1, 60.0),
    more=st.floats(0.0, 60.0),
    prefill=st.integers(1, 12),
    decode=st.integers(1, 12),
    warm=st.integers(0, 4),
)
def test_more_load_never_wants_fewer(low: float, more: float, prefill: int, decode: int, warm: int) -> None:
    policy = Joint(limits=Limits(prefill_max=40, decode_max=40, budget=80))
    totals = []
    for rate in (low, low + more):
        state, fleet = policy.initial(), engines(prefill, decode, warm=warm)
        for window in range(5):
            step = policy.step(seen(rate, fleet, window), state)
            state = dataclasses.replace(step.state, wanted=Counts(prefill, decode), switched_s=-1e9)
        totals.append(step.plan.serving.total)
    assert totals[0] <= totals[1]


@settings(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.floats(0.0, 200.0), min_size=1, max_size=12),
    now=st.tuples(st.integers(0, 14), st.integers(0, 14), st.integers(0, 5)),
    queued=st.integers(0, 2_000),
    step_most=st.integers(1, 30),
)
def test_bounds_are_kept(rates: list[float], now: tuple[int, int, int], queued: int, step_most: int) -> None:
    limits = Limits(2, 9, 1, 8, 0, 3, 0, 4, budget=14, step=step_most)
    policy = Joint(limits=limits, calm_s=5.0, cool_down_s=0.0)
    state, fleet = policy.initial(), engines(*now)
    before = None
    for window, rate in enumerate(rates):
        observation = seen(rate, fleet, window, queued=queued)
        step = policy.step(observation, state)
        assert step == policy.step(observation, state)  # pure
        serving, warm = step.plan.serving, step.plan.warm
        assert 2 <= serving.prefill <= 9 and 1 <= serving.decode <= 8 and 0 <= serving.colocated <= 3
        assert 0 <= warm <= 4 and serving.total + warm <= 14
        if before is not None:
            assert sum(max(0, a - b) for a, b in zip(serving, before, strict=True)) <= step_most
        before, state = serving, step.state


def test_steps_towards_counts() -> None:
    assert stepped(Counts(4, 4), Counts(6, 2), 1) == (5, 3, 0)
    assert stepped(Counts(4, 4), Counts(9, 4), 3) == (7, 4, 0)
    assert stepped(Counts(4, 4), Counts(1, 2), 2) == (2, 4, 0)
    assert stepped(Counts(4, 4), Counts(6, 6), 10) == (6, 6, 0)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"prefill_min": 5, "prefill_max": 4}, "lower one or raise the other"),
        ({"prefill_min": 5, "decode_min": 5, "budget": 9}, "raise the budget"),
        ({"decode_min": 0, "decode_max": 0}, "nothing would decode"),
        ({"prefill_min": 0, "prefill_max": 0}, "nothing would prefill"),
        ({"warm_min": 3, "warm_max": 2}, "warm_min"),
        ({"budget": 0}, "budget"),
    ],
)
def test_impossible_limits_are_refused(bad: dict[str, int], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        Limits(**bad)


def test_a_short_budget_takes_warm_engines_first() -> None:
    limits = Limits(1, 10, 1, 10, warm_max=5, budget=10)
    assert limits.kept(Counts(6, 3), 5) == ((6, 3, 0), 1)
    # 15 are 5 too many: 9 above the minimum of prefill, 4 of decode: 3.46 and 1.54 of them go
    assert limits.kept(Counts(10, 5), 5) == ((7, 3, 0), 0)


def test_full_decode_engines_are_demand_whatever_lengths_were_known() -> None:
    """Three decode engines with all 16 slots taken need 3 / 0.9 = 3.3: four. Half full, two would do for the slots, and
    the demand decides.
    """
    policy = Joint(limits=LIMITS)
    state = dataclasses.replace(steady(policy, 2.0, 2, 3), wanted=Counts(2, 3), looked_s=None)
    full = tuple(dataclasses.replace(e, running=16) if e.role is Role.DECODE else e for e in engines(2, 3))
    assert policy.step(seen(2.0, full, 30), state).plan.serving.decode == 4
    half = tuple(
        dataclasses.replace(e, kv_usage=0.5, running=8) if e.role is Role.DECODE else e for e in full
    )
    assert policy.step(seen(2.0, half, 30), state).plan.serving.decode <= 3


def test_many_requests_teach_new_lengths_at_once_and_few_slowly() -> None:
    """80 arrivals with prompts twice as long are a change: they weigh 80 / (80 + 20). One is none: it weighs as one
    beside 400.
    """
    policy = Joint(limits=LIMITS)
    state = steady(policy, 8.0, 4, 3)
    for rate, share in ((8.0, 0.8), (0.1, 1.0 / 401.0)):
        now = seen(rate, engines(4, 3), 30)
        assert now.windows is not None
        longer = dataclasses.replace(now.windows[0], prompt_tokens=round(10 * rate) * 4_000)
        after = policy.step(dataclasses.replace(now, windows=(longer,)), state).state
        assert after.lengths.prompt_tokens == pytest.approx(2_000.0 + share * 2_000.0)


def _evidence(means: list[float], number: int) -> list[float]:
    """Returns the mean lengths known after each window of `number` requests, with a least gain of 0.1."""
    known, evidence, found = 0.0, Evidence(), list[float]()
    for mean in means:
        known, evidence = evidence.learned(known, mean, number, 0.1)
        found.append(known)
    return found


def test_two_windows_of_lengths_by_hand() -> None:
    """Ten requests of 100 tokens, then ten of 120: each weighs as much, and the recent mean of 100 + 10 / 30 * 20 is
    6.7 away, less than 6.2 * 100 sqrt(0.25 / 3 / (5 / 3 * 10)) = 44. Ten of 300 would move it by 67: it is taken.
    """
    assert _evidence([100.0, 120.0], 10) == pytest.approx([100.0, 110.0])
    assert _evidence([100.0, 300.0], 10) == pytest.approx([100.0, 100.0 + 200.0 / 3.0])


@pytest.mark.parametrize(("errors", "changed"), [(5.7, False), (6.0, True), (-4.9, False), (-5.1, True)])
def test_longer_requests_must_be_surer_than_shorter_ones(errors: float, changed: bool) -> None:
    """Windows of 20 requests with a coefficient of variation of 0.4: the recent mean has a gain of 0.5, an error of
    1,000 sqrt(0.16 * 0.5 / (1.5 * 20)) = 51.64, and a skewness of 1.264 / sqrt(20) * 0.25 / 1.75 * 3^1.5 = 0.21. So
    5 + 0.21 * 24 / 6 = 5.84 errors above are as rare as 5 of a normal mean.
    """
    mean = 1_000.0 + errors * 51.64 / 0.5
    known, after = Evidence(1_000.0, 400.0, 0.16).learned(1_000.0, mean, 20, 0.1)
    assert (after.weight == 20.0) is changed
    assert (known == after.recent) is changed


def test_noise_moves_mean_lengths_little_and_a_change_is_followed() -> None:
    """Windows of five requests with a coefficient of variation of 0.4: their means deviate by 18 %, and those of the
    last 400 requests by 1.4 %. Twice the length is more than six errors of the recent mean, 36 %: three quarters of
    the way are gone in a minute and a half.
    """
    rng = random.Random(4)
    noise = [1_000.0 * (1.0 + rng.gauss(0.0, 0.4) / math.sqrt(5.0)) for _ in range(8_000)]
    quiet = _evidence(noise, 5)
    assert max(abs(one - 1_000.0) for one in quiet[200:]) < 60.0
    after = _evidence([*noise[:500], *(2.0 * one for one in noise[500:520])], 5)
    assert after[509] > 1_750.0


def test_few_requests_are_no_burst_and_many_are() -> None:
    """0.5/s are five a window: up to 5 + 4.75 sqrt(5) + (4.75^2 - 1) / 6 = 19.2 come by chance. The level of the last
    window counts where it is the least of three, so the second window of a burst is one, too.
    """
    policy = Joint(limits=LIMITS)
    state = steady(policy, 0.5, 1, 1)
    some = policy.step(seen(1.9, engines(1, 1), 30), state)
    assert "cheapest change" not in " ".join(some.reasons)
    first = policy.step(seen(4.0, engines(1, 1), 30), state)
    assert first.plan.serving.prefill == 2
    fleet = dataclasses.replace(first.state, wanted=Counts(1, 1))
    assert policy.step(seen(4.0, engines(1, 1), 31), fleet).plan.serving.prefill == 2


def test_the_part_of_a_window_that_has_passed_may_be_a_burst() -> None:
    """At 4/s, 12 in three seconds are the level: up to 12 + 4.75 sqrt(12) + (4.75^2 - 1) / 6 = 32 come by chance. The
    warm engines of a burst of 32/s are ordered by its part, and a part that is too short says nothing.
    """
    for part_s, arrived, burst_part_s, grows in (
        (3.0, 96, 2.0, True),
        (3.0, 32, 2.0, False),
        (1.0, 32, 2.0, False),
        (3.0, 96, None, False),
    ):
        policy = Joint(limits=dataclasses.replace(LIMITS, warm_max=4), burst_part_s=burst_part_s)
        now = seen(4.0, engines(2, 2, warm=4), 30)
        now = dataclasses.replace(now, part_arrived=arrived, part_s=part_s)
        step = policy.step(now, steady(policy, 4.0, 2, 2))
        assert (step.plan.serving.total > 4) == grows, (part_s, arrived, burst_part_s)
        assert [move.way for move in step.plan.moves].count(Way.ACTIVATE) == (4 if grows else 0)


def test_where_engines_are_short_decode_keeps_no_more_than_it_fills() -> None:
    """Eight engines for 30/s of which the known lengths say that half should decode. While the decode engines hold next
    to nothing, prefill gets all but two; while they are full, decode keeps what it has.
    """
    policy = Joint(limits=dataclasses.replace(LIMITS, budget=8), switch_pause_s=0.0)
    state = dataclasses.replace(steady(policy, 30.0, 4, 4), wanted=Counts(4, 4), looked_s=None)
    idle = tuple(dataclasses.replace(e, running=1) if e.role is Role.DECODE else e for e in engines(4, 4))
    assert policy.step(seen(30.0, idle, 30), state).plan.serving == (6, 2, 0)
    full = tuple(dataclasses.replace(e, running=14) if e.role is Role.DECODE else e for e in engines(4, 4))
    assert policy.step(seen(30.0, full, 30), state).plan.serving.decode >= 4


FEW_DECODE = Limits(prefill_max=8, decode_max=2, budget=24)


def test_colocated_engines_are_added_where_decode_has_all_that_its_bounds_allow() -> None:
    """12/s and headroom need three decode engines, of 4.9, 11.5 and 18.3/s; two are allowed. One colocated engine
    carries 2.5/s.
    """
    policy = Joint(limits=dataclasses.replace(FEW_DECODE, colocated_max=4))
    step = policy.step(seen(12.0, engines(3, 2), 30), steady(policy, 12.0, 3, 2))
    assert step.plan.serving == (3, 2, 1)


def test_prefill_has_no_more_engines_than_what_the_bounds_of_decode_carry() -> None:
    """30/s need eight prefill and six decode engines. Two of these carry 11.5/s, for which three prefill engines are
    enough: the others would compute prompts that wait for decode.
    """
    policy = Joint(limits=FEW_DECODE)
    step = policy.step(seen(30.0, engines(2, 2), 30), steady(policy, 30.0, 2, 2))
    assert step.plan.serving == (3, 2, 0)
    # streams that wait change nothing of that, and neither do decode engines that are full
    full = tuple(dataclasses.replace(e, running=16) if e.role is Role.DECODE else e for e in engines(2, 2))
    step = policy.step(seen(30.0, full, 30, pooled=2_000), steady(policy, 30.0, 2, 2))
    assert step.plan.serving == (3, 2, 0)


def test_prefill_engines_beyond_what_the_bounds_of_decode_carry_go() -> None:
    policy = Joint(limits=FEW_DECODE, calm_s=20.0, cool_down_s=0.0)
    state = steady(policy, 30.0, 8, 2)
    for window in range(30, 34):
        step = policy.step(seen(30.0, engines(8, 2), window), state)
        state = step.state
    assert step.plan.serving == (3, 2, 0)


@pytest.mark.parametrize("queued", [0, 5_000])
def test_colocated_engines_alone_grow_to_their_bound_under_any_load(queued: int) -> None:
    """Neither 100/s nor a queue that eight engines do not serve in 30 s is a reason to have fewer."""
    policy = Joint(limits=Limits(0, 0, 0, 0, 1, 8, budget=8))
    state, fleet = policy.initial(), engines(0, 0, 4)
    for window in range(3):
        step = policy.step(seen(100.0, fleet, window, queued=queued), state)
        state = dataclasses.replace(step.state, wanted=Counts(0, 0, 4))
    assert step.plan.serving == (0, 0, 8)
