"""A process that waits becomes the worker that Ray starts; where none does, the worker is started as ever."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.prewarmed import launcher, process
from tests.app.prewarmed.waiting import ROOT, socket_of, started, until, until_waiting
from tests.processes import ended

WORKER = """
import ctypes, gc, json, os, setproctitle, signal, sys
setproctitle.setproctitle("ray::worker")
with open("/proc/self/cmdline") as file: title = file.read().strip(chr(0))
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)  # PR_GET_PDEATHSIG
if "app.prewarmed.process" in sys.modules:
    process = sys.modules["app.prewarmed.process"]
    taken = list(process.taken)
    marked = [os.path.exists(process.taken.mark)]
    process.started()
    marked.append(os.path.exists(process.taken.mark))
else:
    taken = marked = None
print(json.dumps({
    "pid": os.getpid(), "arguments": sys.argv, "name": __name__, "folder": os.getcwd(), "path": sys.path[0],
    "environment": dict(os.environ), "death": death.value, "taken": taken, "main": sys.modules["__main__"].__file__,
    "error": sys.stdin.read(), "title": title, "policy": os.sched_getscheduler(0), "marked": marked,
    "ahead": "wave" in sys.modules, "frozen": gc.get_freeze_count(),
}), flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    file = tmp_path / "worker" / "worker.py"
    file.parent.mkdir()
    file.write_text(WORKER)
    return file


@pytest.fixture
def waiting(tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that waits in `tmp_path`."""
    process = started(tmp_path, (0, 3))
    try:
        until_waiting(tmp_path, process.pid)
        yield process
    finally:
        process.kill()
        process.wait()


# A waiting process that does not get its core for a while is waited for, except where a test stops it.
PATIENT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import launcher
launcher.ANSWER_S = 60.0
sys.exit(launcher.main(sys.argv))
"""


def launched(folder: Path, worker: Path, patient: bool = True) -> dict[str, Any]:
    """Returns what a worker says that Ray would have started, with the launcher's process id added."""
    script = ["-c", PATIENT, str(Path(launcher.__file__).parent)] if patient else [launcher.__file__]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", *script, str(folder), str(worker), "--token=7", "a b"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "RAY_TOKEN": "of the worker"},
        cwd=worker.parent,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"its input")
    process.stdin.close()
    # not to the end: a process that stands still may hold the other end, too
    told: dict[str, Any] = json.loads(process.stdout.readline())
    assert process.wait(60) == 0
    process.stdout.close()
    return told | {"launcher": process.pid}


def same(told: dict[str, Any], worker: Path) -> None:
    """Checks all that holds for a worker however it was started."""
    assert told["arguments"] == [str(worker), "--token=7", "a b"]
    assert (told["name"], told["main"], told["path"]) == ("__main__", str(worker), str(worker.parent))
    assert (told["folder"], told["error"]) == (str(worker.parent), "its input")
    assert told["environment"]["RAY_TOKEN"] == "of the worker"
    assert told["title"] == "ray::worker"
    assert (told["death"], told["policy"]) == (0, os.SCHED_OTHER)


def test_without_a_waiting_process_the_launcher_is_the_worker(tmp_path: Path, worker: Path) -> None:
    told = launched(tmp_path / "empty", worker, patient=False)
    same(told, worker)
    assert told["pid"] == told["launcher"]


def test_a_waiting_process_becomes_the_worker(
    tmp_path: Path, worker: Path, waiting: "subprocess.Popen[bytes]"
) -> None:
    told = launched(tmp_path, worker)
    same(told, worker)
    assert told["pid"] == waiting.pid
    # nothing of its own environment is left
    assert "END" not in told["environment"]
    assert told["taken"][1] == [0, 3]
    assert not socket_of(tmp_path, waiting.pid).exists()
    # its keeper could see that an engine starts in it, until that had started
    assert told["marked"] == [True, False]
    # it has imported ahead, and no collection walks that
    assert told["ahead"]
    assert told["frozen"] > 0
    assert launched(tmp_path, worker)["pid"] != waiting.pid


def test_all_that_a_worker_imports_ahead_is_there() -> None:
    """A missing module is passed over silently: another version of Ray shall not end all pre-warmed processes."""
    missing = [name for name in process.REPLICA if importlib.util.find_spec(name) is None]
    assert not missing


def test_a_process_that_was_killed_is_passed_over(
    tmp_path: Path, worker: Path, waiting: "subprocess.Popen[bytes]"
) -> None:
    waiting.kill()
    waiting.wait()
    assert socket_of(tmp_path, waiting.pid).exists()
    told = launched(tmp_path, worker)
    same(told, worker)
    assert told["pid"] == told["launcher"]


def test_a_process_that_stands_still_is_passed_over_and_waits_on(
    tmp_path: Path, worker: Path, waiting: "subprocess.Popen[bytes]"
) -> None:
    waiting.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(waiting.pid).status() == psutil.STATUS_STOPPED, "it stands still")
    told = launched(tmp_path, worker, patient=False)
    assert told["pid"] == told["launcher"]
    waiting.send_signal(signal.SIGCONT)
    told = launched(tmp_path, worker)
    same(told, worker)
    assert told["pid"] == waiting.pid


def test_a_process_whose_core_has_ended_ends(tmp_path: Path, waiting: "subprocess.Popen[bytes]") -> None:
    (tmp_path / "end").touch()
    assert waiting.wait(60) == 1
    assert not socket_of(tmp_path, waiting.pid).exists()


KEEPER = """
import sys
from pathlib import Path
from tests.app.prewarmed.waiting import started
process = started(Path(sys.argv[1]))
print(process.pid, flush=True)
process.wait()
"""


def test_a_waiting_process_dies_with_its_keeper(tmp_path: Path) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert keeper.stdout is not None
    pid = int(keeper.stdout.readline())
    until_waiting(tmp_path, pid)
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()
    until(lambda: ended(pid), "it has ended")
