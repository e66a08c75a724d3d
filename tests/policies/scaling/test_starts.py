"""Leads are quantiles of the newest measured times; what was not measured stays a guess."""

import pytest

from policies.routing.params import BadParameter
from policies.scaling import starts
from policies.scaling.observation import Leads
from policies.scaling.starts import LeadTimes, StartSteps

PRIOR = Leads(switch_s=1.0, activate_s=2.0, start_s=60.0)


def test_a_lead_is_the_prior_until_something_was_measured() -> None:
    times = LeadTimes()
    assert times.leads(PRIOR) == PRIOR
    assert times.steps() is None
    times.activated(0.25)
    assert times.leads(PRIOR) == Leads(1.0, 0.25, 60.0)


def test_a_lead_is_the_quantile_of_the_newest_times() -> None:
    times = LeadTimes(quantile=0.9, kept=10)
    for seconds in range(1, 11):
        times.switched(float(seconds))
    # the ninth of ten
    assert times.leads(PRIOR).switch_s == 9.0
    # ten more push the first out: 11..20, of which 19 is the ninth
    for seconds in range(11, 21):
        times.switched(float(seconds))
    assert times.leads(PRIOR).switch_s == 19.0


def test_an_engine_counts_once_and_steps_have_quantiles_of_their_own() -> None:
    times = LeadTimes(quantile=0.5, kept=3)
    times.started("a", StartSteps(1.0, 10.0, 5.0, 2.0, 0.5))
    times.started("a", StartSteps(100.0))
    assert times.leads(PRIOR).start_s == 18.5
    times.started("b", StartSteps(3.0, 8.0, 5.0, 2.0, 0.5))
    times.started("c", StartSteps(2.0, 12.0, 4.0, 2.0, 0.5))
    # totals 18.5, 18.5, 20.5; medians of the steps 2, 10, 5, 2, 0.5
    assert times.leads(PRIOR).start_s == 18.5
    assert times.steps() == StartSteps(2.0, 10.0, 5.0, 2.0, 0.5)
    # the oldest goes: b, c, d
    times.started("d", StartSteps(4.0, 20.0, 4.0, 2.0, 0.5))
    assert times.leads(PRIOR).start_s == 20.5


def test_engines_that_are_named_again_at_each_look_push_no_newer_start_out() -> None:
    """The autoscaler names all connected engines at each look, also where these are more than count."""
    times, old = LeadTimes(kept=3), [f"d{i}" for i in range(5)]
    for _ in range(3):
        for engine in old:
            times.started(engine, StartSteps(10.0))
    for engine in ("a0", "a1", "a2"):
        times.started(engine, StartSteps(99.0))
    for engine in old:
        times.started(engine, StartSteps(10.0))
    assert times.leads(PRIOR).start_s == 99.0
    assert times.steps() == StartSteps(99.0)


def test_no_more_engines_are_remembered_than_a_fleet_has_and_connected_ones_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starts, "MOST_COUNTED", 4)
    times = LeadTimes(kept=1)
    times.started("here", StartSteps(10.0))
    for i in range(9):
        times.started(f"gone{i}", StartSteps(20.0))
        times.started("here", StartSteps(30.0))
    assert len(times._counted) == 4
    assert times.leads(PRIOR).start_s == 20.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_seconds_are_refused(seconds: float) -> None:
    with pytest.raises(BadParameter, match="weights_s"):
        StartSteps(weights_s=seconds)
