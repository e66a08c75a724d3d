"""A Ray cluster of one node whose control process (GCS) keeps its state in Redis, and a supervisor of both.

    python -m benchmarks.chaos.redis_ray --orders FOLDER --config FILE --port PORT --http-port PORT

The program serves the configuration on such a cluster (`app.serve --address`) and starts a GCS that has died again, as
a supervisor of the head node does, but not before the file FOLDER/gcs-away has gone.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.live.servers import ROOT, free_ports

AWAY = "gcs-away"
"""Name of the file that keeps the GCS away."""
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Environment variable with the seconds after which a process of Ray ends that does not reach its GCS; 60 without."""
RECONNECT_S = 600
LOOK_S = 0.2
END_S = 60.0


def has_redis() -> bool:
    """Returns whether a Redis server is installed here."""
    return shutil.which("redis-server") is not None


def marked(variable: str) -> list[psutil.Process]:
    """Returns every process that has this variable in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if variable in process.environ():
                found.append(process)
        except psutil.Error:  # ended, or another user's
            continue
    return found


def end(processes: list[psutil.Process]) -> None:
    """Kills processes and waits until they have ended. Raises RuntimeError if one does not."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    left = [process.pid for process in alive if not _has_died(process)]
    if left:
        raise RuntimeError(f"processes that do not end: {left}")


def _has_died(process: psutil.Process) -> bool:
    """Returns whether a process has ended, even if nobody has collected it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[str]:
    """A Redis on a free loopback port, which writes nothing; yields its address."""
    (port,) = free_ports(1)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def cluster(redis_address: str) -> Iterator[tuple[str, str]]:
    """A Ray head as `ray start --head` makes it; yields its address and the mark of its processes, a variable in their
    environment.
    """
    mark = f"SLUICE_RAY_{uuid.uuid4().hex}"
    port, client, agent = free_ports(3)
    # Ray's own sockets have paths of 100 characters at most, which a longer folder leaves no room for.
    folder = tempfile.mkdtemp(prefix="sluice-redis-")
    env = os.environ | {
        mark: "1", "RAY_REDIS_ADDRESS": redis_address, "RAY_external_storage_namespace": mark,
        RECONNECT: str(RECONNECT_S), "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1",
        "--include-dashboard=false", f"--temp-dir={folder}", "--object-store-memory=134217728", "--num-cpus=4",
        f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"no Ray head: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        yield f"127.0.0.1:{port}", mark
    finally:
        # A raylet that loses a worker starts another one, so it goes first.
        end([process for process in marked(mark) if process.name() in ("raylet", "gcs_server")])
        end(marked(mark))
        shutil.rmtree(folder, ignore_errors=True)


class Supervisor:
    """Starts the GCS of a cluster again, as the same program with the same port and the same Redis."""

    def __init__(self, mark: str) -> None:
        self.gcs = next(process for process in marked(mark) if process.name() == "gcs_server")
        self._command, self._env = self.gcs.cmdline(), self.gcs.environ()
        self._own: subprocess.Popen[bytes] | None = None

    def start_again(self) -> None:
        """Starts the GCS, which must have died."""
        self._own = subprocess.Popen(
            self._command, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.gcs = psutil.Process(self._own.pid)

    def has_died(self) -> bool:
        """Returns whether the GCS has died."""
        if self._own is not None:
            return self._own.poll() is not None
        return _has_died(self.gcs)


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM, and returns the exit status of the serving program."""
    parser = argparse.ArgumentParser(prog="benchmarks.chaos.redis_ray", description=__doc__)
    parser.add_argument("--orders", type=Path, required=True, help="folder of orders to fail")
    args, serve = parser.parse_known_args(argv)
    ends: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: ends.append(received))
    with (
        tempfile.TemporaryDirectory(prefix="sluice-redis-") as folder,
        redis(Path(folder)) as address,
        cluster(address) as (ray, mark),
    ):
        supervisor = Supervisor(mark)
        command = [sys.executable, "-m", "app.serve", *serve, "--address", ray]
        serving = subprocess.Popen(command, env=os.environ | {RECONNECT: str(RECONNECT_S)})
        while not ends and serving.poll() is None:
            if supervisor.has_died() and not (args.orders / AWAY).exists():
                supervisor.start_again()
            time.sleep(LOOK_S)
        if supervisor.has_died():
            supervisor.start_again()
        serving.send_signal(signal.SIGINT)
        return serving.wait()


if __name__ == "__main__":
    sys.exit(main())
