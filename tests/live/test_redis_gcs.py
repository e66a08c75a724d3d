"""A Ray cluster with its state in Redis loses its control process (GCS) under load, and gets it back."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.chaos.redis_ray import RECONNECT, RECONNECT_S, Supervisor, cluster, has_redis, redis
from tests.chaos.test_kill_sim import Load, grow
from tests.live.serving import PATIENCE_S, ROOT, App, config_file, serving

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.live,
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not has_redis(),
        reason="redis-server is not installed (Debian, Ubuntu: apt-get install redis-server)",
    ),
]

DEPLOYMENTS = ("Router", "Ingress", "PrefillEngine", "DecodeEngine")
AWAY_S = 75.0
"""Seconds for which the GCS is away. Ray's processes end after 60 s without it (`gcs_rpc_server_reconnect_timeout_s` in
Ray's ray_config_def.h), unless they are told to wait longer, as those of a cluster with Redis are."""


def two_prefills(args: dict[str, Any]) -> None:
    args["engines"] = [
        {"name": "prefill", "role": "prefill", "kind": "sim", "replicas": 2},
        {"name": "decode", "role": "decode", "kind": "sim", "replicas": 2},
    ]


def answers(app: App) -> bool:
    """Whether anything listens on the public port."""
    try:
        return bool(app.http.get(f"{app.url}/health/live").status_code)
    except httpx.HTTPError:
        return False


def replicas(app: App) -> dict[str, set[int]]:
    return {name: set(app.replica_pids(name)) for name in DEPLOYMENTS}


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder whose name is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="sluice-sockets-") as folder:
        yield folder


def test_a_killed_gcs_comes_back_from_redis_and_no_request_fails(
    tmp_path: Path, sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the command that serves is a process of Ray's as well
    monkeypatch.setenv(RECONNECT, str(RECONNECT_S))

    def change(args: dict[str, Any]) -> None:
        two_prefills(args)
        args["wire"] = {"socket_dir": sockets}

    config = config_file(tmp_path, "sim.yaml", change)
    with redis(tmp_path) as address, cluster(address) as (ray, mark), serving(config, ray, mark) as app:
        app.wait(lambda s: len(s["engines"]) == 4, "all four engines")
        before = replicas(app)
        supervisor = Supervisor(mark)
        with Load(app, 4) as load:
            grow(load, 40, app)
            began_s = time.monotonic()
            supervisor.gcs.kill()
            victim = min(before["PrefillEngine"])
            os.kill(victim, signal.SIGKILL)
            time.sleep(AWAY_S)
            grow(load, 100, app)
            supervisor.start_again()
            app.wait(
                lambda s: (
                    len(app.replica_pids("PrefillEngine")) == 2
                    and victim not in app.replica_pids("PrefillEngine")
                    and sum(e["state"] == "ready" for e in s["engines"]) == 4
                ),
                "a new prefill engine",
            )
            print(
                f"the killed engine is replaced {time.monotonic() - began_s:.1f} s after the GCS was killed"
            )
            grow(load, 40, app)
        assert not supervisor.has_died()
        assert not load.bad, load.bad[:3]
        after = replicas(app)
        assert after.pop("PrefillEngine") >= before.pop("PrefillEngine") - {victim}
        assert after == before
        # before such a node goes, its replicas drain: the ingress, four engines, and not the one that was killed
        command = [sys.executable, "-m", "app.drain", "--seconds", "30", "--socket-dir", sockets]
        drained = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        assert drained.returncode == 0, drained.stdout + drained.stderr
        assert drained.stdout.count(" drained after ") == 5, drained.stdout
        assert not answers(app)
    # it ended with its cluster
    assert supervisor.has_died()
