"""An event when an experiment on this application begins, and one when it ends, whoever has started it.

A look once a second at the folders of runs, that of the dashboard and that of the command `sluice experiment`, finds
both. Not seen are runs in another folder or on another machine; what they change is seen all the same
(`app.dashboard.policies`).
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from app.dashboard.engines import Happened
from app.dashboard.store import RunError, RunStore, same_server

log = logging.getLogger("ray.serve.dashboard")

LOOK_S = 1.0
MOST_TEXT = 200
"""Most characters of a run's name, and of why it ended, in an event."""

Marked = Callable[[float, Happened], None]
"""Takes an event and its Unix time."""


@dataclass(slots=True)
class _Folder:
    """One folder of runs: those that were read (None before the first look), those of them that run on this
    application, and why the folder could not be read the last time.
    """

    store: RunStore
    known: set[str] | None = None
    running: set[str] = field(default_factory=set)
    failure: str = ""


class RunMarks:
    """Watches the runs in `stores` on the application whose ingress is at `url`. `marked` takes the events."""

    def __init__(self, stores: Iterable[RunStore], url: str, marked: Marked) -> None:
        self._folders = [_Folder(store) for store in {store.folder: store for store in stores}.values()]
        self._marked = marked
        self._url = url
        self._here = local_names()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look in the background."""
        self._task = asyncio.create_task(self._watch(), name="marks of experiments")

    def stop(self) -> None:
        """Ends the looking. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self) -> None:
        while True:
            try:
                for at, happened in await asyncio.to_thread(self.look):
                    self._marked(at, happened)
            except Exception:
                log.exception("the look for experiments failed; it is tried again in %g s", LOOK_S)
            await asyncio.sleep(LOOK_S)

    def look(self) -> list[tuple[float, Happened]]:
        """Returns what has begun and ended since the last look, with its Unix time. The first look only learns what
        there is: what runs already has begun before.
        """
        found: list[tuple[float, Happened]] = []
        for folder in self._folders:
            try:
                found += self._look(folder)
                folder.failure = ""
            except RunError as error:
                # it is said once, and not each second
                if str(error) != folder.failure:
                    log.warning("experiments leave no marks: %s", error)
                folder.failure = str(error)
        return found

    def _look(self, folder: _Folder) -> Iterator[tuple[float, Happened]]:
        """Yields the events of one folder. Raises RunError if it cannot be read."""
        ids = folder.store.ids()
        first = folder.known is None
        known = folder.known = (folder.known or set()) & set(ids)
        folder.running &= known
        for run_id in reversed(ids):
            is_new = run_id not in known
            if not is_new and run_id not in folder.running:
                continue
            try:
                run = folder.store.read(run_id)
            except RunError:
                # it was deleted meanwhile
                continue
            began_at = run.get("began_at")
            if not isinstance(began_at, int | float):
                # its file is not there yet, or cannot be read now
                continue
            known.add(run_id)
            if not self._is_ours(run):
                continue
            if is_new and not first:
                yield began_at, Happened("experiment", f"experiment {_name(run)} began ({run_id})")
            if run.get("state") == "running":
                folder.running.add(run_id)
            elif not is_new or not first:
                folder.running.discard(run_id)
                yield time.time(), _ended(run)

    def _is_ours(self, run: dict[str, Any]) -> bool:
        """Returns whether a run's load goes to this application; this machine has several names."""
        return same_server(run.get("url"), self._url, self._here)


def _name(run: dict[str, Any]) -> str:
    return str(run.get("name"))[:MOST_TEXT]


def _ended(run: dict[str, Any]) -> Happened:
    state, message = run.get("state"), run.get("message")
    why = f" ({str(message)[:MOST_TEXT]})" if message else ""
    text = f"experiment {_name(run)} ended: {state}{why}"
    return Happened("experiment", text, "warn" if state == "failed" else "info")


def local_names() -> frozenset[str]:
    """Returns the names and addresses by which this machine reaches itself, without asking a name server."""
    addresses = {address.address for each in psutil.net_if_addrs().values() for address in each}
    return frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname().lower(), *addresses})
