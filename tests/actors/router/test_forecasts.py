"""Predictors in the router: forecasts reach the reducer, outcomes reach the log, a promoted model is adopted."""

import asyncio
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from actors.router import forecasts as module
from actors.router.clock import clock_s
from actors.router.forecasts import Forecasts, PredictorConfig, arrival_of
from actors.router.server import RouterServer
from actors.wire import messages as wire
from actors.wire.channel import Identity
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from predictors.outcomes import read_log
from predictors.promote import RefitJob, RefitResult, refit
from predictors.protocol import FinishReason, WindowRange
from predictors.store import ModelRefused
from tests.actors.router.test_server import engine, peer, until


def submit(attempt_id: str, prompt_tokens: int = 10, max_tokens: int = 400, **hints: object) -> wire.Submit:
    return wire.Submit(attempt_id, prompt_tokens, max_tokens, hints=wire.Hints(**hints))  # type: ignore[arg-type]


def learn(forecasts: Forecasts, lengths: list[int], key: str = "k") -> float:
    """Plays requests one after another, one a second, and returns the time after the last."""
    for n, tokens in enumerate(lengths):
        forecasts.arrived(submit(f"{key}{n}", prompt_key=key, template_key=key), float(n))
        forecasts.closed(f"{key}{n}", "finished", tokens, n + 0.5)
    return float(len(lengths))


def test_hints_become_the_arrival_and_what_is_not_said_stays_absent() -> None:
    told = arrival_of(
        submit("r", temperature=0.5, prompt_key="p", signals=wire.PromptSignals(9, 9, 1, 0, 0, None)), 7.0
    )
    assert (told.sampling.temperature, told.prompt_key, told.arrival_s) == (0.5, "p", 7.0)
    assert told.text is not None
    assert told.text.question_marks == 1
    silent = arrival_of(wire.Submit("r", 10, 400), 7.0)
    assert (silent.sampling.temperature, silent.prompt_key, silent.text, silent.session) == (None,) * 4


def test_a_request_near_its_end_is_forecast_to_finish_and_one_far_from_it_stays() -> None:
    forecasts = Forecasts(PredictorConfig(enabled=True, window_tokens=24, refresh_tokens=8))
    now_s = learn(forecasts, [100] * 60)
    forecasts.arrived(submit("new", prompt_key="k", template_key="k"), now_s)
    forecasts.progressed("new", 4)
    (early,) = forecasts.refresh(now_s)
    assert (early.attempt_id, early.tokens, early.finishes_in_tokens) == ("new", 4, None)
    forecasts.progressed("new", 9)
    assert forecasts.refresh(now_s) == []  # k = 8 tokens have not passed
    forecasts.progressed("new", 90)
    (late,) = forecasts.refresh(now_s)
    assert late.finishes_in_tokens is not None
    assert 5 <= late.finishes_in_tokens <= 20


@pytest.mark.parametrize(("horizon", "finishes_in"), [(1, None), (24, None), (96, 60.0)])
def test_the_horizon_of_the_decode_policy_is_the_window_of_the_forecasts(
    horizon: int, finishes_in: float | None
) -> None:
    """60 tokens are left of about 100: within a window of 96, beyond one of 24, whatever `window_tokens` says."""
    forecasts = Forecasts(PredictorConfig(enabled=True, window_tokens=48))
    now_s = learn(forecasts, [100] * 60)
    forecasts.arrived(submit("new", prompt_key="k", template_key="k"), now_s)
    forecasts.progressed("new", 40)
    (made,) = forecasts.refresh(now_s, horizon)
    assert made.finishes_in_tokens == (None if finishes_in is None else pytest.approx(finishes_in, abs=6))
    assert forecasts.gauges()["predictor_window_tokens"] == horizon


def test_another_horizon_makes_all_forecasts_anew_and_0_none() -> None:
    forecasts = Forecasts(PredictorConfig(enabled=True, window_tokens=24))
    forecasts.arrived(submit("a"), 0.0)
    forecasts.progressed("a", 5)
    assert len(forecasts.refresh(0.0, None)) == 1
    assert forecasts.refresh(0.0, 24) == []  # the same window
    assert len(forecasts.refresh(0.0, 25)) == 1
    assert forecasts.refresh(0.0, 0) == []


def test_a_horizon_that_the_model_does_not_cover_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forecasts = Forecasts(PredictorConfig(enabled=True))
    monkeypatch.setattr(type(forecasts.predictor), "model_windows", WindowRange(1, 96))

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.endswith(".forecasts")]

    forecasts.refresh(0.0, 96)
    assert not said()
    forecasts.refresh(0.0, 200)
    forecasts.refresh(1.0, 200)
    (line,) = said()
    assert "1 to 96 tokens" in line and "asks for 200" in line


def test_of_a_resumed_answer_predictors_see_the_whole_and_the_router_its_attempt() -> None:
    forecasts = Forecasts(PredictorConfig(enabled=True, window_tokens=24, refresh_tokens=8))
    now_s = learn(forecasts, [100] * 60)
    # of 400 tokens 80 have come from another engine
    again = wire.Submit("new", 90, 320, hints=wire.Hints(prompt_key="k", template_key="k"), resumed_tokens=80)
    told = arrival_of(again, now_s)
    assert (told.prompt_tokens, told.max_tokens) == (10, 400)
    whole_tokens = forecasts.arrived(submit("whole", prompt_key="k", template_key="k"), now_s, wanted=True)
    left_tokens = forecasts.arrived(again, now_s, wanted=True)
    assert whole_tokens is not None
    assert left_tokens == pytest.approx(whole_tokens - 80)
    forecasts.progressed("new", 10)
    (made,) = forecasts.refresh(now_s)
    # at 90 of about 100 tokens
    assert (made.attempt_id, made.tokens) == ("new", 10)
    assert made.finishes_in_tokens is not None
    forecasts.closed("new", "finished", 20, now_s)
    assert not forecasts._resumed


def test_several_sequences_have_no_forecast_and_a_rejected_request_teaches_nothing() -> None:
    forecasts = Forecasts(PredictorConfig(enabled=True))
    forecasts.arrived(wire.Submit("many", 10, 400, slots=3), 0.0)
    forecasts.progressed("many", 50)
    assert forecasts.refresh(0.0) == []
    forecasts.arrived(submit("gone"), 0.0)
    forecasts.closed("gone", "rejected", 0, 1.0)
    forecasts.closed("never seen", "finished", 5, 1.0)
    assert forecasts.totals()["predictor_outcomes"] == 0


async def test_outcomes_are_logged_with_their_reason_and_without_text(tmp_path: Path) -> None:
    forecasts = Forecasts(PredictorConfig(enabled=True, folder=str(tmp_path)))
    for n, (outcome, tokens) in enumerate(
        [("finished", 400), ("finished", 7), ("cancelled", 0), ("failed", 9)]
    ):
        forecasts.arrived(submit(f"r{n}", prompt_key="digest"), float(n))
        forecasts.progressed(f"r{n}", 3)
        forecasts.closed(f"r{n}", outcome, tokens, n + 0.5)
    await forecasts.stop()
    outcomes = read_log(tmp_path / "outcomes").outcomes
    assert [(o.output_tokens, o.reason) for o in outcomes] == [
        (400, FinishReason.LENGTH),
        (7, FinishReason.STOP),
        (3, FinishReason.CANCELLED),
        (9, FinishReason.ERROR),
    ]


async def test_a_disk_that_fails_or_hangs_costs_outcomes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over real sockets: the ingress whose request ends keeps its connection, and the router comes to its end."""
    monkeypatch.setattr(module, "STOP_S", 0.2)
    monkeypatch.setattr(module, "MOST_UNWRITTEN", 2)
    policy = JoinShortestQueue()
    forecasts = Forecasts(PredictorConfig(enabled=True, folder=str(tmp_path)))
    folder = tmp_path / "outcomes"
    folder.rmdir()  # every write fails
    router = RouterServer(
        Identity("router", "r"), Dispatcher(DispatchConfig(), policy, policy), forecasts=forecasts
    )
    await router.start([f"unix:{tmp_path}/r.sock"])
    await engine(router, "c", "colocated")
    await until(lambda: len(router.status().statuses) == 1)
    ingress = await peer(router, "ingress", "i")

    async def one(attempt_id: str) -> None:
        ingress.channel.send(submit(attempt_id))
        await ingress.get(wire.RoutePrefill)
        ingress.channel.send(wire.Closed(attempt_id, "finished", 5))
        await until(lambda: router.status().in_flight == 0)

    await one("x")
    await until(lambda: forecasts.totals()["predictor_outcome_write_errors"] == 1)
    assert f"make room in {tmp_path}" in caplog.text
    with full_pipe(tmp_path / "pipe") as pipe:
        assert forecasts._log is not None
        # write(2) hangs until the end of the test
        forecasts._log._file = pipe
        for attempt_id in "abcde":
            await one(attempt_id)
        assert forecasts.totals()["predictor_outcomes_dropped"] >= 1
        await router.stop()
    assert "has not answered" in caplog.text


@contextmanager
def full_pipe(path: Path) -> Iterator[BinaryIO]:
    """The end of a pipe that takes no byte more until the context ends."""
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    filling = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(filling, b"x" * 4096)
    except BlockingIOError:
        pass
    try:
        yield path.open("ab", buffering=0)
    finally:
        os.close(filling)
        os.close(reading)  # what hangs gets EPIPE


async def _elsewhere(job: RefitJob) -> RefitResult:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, refit, job)


def test_a_promoted_model_that_is_refused_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "current.json").write_text("{")
    Forecasts(PredictorConfig(enabled=True, folder=str(tmp_path)))
    assert "the promoted model" in caplog.text
    assert "delete it to start from survival" in caplog.text


# on a busy machine the fit takes minutes
@pytest.mark.timeout(900)
@pytest.mark.nightly
async def test_a_refit_runs_elsewhere_and_its_promoted_model_serves(tmp_path: Path) -> None:
    config = PredictorConfig(enabled=True, folder=str(tmp_path), refit_every_s=100.0, refit_outcomes=500)
    forecasts = Forecasts(config, _elsewhere)
    rng = random.Random(0)
    # the length follows from max_tokens, which survival cannot see
    for n in range(1000):
        limit = rng.choice((20, 300))
        forecasts.arrived(submit(f"r{n}", max_tokens=4 * limit), float(n))
        forecasts.closed(f"r{n}", "finished", limit + rng.randrange(10), n + 0.5)
    forecasts.maintain(1000.0)
    # the interval counts from the first call
    assert forecasts.totals()["predictor_refits"] == 0
    forecasts.maintain(1100.0)
    assert forecasts.totals()["predictor_refits"] == 1
    async with asyncio.timeout(600):
        while forecasts.totals()["predictor_promotions"] == 0:
            await asyncio.sleep(0.1)
            assert forecasts.totals()["predictor_refit_failures"] == 0
    assert forecasts.gauges()["predictor_model_in_use"] == 1
    again = Forecasts(config, _elsewhere)
    assert again.gauges()["predictor_model_in_use"] == 1  # a restarted router starts with it
    await forecasts.stop()
    await again.stop()


async def test_drift_is_looked_for_only_where_it_would_begin_a_refit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router calls `maintain` twenty times a second, and a look at drift takes a millisecond."""
    looks: list[bool] = []

    class Report:
        drifted = False

    def drift() -> Report:
        looks.append(True)
        return Report()

    async def nothing(job: RefitJob) -> RefitResult:
        return RefitResult("same", False, "no better", 3, 0)

    config = PredictorConfig(enabled=True, folder=str(tmp_path), refit_every_s=3600.0, refit_outcomes=4)
    forecasts = Forecasts(config, nothing)
    monkeypatch.setattr(forecasts.predictor, "drift", drift)
    learn(forecasts, [5, 6, 7])
    for at_s in (10.0, 400.0, 401.0):
        forecasts.maintain(at_s)
    # three new outcomes are too few
    assert not looks
    learn(forecasts, [8], key="l")
    # from 10 + 3600 / 10 seconds on, and once a minute
    for at_s, seen in ((402.0, 1), (402.05, 1), (461.9, 1), (462.1, 2), (521.0, 2)):
        forecasts.maintain(at_s)
        assert len(looks) == seen
    Report.drifted = True
    forecasts.maintain(522.2)
    assert forecasts.totals()["predictor_refits"] == 1
    await until(lambda: forecasts._refit is None)
    # without drift the whole interval passes; then nobody looks
    learn(forecasts, [9, 9, 9, 9], key="m")
    Report.drifted, looks[:] = False, []
    forecasts.maintain(522.2 + 3600.0)
    assert forecasts.totals()["predictor_refits"] == 2
    assert not looks
    await forecasts.stop()


async def test_the_loop_goes_on_while_a_promoted_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(folder: Path, in_use: str | None) -> None:
        reading.set()
        assert go_on.wait(60)
        raise ModelRefused(f"{folder}: damaged")

    async def promoted(job: RefitJob) -> RefitResult:
        return RefitResult("new", True, "better", 3, 0)

    monkeypatch.setattr("actors.router.forecasts.read_promoted", slow)
    config = PredictorConfig(enabled=True, folder=str(tmp_path), refit_every_s=1.0, refit_outcomes=2)
    forecasts = Forecasts(config, promoted)
    now_s = learn(forecasts, [5, 6, 7])
    forecasts.maintain(now_s)
    forecasts.maintain(now_s + 2)
    await until(reading.is_set)
    assert forecasts.totals()["predictor_models_refused"] == 0
    go_on.set()
    await until(lambda: forecasts.totals()["predictor_models_refused"] == 1)
    assert "the promoted model" in caplog.text
    assert forecasts.totals()["predictor_promotions"] == 0
    await forecasts.stop()


def test_lightgbm_is_imported_before_requests_come(tmp_path: Path) -> None:
    """At the first adoption its import would keep a router from its connections for seconds."""
    script = (
        "import sys\nfrom actors.router.forecasts import Forecasts, PredictorConfig\n"
        f"Forecasts(PredictorConfig(enabled=True, folder={str(tmp_path)!r}))\n"
        "assert 'lightgbm' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


async def test_a_refit_that_fails_leaves_the_model_and_is_counted(tmp_path: Path) -> None:
    async def broken(job: RefitJob) -> RefitResult:
        raise OSError("disk full")

    config = PredictorConfig(enabled=True, folder=str(tmp_path), refit_every_s=1.0, refit_outcomes=2)
    forecasts = Forecasts(config, broken)
    now_s = learn(forecasts, [5, 6, 7])
    forecasts.maintain(now_s)
    forecasts.maintain(now_s + 2)
    await until(lambda: forecasts.totals()["predictor_refit_failures"] == 1)
    assert forecasts.gauges()["predictor_model_in_use"] == 0
    await forecasts.stop()


async def test_forecasts_reach_the_reducer_and_metrics_over_real_sockets(tmp_path: Path) -> None:
    policy = JoinShortestQueue()
    forecasts = Forecasts(PredictorConfig(enabled=True, window_tokens=24))
    now_s = learn(forecasts, [50] * 60)
    assert now_s == 60.0
    router = RouterServer(
        Identity("router", "r"), Dispatcher(DispatchConfig(), policy, policy), forecasts=forecasts
    )
    await router.start([f"unix:{tmp_path}/r.sock"])
    try:
        await engine(router, "p", "prefill")
        await engine(router, "d", "decode")
        await until(lambda: len(router.status().statuses) == 2)
        ingress = await peer(router, "ingress", "i")
        fleet = await ingress.get(wire.Fleet)
        assert fleet.wants_hints  # type: ignore[attr-defined]
        ingress.channel.send(submit("x", prompt_key="k", template_key="k"))
        await ingress.get(wire.RoutePrefill)
        ingress.channel.send(wire.PrefillReported("x", 30.0, 1, 0))
        await ingress.get(wire.RouteDecode)
        ingress.channel.send(wire.Progress(["x"], [wire.Grown("x", 45)]))
        await until(lambda: router.status().totals["predictor_predictions"] >= 1)

        def departures() -> int:
            return len(router.dispatcher.state.snapshot(0).workers["d"].departures)

        await until(lambda: departures() == 1)
        # 5 tokens are left: beyond a horizon of 2 steps, within one of 30
        for horizon, expected in ((2, 0), (30, 1)):
            change = ev.PoliciesChanged(
                clock_s(), decode=ev.PolicyChoice("balance_route_h", {"horizon": horizon})
            )
            router.dispatcher.handle(change)
            await until(lambda expected=expected: departures() == expected)
        ingress.channel.send(wire.Closed("x", "finished", 50))
        await until(lambda: router.status().totals["predictor_outcomes"] == 61)
    finally:
        await router.stop()


@pytest.mark.parametrize(
    "wrong", [{"window_tokens": 0}, {"gate": 1.5}, {"refit_every_s": 0}, {"refresh_tokens": 0}]
)
def test_config_out_of_range_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PredictorConfig(**wrong)  # type: ignore[arg-type]
