"""The program of a pre-warmed process: `main` imports, waits at a unix socket, and becomes the worker that Ray starts.

Its imports give way to all other work (`actors.background`). It has those of Ray's worker and of an engine's replica
(`REPLICA`), and what it waits with beside them is the kind's own (`actors.engine.registry`, `EngineKind.prewarm`). It
ends when the keeper that made it ends, or its engine core's process does.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from actors import background, garbage
from actors.engine.registry import ENGINES, Prewarmed
from actors.engine.weights.ahead import read_ahead
from actors.environment import change
from app.config import ModelConfig
from app.groups import EngineConfig
from app.prewarmed.launcher import ANSWER_S, GO, READY, STARTING, SUFFIX
from app.strict import Strict

_PR_SET_PDEATHSIG = 1
_LENGTH_BYTES = 4

REPLICA = (
    "uvloop",
    "anyio._backends._asyncio",
    "ray._common.pydantic_compat",
    "ray._private.arrow_serialization",
    "ray._private.authentication.grpc_authentication_server_interceptor",
    "ray._private.workers.default_worker",
    "ray.serve._private.controller",
    "ray.serve._private.replica",
    "app.replicas",
    "app.models",
    "actors.engine.report",
    "actors.engine.server",
    "actors.engine.topology",
    "actors.telemetry.environment",
)
"""The modules from which follows nearly all that Ray's worker, Serve's replica in it and an engine's replica import,
whatever the engine. One that is missing is imported, or missed, when the process is a worker."""


class Settings(Strict):
    """The facts that a pre-warmed process needs: the engine whose imports it does, the cores of its share, and the
    folder in which it waits.
    """

    model: ModelConfig
    engine: EngineConfig
    cores: tuple[int, ...] | None
    folder: str


class Order(NamedTuple):
    """A worker's command, with its environment, its working directory and its standard streams. An empty command tells
    the process to end.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]


class Taken(NamedTuple):
    """The time (Unix) at which a pre-warmed process was taken, the cores for which it was made, and the file that
    stands for it until its engine has started.
    """

    at_s: float
    cores: tuple[int, ...] | None
    mark: str


taken: Taken | None = None
"""Set in a process that was pre-warmed."""


def main(text: str) -> None:
    """Runs the process with its `Settings` as JSON. Ends with status 1 if its engine core's process ends."""
    settings = Settings.model_validate_json(text)
    with background.work():
        prepared = prepare(settings)
        import_all(REPLICA)
        # what is there now never becomes garbage, and each collection of the start to come would walk it
        garbage.settle()
    path = Path(settings.folder, f"{os.getpid()}{SUFFIX}")
    order = wait(path, prepared)
    if order is None:
        sys.exit(1)
    become(order, settings.cores, path.with_suffix(STARTING))


def started() -> None:
    """Lets the keeper replace this process, if it was pre-warmed: its engine has started."""
    if taken is not None:
        Path(taken.mark).unlink(missing_ok=True)


def prepare(settings: Settings) -> Prewarmed:
    """Does the imports of an engine of this kind, and returns what waits with them."""
    kind, model = ENGINES[settings.engine.kind], settings.model
    assert kind.prewarm is not None
    files, known = model.served_name, {} if settings.cores is None else {"cores": settings.cores}
    if kind.loads_model:
        from app.models import resolve

        files = str(resolve(model.path))
        if settings.engine.options.get("weights_from") != "peer":
            read_ahead(Path(files))
    return kind.prewarm(settings.engine.engine_config("prewarmed", files, model.served_name, **known))


def import_all(modules: tuple[str, ...]) -> None:
    """Imports `modules`, without those that are not installed."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def wait(path: Path, prepared: Prewarmed) -> Order | None:
    """Waits at a socket at `path` until a launcher comes, and returns its order; None if `prepared` has ended, or the
    pool has told this process to.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # it appears under its name only when it listens
        made = path.with_suffix(".new")
        made.unlink(missing_ok=True)
        listener.bind(str(made))
        listener.listen()
        made.rename(path)
        try:
            while True:
                ready, _, _ = select.select([listener, prepared], [], [])
                if prepared in ready:
                    return None
                launcher, _ = listener.accept()
                with launcher:
                    launcher.settimeout(ANSWER_S)
                    with contextlib.suppress(OSError, ValueError):
                        order = heard(launcher)
                        if order is not None and not order.command:
                            return None
                        if order is not None:
                            path.rename(path.with_suffix(STARTING))
                            return order
        finally:
            path.unlink(missing_ok=True)


def heard(launcher: socket.socket) -> Order | None:
    """Returns the order of a launcher; None if it has gone before the order was confirmed. Raises OSError or
    ValueError.
    """
    header, streams, _, _ = socket.recv_fds(launcher, _LENGTH_BYTES, 3)
    try:
        text = bytearray()
        while len(text) < int.from_bytes(header, "big"):
            part = launcher.recv(1 << 16)
            if not part:
                return None
            text += part
        told = json.loads(text)
        order = Order(told["command"], told["environment"], told["folder"], list(streams))
        launcher.sendall(READY)
        if launcher.recv(1) == GO:
            streams = []
            return order
        return None
    finally:
        for stream in streams:
            os.close(stream)


def become(order: Order, cores: tuple[int, ...] | None, mark: Path) -> None:
    """Runs a worker's command in this process, which does not die with its keeper any more. The file `mark` is removed
    when its engine has started.
    """
    global taken
    taken = Taken(time.time(), cores, str(mark))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    change(order.environment)
    os.chdir(order.folder)
    for number, stream in enumerate(order.streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv[:] = order.command
    # as Python does for a script
    sys.path.insert(0, os.path.dirname(os.path.abspath(order.command[0])))
    runpy.run_path(order.command[0], run_name="__main__")
