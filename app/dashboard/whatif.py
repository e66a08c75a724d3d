"""Answers to what-if questions from the page: what runs is described, and simulated with changes, one at a time.

The work is done by `sluice simulate` as a process of low priority. Its files lie in `.whatif` in the folder of runs:

    .whatif/<base>/     a base that was read: its file, workload, what was measured; the last question about it
    .whatif/by-hand/    the last question about a file that names no base

A question is answered in the folder of the base that it names, so that what was measured of another base never stands
beside it; whether its file still is that base is found by the command.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from actors.private_folder import make_private
from app.dashboard.commands import MOST_ERROR_BYTES, Access, Commands, drained, end, said, spawn
from app.dashboard.store import RunError, RunsConfig

log = logging.getLogger("ray.serve.dashboard")

MOST_TEXT_BYTES = 256 << 10
MOST_CHANGES = 8
QUESTION, CHANGES, ANSWER = "question.yaml", "changes.json", "answer.json"
BY_HAND = "by-hand"
MOST_BASES = 4
"""Bases that are kept; the one that was not used for the longest time goes when another is read."""
WATCH_S = 8.0
DESCRIBE_S = 90.0
SIMULATE_S = 600.0
"""Longest simulation. A longer question belongs to the command, on another machine."""
STOPPED = "the simulation was stopped"
_MOST_ANSWER_BYTES = 64 << 20
_PATH = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_BASE = re.compile(r"[0-9a-f]{16}")

State = Literal["idle", "running", "done", "failed"]


class WhatIf:
    """The what-if questions about the application whose ingress is at `url`; `key` and `certificates` are those of
    `commands.Access`.
    """

    def __init__(
        self,
        config: RunsConfig,
        url: str,
        key: str | None = None,
        certificates: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = config.store().folder / ".whatif"
        self._url, self._access = url, Access(key, certificates or {})
        self._commands = Commands(self._access)
        self._busy = self._stopped = False
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._state: State = "idle"
        self._progress = 0.0
        self._phase = ""
        self._message: str | None = None
        self._result: dict[str, Any] | None = None
        self._number = 0

    def state(self) -> dict[str, Any]:
        """Returns how far the present question is, or the answer to the last one."""
        return {
            "state": self._state,
            "progress": self._progress,
            "phase": self._phase,
            "message": self._message,
            "result": self._result,
        }

    async def base(self) -> dict[str, Any]:
        """Returns the what-if file of the application as it runs now, with facts and problems. `base` is the name by
        which a question says that it is about this file.
        """
        self._claim()
        base = secrets.token_hex(8)
        try:
            folder = self._made(base)
            arguments = ["simulate", "--from-live", self._url, "--only-write", "--write", str(folder)]
            try:
                found = await self._commands.ask_json([*arguments, "--watch", str(WATCH_S)], DESCRIBE_S)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._forget()
        finally:
            self._busy = False
        return {"base": base, **{key: found[key] for key in ("text", "facts", "problems", "measured")}}

    async def start(self, text: str, changes: object, base: object = None) -> dict[str, Any]:
        """Begins to simulate the file with its changes; `base` names the base that it was made of, if any.

        What was measured stands beside the answer if the file still is that base. Raises RunError 409 while another
        question is open, 400 for changes that no file can have, and 404 for a base that is not kept.
        """
        variants = checked(changes)
        self._claim()
        try:
            folder = self._of(base)
            (folder / QUESTION).write_text(text, "utf-8")
            (folder / CHANGES).write_text(json.dumps(variants), "utf-8")
            (folder / ANSWER).unlink(missing_ok=True)
        except OSError as error:
            self._busy = False
            raise RunError(
                507, f"nothing can be written to {self._folder}: {error.strerror or error}; make room"
            ) from error
        except RunError:
            self._busy = False
            raise
        self._number += 1
        self._stopped = False
        self._state, self._progress, self._phase, self._message, self._result = (
            "running",
            0.0,
            "starting",
            None,
            None,
        )
        self._task = asyncio.create_task(self._simulate(folder), name="what if")
        return {"id": str(self._number)}

    def _claim(self) -> None:
        if self._busy:
            raise RunError(409, "another what-if question is open: wait for its answer, or stop it")
        self._busy = True

    def _made(self, name: str) -> Path:
        """Makes the folder of a base. Raises RunError 507 if it cannot be made."""
        folder = self._folder / name
        try:
            for one in (self._folder.parent, self._folder, folder):
                make_private(one)
        except OSError as error:
            raise RunError(507, f"{folder} cannot be made: {error}") from error
        return folder

    def _of(self, base: object) -> Path:
        """Returns the folder of a base that was read, or the one for files that name none. Raises RunError."""
        if base is None:
            return self._made(BY_HAND)
        if not isinstance(base, str) or not _BASE.fullmatch(base):
            raise RunError(400, "base must be the name of a base that this server has read")
        folder = self._folder / base
        if not folder.is_dir() or folder.is_symlink():
            raise RunError(404, f"this base is not kept any more ({MOST_BASES} are): read it anew")
        os.utime(folder)
        return folder

    def _forget(self) -> None:
        """Removes the bases that were not used for the longest time, down to MOST_BASES."""
        # another server that has the same folder may remove them, too
        with contextlib.suppress(OSError):
            kept = [one for one in self._folder.iterdir() if _BASE.fullmatch(one.name)]
            for old in sorted(kept, key=lambda one: one.stat().st_mtime_ns)[:-MOST_BASES]:
                shutil.rmtree(old, ignore_errors=True)

    async def _simulate(self, folder: Path) -> None:
        try:
            await self._run(folder)
        except RunError as error:
            self._state, self._message = "failed", str(error)
        except Exception as error:
            log.exception("a what-if question cannot be answered")
            self._state, self._message = "failed", f"this cannot be answered: {error!r}"
        finally:
            self._busy = False

    async def _run(self, folder: Path) -> None:
        arguments = ["simulate", str(folder / QUESTION), "--changes", str(folder / CHANGES), "--files-here"]
        arguments += ["--json", str(folder / ANSWER), "--jobs", "1", "--progress-json"]
        pipe = asyncio.subprocess.PIPE
        process = self._process = await spawn(
            arguments, self._access, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        assert process.stdout is not None
        errors = asyncio.create_task(drained(process.stderr, MOST_ERROR_BYTES))
        try:
            if self._stopped:
                raise RunError(400, STOPPED)
            async with asyncio.timeout(SIMULATE_S):
                while line := await process.stdout.readline():
                    self._heard(line)
                status = await process.wait()
            told = said(await errors)
        except TimeoutError:
            raise RunError(
                504,
                f"the simulation took longer than {SIMULATE_S:g} s: simulate fewer engines, requests or changes",
            ) from None
        finally:
            errors.cancel()
            self._process = None
            await end(process)
        if status != 0:
            raise RunError(400, told or STOPPED)
        self._result = answer_of(await asyncio.to_thread(_read, folder / ANSWER))
        self._state, self._progress, self._phase = "done", 1.0, ""

    def _heard(self, line: bytes) -> None:
        try:
            told = json.loads(line)
            self._progress, self._phase = float(told["progress"]), str(told["phase"])
        except (ValueError, KeyError, TypeError):
            # no line of progress
            return

    async def stop(self) -> None:
        """Ends the present question, if one is open, also while its process is being started. Idempotent."""
        self._stopped = True
        if self._process is not None:
            await end(self._process)
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def close(self) -> None:
        """Ends everything, at the end of the server."""
        await self.stop()
        await self._commands.close()


def checked(changes: object) -> list[dict[str, Any]]:
    """Returns the changes as variants of a what-if file. Raises RunError 400 for anything else."""
    if changes is None:
        return []
    if not isinstance(changes, list) or len(changes) > MOST_CHANGES:
        raise RunError(400, f"changes must be a list of at most {MOST_CHANGES} changes")
    found: list[dict[str, Any]] = []
    for one in changes:
        if not isinstance(one, dict) or set(one) != {"name", "set"}:
            raise RunError(
                400, 'each change has a name and what it sets: {"name": "..", "set": {PATH: VALUE}}'
            )
        name, values = one["name"], one["set"]
        if not isinstance(name, str) or not 0 < len(name) <= 80 or name == "base":
            raise RunError(400, "a change needs a name of at most 80 characters that is not `base`")
        if any(name == other["name"] for other in found):
            raise RunError(400, f"two changes are called {name!r}")
        if not isinstance(values, dict) or not values:
            raise RunError(400, f"change {name!r} sets nothing")
        wrong = next((path for path in values if not _PATH.fullmatch(path)), None)
        if wrong is not None:
            raise RunError(
                400,
                f"change {name!r}: {wrong[:80]!r} is no path of keys such as cluster.engines.decode.count",
            )
        found.append({"name": name, "set": values})
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found: dict[str, Any] = json.loads(file.read(_MOST_ANSWER_BYTES))
    except (OSError, ValueError) as error:
        raise RunError(500, f"the simulation left no answer: {error}") from error
    return found


def answer_of(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the page shows of the answer that `sluice simulate --json` wrote."""
    means: Mapping[str, Mapping[str, float | None]] = whole["means"]
    measured: Mapping[str, float | None] = whole.get("measured") or {}
    shown: Sequence[str] = [
        name for name in whole["figures"] if any(means[column].get(name) is not None for column in means)
    ]
    nothing = {
        "ok": False,
        "text": "nothing was measured of this file: it was not made from what runs, or was changed since",
    }
    return {
        "measured": {name: measured.get(name) for name in shown},
        "trust": whole.get("trust") or nothing,
        "columns": [
            {"name": column, "figures": {name: values.get(name) for name in shown}}
            for column, values in means.items()
        ],
        "labels": {name: whole["figures"][name] for name in shown},
    }
