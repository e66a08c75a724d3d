"""The composite and its state machine on cases worked by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.forecast import (
    STAYS,
    FinishesIn,
    ForecastConfig,
    ForecastState,
    composite,
    forecast_at,
    refresh,
    refresh_due,
)

CONFIG = ForecastConfig(refresh_tokens=16, gate=0.5, floor_tokens=1.0)


@pytest.mark.parametrize(
    ("p", "mu", "window", "floor", "expected"),
    [
        (0.8, 10.0, 24, 1.0, 12.8),  # 0.8 * 10 + 0.2 * 24
        (0.0, 5.0, 24, 1.0, 24.0),  # collapses to the anchor H
        (1.0, 5.0, 24, 1.0, 5.0),  # tracks mu
        (1.0, 0.2, 24, 1.0, 1.0),  # clipped to the floor
        (1.0, 90.0, 24, 1.0, 24.0),  # clipped to H
        (0.5, 1.0, 1, 1.0, 1.0),  # H = 1 has one answer
        (1.0, 1.0, 1, 4.0, 1.0),  # H below the floor wins
        (0.25, 4.0, 96, 1.0, 73.0),  # 1 + 72
    ],
)
def test_composite(p, mu, window, floor, expected):
    assert composite(p, mu, window, floor) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p", "mu", "window"),
    [(1.1, 1.0, 8), (-0.1, 1.0, 8), (float("nan"), 1.0, 8), (0.5, float("nan"), 8), (0.5, -1.0, 8)],
)
def test_composite_refuses_nonsense(p, mu, window):
    with pytest.raises(ValueError, match="probability"):
        composite(p, mu, window)


def test_a_window_of_zero_needs_no_forecast():
    with pytest.raises(ValueError, match="H = 0 needs no forecast"):
        composite(0.5, 1.0, 0)


@settings(deadline=None, derandomize=True)
@given(st.floats(0, 1), st.floats(0, 200), st.integers(1, 96))
def test_composite_stays_in_its_range(p, mu, window):
    assert 1.0 <= composite(p, mu, window) <= window


def test_gate_open_finishes_gate_closed_stays():
    assert refresh(CONFIG, 32, 0.5, 10.0, True, 24) == ForecastState(FinishesIn(17.0), 32)  # 5 + 12
    assert refresh(CONFIG, 32, 0.499, 10.0, True, 24) == ForecastState(STAYS, 32)
    assert refresh(CONFIG, 32, 0.9, 10.0, False, 24) == ForecastState(STAYS, 32)


def test_counts_down_one_per_token_and_never_below_the_floor():
    state = ForecastState(FinishesIn(3.5), 100)
    seen = [forecast_at(CONFIG, state, 100 + i) for i in range(5)]
    assert seen == [FinishesIn(3.5), FinishesIn(2.5), FinishesIn(1.5), FinishesIn(1.0), FinishesIn(1.0)]


def test_crossing_the_floor_forces_a_refresh_at_that_token():
    state = ForecastState(FinishesIn(3.5), 100)
    # 3.5, 2.5, 1.5 are above the floor; at 103 it would be 0.5
    assert [refresh_due(CONFIG, state, 100 + i) for i in range(5)] == [False, False, False, True, True]


def test_standing_on_the_floor_is_not_crossing_it():
    state = ForecastState(FinishesIn(3.0), 0)
    assert [refresh_due(CONFIG, state, age) for age in (0, 1, 2, 3)] == [False, False, False, True]


def test_staying_does_not_count_down_and_is_asked_again_every_k_tokens():
    state = ForecastState(STAYS, 10)
    assert forecast_at(CONFIG, state, 25) == STAYS
    assert [refresh_due(CONFIG, state, age) for age in (10, 25, 26, 40)] == [False, False, True, True]


def test_a_request_never_asked_about_is_due():
    assert refresh_due(CONFIG, None, 0)


def test_ages_do_not_go_back():
    with pytest.raises(ValueError, match="before the refresh"):
        forecast_at(CONFIG, ForecastState(STAYS, 10), 9)


@pytest.mark.parametrize(
    "bad", [{"refresh_tokens": 0}, {"gate": 1.5}, {"gate": float("nan")}, {"floor_tokens": 0.0}]
)
def test_config_refuses(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ForecastConfig(**bad)
