"""Puts back what an experiment changed, whatever ended it: its own process, a guardian beside it, or a later command.

The runner writes `before.json` into the run's folder before its first change and removes it after the last thing is put
back. The guardian is a small process in a session of its own that waits for the end of the runner (its standard input
ends then) and puts back what the file says if it is still there. If the guardian dies too, with the whole machine for
example, `sluice experiment restore` and the start of the dashboard do the same.

Only one of them works on a run at a time: each holds a lock on the file while it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from app.dashboard.store import BEFORE, RUN, RunStore, lives, same_server, write
from benchmarks.live.experiment.control import Control, ControlError
from sluice import SluiceError
from sluice._admin_key import key_of_this_machine

PATIENCE_S = 120.0
"""Longest time for which a guardian tries. ASSUMPTION: a router that has died with the runner is back before."""
AGAIN_S = 2.0
NOT_YET = "what was changed could not be put back yet"
"""The words with which a run ends that leaves this to its guardian."""
DIED = "its process was killed; "


def start(folder: Path, key: str | None) -> subprocess.Popen[bytes]:
    """Starts the guardian of the run in `folder`; it waits until this process has ended, or closes its input."""
    environment = {**os.environ, **({} if key is None else {"SLUICE_ADMIN_KEY": key})}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.live.experiment.guardian", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        # a signal to the runner's group does not reach it
        start_new_session=True,
        cwd=Path(__file__).resolve().parents[3],
    )


def remember(folder: Path, before: dict[str, Any]) -> None:
    """Writes down what is to be put back, before anything is changed."""
    write(folder / BEFORE, before)


def put_back(folder: Path, control: Control | None = None, key: str | None = None) -> list[str]:
    """Puts back what the run in `folder` changed; returns what was done, [] if nothing was left to do.

    Raises ControlError or SluiceError if the application cannot be reached or refuses; the file stays then.
    """
    with _locked(folder / BEFORE) as file:
        if file is None:
            return []
        before = json.load(file)
        own = Control(before["url"], key, before.get("dashboard")) if control is None else control
        try:
            done = own.restore(before)
        finally:
            if control is None:
                own.close()
        (folder / BEFORE).unlink(missing_ok=True)
        return done


def left_over(store: RunStore) -> list[str]:
    """Returns the ids of runs that do not run and have not put back what they changed."""
    found = []
    for run_id in store.ids():
        if (store.folder / run_id / BEFORE).exists() and store.read(run_id)["state"] != "running":
            found.append(run_id)
    return found


def went_to(folder: Path) -> tuple[str, str | None] | None:
    """Returns the URLs of the server and of the dashboard (None without one) that the run in `folder` has changed; None
    if nothing is left to be put back. Raises ValueError for a file that names no server.
    """
    try:
        before = json.loads((folder / BEFORE).read_text("utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(before, dict) or not isinstance(before.get("url"), str):
        raise ValueError(f"{folder / BEFORE} names no server")
    return before["url"], before.get("dashboard")


def key_for(url: str, own: str) -> str | None:
    """Returns the key with which the server at `url` is put back: None, which stands for SLUICE_ADMIN_KEY or the key
    file of this machine, if that is the server at `own`, else the one in the server's key file on this machine.

    SLUICE_ADMIN_KEY is a key of the server at `own`, and no other one may learn it. Raises ControlError if another one
    has no key file here.
    """
    if same_server(url, own):
        return None
    key = key_of_this_machine(url)
    if key is None:
        raise ControlError(
            f"it changed the server at {url}, which gets no key that is meant for {own}: give `--url {url}` with the"
            " server's own key in SLUICE_ADMIN_KEY"
        )
    return key


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[str] | None]:
    """A context that holds the lock of the file; None if there is no file, or its content was put back meanwhile."""
    try:
        file = path.open("r+", encoding="utf-8")
    except FileNotFoundError:
        yield None
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file if path.exists() else None


def note_end(folder: Path, message: str) -> None:
    """Writes into a run's file that its process has died, or has left something, and what was done about it."""
    try:
        found = json.loads((folder / RUN).read_text("utf-8"))
        if found.get("state") == "running" and not lives(found.get("pid"), found.get("pid_started")):
            write(folder / RUN, {**found, "state": "failed", "message": message, "phase": "ended"})
        elif NOT_YET in str(found.get("message")):
            before = str(found["message"]).partition(NOT_YET)[0]
            write(folder / RUN, {**found, "message": f"{before}then {message.removeprefix(DIED)}"})
    except (OSError, ValueError):
        # a full disk, perhaps; the list says by itself that the process has died
        return


def main(argv: list[str]) -> int:
    """Waits for the end of standard input, then puts back what is left to be put back."""
    folder = Path(argv[0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_s = time.monotonic() + PATIENCE_S
    while (folder / BEFORE).exists():
        try:
            done = put_back(folder)
            note_end(folder, DIED + "put back: " + ("; ".join(done) or "nothing had changed"))
        except (SluiceError, ControlError, ValueError, OSError) as error:
            if time.monotonic() > end_s:
                note_end(folder, f"its process was killed, and nothing could be put back: {error}")
                return 1
            time.sleep(AGAIN_S)
    note_end(folder, f"{DIED}there was nothing to put back")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
