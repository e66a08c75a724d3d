"""A policy's view: windows by class, who counts as missed, first seconds that do not count, silence."""

import math

import pytest

from policies.engine_model.timing import TICK_1MS
from policies.routing.params import BadParameter
from policies.scaling.observation import (
    Capability,
    ClassWindow,
    Duty,
    EngineView,
    Leads,
    Observer,
    Outcome,
    Room,
    attainment,
)
from policies.state.views import Role

CAPABILITY = Capability(TICK_1MS)


def test_a_window_by_hand() -> None:
    """Three arrivals of 1,000 tokens, 200 of them cached; of five ends two are late or lost, one is too early to
    count.
    """
    seen = Observer(length_s=10.0, settle_s=5.0)
    for at_s in (1.0, 2.0, 3.0):
        seen.arrived("chat", at_s, 1_000, 200, 50.0, ttft_slo_s=1.0, tpot_slo_s=0.1)
    seen.closed("chat", 4.0, Outcome.SERVED, 0.5, 0.05, 60)
    seen.closed("chat", 5.0, Outcome.SERVED, 1.5, 0.05, 40)
    seen.closed("chat", 6.0, Outcome.REFUSED)
    seen.closed("chat", 7.0, Outcome.SERVED, 3.0, 0.05, 10, engine_active_s=4.9)
    assert seen.freeze(9.9, (), CAPABILITY).windows is None  # no window is complete
    seen.heard(10.0)
    observation = seen.freeze(10.0, (), CAPABILITY)
    assert observation.windows == (
        ClassWindow(
            "chat",
            10.0,
            arrived=3,
            prompt_tokens=2_400,
            hit_tokens=600,
            forecast_tokens=150.0,
            met=1,
            missed=2,
            refused=1,
            ended=3,
            output_tokens=110,
            ttft_slo_s=1.0,
            tpot_slo_s=0.1,
            ttft_p90_s=1.5,
            tpot_p90_s=0.05,
        ),
    )
    assert (observation.window, observation.rate_per_s) == (0, 0.3)


def test_silence_is_not_an_empty_window() -> None:
    seen = Observer(length_s=10.0, silent_s=5.0)
    seen.arrived("chat", 1.0, 100)
    seen.heard(12.0)
    assert seen.freeze(12.0, (), CAPABILITY).arrived == 1
    seen.heard(22.0)
    quiet = seen.freeze(22.0, (), CAPABILITY)
    # the class is known, and nothing arrived
    assert quiet.windows == (ClassWindow("chat", 10.0),) and quiet.rate_per_s == 0.0
    assert seen.freeze(27.1, (), CAPABILITY).windows is None
    assert seen.freeze(41.0, (), CAPABILITY).windows is None
    seen.heard(42.0)
    # the window before was silent from beginning to end
    assert seen.freeze(42.0, (), CAPABILITY).windows is None
    seen.heard(50.0)
    assert seen.freeze(50.0, (), CAPABILITY).rate_per_s == 0.0


def test_attainment_is_that_of_the_worst_class_with_enough_requests() -> None:
    many, few = ClassWindow("a", 10.0, met=90, missed=10), ClassWindow("b", 10.0, met=1, missed=1)
    assert attainment((many, few), least=20) == 0.9
    assert attainment((many, few), least=2) == 0.5
    assert attainment((few,), least=20) == 0.5
    assert attainment((ClassWindow("a", 10.0),)) is None


@pytest.mark.parametrize(("prompt", "hit", "forecast"), [(-1, 0, 1.0), (10, 11, 1.0), (10, 0, math.nan)])
def test_impossible_requests_are_refused(prompt: int, hit: int, forecast: float) -> None:
    with pytest.raises(BadParameter, match="drop this request"):
        Observer().arrived("chat", 0.0, prompt, hit, forecast)


def test_bad_settings_are_refused() -> None:
    for build in (
        lambda: Leads(start_s=math.inf),
        lambda: Leads(switch_s=-1.0),
        lambda: Capability(TICK_1MS, slots=0),
        lambda: Capability(TICK_1MS, colocated=Room(8, 0)),
        lambda: Observer(length_s=0.0),
    ):
        with pytest.raises(BadParameter):
            build()


def test_who_waits_counts_at_the_router_and_at_engines() -> None:
    """2 + 3 + 1 prompts, 4 + 5 streams; a colocated engine's queue is one of prompts."""
    views = (
        EngineView("p", Role.PREFILL, Duty.ACTIVE, waiting=3),
        EngineView("c", Role.COLOCATED, Duty.DRAINING, waiting=1),
        EngineView("d", Role.DECODE, Duty.ACTIVE, waiting=5),
    )
    observation = Observer().freeze(1.0, views, CAPABILITY, queued=2, pooled=4)
    assert (observation.prompts_waiting, observation.streams_waiting) == (6, 9)


def test_what_came_since_the_last_window_is_seen() -> None:
    observer = Observer()
    for at_s in (1.0, 9.0, 11.0, 12.5):
        observer.arrived("chat", at_s, 10)
    observer.arrived("batch", 13.0, 10)
    seen = observer.freeze(14.0, (), CAPABILITY)
    assert (seen.arrived, seen.part_arrived, seen.part_s) == (2, 3, 4.0)
    seen = observer.freeze(20.0, (), CAPABILITY)
    assert (seen.part_arrived, seen.part_s) == (0, 0.0)
