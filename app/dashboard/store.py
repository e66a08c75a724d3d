"""A folder of experiment runs: that of the command `sluice experiment`, or the one that a dashboard has for itself.

    <folder>/<run>/plan.yaml        the file as it was given
    <folder>/<run>/run.json         what `Run` describes; replaced as a whole
    <folder>/<run>/samples.jsonl    a line a second
    <folder>/<run>/requests.jsonl   a line a request
    <folder>/<run>/actions.jsonl    a line for each thing that was done to the application
    <folder>/<run>/before.json      what is to be put back; it is there exactly as long as that is still to be done

A run's name is made here, and a name that comes from outside is checked here, before it becomes a path.
"""

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import psutil

from actors.private_folder import make_private
from policies.routing.params import Number, Whole, check

PLAN, RUN, SAMPLES, REQUESTS = "plan.yaml", "run.json", "samples.jsonl", "requests.jsonl"
ACTIONS, BEFORE = "actions.jsonl", "before.json"

SHOWN = ("id", "name", "state", "began_at", "took_s", "progress", "phase", "message", "summary")
"""The keys of a run's file that a list of runs shows."""

_RUN_ID = re.compile(r"\d{8}T\d{6}-[a-z0-9][a-z0-9-]{0,39}-[0-9a-f]{6}")
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
_MOST_RUN_BYTES = 1 << 20


class RunError(Exception):
    """A request about runs that cannot be met. `status` is the HTTP status of the answer; the message says what to
    do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class RunsConfig:
    """Bounds on experiments. `folder` holds the runs of one application, which may take `disk_bytes` together (None:
    `runs` in the folder of its dashboard). They are sent to `url`, the public port of an ingress (None: that of this
    machine).

    No phase sends more than `rate_per_s` requests a second, and a whole run lasts `duration_s` at most. Only with
    `may_kill` may an experiment kill engines; it kills processes of this machine and of this user.
    """

    folder: str | None = None
    url: str | None = None
    rate_per_s: Annotated[float, Number(above=0)] = 200.0
    duration_s: Annotated[float, Number(above=0)] = 900.0
    disk_bytes: Annotated[int, Whole(1 << 20)] = 512 << 20
    may_kill: bool = False

    def __post_init__(self) -> None:
        check(self, "dashboard.experiments")
        if self.folder is not None and not os.path.isabs(self.folder):
            raise ValueError(
                f"dashboard.experiments.folder is {self.folder!r}: give an absolute path, because the server runs in a"
                " folder of Ray's"
            )

    def within(self, folder: Path) -> "RunsConfig":
        """Returns the same bounds with a folder: the configured one, or `runs` in the dashboard's `folder`."""
        return self if self.folder is not None else replace(self, folder=str(folder / "runs"))

    def store(self) -> "RunStore":
        """Returns the store of the folder, which need not exist yet; without one `within` gives it."""
        assert self.folder is not None
        return RunStore(Path(self.folder))


def default_folder() -> Path:
    """Returns the folder of the command: SLUICE_RUNS, or the one of this user below XDG_STATE_HOME."""
    given = os.environ.get("SLUICE_RUNS")
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state, "sluice", "experiments")


class RunStore:
    """The runs in `folder`. Every method that takes a run's id raises RunError 404 for one that is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def _restore(self) -> str:
        return f"`sluice experiment restore --runs {self.folder}`"

    def path(self, run_id: str) -> Path:
        """Returns the folder of a run. Raises RunError for a name that no run can have, and for a run that is not."""
        if not _RUN_ID.fullmatch(run_id):
            raise RunError(400, f"{run_id[:80]!r} is no name of a run")
        path = self.folder / run_id
        if not path.is_dir() or path.is_symlink():
            raise RunError(404, f"there is no run {run_id}")
        return path

    def make(self) -> None:
        """Makes the folder, for this user alone. Raises OSError."""
        make_private(self.folder)

    def new(self, name: str) -> tuple[str, Path]:
        """Makes the folder of a new run; returns its id and the folder. Raises RunError if it cannot be made."""
        short = _NOT_IN_NAMES.sub("-", name.lower()).strip("-")[:40].strip("-") or "run"
        run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{short}-{secrets.token_hex(3)}"
        try:
            self.make()
            path = self.folder / run_id
            path.mkdir(mode=0o700)
        except OSError as error:
            raise RunError(
                507,
                f"no run can be kept in {self.folder}: {error.strerror or error}; make room, or set another folder",
            ) from error
        return run_id, path

    def ids(self) -> list[str]:
        """Returns the ids of all runs, newest first."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(503, f"the runs in {self.folder} cannot be read: {error.strerror}") from error
        return sorted((name for name in names if _RUN_ID.fullmatch(name)), reverse=True)

    def read(self, run_id: str) -> dict[str, Any]:
        """Returns the content of a run's file. One whose process has died is shown as failed."""
        path = self.path(run_id) / RUN
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_MOST_RUN_BYTES))
            if not isinstance(found, dict):
                raise ValueError("it is no object")
        except (OSError, ValueError) as error:
            # a run whose first write failed, or a file that somebody has changed
            return {
                "id": run_id,
                "name": run_id,
                "state": "failed",
                "began_at": None,
                "took_s": None,
                "progress": 0.0,
                "phase": "",
                "message": f"its file cannot be read: {error}",
                "summary": None,
            }
        if found.get("state") == "running" and not lives(found.get("pid"), found.get("pid_started")):
            left = (path.parent / BEFORE).exists()
            found["state"] = "failed"
            found["message"] = "its process has died" + (
                f"; what it changed is not put back yet: {self._restore} does that" if left else ""
            )
        return found

    def shown(self, run_id: str) -> dict[str, Any]:
        """Returns a run as lists show it."""
        found = self.read(run_id)
        return {key: found.get(key) for key in SHOWN}

    def all(self) -> list[dict[str, Any]]:
        """Returns all runs as lists show them, newest first."""
        return [self.shown(run_id) for run_id in self.ids()]

    def text(self, run_id: str) -> str:
        """Returns the file of a run as it was given."""
        try:
            return (self.path(run_id) / PLAN).read_text("utf-8", "replace")
        except OSError as error:
            raise RunError(404, f"run {run_id} has kept no file: {error.strerror}") from error

    def delete(self, run_id: str) -> None:
        """Deletes a run. Raises RunError 409 for one that runs, or that has not put back what it changed."""
        path = self.path(run_id)
        if self.read(run_id)["state"] == "running":
            raise RunError(409, f"run {run_id} is running: stop it first")
        if (path / BEFORE).exists():
            raise RunError(
                409,
                f"run {run_id} has not put back what it changed: {self._restore} does that",
            )
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise RunError(503, f"run {run_id} cannot be deleted: {error.strerror}") from error

    def size_bytes(self) -> int:
        """Returns the bytes of all runs together."""
        total = 0
        for run_id in self.ids():
            for place, _, files in os.walk(self.folder / run_id):
                for name in files:
                    try:
                        total += os.lstat(os.path.join(place, name)).st_size
                    except OSError:
                        # deleted meanwhile
                        continue
        return total


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a JSON file as a whole: readers see the old content or the new one, also after a crash."""
    half = path.with_name(path.name + ".part")
    with half.open("w", encoding="utf-8") as file:
        json.dump(content, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(half, path)


def started_s(pid: int) -> float:
    """Returns when a process started, by which it differs from a later one of the same number."""
    return float(psutil.Process(pid).create_time())


def lives(pid: object, pid_started: object) -> bool:
    """Returns whether the process that a run's file names is still there."""
    if not isinstance(pid, int) or not isinstance(pid_started, int | float):
        return False
    try:
        process = psutil.Process(pid)
        # the kernel counts in hundredths of a second, and the boot time may be corrected by as much
        same = abs(process.create_time() - pid_started) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return False


def same_server(one: object, other: str, alike: Set[str] = frozenset()) -> bool:
    """Returns whether two URLs name one server, with or without `/v1`; False for anything that is no URL. The hosts in
    `alike` count as one.
    """
    try:
        return isinstance(one, str) and _server(one, alike) == _server(other, alike)
    except ValueError:
        return False


def _server(url: str, alike: Set[str]) -> tuple[str, str | None, int | None, str]:
    parts = urlsplit(url)
    host = "" if parts.hostname in alike else parts.hostname
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, host, port, parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
