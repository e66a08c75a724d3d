"""Arrivals ahead: level, damped trend, season, and quantiles of the forecast's own residuals at each lead.

    y_t      requests/s in window t                     x_t = y_t / S_phase
    L_t      = a x_t + (1 - a)(L_{t-1} + d T_{t-1})     level
    T_t      = b (L_t - L_{t-1}) + (1 - b) d T_{t-1}    trend (a window)
    S_phase += g (y_t / L_t - S_phase)                  season, used once a whole period has been seen: then S is y over
                                                        the period's mean, L is that mean, and T is 0
    F_t(h)   = max(0, L_t + (d + .. + d^h) T_t) S_phase(t+h)

(Gardner and McKenzie 1985, multiplicative season as Holt-Winters.) A window with few arrivals says little, so
`level_gain` is only the greatest a. Below it a is the gain of a Kalman filter for a level that changes by a share of
`drift` in a window and is seen through Poisson counts of n = L_t l requests; it begins with that of a mean:

    a = min(level_gain, max(1 / (t + 1), (sqrt(r^2 + 4 r) - r) / 2, 1 / w)),   r = drift^2 n

1 / w is there only if the level lags: w is the least number of the last windows, one of `HORIZONS`, of which the sum of
the residuals e at h = 1 (below) exceeds LAGS sqrt(w), by which noise alone would reach it once in 16,000 times.

The residuals are kept for each horizon of
`HORIZONS` in units of the deviation that a Poisson count has in a window of l seconds, at the greater of both rates:

    e = (y_{t+h} - F_t(h)) / s(max(F, y)),   s(r) = sqrt(max(r, 1 / l) / l)
    upper = F + sqrt(max(0, q(e)^2 - z'^2)) s(F),   q: their quantile, z: that of the normal distribution
    z'    = z (1 + SURE / sqrt(number of residuals))

So residuals of a busy hour say the right thing of a quiet one, a burst's surprise stays what it was, and the counting
noise of a single window (z) is taken out: arrivals that are Poisson with the forecast rate need no more than that rate,
since `capacity` has room for their noise already. The quantile itself is uncertain: that at 90 % of 128 residuals has a
standard error of sqrt(0.9 0.1 / 128) / 0.175 = 0.15, and the square root would make 0.5 s(F) of each. z' is two of them
above z. Until there are `FEW` residuals, `upper` adds z s(F). The state is
frozen, and every number in it is plain.
"""

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Annotated

from policies.routing.params import BadParameter, Number, Whole, check

HORIZONS = (1, 2, 4, 8, 16, 32)
"""The horizons, in windows, at which residuals are kept; a lead uses the next one that is not shorter."""
FEW = 16
LAGS = 4.0
"""The deviations of a sum of residuals beyond which the level lags behind the load."""
SURE = 2.7
"""Two standard errors of the 0.9-quantile of n normal deviations, in units of the quantile, times sqrt(n):
2 sqrt(0.9 * 0.1) / (0.1755 * 1.2816); for quantiles of 0.8 to 0.99 it is 2.6 to 3.4."""


@dataclass(frozen=True, slots=True)
class ForecastState:
    """The memory of a forecast, learned from `seen` windows.

    `past` has (level, trend) after each of the last windows, and `errors[i]` the last
    residuals at HORIZONS[i] in Poisson deviations; the newest are last.
    """

    seen: int = 0
    level: float = 0.0
    trend: float = 0.0
    season: tuple[float, ...] = ()
    past: tuple[tuple[float, float], ...] = ()
    errors: tuple[tuple[float, ...], ...] = field(default=((),) * len(HORIZONS))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The smoothing of the forecast. `season_windows` is the period in windows (0: no season)."""

    level_gain: Annotated[float, Number(above=0.0, high=1.0)] = 0.3  # ASSUMPTION: all gains
    # ASSUMPTION: 0.3 % of the level in a window of 10 s, more than twice what a day with a peak of three times its mean
    # changes at most; what changes faster shows in the residuals, or is a burst (`joint`)
    drift: Annotated[float, Number(above=0.0, high=1.0)] = 0.003
    trend_gain: Annotated[float, Number(low=0.0, high=1.0)] = 0.1
    damping: Annotated[float, Number(low=0.0, high=1.0)] = 0.8
    season_gain: Annotated[float, Number(low=0.0, high=1.0)] = 0.2
    season_windows: Annotated[int, Whole(0, 100_000)] = 0
    kept_errors: Annotated[int, Whole(FEW, 4096)] = 128

    def __post_init__(self) -> None:
        check(self, "forecast")

    def observed(self, state: ForecastState, rate: float, length_s: float) -> ForecastState:
        """Returns the state after one more window of `length_s` seconds with `rate` requests/s. Raises BadParameter for
        an impossible rate.
        """
        if not (math.isfinite(rate) and rate >= 0.0):
            raise BadParameter(f"forecast: {rate!r} requests/s: a rate must be a number >= 0")
        errors = tuple(
            (*kept, (rate - forecast) / _deviation(max(rate, forecast), length_s))[-self.kept_errors :]
            if (forecast := self._past(state, h)) is not None
            else kept
            for h, kept in zip(HORIZONS, state.errors, strict=True)
        )
        season = self._season(state, state.seen)
        plain = rate / season if season > 0.0 else rate
        if not state.seen:
            level, trend = plain, 0.0
        else:
            onward = state.level + self.damping * state.trend
            gain = self._gain(state, length_s)
            level = max(0.0, gain * plain + (1.0 - gain) * onward)
            trend = (
                self.trend_gain * (level - state.level) + (1.0 - self.trend_gain) * self.damping * state.trend
            )
        learned, past = self._learned(state, rate, level), state.past
        if self.season_windows and state.seen == self.season_windows - 1:
            # The first period ends. Without the season all of its windows had the same rate, the mean; its own levels
            # had the season in them, so nothing can be compared with them.
            level, trend, past = sum((*state.season[:-1], rate)) / self.season_windows, 0.0, ()
        return replace(
            state,
            seen=state.seen + 1,
            level=level,
            trend=trend,
            season=learned,
            past=(*past, (level, trend))[-HORIZONS[-1] :],
            errors=errors,
        )

    def _gain(self, state: ForecastState, length_s: float) -> float:
        """Returns the weight of the next window in the level."""
        r = self.drift**2 * max(1.0, state.level * length_s)
        steady = (math.sqrt(r * r + 4.0 * r) - r) / 2.0
        errors = state.errors[0]
        lags = (w for w in HORIZONS if len(errors) >= w and abs(sum(errors[-w:])) > LAGS * math.sqrt(w))
        lagging = next((1.0 / w for w in lags), 0.0)
        return min(self.level_gain, max(1.0 / (state.seen + 1), steady, lagging))

    def mean(self, state: ForecastState, windows: int) -> float:
        """Returns the expected requests/s `windows` windows after the last one seen."""
        return self._ahead(state.level, state.trend, windows) * self._season(state, state.seen - 1 + windows)

    def upper(self, state: ForecastState, windows: int, quantile: float, length_s: float) -> float:
        """Returns the quantile of the requests/s `windows` windows ahead; windows are `length_s` seconds long."""
        mean = self.mean(state, windows)
        at = next((i for i, h in enumerate(HORIZONS) if h >= windows), len(HORIZONS) - 1)
        errors = state.errors[at]
        counting = max(0.0, NormalDist().inv_cdf(quantile))
        if len(errors) < FEW:
            return mean + counting * math.sqrt(mean / length_s)
        error = sorted(errors)[math.ceil(quantile * len(errors)) - 1]
        counting *= 1.0 + SURE / math.sqrt(len(errors))
        if error <= counting:
            return mean
        return mean + math.sqrt(error * error - counting * counting) * _deviation(mean, length_s)

    def peak(self, state: ForecastState, windows: int, quantile: float, length_s: float) -> float:
        """Returns the greatest `upper` of 1 to `windows` windows ahead, at HORIZONS and at the last one."""
        ahead = {h for h in HORIZONS if h < windows} | {max(1, windows)}
        return max(self.upper(state, h, quantile, length_s) for h in sorted(ahead))

    def _past(self, state: ForecastState, windows: int) -> float | None:
        """Returns what was forecast `windows` windows ago for the window that comes next, or None."""
        if len(state.past) < windows:
            return None
        return self._ahead(*state.past[-windows], windows) * self._season(state, state.seen)

    def _ahead(self, level: float, trend: float, windows: int) -> float:
        d = self.damping
        steps = float(windows) if d == 1.0 else d * (1.0 - d**windows) / (1.0 - d)
        return max(0.0, level + steps * trend)

    def _season(self, state: ForecastState, window: int) -> float:
        """Returns the factor of a window by its number; 1 until a whole period has been seen."""
        if not self.season_windows or state.seen < self.season_windows or not state.season:
            return 1.0
        return state.season[window % self.season_windows]

    def _learned(self, state: ForecastState, rate: float, level: float) -> tuple[float, ...]:
        if not self.season_windows:
            return ()
        season = list(state.season) or [1.0] * self.season_windows
        phase = state.seen % self.season_windows
        if state.seen < self.season_windows:
            # In the first period the rates themselves are kept; they become factors when it ends.
            season[phase] = rate
            if state.seen == self.season_windows - 1:
                mean = sum(season) / len(season)
                season = [max(0.05, one / mean) if mean > 0.0 else 1.0 for one in season]
        elif level > 0.0:
            season[phase] = max(0.05, season[phase] + self.season_gain * (rate / level - season[phase]))
        return tuple(season)


def _deviation(rate: float, length_s: float) -> float:
    """Returns the deviation in requests/s of the rate in one window, for a Poisson count of at least 1."""
    return math.sqrt(max(rate, 1.0 / length_s) / length_s)
