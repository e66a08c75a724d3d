"""A pre-warmed process of a kind of engine whose imports take no time, and what it needs to be started by."""

import os
import subprocess
import time
from pathlib import Path

from actors.engine.vllm import plugin
from app.config import ModelConfig
from app.groups import EngineConfig
from app.prewarmed import launcher
from app.prewarmed.pool import start_process
from app.prewarmed.process import Settings

ROOT = Path(__file__).parents[3]

# The engine to come holds one end of a pair of sockets, whose other end is closed when the file END appears.
CODE = """
import dataclasses, os, socket, sys, threading, time
from actors.engine.registry import ENGINES
from app.prewarmed import process
mine, other = socket.socketpair()
def end():
    while not os.path.exists(os.environ["END"]): time.sleep(0.01)
    other.close()
threading.Thread(target=end, daemon=True).start()
ENGINES["sim"] = dataclasses.replace(ENGINES["sim"], prewarm=lambda config: mine)
# as idle work, Ray's would take minutes on a busy machine
process.REPLICA = ("wave", "no_such_module")
process.main(sys.argv[1])
"""


def started(folder: Path, cores: tuple[int, ...] | None = None) -> "subprocess.Popen[bytes]":
    """Starts a process that is to wait in `folder` and dies with this one."""
    settings = Settings(
        model=ModelConfig(path=str(folder)),
        engine=EngineConfig(name="e", role="decode", kind="sim"),
        cores=cores,
        folder=str(folder),
    )
    environment = {**os.environ, plugin.PARENT_ENV: str(os.getpid()), "END": str(folder / "end")}
    return start_process(plugin.spawned_child_code() + CODE, settings.model_dump_json(), environment)


def socket_of(folder: Path, pid: int) -> Path:
    return folder / f"{pid}{launcher.SUFFIX}"


def until_waiting(folder: Path, pid: int) -> None:
    until(lambda: socket_of(folder, pid).exists(), f"process {pid} waits")


def until(holds: object, what: str, seconds: float = 60.0) -> None:
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)
