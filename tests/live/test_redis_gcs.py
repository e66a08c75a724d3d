"""A Ray cluster with its state in Redis loses its control process (GCS) under load, and gets it back."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.live.servers import free_ports
from tests.chaos.test_kill_sim import Load, grow
from tests.live.serving import PATIENCE_S, ROOT, App, config_file, marked, serving, still_running

pytestmark = [
    pytest.mark.live,
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("redis-server") is None,
        reason="redis-server is not installed (Debian, Ubuntu: apt-get install redis-server)",
    ),
]

DEPLOYMENTS = ("Router", "Ingress", "PrefillEngine", "DecodeEngine")
AWAY_S = 5.0


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.kill()
    assert not still_running(processes, 60)


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """A Redis on a free loopback port, which writes nothing; yields its address."""
    (port,) = free_ports(1)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        end([psutil.Process(process.pid)])
        process.wait()


@contextmanager
def cluster(redis_address: str) -> Iterator[tuple[str, str]]:
    """A Ray head as `ray start --head` makes it; yields its address and the mark of its processes."""
    mark = f"SLUICE_TEST_{uuid.uuid4().hex}"
    port, client, agent = free_ports(3)
    # Ray's own sockets have paths of 100 characters at most, which pytest's folders leave no room for.
    folder = tempfile.mkdtemp(prefix="sluice-redis-")
    env = os.environ | {
        mark: "1", "RAY_REDIS_ADDRESS": redis_address, "RAY_external_storage_namespace": mark,
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600", "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1",
        "--include-dashboard=false", f"--temp-dir={folder}", "--object-store-memory=134217728", "--num-cpus=4",
        f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        yield f"127.0.0.1:{port}", mark
    finally:
        # A raylet that loses a worker starts another one, so it goes first.
        end([process for process in marked(mark) if process.name() in ("raylet", "gcs_server")])
        end(marked(mark))
        shutil.rmtree(folder, ignore_errors=True)


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


def test_a_killed_gcs_comes_back_from_redis_and_no_request_fails(tmp_path: Path, sockets: str) -> None:
    def change(args: dict[str, Any]) -> None:
        two_prefills(args)
        args["wire"] = {"socket_dir": sockets}

    config = config_file(tmp_path, "sim.yaml", change)
    with redis(tmp_path) as address, cluster(address) as (ray, mark), serving(config, ray, mark) as app:
        app.wait(lambda s: len(s["engines"]) == 4, "all four engines")
        before = replicas(app)
        (gcs,) = (process for process in app.processes() if process.name() == "gcs_server")
        command, env = gcs.cmdline(), gcs.environ()
        with Load(app, 4) as load:
            grow(load, 40, app)
            began_s = time.monotonic()
            gcs.kill()
            victim = min(before["PrefillEngine"])
            os.kill(victim, signal.SIGKILL)
            time.sleep(AWAY_S)
            grow(load, 100, app)
            # this is what a supervisor of the head does: the same program with the same Redis and port
            with (tmp_path / "gcs.log").open("wb") as log:
                again = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
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
        assert again.poll() is None
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
    again.wait(60)
