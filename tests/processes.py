"""Questions about processes that may end at any moment."""

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil


def ended(pid: int) -> bool:
    """A process that nobody has collected yet (a zombie) has ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def still_running(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Processes that have not ended within the time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        alive = [p for p in processes if p.is_running() and not ended(p.pid)]
        if not alive or time.monotonic() > deadline_s:
            return alive
        time.sleep(0.1)


def command_line(process: psutil.Process) -> str:
    """The command line of a process; "" for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def name_of(process: psutil.Process) -> str:
    """The name of a process; "" for one that has just ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kills these processes; the death of one may end others before their turn."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
