"""The CPU of replicas: found by their sockets, and counted with the processes below them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.drain import SUFFIX
from benchmarks.live.idle import DRAIN_SUFFIX, idle_cores, replicas

REPLICA = """
import socket, subprocess, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
below = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=subprocess.PIPE)
print("listens", flush=True)
sys.stdin.read()
below.kill()
below.wait()
"""
"""A process that listens at a socket, with one below it that runs the code of the second argument."""
BUSY, IDLE = "while True: pass", "import sys; sys.stdin.read()"


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[dict[str, int]]:
    """The process ids of two engines' replicas, of which the first one computes, and of an ingress."""
    pids: dict[str, int] = {}
    with ExitStack() as stack:
        for name, code in (("d-1.drain", BUSY), ("d-2.drain", IDLE), ("d-2.sock", IDLE)):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", REPLICA, str(tmp_path / name), code],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            assert process.stdin is not None and process.stdout is not None
            stack.callback(process.stdin.close)
            assert process.stdout.readline() == b"listens\n"
            pids[name] = process.pid
        yield pids


def test_replicas_are_found_by_the_names_of_their_sockets_in_the_folder(
    listening: dict[str, int], tmp_path: Path
) -> None:
    assert DRAIN_SUFFIX == SUFFIX
    wanted = {"d-1": listening["d-1.drain"], "d-2": listening["d-2.drain"]}
    assert replicas(os.getpid(), tmp_path) == wanted
    assert replicas(os.getpid(), tmp_path / "other") == {}


def test_what_runs_below_a_replica_is_its_own(listening: dict[str, int], tmp_path: Path) -> None:
    engines, end_s = replicas(os.getpid(), tmp_path), time.monotonic() + 60.0
    while (cores := idle_cores(engines, 0.2))["d-1"] < 0.01:
        # on a busy machine it may not have run yet
        assert time.monotonic() < end_s
    assert cores["d-2"] < cores["d-1"]
