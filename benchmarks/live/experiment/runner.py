"""Runs an experiment: trial after trial, each with its load, its timeline and a sample a second; then puts back.

Whatever ends it (its own end, a refusal, SIGINT, SIGTERM, the end of its parent, a full disk, SIGKILL), what it changed
is put back: by itself or by its guardian (`guardian`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from app.dashboard.store import RunStore, started_s
from benchmarks.checkout import commit
from benchmarks.live.experiment import guardian
from benchmarks.live.experiment.client import Client, Sent
from benchmarks.live.experiment.control import Control, ControlError
from benchmarks.live.experiment.figures import Trialled, summary_of
from benchmarks.live.experiment.plan import Bounds, Plan, Trial, described
from benchmarks.live.experiment.recorder import DiskFullError, Recorder
from benchmarks.live.experiment.requests import Planned, planned
from benchmarks.live.experiment.sampling import Sampler
from benchmarks.live.machine import versions
from sluice import SluiceError

SAMPLE_S = 1.0
SETTLE_S = 30.0
"""Longest wait for an idle application between two trials."""
NICENESS = 5


class Stopped(Exception):
    """The run was stopped; the message says by what."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is carried out: the niceness of its process, whether it speaks JSON, and whether it ends when its
    standard input does.
    """

    nice: int = NICENESS
    as_json: bool = False
    leashed: bool = False


class Runner:
    """One run of a plan against the application of `control`. `key` is handed to the guardian."""

    def __init__(
        self,
        plan: Plan,
        text: str,
        control: Control,
        store: RunStore,
        bounds: Bounds,
        options: Options,
        key: str | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._plan, self._control, self._options, self._key = plan, control, options, key
        self._model = control.check(plan).model or ""
        self._loads = [planned(plan.load, repeat) for repeat in range(plan.repeats)]
        n_requests = sum(len(self._loads[trial.repeat]) for trial in plan.trials)
        run_id, folder = store.new(plan.name)
        self.run_id, self.folder = run_id, folder
        run = {
            "id": run_id,
            "name": plan.name,
            "state": "running",
            "began_at": time.time(),
            "took_s": 0.0,
            "progress": 0.0,
            "phase": "starting",
            "message": None,
            "summary": None,
            "pid": os.getpid(),
            "pid_started": started_s(os.getpid()),
            "url": control.url,
            "plan": described(plan, n_requests),
            "trials": [],
            "versions": {"commit": commit(), "server": control.client.version().version, **versions()},
        }
        self._recorder = Recorder(folder, run, text, bounds.disk_bytes, out, options.as_json)
        self._most_s = bounds.duration_s + len(plan.trials) * (plan.load.patience_s + SETTLE_S) + 60.0
        self._trialled: list[Trialled] = []
        self._failure: Exception | None = None

    def run(self) -> int:
        """Runs to the end. Returns 0 if all trials were made, 1 after a failure, 130 when it was stopped."""
        with contextlib.suppress(OSError):
            os.nice(self._options.nice)
        self._recorder.say("started", plan=self._recorder.run["plan"])
        guard = None
        before: dict[str, Any] | None = None
        state, message = "done", None
        try:
            if self._plan.kinds - {"kill"}:
                before = self._control.before(self._plan)
                guardian.remember(self.folder, before)
                guard = guardian.start(self.folder, self._key)
            asyncio.run(self._trials(before))
        except Stopped as error:
            state, message = "stopped", str(error)
        except (SluiceError, ControlError, DiskFullError, TimeoutError) as error:
            state, message = "failed", str(error) or "the run took longer than it may"
        except OSError as error:
            state, message = "failed", f"{error.strerror or error}: {error.filename or self.folder}"
        except KeyboardInterrupt:
            state, message = "stopped", "by an interrupt"
        state, message = self._put_back(state, message)
        summary, trials = self._results()
        self._recorder.end(state, message, phase="ended", summary=summary, trials=trials)
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
        return {"done": 0, "failed": 1}.get(state, 130)

    def _put_back(self, state: str, message: str | None) -> tuple[str, str | None]:
        """Puts back what was changed, whatever the run's end was; a failure is added to the message."""
        try:
            for what in guardian.put_back(self.folder, self._control):
                self._note(f"put back: {what}")
        except (SluiceError, ControlError, ValueError, OSError) as error:
            failure = (
                f"{guardian.NOT_YET}: {error}; the guardian goes on trying, and"
                f" `sluice experiment restore --runs {self.folder.parent}` does it at any time"
            )
            return "failed", f"{message}; {failure}" if message else failure
        except DiskFullError:
            # the action was carried out, and only its note was not written
            pass
        return state, message

    def _note(self, what: str) -> None:
        self._recorder.action({"at_s": self._recorder.took_s(), "trial": None, "what": what})

    def _results(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        if not self._trialled:
            return None, []
        trials = [
            {"arm": one.trial.arm, "repeat": one.trial.repeat, "began_s": one.began_s, "load_s": one.load_s}
            for one in self._trialled
        ]
        return summary_of(self._trialled), trials

    # ------------------------------------------------------------------------------------------- in the event loop

    async def _trials(self, before: dict[str, Any] | None) -> None:
        """Makes all trials. Raises Stopped when a signal or the end of the parent ends the run."""
        stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch(stop)
        work = asyncio.ensure_future(self._all(before))
        try:
            async with asyncio.timeout(self._most_s):
                both: list[asyncio.Future[Any]] = [work, stop]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Stopped(stop.result())
            await work
        finally:
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    def _watch(self, stop: asyncio.Future[str]) -> None:
        loop = asyncio.get_running_loop()

        def ends(why: str) -> None:
            if not stop.done():
                stop.set_result(why)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, ends, f"by {number.name}")
        if self._options.leashed:
            descriptor = sys.stdin.fileno()

            def readable() -> None:
                if not os.read(descriptor, 4096):
                    loop.remove_reader(descriptor)
                    ends("by the end of what started it, or on its order")

            os.set_blocking(descriptor, False)
            loop.add_reader(descriptor, readable)

    async def _all(self, before: dict[str, Any] | None) -> None:
        trials = self._plan.trials
        for number, trial in enumerate(trials):
            if number:
                await self._between(before)
            if trial.arm:
                for what in await asyncio.to_thread(self._control.set_arm, self._plan.arms[trial.arm]):
                    self._recorder.action(
                        {"at_s": self._recorder.took_s(), "trial": number, "what": f"{trial.label}: {what}"}
                    )
            await self._trial(number, trial, self._loads[trial.repeat])

    async def _between(self, before: dict[str, Any] | None) -> None:
        """Waits until nothing is in flight, puts back what the last trial changed, and pauses."""
        settled = await asyncio.to_thread(self._control.settle, SETTLE_S)
        if not settled:
            self._note(f"requests were still in flight {SETTLE_S:g} s after the end of the trial before")
        if before is not None:
            await asyncio.to_thread(self._control.restore, before)
        await asyncio.sleep(self._plan.pause_s)

    async def _trial(self, number: int, trial: Trial, load: list[Planned]) -> None:
        plan, recorder = self._plan, self._recorder
        made = Trialled(trial, recorder.took_s(), plan.load.duration_s)
        self._trialled.append(made)

        def ended(one: Sent) -> None:
            made.requests.append(one)
            try:
                recorder.request({"trial": number, **one.as_json()})
            except DiskFullError as error:
                self._failure = self._failure or error

        name = f"{self.run_id}-{number}"
        # with an admin key a plan may have every class, where the server gives an anonymous request no more than its
        # ceiling, and needs no API key
        api_key = os.environ.get("SLUICE_API_KEY") or self._control.key
        client = Client(self._control.url, self._model, name, api_key, ended)
        sending = asyncio.ensure_future(client.run(load, plan.load.seed + trial.repeat, plan.load.patience_s))
        beside = [
            asyncio.ensure_future(self._sample(number, made, client)),
            asyncio.ensure_future(self._act(number, client)),
            asyncio.ensure_future(self._report(number, trial, client)),
        ]
        try:
            await asyncio.wait({sending, *beside}, return_when=asyncio.FIRST_EXCEPTION)
            for task in (sending, *beside):
                if task.done():
                    task.result()
        finally:
            for task in (sending, *beside):
                task.cancel()
            await asyncio.gather(sending, *beside, return_exceptions=True)

    async def _sample(self, number: int, made: Trialled, client: Client) -> None:
        """Takes a sample a second until every request has ended, at most until patience is over."""
        sampler = Sampler(self._control)
        missing = False
        end_s = self._plan.load.duration_s + self._plan.load.patience_s
        try:
            await asyncio.sleep(0)
            while client.now_s() < end_s:
                at_s = client.now_s()
                found = await asyncio.to_thread(sampler.sample, at_s)
                row = {"trial": number, "at_s": round(at_s, 3), "t": self._recorder.took_s(), **found}
                made.samples.append(row)
                self._recorder.sample(row)
                if "error" in found and not missing:
                    # the series have a gap from here, and say nothing of why
                    self._note(f"figures are missing: {found['error']}")
                missing = "error" in found
                if self._failure is not None:
                    raise self._failure
                if at_s >= self._plan.load.duration_s and not client.under_way:
                    return
                await asyncio.sleep(max(0.05, SAMPLE_S - (client.now_s() - at_s)))
        finally:
            sampler.close()

    async def _act(self, number: int, client: Client) -> None:
        """Carries out the timeline. What the application refuses ends the run."""
        for action in sorted(self._plan.actions, key=lambda one: one.at_s):
            await asyncio.sleep(max(0.0, action.at_s - client.now_s()))
            at_s = client.now_s()
            what = await asyncio.to_thread(self._control.do, action)
            self._recorder.action(
                {"at_s": self._recorder.took_s(), "trial": number, "trial_s": round(at_s, 3), "what": what}
            )

    async def _report(self, number: int, trial: Trial, client: Client) -> None:
        """Says how far the run is, once a second, until the load has been sent."""
        plan, n = self._plan, len(self._plan.trials)
        while (at_s := client.now_s()) < plan.load.duration_s:
            phase = next(
                (name for name, _, end, _ in plan.load.windows() if at_s < end),
                "",
            )
            label = f"{trial.label}: {phase}" if n > 1 else phase
            self._recorder.progress((number + at_s / plan.load.duration_s) / n, label)
            await asyncio.sleep(1.0)
        self._recorder.progress((number + 1) / n, "waiting for answers")
