"""The predictors in the router: they make forecasts for the policies, and log outcomes from which the next model is
fitted.

Predictors are off by default. If they are on, the features of a request are taken at its arrival. One batched call
refreshes the forecasts of all requests that have generated k more tokens, and the reducer gets the forecasts as
`ForecastMade` events. The outcome of every request is logged, with keyed digests in place of the prompt's text. From
time to time a refit runs outside this process, and its model is adopted if it was promoted.

Nothing here decides or waits. A refit is a coroutine that the caller supplies (a Ray task in the product). Outcomes are
written in a thread. A disk that fails or hangs therefore costs only outcomes, which are counted.
"""

import asyncio
import importlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec.structs import asdict

from actors.router.worker_thread import WorkerThread
from actors.wire.messages import Hints, Submit
from policies.routing.params import Number, Whole, check
from policies.state.events import ForecastMade
from predictors.feed import ForecastFeed
from predictors.forecast import ForecastConfig
from predictors.live import LivePredictor, read_promoted
from predictors.outcomes import OutcomeLog
from predictors.promote import RefitJob, RefitResult
from predictors.protocol import Arrival, Outcome, Sampling, TextSignals
from predictors.store import ModelRefused

log = logging.getLogger(__name__)

MOST_UNWRITTEN = 16_384
"""Most outcomes, of some 2 kB each, that may wait for a slow disk. Further ones are dropped and counted."""

DRIFT_HASTE = 10
"""After drift a refit may follow the one before in this part of `refit_every_s`."""
DRIFT_LOOK_S = 60.0
"""Least seconds between two looks whether lengths have drifted, since a look takes a millisecond of the router's loop.
ASSUMPTION: a refit that begins a minute later is as good.
"""

STOP_S = 5.0
"""Seconds that `stop` waits for a disk that does not answer."""

NO_HINTS = Hints()

RunRefit = Callable[[RefitJob], Awaitable[RefitResult]]


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """Settings of the predictors. `folder` keeps the outcome log and the models; with None nothing is logged or fitted.

    Forecasts are made for the `horizon` of the decode policy. `window_tokens` is their H while that policy has none, so
    that the predictor is watched under every policy. `refresh_tokens` (k), `gate` and `floor_tokens` belong to the
    state machine of a forecast (`predictors.forecast`). `total_at_arrival` says whether total lengths are forecast at
    arrival; with None they are while the policy in use reads them. A refit starts when `refit_every_s` have passed and
    there are `refit_outcomes` new outcomes; after drift a tenth of that time is enough.
    """

    enabled: bool = False
    folder: str | None = None
    # ASSUMPTION: one of the paper's swept horizons {1, 24, 48, 96}
    window_tokens: Annotated[int, Whole(1)] = 48
    refresh_tokens: int = 16
    gate: float = 0.5
    floor_tokens: float = 1.0
    total_at_arrival: bool | None = None
    refit_every_s: Annotated[float, Number(above=0)] = 3600.0
    refit_outcomes: Annotated[int, Whole(2)] = 1000
    log_file_bytes: Annotated[int, Whole(1)] = 16 << 20
    log_files: Annotated[int, Whole(1)] = 16

    def __post_init__(self) -> None:
        check(self, "predictor")
        ForecastConfig(self.refresh_tokens, self.gate, self.floor_tokens)


class Forecasts:
    """The predictors of one router. All times are on the router's clock. Without `run_refit` models are read but never
    fitted. With a folder, making one takes the seconds in which LightGBM is imported: make it before requests come.
    """

    def __init__(self, config: PredictorConfig, run_refit: RunRefit | None = None) -> None:
        self.config = config
        self.predictor = LivePredictor()
        states = ForecastConfig(config.refresh_tokens, config.gate, config.floor_tokens)
        self._feed = ForecastFeed(self.predictor, states, config.window_tokens)
        self._run_refit = run_refit
        self._folder = Path(config.folder) if config.folder else None
        self._log = (
            OutcomeLog(self._folder / "outcomes", config.log_file_bytes, config.log_files)
            if self._folder
            else None
        )
        self._disk = WorkerThread("outcomes")
        # tokens of attempts that resume an answer: predictors see the whole answer, the router its attempt
        self._resumed: dict[str, int] = {}
        self._window_tokens = config.window_tokens
        """H of the last refresh."""
        self._new_outcomes = 0
        self._last_refit_s: float | None = None
        # when it is looked for drift again
        self._drift_look_s = -math.inf
        self._refit: asyncio.Task[None] | None = None
        self._counts = {"refits": 0, "promotions": 0, "refit_failures": 0, "outcomes_dropped": 0}
        self._write_errors = 0  # only the thread writes it
        if self._folder is not None:
            # 3 s of CPU on two cores: a router that did it at its first adoption was silent, and taken for lost
            importlib.import_module("lightgbm")
            if self.predictor.adopt_promoted(self._folder / "models"):
                self._check_window()
            elif self.predictor.stats().refused_models:
                self._say_refused(self._folder)

    # -------------------------------------------------------------------------------------------- life of a request

    def arrived(self, submit: Submit, now_s: float, wanted: bool = False) -> float | None:
        """Takes in the features of a request. Returns its expected output length in tokens if `total_at_arrival` is
        true, or if it is None and the length is `wanted`; else None.
        """
        total, resumed = self.config.total_at_arrival, submit.resumed_tokens
        arrival = arrival_of(submit, now_s)
        predicted = self._feed.arrived(
            arrival, submit.max_tokens + resumed, wanted if total is None else total
        )
        if not resumed:
            return predicted
        self._resumed[submit.attempt_id] = resumed
        return None if predicted is None else max(1.0, predicted - resumed)

    def progressed(self, attempt_id: str, tokens: int) -> None:
        """Takes in the number of tokens that the attempt has generated so far."""
        self._feed.progressed(attempt_id, tokens + self._resumed.get(attempt_id, 0))

    def closed(self, attempt_id: str, outcome: str, tokens: int, now_s: float) -> None:
        """Takes in the end of an attempt, and logs its outcome unless it was rejected."""
        tokens += self._resumed.pop(attempt_id, 0)
        ended = self._feed.closed(attempt_id, outcome, tokens, now_s)
        if ended is None:
            return
        self._new_outcomes += 1
        if self._log is None:
            return
        if self._disk.waiting < MOST_UNWRITTEN:
            self._disk.post(partial(self._write, self._log, ended))
        else:
            self._counts["outcomes_dropped"] += 1

    def _write(self, outcomes: OutcomeLog, ended: Outcome) -> None:
        """Writes one outcome; called in the thread."""
        try:
            outcomes.append(ended)
        except OSError as error:
            if self._write_errors % 1000 == 0:
                log.error("outcomes cannot be written (%s): make room in %s", error, self._folder)
            self._write_errors += 1

    # --------------------------------------------------------------------------------------------------- in batches

    def refresh(self, now_s: float, horizon: int | None = None) -> list[ForecastMade]:
        """Refreshes all forecasts that are due in one call of the predictor, and returns them as events for the
        reducer. `horizon` is H of the decode policy, or None if it has none; then H is `window_tokens`.
        """
        window_tokens = self.config.window_tokens if horizon is None else horizon
        if window_tokens != self._window_tokens:
            self._window_tokens = window_tokens
            self._check_window()
        return [
            ForecastMade(
                now_s,
                made.request_id,
                made.age - self._resumed.get(made.request_id, 0),
                made.finishes_in_tokens,
            )
            for made in self._feed.refresh(window_tokens)
        ]

    def _check_window(self) -> None:
        """Logs that the model in use does not answer for the present window, if so."""
        covered = self.predictor.model_windows
        window_tokens = self._window_tokens
        if covered is not None and window_tokens and not covered.low <= window_tokens <= covered.high:
            log.warning(
                "the model covers horizons of %d to %d tokens, the decode policy asks for %d: memorised lengths answer;"
                " fit a model that covers it (sluice train --windows) or lower the policy's horizon",
                covered.low,
                covered.high,
                window_tokens,
            )

    def maintain(self, now_s: float) -> None:
        """Starts a refit if one is due, and returns at once."""
        if self._folder is None or self._run_refit is None or self._refit is not None:
            return
        if self._last_refit_s is None:
            # the first interval begins with the first call
            self._last_refit_s = now_s
        if self._new_outcomes >= self.config.refit_outcomes and self._is_due(
            now_s - self._last_refit_s, now_s
        ):
            self._last_refit_s, self._new_outcomes = now_s, 0
            self._counts["refits"] += 1
            self._refit = asyncio.create_task(self._refit_once(self._folder, self._run_refit), name="refit")

    def _is_due(self, since_s: float, now_s: float) -> bool:
        """Returns whether it is time for a refit, `since_s` after the last one: drift is looked for only where it would
        make a difference.
        """
        every_s = self.config.refit_every_s
        if since_s >= every_s:
            return True
        if since_s < every_s / DRIFT_HASTE or now_s < self._drift_look_s:
            return False
        self._drift_look_s = now_s + DRIFT_LOOK_S
        report = self.predictor.drift()
        return report is not None and report.drifted

    async def _refit_once(self, folder: Path, run_refit: RunRefit) -> None:
        try:
            # when this call returns, all outcomes so far are in the log
            await self._disk.call(lambda: None)
            result = await run_refit(RefitJob(folder / "outcomes", folder / "models"))
            log.info(
                "refit of %d outcomes: promoted %s (%s)", result.requests, result.promoted, result.reason
            )
            if result.damaged_lines:
                log.warning(
                    "%d lines of the log in %s are damaged and taught nothing", result.damaged_lines, folder
                )
            if result.promoted and await self._adopt(folder):
                self._counts["promotions"] += 1
        except Exception:
            # the model in use stays, and the next interval tries again
            self._counts["refit_failures"] += 1
            log.exception("the refit failed; the model in use stays")
        finally:
            self._refit = None

    async def _adopt(self, folder: Path) -> bool:
        """Takes the promoted model into use if it is a new one, and returns whether it did. Logs why a model is
        refused. The file is read in the thread, so that requests do not wait for it.
        """
        in_use = self.predictor.model_version
        try:
            read = await self._disk.call(partial(read_promoted, folder / "models", in_use))
        except ModelRefused as error:
            self.predictor.refuse(error)
            self._say_refused(folder)
            return False
        if read is not None:
            self.predictor.adopt(*read)
            self._check_window()
        return read is not None

    def _say_refused(self, folder: Path) -> None:
        log.error("the promoted model in %s is refused: %s", folder, self.predictor.stats().last_refusal)

    async def stop(self) -> None:
        """Closes the outcome log within STOP_S, or logs how many outcomes are lost, and cancels a running refit.
        Idempotent.
        """
        if self._refit is not None:
            self._refit.cancel()
        outcomes, self._log = self._log, None
        if outcomes is not None and not await self._disk.end(outcomes.close, STOP_S):
            lost = self._disk.waiting
            log.error(
                "%d outcomes are lost: the disk of %s has not answered for %g s", lost, self._folder, STOP_S
            )

    def totals(self) -> dict[str, float]:
        """Returns the totals since the start, for the router's metrics."""
        stats = self.predictor.stats()
        shown = {
            "outcomes": stats.outcomes,
            "outcomes_censored": stats.censored,
            "predictions": stats.predictions,
            "predictions_abstained": stats.abstained,
            "models_refused": stats.refused_models,
            "outcome_write_errors": self._write_errors,
            **self._counts,
        }
        return {f"predictor_{name}": float(value) for name, value in shown.items()}

    def gauges(self) -> dict[str, float]:
        """Returns the present figures, for the router's metrics. The figures of drift are absent until there is data
        for them.
        """
        stats, drift = self.predictor.stats(), self.predictor.drift()
        shown: dict[str, float | None] = {
            "model_in_use": float(stats.model_version is not None),
            "running_forecasts": float(len(self._feed.book)),
            "window_tokens": float(self._window_tokens),
            "drift_psi": drift.psi if drift else None,
            "drift_ks": drift.ks if drift else None,
            "calibration_error": drift.calibration_error if drift else None,
        }
        return {f"predictor_{name}": value for name, value in shown.items() if value is not None}


def arrival_of(submit: Submit, now_s: float) -> Arrival:
    """Returns the facts from which the predictors make their features. Facts that the ingress did not send stay
    absent.
    """
    hints = submit.hints or NO_HINTS
    signals = hints.signals
    return Arrival(
        request_id=submit.attempt_id,
        arrival_s=now_s,
        prompt_tokens=submit.prompt_tokens - submit.resumed_tokens,
        max_tokens=submit.max_tokens + submit.resumed_tokens,
        sampling=Sampling(
            hints.temperature,
            hints.top_p,
            hints.top_k,
            hints.stop_strings,
            submit.slots,
            hints.structured_output,
        ),
        traffic_class=submit.terms.request_class,
        model=hints.model,
        client=hints.user,
        session=submit.terms.session or None,
        prompt_key=hints.prompt_key,
        template_key=hints.template_key,
        wall_clock_s=now_s,
        text=None if signals is None else TextSignals(**asdict(signals)),
    )
