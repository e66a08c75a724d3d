"""Experiments from the page: one at a time, as a process of `sluice experiment run`, within the configured bounds.

The runner's standard input is its leash: when this server closes it, or dies, the runner ends its load and puts back
what it changed. If the runner is killed, its guardian does (`benchmarks.live.experiment.guardian`), and `start_up` does
for what neither could.
"""

import asyncio
import contextlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.dashboard.commands import MOST_ERROR_BYTES, Access, Commands, drained, end, said, spawn
from app.dashboard.store import BEFORE, RunError, RunsConfig, RunStore, default_folder, same_server

log = logging.getLogger("ray.serve.dashboard")

MOST_TEXT_BYTES = 64 << 10
START_S = 60.0
"""Longest time in which a runner begins. ASSUMPTION: it imports for two seconds on an idle machine."""
STOP_S = 60.0
"""Longest time in which a stopped runner puts back what it changed; then it is killed, and its guardian acts."""
ANSWER_S = 60.0
MOST_COMPARED = 6
KEPT_S = 10.0
"""Time for which the series of a run that still runs are kept for all pages that watch it. Each reading is a process of
its own beside what is measured. ASSUMPTION: about a second of a core, thus a tenth of one."""


class _Kept(NamedTuple):
    """The last reading of a run that still runs, and its time."""

    run_id: str
    at_s: float
    found: dict[str, Any]


class Runs:
    """The experiments on the application whose ingress is at `url`. `dashboard_url` is this server's own address, by
    which single engines are changed; `key` and `certificates` are those of `commands.Access`.
    """

    def __init__(
        self,
        config: RunsConfig,
        url: str,
        dashboard_url: str | None = None,
        key: str | None = None,
        certificates: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.store = config, config.store()
        self._url, self._dashboard_url = url, dashboard_url
        self._access = Access(key, certificates or {})
        self._commands = Commands(self._access)
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._starting = self._closed = False
        self._kept: _Kept | None = None
        self._reading = asyncio.Lock()
        self._shipped: list[dict[str, str]] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.run_id: str | None = None
        """The run that this server has started and that has not ended."""

    # ------------------------------------------------------------------------------------------------------- reading

    async def all(self) -> dict[str, Any]:
        """Returns the shipped files, all runs with their folder, the one that runs, and the bounds."""
        if self._shipped is None:
            self._shipped = await self._commands.ask_json(
                ["experiment", "list", "--shipped", "--json"], ANSWER_S
            )
        runs = await asyncio.to_thread(self.store.all)
        return {
            "shipped": self._shipped,
            "runs": runs,
            "folder": str(self.store.folder),
            "running": next((run for run in runs if run["state"] == "running"), None),
            "bounds": {
                "rate_per_s": self.config.rate_per_s,
                "duration_s": self.config.duration_s,
                "disk_bytes": self.config.disk_bytes,
                "may_kill": self.config.may_kill,
            },
        }

    async def detail(self, run_id: str) -> Any:
        """Returns a run with its file and its series; those of one that still runs are up to KEPT_S old."""
        self.store.path(run_id)
        run = await asyncio.to_thread(self.store.shown, run_id)
        if run["state"] != "running":
            if self._kept is not None and self._kept.run_id == run_id:
                self._kept = None
            return await self._commands.ask_json(self._about("show", run_id), ANSWER_S)
        # one after the other, so that pages that ask at the same time share an answer
        async with self._reading:
            kept, now_s = self._kept, time.monotonic()
            if kept is None or kept.run_id != run_id or now_s - kept.at_s >= KEPT_S:
                found = await self._commands.ask_json(self._about("show", run_id), ANSWER_S)
                kept = self._kept = _Kept(run_id, now_s, found)
        return {**kept.found, "run": run}

    async def compare(self, run_ids: list[str]) -> Any:
        """Returns runs side by side. Raises RunError for none or too many."""
        if not 1 <= len(run_ids) <= MOST_COMPARED:
            raise RunError(400, f"give the ids of 1 to {MOST_COMPARED} runs, with commas between them")
        for run_id in run_ids:
            self.store.path(run_id)
        return await self._commands.ask_json([*self._about("compare", *run_ids), "--json"], ANSWER_S)

    async def report(self, run_id: str, kind: str) -> bytes:
        """Returns a run's report as `html`, `json` or `png`."""
        self.store.path(run_id)
        option = ["--json"] if kind == "json" else [f"--{kind}", "-"]
        return await self._commands.ask([*self._about("report", run_id), *option], ANSWER_S)

    def _about(self, action: str, *run_ids: str) -> list[str]:
        return ["experiment", action, *run_ids, "--runs", str(self.store.folder)]

    async def check(self, text: str) -> Any:
        """Returns what a file would do, or what is wrong with it."""
        return await self._commands.ask_json(
            ["experiment", "check", "-", "--json", *self._bounds(None)], ANSWER_S, text.encode()
        )

    # ------------------------------------------------------------------------------------------------------ changing

    async def start(self, text: str) -> dict[str, Any]:
        """Starts a run and returns it. Raises RunError 409 if one runs, 507 if its folder is full, and 400 with every
        problem of a file that is refused.
        """
        if self._starting:
            raise RunError(409, "an experiment is being started")
        self._starting = True
        try:
            running = await asyncio.to_thread(self._running)
            if running is not None or self._process is not None:
                raise RunError(
                    409, f"experiment {running or self.run_id} is running: stop it, or wait for its end"
                )
            room_bytes = await asyncio.to_thread(self._room_bytes)
            await self._start(text, room_bytes)
        finally:
            self._starting = False
        assert self.run_id is not None
        return await asyncio.to_thread(self.store.shown, self.run_id)

    def _running(self) -> str | None:
        """Returns the experiment that runs: one of this folder, or one of a command on this application."""
        here = next((str(run["id"]) for run in self.store.all() if run["state"] == "running"), None)
        return self._of_a_command() if here is None else here

    def _of_a_command(self) -> str | None:
        """Returns the experiment that a command runs on this application in its own default folder, if there is one."""
        commands = RunStore(default_folder())
        try:
            runs = [commands.read(run_id) for run_id in commands.ids()]
        except RunError:
            # that folder cannot be read, or a run was deleted meanwhile
            return None
        mine = (run for run in runs if run["state"] == "running" and same_server(run.get("url"), self._url))
        return next((str(run["id"]) for run in mine), None)

    def _room_bytes(self) -> int:
        """Returns the bytes that a run may take. Raises RunError 507 if there is no room for one."""
        left = self.config.disk_bytes - self.store.size_bytes()
        if left < 1 << 20:
            raise RunError(
                507,
                f"the runs in {self.store.folder} take all of the {self.config.disk_bytes >> 20} MiB that they may"
                " (dashboard.experiments.disk_bytes): delete some",
            )
        place = next(p for p in (self.store.folder, *self.store.folder.parents) if p.exists())
        free = shutil.disk_usage(place).free
        if free < 4 << 20:
            raise RunError(507, f"the disk of {self.store.folder} is full: make room there")
        return min(left, free)

    async def _start(self, text: str, room_bytes: int) -> None:
        with self._written(text) as plan:
            where = ["--url", self._url, "--runs", str(self.store.folder)]
            where += [] if self._dashboard_url is None else ["--dashboard", self._dashboard_url]
            arguments = ["experiment", "run", plan, "--json", "--until-input-ends", *where]
            pipe = asyncio.subprocess.PIPE
            process = await spawn(
                [*arguments, *self._bounds(room_bytes)], self._access, stdin=pipe, stdout=pipe, stderr=pipe
            )
            self._process = process
            try:
                if self._closed:
                    raise RunError(503, "the server is stopping")
                async with asyncio.timeout(START_S):
                    self.run_id = await _began(process)
            except (RunError, TimeoutError) as error:
                await end(process)
                self._process = None
                if isinstance(error, RunError):
                    raise
                raise RunError(504, f"the experiment did not begin within {START_S:g} s") from None
        self._watcher = asyncio.create_task(self._watch(process), name="experiment")

    @contextlib.contextmanager
    def _written(self, text: str) -> Iterator[str]:
        """A context with the path of a file that has the text, beside the runs: what holds them has room for it.

        Raises RunError 507 if it cannot be written.
        """
        with contextlib.ExitStack() as open_files:
            try:
                self.store.make()
                file = open_files.enter_context(
                    tempfile.NamedTemporaryFile(
                        "w", dir=self.store.folder, prefix=".plan-", suffix=".yaml", encoding="utf-8"
                    )
                )
                file.write(text)
                file.flush()
            except OSError as error:
                raise RunError(
                    507,
                    f"nothing can be written to {self.store.folder}: {error.strerror or error}; make room",
                ) from error
            yield file.name

    def _bounds(self, room_bytes: int | None) -> list[str]:
        config = self.config
        found = [
            "--most-rate",
            str(config.rate_per_s),
            "--most-seconds",
            str(config.duration_s),
            "--no-files",
        ]
        found += [] if room_bytes is None else ["--most-bytes", str(room_bytes)]
        return [*found, "--may-kill"] if config.may_kill else found

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Reads what the runner says until it ends, so that it never waits for a reader."""
        assert process.stdout is not None
        errors = asyncio.create_task(drained(process.stderr, MOST_ERROR_BYTES))
        try:
            while await process.stdout.read(1 << 16):
                pass
            await process.wait()
            told = said(await errors)
            if process.returncode not in (0, 130) and told:
                log.warning("experiment %s: %s", self.run_id, told)
        finally:
            errors.cancel()
            if self._process is process:
                self._process = None
                self.run_id = None

    async def stop(self) -> None:
        """Ends the run that this server has started: its load ends, and what it changed is put back. Idempotent."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), STOP_S)
        await end(process)
        if self._watcher is not None:
            await self._watcher

    async def stop_asked(self) -> dict[str, Any]:
        """Stops the run on an administrator's order and returns it. Raises RunError 409 if none runs."""
        run_id = self.run_id
        if self._starting:
            raise RunError(409, "an experiment is being started: try again in a moment")
        if self._process is None or run_id is None:
            running = await asyncio.to_thread(self._running)
            if running is not None:
                raise RunError(
                    409, f"experiment {running} was not started here: stop it where it was started (Ctrl-C)"
                )
            raise RunError(409, "no experiment is running")
        await self.stop()
        return await asyncio.to_thread(self.store.shown, run_id)

    async def close(self) -> None:
        """Ends everything, at the end of the server."""
        self._closed = True
        await self.stop()
        for task in list(self._background):
            task.cancel()
        await self._commands.close()

    async def delete(self, run_id: str) -> None:
        """Deletes a run."""
        await asyncio.to_thread(self.store.delete, run_id)

    def start_up(self) -> None:
        """Puts back, in the background, what runs have left that were killed with their guardians."""
        task = asyncio.create_task(self._restore(), name="restore experiments")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _left_over(self) -> bool:
        return any(Path(self.store.folder, run_id, BEFORE).exists() for run_id in self.store.ids())

    async def _restore(self) -> None:
        if not await asyncio.to_thread(self._left_over):
            return
        # the key is this application's, and what was left in the folder may be another's
        where = ["--runs", str(self.store.folder), "--url", self._url]
        where += [] if self._dashboard_url is None else ["--dashboard", self._dashboard_url]
        try:
            told = await self._commands.ask(["experiment", "restore", *where], 180.0)
            log.info("what killed experiments had changed: %s", told.decode(errors="replace").strip())
        except RunError as error:
            log.warning("what killed experiments have changed is not put back: %s", error)


async def _began(process: asyncio.subprocess.Process) -> str:
    """Returns the id of the run that a runner has begun. Raises RunError if it refuses."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if told.get("event") == "started":
            return str(told["id"])
        if told.get("event") == "refused":
            raise RunError(400, "\n".join(map(str, told["problems"])))
    raise RunError(
        400, said(await drained(process.stderr, MOST_ERROR_BYTES)) or "the experiment did not begin"
    )
