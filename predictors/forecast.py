"""A running request carries a forecast between two calls of the predictor (BalanceRoute C.1 equation 6, C.2.3;
docs/design.md, section 4).

    c = p * mu + (1 - p) * H,   clipped to [floor, H]

A refresh with a valid answer and p >= gate gives *finishes in c*; any other refresh gives *stays*. Between
refreshes c falls by one per generated token. *Stays* does not count down, because the gate would then forecast
departures that nobody predicted. A refresh is due every k tokens, and at once when c has fallen below the floor.

Symbols: H -> window_tokens (an argument of each refresh, because policies sweep it), k -> refresh_tokens, gate ->
gate, floor -> floor_tokens. The defaults of k, gate and floor are missing from the text of the paper that we have;
ours are explained in docs/design.md, section 4.

No counter is stored. A forecast keeps the age of its refresh, and its present value is computed from the present
age. So the live router and the simulator give the same forecasts even if their tokens are reported in different
steps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stays:
    """The request is not expected to finish within the window."""


@dataclass(frozen=True, slots=True)
class FinishesIn:
    """The request is expected to finish in `steps` decode steps (>= floor, <= H; not rounded)."""

    steps: float


Forecast = Stays | FinishesIn
STAYS = Stays()


@dataclass(frozen=True, slots=True)
class ForecastConfig:
    """The parameters k, gate and floor of the state machine."""

    refresh_tokens: int = 16  # ASSUMPTION: k; the paper's default is not known.
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
    """A forecast as it was at its last refresh, when the request had generated `age` tokens."""

    forecast: Forecast
    age: int


def composite(p: float, mu: float, window_tokens: int, floor_tokens: float = 1.0) -> float:
    """Returns c, clipped to [floor, H]. Raises ValueError for a p outside 0..1, a negative or NaN mu, or H < 1
    (which needs no forecast).
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
    """Returns the state after the predictor has answered (p, mu, valid) for the window H at `age`."""
    c = composite(p, mu, window_tokens, min(config.floor_tokens, float(window_tokens)))
    return ForecastState(FinishesIn(c) if valid and p >= config.gate else STAYS, age)


def forecast_at(config: ForecastConfig, state: ForecastState, age: int) -> Forecast:
    """Returns the forecast at `age`, counted down from its refresh and never below the floor. Raises ValueError if
    `age` is less than at the refresh.
    """
    if age < state.age:
        raise ValueError(f"age {age} lies before the refresh at {state.age}")
    if isinstance(state.forecast, Stays):
        return STAYS
    return FinishesIn(max(state.forecast.steps - (age - state.age), config.floor_tokens))


def refresh_due(config: ForecastConfig, state: ForecastState | None, age: int) -> bool:
    """Returns True if the forecast is due at `age`: it was never made, k tokens have passed since, or c has fallen
    below the floor.
    """
    if state is None or age - state.age >= config.refresh_tokens:
        return True
    return (
        isinstance(state.forecast, FinishesIn)
        and state.forecast.steps - (age - state.age) < config.floor_tokens
    )
