"""scripts/reap.py: nothing that its command started outlives it, whatever way it tried to escape."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "reap.py"
ESCAPES = {
    "background": "sleep 600 & echo $!",
    "own session": "setsid sleep 600 & echo $!",
    "deaf to SIGTERM": "(trap '' TERM; exec sleep 600) & echo $!",
}


def start(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, "bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("escape", sorted(ESCAPES))
def test_leftovers_are_ended_and_named(escape: str) -> None:
    process = start(f"{ESCAPES[escape]}; sleep 0.3; exit 7")
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 7
    assert not alive(int(printed))
    assert "left behind" in errors
    assert printed.strip() in errors


def test_status_and_silence_of_a_clean_command() -> None:
    process = start("exit 0")
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_termination_ends_the_descendants_too() -> None:
    process = start("setsid sleep 600 & echo $!; wait")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not alive(pid)


def test_an_orphan_that_ends_meanwhile_is_collected() -> None:
    """A waiting ancestor must not leave zombies: tests look whether processes have gone."""
    process = start("bash -c 'sleep 0.2 & echo $!'; sleep 600")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    gone = not Path(f"/proc/{pid}").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert gone
