"""Predictors in the simulated router: what they are told, what the policies are told, and that history counts."""

import json

import pytest

from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import IDEAL, EngineSpec, Forecasting, ForecastSource, SimConfig
from benchmarks.workloads.record import WorkloadRequest
from policies.engine_model.timing import TICK_1MS
from policies.state.views import Role
from predictors.oracle import Oracle
from predictors.protocol import Arrival, Outcome
from predictors.survival import EmpiricalSurvival

SOURCES: dict[str, ForecastSource] = {"oracle": Oracle, "survival": lambda lengths: EmpiricalSurvival()}


def forecasts(
    predictor: str,
    work: list[WorkloadRequest],
    decode: tuple[str, dict[str, object]] = ("join_shortest_queue", {}),
    **changes: object,
) -> list[tuple[str, int, float | None]]:
    """(request, its tokens then, finishes in) of every forecast that the router was told."""
    lines: list[str] = []
    config = SimConfig(
        (EngineSpec("c", Role.COLOCATED, 1, TICK_1MS),),
        decode=decode,
        control=IDEAL,
        forecasts=Forecasting(SOURCES[predictor], **changes),  # type: ignore[arg-type]
    )
    simulate(config, work, journal=lines.append)
    events = [json.loads(line) for line in "".join(lines).splitlines()]
    return [
        (e["attempt_id"], e["tokens"], e["finishes_in_tokens"])
        for e in events
        if e.get("event") == "ForecastMade"
    ]


def test_the_oracle_says_when_it_ends() -> None:
    told = forecasts("oracle", [WorkloadRequest("a", 0.0, 10, 500)], window_tokens=100)
    assert len(told) >= 5
    for attempt_id, tokens, finishes_in in told:
        left = 500 - tokens
        assert (attempt_id, finishes_in) == ("a", left if left <= 100 else None)


@pytest.mark.parametrize("horizon", [20, 48, 96])
def test_forecasts_are_for_the_horizon_of_the_decode_policy_as_in_the_live_router(horizon: int) -> None:
    work = [WorkloadRequest("a", 0.0, 10, 500)]
    told = forecasts("oracle", work, ("balance_route_h", {"horizon": horizon}), window_tokens=7)
    assert {in_ is None for _, _, in_ in told} == {True, False}
    for _, tokens, finishes_in in told:
        assert finishes_in == (500 - tokens if 500 - tokens <= horizon else None)
    assert forecasts("oracle", work, ("balance_route_h", {"horizon": 0})) == []


def test_history_is_known_from_the_start() -> None:
    """All that went before ended after 60 tokens; so will this one, it seems, when it has generated 20 or so."""
    past = tuple(Outcome(Arrival(f"h{i}", -900.0 + i, 10), 60, -500.0 + i) for i in range(400))
    work = [WorkloadRequest("a", 0.0, 10, 60)]
    (_, tokens, finishes_in), *_ = forecasts("survival", work, window_tokens=60, history=past)
    assert finishes_in == pytest.approx(60 - tokens, abs=2)
    assert forecasts("survival", work, window_tokens=20)[0][2] is None


@pytest.mark.parametrize(
    ("decode", "told", "expected"),
    [
        # as in the live router: it looks at lengths
        ("composition", None, 500.0),
        ("join_shortest_queue", None, None),
        ("join_shortest_queue", True, 500.0),
        ("composition", False, None),
    ],
)
def test_lengths_are_forecast_at_arrival_while_a_policy_looks_at_them(
    decode: str, told: bool | None, expected: float | None
) -> None:
    lines: list[str] = []
    config = SimConfig(
        (EngineSpec("c", Role.COLOCATED, 1, TICK_1MS),),
        decode=(decode, {}),
        control=IDEAL,
        forecasts=Forecasting(SOURCES["oracle"], total_at_arrival=told),
    )
    simulate(config, [WorkloadRequest("a", 0.0, 10, 500)], journal=lines.append)
    events = [json.loads(line) for line in "".join(lines).splitlines()]
    (arrived,) = [e for e in events if e.get("event") == "Arrived"]
    assert arrived["request"]["predicted_tokens"] == expected
