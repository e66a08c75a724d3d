"""Arrivals ahead: constants, lines, seasons, quantiles of the residuals."""

import dataclasses
import math
import random

import pytest

from policies.routing.params import BadParameter
from policies.scaling.forecast import FEW, Forecast, ForecastState


def after(forecast: Forecast, rates: list[float]) -> ForecastState:
    state = ForecastState()
    for rate in rates:
        state = forecast.observed(state, rate, 10.0)
    return state


def test_two_windows_by_hand() -> None:
    """10, then 20 with gain 0.5: level 15; trend 0.2 * 5 = 1; two windows ahead 15 + (0.5 + 0.25) * 1."""
    forecast = Forecast(level_gain=0.5, drift=1.0, trend_gain=0.2, damping=0.5)
    state = after(forecast, [10.0, 20.0])
    assert (state.level, state.trend) == (15.0, 1.0)
    assert forecast.mean(state, 2) == pytest.approx(15.75)


def test_few_requests_move_the_level_little_and_many_move_it_by_its_gain() -> None:
    """In windows of 10 s with a drift of 1 %, 5/s are 50 requests: r = 0.005, and (sqrt(r^2 + 4 r) - r) / 2 = 0.0683.
    The first windows weigh as in a mean; of 20,000 requests r is 2, and the gain would be 0.73 without its limit.
    """
    forecast = Forecast(level_gain=0.5, drift=0.01, trend_gain=0.0)
    assert after(forecast, [5.0, 6.0, 7.0]).level == pytest.approx(6.0)
    few = after(forecast, [5.0] * 40)
    assert forecast.observed(few, 6.0, 10.0).level == pytest.approx(5.0683, abs=1e-4)
    many = after(forecast, [2_000.0] * 40)
    assert forecast.observed(many, 2_400.0, 10.0).level == pytest.approx(2_200.0)


def test_the_noise_of_a_quiet_load_is_not_followed() -> None:
    """0.5/s in windows of 10 s: counts of 5 +- 2.2. A gain of 0.3 alone would have the level deviate by a fifth, that
    of 0.3 % drift, 0.0067, by a fortieth: 0.5 (0.0067 / 1.9933)^0.5 sqrt(1 / 5) = 0.013/s.
    """
    rng, forecast = random.Random(5), Forecast()
    state, levels = ForecastState(), list[float]()
    for i in range(3_000):
        count = sum(rng.random() < 0.05 for _ in range(100))
        state = forecast.observed(state, count / 10.0, 10.0)
        levels += [state.level] if i >= 200 else []
    assert max(abs(level - 0.5) for level in levels) < 0.08


def test_a_constant_stays_one_and_has_no_spread() -> None:
    forecast = Forecast()
    state = after(forecast, [5.0] * 60)
    assert forecast.mean(state, 6) == pytest.approx(5.0)
    assert forecast.upper(state, 6, 0.99, 10.0) == pytest.approx(5.0)
    # before there are residuals: 5 + 2.33 sqrt(5 / 10)
    few = after(forecast, [5.0] * (FEW - 1))
    assert forecast.upper(few, 1, 0.99, 10.0) == pytest.approx(5.0 + 2.326 * math.sqrt(0.5), rel=1e-3)


def test_a_rise_is_continued_but_damped() -> None:
    forecast = Forecast(drift=1.0)
    state = after(forecast, [float(i) for i in range(60)])
    assert 57.0 < forecast.mean(state, 1) < 60.0
    assert forecast.mean(state, 1) < forecast.mean(state, 8) < 68.0
    # the residuals of a rise that goes on are positive, so the upper quantile lies above what is to come
    assert 67.0 < forecast.upper(state, 8, 0.9, 10.0) < 85.0


def test_a_season_is_learned_in_one_period() -> None:
    day = [10.0 + 8.0 * math.sin(2 * math.pi * i / 48) for i in range(48)]
    forecast = Forecast(season_windows=48)
    state = after(forecast, day * 3)
    for ahead in (1, 8, 24):
        assert forecast.mean(state, ahead) == pytest.approx(day[(ahead - 1) % 48], abs=1.5)
    flat = after(Forecast(), day * 3)
    # without a season the forecast says that tomorrow noon is like this midnight
    assert abs(Forecast().mean(flat, 12) - day[11]) > 5.0


@pytest.mark.parametrize("first", [0, 12, 24, 36])
@pytest.mark.parametrize("gain", [0.05, 1.0])
def test_the_second_period_is_forecast_right_from_its_first_window_on(first: int, gain: float) -> None:
    """A period that ends at a peak of 1.8 times the mean: the level without the season is the mean, and not the peak,
    of which the season would make 1.8 times the peak.
    """
    day = [10.0 + 8.0 * math.sin(2 * math.pi * (i + first) / 48) for i in range(48)]
    forecast = Forecast(season_windows=48, level_gain=gain)
    state = after(forecast, day)
    for window in range(48):
        assert state.level == pytest.approx(10.0)
        for ahead in (1, 8):
            assert forecast.mean(state, ahead) == pytest.approx(day[(window + ahead - 1) % 48])
        state = forecast.observed(state, day[window], 10.0)
    # no residual is that of a level that had the season in it
    assert all(error == pytest.approx(0.0) for error in state.errors[0][-40:])


def test_a_first_period_without_any_request_forecasts_none() -> None:
    state = after(Forecast(season_windows=4), [0.0] * 4)
    assert (state.level, Forecast(season_windows=4).mean(state, 3)) == (0.0, 0.0)


def _noisy(deviation: float, gain: float = 0.3) -> tuple[float, float]:
    """Returns the means of `upper` at 90 % and of the level over many windows of 10 s around 20 requests/s."""
    rng, forecast = random.Random(2), Forecast(level_gain=gain, drift=1.0, trend_gain=0.0)
    state, uppers, levels = ForecastState(), 0.0, 0.0
    for i in range(1_050):
        state = forecast.observed(state, max(0.0, rng.gauss(20.0, deviation)), 10.0)
        if i >= 50:
            uppers, levels = uppers + forecast.upper(state, 1, 0.9, 10.0), levels + state.level
    return uppers / 1_000, levels / 1_000


def test_counting_noise_is_not_demand() -> None:
    """Poisson counts of 20/s in 10 s deviate by sqrt(20 / 10) = 1.41; with the level's own noise residuals deviate by
    1.41 sqrt(1 / (1 - a / 2)) = 1.53 with a = 0.3. Their 90 % quantile of 1.96 in deviations of 22/s is 1.33, below
    1.28 (1 + 2.7 / sqrt(128)) = 1.59: it may be chance. Noise of twice that is more than counting: 3.93 in deviations
    of 23.9/s is 2.54, of which sqrt(2.54^2 - 1.59^2) = 1.98 deviations of 1.41 are left.
    """
    upper, level = _noisy(math.sqrt(2.0))
    assert upper - level == pytest.approx(0.0, abs=0.1)
    upper, level = _noisy(2.0 * math.sqrt(2.0))
    assert upper - level == pytest.approx(2.8, abs=0.5)


def test_a_level_that_lags_is_followed_sooner() -> None:
    """0.5/s, then 1/s: five and ten a window, residuals of at most 5 / sqrt(10) = 1.58. Eight sum to 4 sqrt(8), so from
    then on a window weighs 1 / 8 and not 0.0067: ten minutes after the rise the level has gone four fifths of the way.
    """
    state = after(Forecast(trend_gain=0.0), [0.5] * 200 + [1.0] * 8)
    assert state.level == pytest.approx(0.5 + 0.5 * (1.0 - (1.0 - 0.0067) ** 8), rel=0.01)
    assert after(Forecast(trend_gain=0.0), [0.5] * 200 + [1.0] * 60).level > 0.9


def test_residuals_of_a_busy_hour_scale_to_a_quiet_one() -> None:
    """At 1/s the same relative spread is a tenth of that at 100/s (the square root), not the same number."""
    rng, forecast = random.Random(3), Forecast()
    state = ForecastState()
    for _ in range(200):
        state = forecast.observed(state, rng.gauss(100.0, 15.0), 10.0)
    busy = forecast.upper(state, 1, 0.9, 10.0) - forecast.mean(state, 1)
    quiet = dataclasses.replace(state, level=1.0, trend=0.0)
    assert forecast.upper(quiet, 1, 0.9, 10.0) - 1.0 == pytest.approx(busy / 10.0, rel=0.1)
    assert forecast.peak(state, 8, 0.9, 10.0) >= forecast.upper(state, 8, 0.9, 10.0)


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(BadParameter, match="a rate must be"):
        Forecast().observed(ForecastState(), rate, 10.0)


def test_a_burst_surprises_by_no_more_than_it_was() -> None:
    """After 4/s come 32/s, eight windows ahead of every forecast: 28/s too little each time, and not the 79/s that its
    44 Poisson deviations at 4/s would be at 32/s.
    """
    forecast = Forecast()
    state = after(forecast, [4.0] * 30 + [32.0] * 12)
    above = forecast.upper(state, 8, 0.9, 10.0) - forecast.mean(state, 8)
    assert 15.0 < above < 30.0
