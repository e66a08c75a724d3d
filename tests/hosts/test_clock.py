"""The clock of `clock`: readings and deadlines of a process that has it, compared with this process's own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.clock import LIBRARY, compilation, environment, needs_compiler, set_offset

pytestmark = needs_compiler

WAIT_S = 0.05
PROGRAM = f"""
import ctypes, datetime, platform, threading, time

libc = ctypes.CDLL(None, use_errno=True)
FUTEX = {{"x86_64": 202, "aarch64": 98}}[platform.machine()]
WAIT_BITSET_REALTIME, EVERY = 9 | 256, 2**32 - 1
TIMED_OUT = 110

class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]

def soon():
    return ctypes.byref(Timespec(*divmod(time.time_ns() + {int(WAIT_S * 1e9)}, 10**9)))

def semaphore():
    assert libc.sem_timedwait(ctypes.create_string_buffer(64), soon()) == -1
    assert ctypes.get_errno() == TIMED_OUT

def condition():
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    assert libc.pthread_cond_timedwait(ctypes.create_string_buffer(64), mutex, soon()) == TIMED_OUT

def futex():
    long = ctypes.c_long
    word = ctypes.create_string_buffer(8)
    libc.syscall(long(FUTEX), word, long(WAIT_BITSET_REALTIME), long(0), soon(), None, long(EVERY))
    assert ctypes.get_errno() == TIMED_OUT

def lock():
    held = threading.Lock()
    held.acquire()
    assert not held.acquire(timeout={WAIT_S})

waits = [semaphore, condition, futex, lock, lambda: time.sleep({WAIT_S})]
while input():
    readings = [time.time(), time.time_ns() / 1e9, datetime.datetime.now().timestamp()]
    monotonic_s, waited_s = time.monotonic(), []
    for wait in waits:
        began_s = time.monotonic()
        wait()
        waited_s.append(time.monotonic() - began_s)
    print(*readings, monotonic_s, *waited_s, flush=True)
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A Python process with a clock of its own, at `tmp_path / "clock"`; it answers each line with its readings."""
    library, file = tmp_path / LIBRARY, tmp_path / "clock"
    subprocess.run(compilation(library), check=True)
    set_offset(file, 0)
    env = dict(os.environ) | environment(library, file)
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        yield running
        running.kill()


def test_a_process_sees_its_wall_clock_jump_and_waits_as_long_as_ever(
    process: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    for offset_s in (0, 3600, -3600, 0):
        set_offset(tmp_path / "clock", offset_s)
        before_s, monotonic_before_s = time.time(), time.monotonic()
        process.stdin.write("go\n")
        process.stdin.flush()
        answer = [float(word) for word in process.stdout.readline().split()]
        after_s, monotonic_after_s = time.time(), time.monotonic()
        assert len(answer) == 9, f"the process ended at an offset of {offset_s} s"
        for wall_s in answer[:3]:
            # a microsecond for rounding
            assert before_s - 1e-6 <= wall_s - offset_s <= after_s + 1e-6
        assert monotonic_before_s <= answer[3] <= monotonic_after_s
        # no wait ends before its time, and this line is reached: none lasts until the other clock's deadline, either
        assert min(answer[4:]) > 0.9 * WAIT_S
