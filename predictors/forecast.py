"""The forecast that a request carries between two calls of the predictor (BalanceRoute C.1 equation 6, C.2.3;
docs/design.md, section 4).

    c = p * mu + (1 - p) * H,   clipped to [floor, H]

A refresh whose p passes the gate (p >= gate) and is valid gives *finishes in c*; any other gives *stays*.
Between refreshes c counts down by one per generated token; *stays* does not, else the gate itself would make
phantom departures. A refresh is due every k tokens, and at once when c has fallen below the floor.

Symbols: H -> window_tokens (belongs to the refresh: policies sweep it), k -> refresh_tokens, gate -> gate,
floor -> floor_tokens. The text of the paper has lost the defaults of k, gate and floor; the gate and the
floor are ours (docs/design.md, section 4).

Nothing counts: a forecast is where it was refreshed, and its present value is computed from the present age.
So live and simulation share it whatever steps their tokens come in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stays:
    """Not expected to finish within the window."""


@dataclass(frozen=True, slots=True)
class FinishesIn:
    """Expected to finish in this many steps (>= floor, <= H; not rounded)."""

    steps: float


Forecast = Stays | FinishesIn
STAYS = Stays()


@dataclass(frozen=True, slots=True)
class ForecastConfig:
    """k, gate and floor of the state machine."""

    refresh_tokens: int = 16  # ASSUMPTION: k; the paper's default is lost
    gate: float = 0.5
    floor_tokens: float = 1.0

    def __post_init__(self) -> None:
        if self.refresh_tokens < 1:
            raise ValueError(f"refresh_tokens {self.refresh_tokens} must be at least 1")
        if not 0.0 <= self.gate <= 1.0:
            raise ValueError(f"gate {self.gate} must be a probability")
        if not self.floor_tokens > 0.0:
            raise ValueError(
                f"floor_tokens {self.floor_tokens} must be above 0: at 0 a running request has left"
            )


@dataclass(frozen=True, slots=True)
class ForecastState:
    """The forecast as of its last refresh, at `age` tokens."""

    forecast: Forecast
    age: int


def composite(p: float, mu: float, window_tokens: int, floor_tokens: float = 1.0) -> float:
    """c, clipped to [floor, H]. Raises ValueError for a p outside 0..1, a NaN, or H < 1 (which needs no
    forecast).
    """
    if window_tokens < 1:
        raise ValueError(f"window {window_tokens}: a composite needs H >= 1; H = 0 needs no forecast")
    if not 0.0 <= p <= 1.0 or not mu >= 0.0:
        raise ValueError(f"p = {p} must be a probability and mu = {mu} a number of tokens >= 0")
    c = p * mu + (1.0 - p) * window_tokens
    return min(max(c, floor_tokens), float(window_tokens))


def refresh(
    config: ForecastConfig, age: int, p: float, mu: float, valid: bool, window_tokens: int
) -> ForecastState:
    """The state after the predictor answered (p, mu, valid) for the window at `age`."""
    c = composite(p, mu, window_tokens, min(config.floor_tokens, float(window_tokens)))
    return ForecastState(FinishesIn(c) if valid and p >= config.gate else STAYS, age)


def forecast_at(config: ForecastConfig, state: ForecastState, age: int) -> Forecast:
    """The forecast `age - state.age` tokens after its refresh, never below the floor. Raises ValueError if
    age went back.
    """
    if age < state.age:
        raise ValueError(f"age {age} lies before the refresh at {state.age}")
    if isinstance(state.forecast, Stays):
        return STAYS
    return FinishesIn(max(state.forecast.steps - (age - state.age), config.floor_tokens))


def refresh_due(config: ForecastConfig, state: ForecastState | None, age: int) -> bool:
    """True if the predictor is to be asked again at `age`: never asked, k tokens on, or c fallen below the
    floor.
    """
    if state is None or age - state.age >= config.refresh_tokens:
        return True
    return (
        isinstance(state.forecast, FinishesIn)
        and state.forecast.steps - (age - state.age) < config.floor_tokens
    )
