"""Reads the CPU that engine replicas take while nothing comes, each with the processes below it.

A replica is found by the unix socket at which it takes the order to drain, whose name is its engine's id (`app.drain`).
CPU seconds are user + system time, in ticks of 10 ms.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import psutil

DRAIN_SUFFIX = ".drain"
"""The end of that socket's name (`app.drain.SUFFIX`)."""


def replicas(root_pid: int, folder: Path) -> dict[str, int]:
    """Returns the process ids of the replicas below a process by the engine's id; `folder` has their sockets."""
    found: dict[str, int] = {}
    for process in psutil.Process(root_pid).children(recursive=True):
        try:
            paths = [Path(one.laddr) for one in process.net_connections(kind="unix") if one.laddr]
        except psutil.Error:
            # it ended meanwhile
            continue
        own = (path for path in paths if (path.parent, path.suffix) == (folder, DRAIN_SUFFIX))
        found |= {path.stem: process.pid for path in own}
    return found


def idle_cores(engines: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Returns the mean number of cores that each engine takes for `seconds` from now on. `engines` has the process ids
    of their replicas. Raises psutil.NoSuchProcess if one of these has ended.
    """
    before, began_s = {engine: _cpu_s(pid) for engine, pid in engines.items()}, time.perf_counter()
    time.sleep(seconds)
    after, took_s = {engine: _cpu_s(pid) for engine, pid in engines.items()}, time.perf_counter() - began_s
    return {
        engine: sum(cpu_s - before[engine].get(pid, 0.0) for pid, cpu_s in spent.items()) / took_s
        for engine, spent in after.items()
    }


def _cpu_s(pid: int) -> dict[int, float]:
    """Returns the CPU seconds of a process and of each one below it, by process id."""
    root = psutil.Process(pid)
    own = root.cpu_times()
    found = {pid: own.user + own.system}
    for child in root.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        found[child.pid] = times.user + times.system
    return found
