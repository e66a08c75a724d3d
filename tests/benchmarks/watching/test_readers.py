"""Readers of the dashboard's stream, over the development server: they take every event and say what they missed."""

import json
import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from benchmarks.live.servers import ROOT, python
from tests.dashboard.server import Server
from tests.dashboard.synthetic import Cluster

PERIOD_S = 0.05


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(Cluster(4), period_s=PERIOD_S)
    made.start()
    yield made
    made.stop()


def read(server: Server, key: str = "admin", deltas: int = 20) -> tuple[str, dict[str, object]]:
    """Returns the first line that three readers printed, and what they took until the server had made more deltas."""
    port = server.url.rpartition(":")[2]
    argv = python("-m", "benchmarks.watching.readers", "--port", port, "--count", "3")
    pipe = subprocess.PIPE
    env = os.environ | {"SLUICE_ADMIN_KEY": key}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        last = server.cluster.seq + deltas
        deadline_s = time.monotonic() + 60.0
        while server.cluster.seq < last:
            assert time.monotonic() < deadline_s, "no deltas"
            time.sleep(PERIOD_S)
        told, _ = process.communicate("", timeout=60)
    return first, json.loads(told)


def test_three_readers_take_everything(server: Server) -> None:
    first, taken = read(server)
    assert first == "ready"
    assert (taken["snapshots"], taken["problems"]) == (3, [])
    assert isinstance(taken["deltas"], int) and taken["deltas"] > 3
    assert isinstance(taken["bytes"], int) and taken["bytes"] > 3000


def test_a_stream_that_breaks_or_is_refused_is_a_problem(server: Server) -> None:
    _, taken = read(server, key="wrong")
    assert taken["problems"] == ["the stream was answered with status 401"] * 3
