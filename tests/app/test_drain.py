"""The command that drains a node: the replicas of this machine in processes of their own, told over their sockets."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.drain import DrainPoint, drain_node
from tests.app.ingress.rig import Rig, pair, rig, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, pair(tmp_path)) as running:
        yield running


async def run(directory: Path, seconds: float) -> tuple[int, str]:
    """Exit status and output of the command in a process of its own."""
    command = [sys.executable, "-m", "app.drain", "--seconds", str(seconds), "--socket-dir", str(directory)]
    done = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    out, _ = await done.communicate()
    return done.returncode or 0, out.decode()


async def test_an_ingress_completes_its_answers_and_takes_no_new_connection(
    made: Rig, tmp_path: Path
) -> None:
    directory = tmp_path / "sockets"
    point = DrainPoint(str(directory), "ingress-a", lambda seconds: made.listener.stop(drain_s=seconds))
    await point.start()
    made.engines["p"].auto = False
    held = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
    await until(lambda: made.app.in_flight == 1, "a running request")
    told = asyncio.create_task(run(directory, 60.0))
    await until(lambda: made.app.draining, "the drain")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", made.listener.port)
    assert not told.done()
    made.engines["p"].finish_prefill(next(iter(made.engines["p"].live)))
    assert (await held).status_code == 200
    status, said = await told
    assert (status, "ingress-a drained after" in said) == (0, True)
    await point.stop()
    assert list(directory.iterdir()) == []


async def test_two_requests_to_drain_are_one_drain(tmp_path: Path) -> None:
    begun: list[float] = []
    end = asyncio.Event()

    async def drain(seconds: float) -> None:
        begun.append(seconds)
        await end.wait()

    point = DrainPoint(str(tmp_path), "engine-a", drain)
    await point.start()
    said: list[str] = []
    both = asyncio.gather(*(drain_node(str(tmp_path), 7.0, said.append) for _ in range(2)))
    await until(lambda: begun, "the drain")
    end.set()
    assert await both == [True, True]
    assert begun == [7.0]
    await point.stop()


async def test_a_replica_that_does_not_answer_in_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.drain.ANSWER_MARGIN_S", 0.1)
    never = asyncio.Event()
    point = DrainPoint(str(tmp_path), "engine-a", lambda _: never.wait())
    await point.start()
    said: list[str] = []
    assert await drain_node(str(tmp_path), 0.1, said.append) is False
    assert said[0].startswith("engine-a did not drain")
    never.set()
    await point.stop()


def leave_a_socket(path: Path) -> None:
    """Has a process listen at `path` and end without removing its socket."""
    script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)


async def test_the_socket_of_a_dead_replica_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "engine-a.drain"
    leave_a_socket(path)
    assert path.exists()
    said: list[str] = []
    assert await drain_node(str(tmp_path), 1.0, said.append) is True
    assert not path.exists()
    assert "nothing to drain" in said[0]
