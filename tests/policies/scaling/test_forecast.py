"""Arrivals ahead: constants, lines, seasons, quantiles of the residuals."""

import math
import random

import pytest

from policies.routing.params import BadParameter
from policies.scaling.forecast import FEW, Forecast, ForecastState


def after(forecast: Forecast, rates: list[float]) -> ForecastState:
    state = ForecastState()
    for rate in rates:
        state = forecast.observed(state, rate)
    return state


def test_two_windows_by_hand() -> None:
    """10, then 20 with gain 0.5: level 15; trend 0.2 * 5 = 1; two windows ahead 15 + (0.5 + 0.25) * 1."""
    forecast = Forecast(level_gain=0.5, trend_gain=0.2, damping=0.5)
    state = after(forecast, [10.0, 20.0])
    assert (state.level, state.trend) == (15.0, 1.0)
    assert forecast.mean(state, 2) == pytest.approx(15.75)


def test_a_constant_stays_one_and_has_no_spread() -> None:
    forecast = Forecast()
    state = after(forecast, [5.0] * 60)
    assert forecast.mean(state, 6) == pytest.approx(5.0)
    assert forecast.upper(state, 6, 0.99, 10.0) == pytest.approx(5.0)
    # before there are residuals: 5 + 2.33 sqrt(5 / 10)
    few = after(forecast, [5.0] * (FEW - 1))
    assert forecast.upper(few, 1, 0.99, 10.0) == pytest.approx(5.0 + 2.326 * math.sqrt(0.5), rel=1e-3)


def test_a_rise_is_continued_but_damped() -> None:
    forecast = Forecast()
    state = after(forecast, [float(i) for i in range(60)])
    assert 57.0 < forecast.mean(state, 1) < 60.0
    assert forecast.mean(state, 1) < forecast.mean(state, 8) < 68.0
    # the residuals of a rise that goes on are positive, so the upper quantile follows it
    assert forecast.upper(state, 8, 0.9, 10.0) == pytest.approx(67.0, abs=1.5)


def test_a_season_is_learned_in_one_period() -> None:
    day = [10.0 + 8.0 * math.sin(2 * math.pi * i / 48) for i in range(48)]
    forecast = Forecast(season_windows=48)
    state = after(forecast, day * 3)
    for ahead in (1, 8, 24):
        assert forecast.mean(state, ahead) == pytest.approx(day[(ahead - 1) % 48], abs=1.5)
    flat = after(Forecast(), day * 3)
    # without a season the forecast says that tomorrow noon is like this midnight
    assert abs(Forecast().mean(flat, 12) - day[11]) > 5.0


def test_quantiles_cover_their_share() -> None:
    """Noise around 20: the 90 % quantile lies above nine of ten later windows, within three deviations."""
    rng, forecast = random.Random(2), Forecast()
    state, over, n = ForecastState(), 0, 2_000
    for i in range(n + 50):
        rate = max(0.0, rng.gauss(20.0, 3.0))
        over += i >= 50 and rate > forecast.upper(state, 1, 0.9, 10.0)
        state = forecast.observed(state, rate)
    assert 0.07 <= over / n <= 0.13
    assert forecast.peak(state, 8, 0.9, 10.0) >= forecast.upper(state, 8, 0.9, 10.0)


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(BadParameter, match="a rate must be"):
        Forecast().observed(ForecastState(), rate)
