"""A run that is killed: no process of it stays, and what had finished is kept."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT

PROGRAM = """
import sys
from benchmarks import __main__ as program
from benchmarks.experiments import registry
from benchmarks.experiments.base import Variant
from tests.benchmarks import toy_experiment as toy

registry.EXPERIMENTS["toy"] = toy.__name__
log = {"log": sys.argv[1] + "/log", "customers": 50}
toy.variants = lambda quick: [
    Variant("done", {"rho": 0.2, **log}),
    Variant("stays", {"rho": 0.3, "stays_on": 0, **log}),
    Variant("stays too", {"rho": 0.4, "stays_on": 0, **log}),
    Variant("never begun", {"rho": 0.5, **log}),
]
sys.exit(program.main(["run", "toy", "--seeds", "1", "--jobs", "2", "--out", sys.argv[1]]))
"""
# Only a test that fails waits this long.
LONGEST_S = 60.0


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_killed_run_leaves_no_process_and_keeps_what_had_finished(tmp_path, how, code):
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: begun(tmp_path) == ["0.2 0", "0.3 0", "0.4 0"] and len(kept(tmp_path)) == 1)
        # it and its workers, which stay for ten minutes if nothing ends them
        assert len(alive(run.pid)) >= 3
        os.kill(run.pid, how)
        printed, _ = run.communicate(timeout=LONGEST_S)
        until(lambda: not alive(run.pid))
    finally:
        for process in alive(run.pid):
            os.kill(process, signal.SIGKILL)
    assert run.returncode == code
    assert "Traceback" not in printed
    assert how == signal.SIGKILL or "finished runs are kept" in printed
    assert begun(tmp_path) == ["0.2 0", "0.3 0", "0.4 0"]
    [done] = kept(tmp_path)
    assert json.loads(done.read_text())["config"]["rho"] == 0.2


def begun(folder: Path) -> list[str]:
    """The runs that have begun, by load and seed."""
    log = folder / "log"
    return sorted(log.read_text().splitlines()) if log.exists() else []


def kept(folder: Path) -> list[Path]:
    return list((folder / "runs" / "toy").glob("*.json"))


def alive(session: int) -> list[int]:
    """Processes of a session; one that nobody has collected yet (a zombie) has ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        state, of = after_name[0], int(after_name[3])
        if of == session and state not in "ZX":
            found.append(int(folder.name))
    return found


def until(holds) -> None:
    last_s = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < last_s, "it did not happen in time"
        time.sleep(0.05)
