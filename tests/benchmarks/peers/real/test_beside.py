"""The program that runs a server beside an idle Ray, and what it makes of an end of either."""

import subprocess
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.live.measure import tree_state
from benchmarks.live.servers import Command, running
from benchmarks.peers.real import beside
from benchmarks.peers.sides import Ticks, bare


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that last, one of them as the server and one as Ray's."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield started
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.parametrize(("ends", "said"), [(0, "the server, with status -9"), (1, "process {pid} of Ray")])
def test_the_end_of_the_server_and_of_ray_are_both_noticed(
    sleepers: list[subprocess.Popen[bytes]], ends: int, said: str
) -> None:
    server, member = sleepers
    process = psutil.Process(member.pid)
    sleepers[ends].kill()
    assert beside.watch(server, [process]) == said.format(pid=member.pid)


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert beside.main([]) == 2
    assert "python -m benchmarks.peers.real.beside" in capsys.readouterr().err


@pytest.mark.live
@pytest.mark.timeout(400)
def test_a_server_runs_beside_a_ray_of_its_own_and_both_end() -> None:
    """`running` raises if a process or a listener is left, and ends no process outside the tree."""
    said: list[str] = []
    server = bare(Ticks(1e-3))
    argv = [server.argv[0], "-m", "benchmarks.peers.real.beside", *server.argv]
    command = Command("a server beside an idle Ray", argv, server.port, timeout_s=240.0)
    with running(command, said.append) as started:
        roles = tree_state(started, 0.1).memory
        assert {"launcher", "decode source", "gcs", "raylet"} <= set(roles)
    assert said[-1] == "a server beside an idle Ray: stopped, its ports are free"
