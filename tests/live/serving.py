"""Starts a whole Sluice (`python -m app.serve`) for tests: own Ray, free loopback ports, ended and checked by pid."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from app.admin_key import authorize
from benchmarks.chaos.redis_ray import marked
from benchmarks.live.servers import free_ports
from tests.processes import command_line, kill_all, still_running

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 120.0
PATIENCE_S = 180.0
"""How long a test waits for what must come. Only what never comes takes that long, however busy the machine is."""


def plain_client() -> httpx.Client:
    """A client that neither loads certificates, which may take longer than what is looked at lasts, nor keeps
    connections to a process that a test kills. It administers with the key in the application's file."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(timeout=30, verify=False, limits=limits, auth=authorize)


@dataclass
class App:
    """A running Sluice. `log` is what it printed, with Ray's session directory beside it."""

    process: subprocess.Popen[bytes]
    url: str
    serve_url: str
    log: Path
    name: str
    http: httpx.Client = field(default_factory=plain_client)
    mark: str | None = None
    """Name of an environment variable that the processes of a joined Ray cluster have, and nobody else has."""

    def status(self) -> dict[str, Any]:
        answer = self.http.get(f"{self.url}/sluice/status")
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels; 0.0 when there is none yet."""
        total = 0.0
        for line in self.http.get(f"{self.url}/metrics").text.splitlines():
            match = re.match(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", line)
            if match and all(f'{k}="{v}"' in (match[1] or "") for k, v in labels.items()):
                total += float(match[2])
        return total

    def settle(self, *names: str, quiet_s: float = 3.0) -> None:
        """Until these metrics have been reported unchanged for a while: what was under way has arrived."""
        end_s = time.monotonic() + PATIENCE_S
        last, since_s = [self.metric(name) for name in names], time.monotonic()
        while time.monotonic() < since_s + quiet_s:
            assert time.monotonic() < end_s, f"{names} still change after {PATIENCE_S} s"
            time.sleep(0.2)
            now = [self.metric(name) for name in names]
            if now != last:
                last, since_s = now, time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """Every process of this app: the tree of its Ray, or those of the cluster that it joined."""
        if self.mark is not None:
            return marked(self.mark)
        return psutil.Process(self.process.pid).children(recursive=True)

    def replica_pids(self, deployment: str) -> list[int]:
        """The processes of a deployment's replicas, by the title that Ray gives them."""
        title = f"ServeReplica:{self.name}:{deployment}"
        return [p.pid for p in self.processes() if title in command_line(p)]

    def replica_pid(self, deployment: str) -> int:
        """The process of a deployment's (only) replica."""
        found = self.replica_pids(deployment)
        assert len(found) == 1, f"{deployment}: {found}"
        return found[0]

    def wait(self, condition: Any, what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Polls until `condition(status)` is true; fails with the last status and how polling went."""
        began_s = time.monotonic()
        polls, slowest_s = 0, 0.0
        status: dict[str, Any] = {}
        while (poll_s := time.monotonic()) < began_s + timeout_s:
            try:
                status = self.status()
                if condition(status):
                    return status
            except httpx.HTTPError as error:
                status = {"error": repr(error)}
            polls, slowest_s = polls + 1, max(slowest_s, time.monotonic() - poll_s)
            time.sleep(0.2)
        raise AssertionError(
            f"not within {timeout_s} s: {what}; {polls} polls, the slowest took {slowest_s:.1f} s; {pressure()}; "
            f"last status {status}"
        )

    def wait_idle(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Until every counter is 0 and no engine uses a KV block."""

        def idle(status: dict[str, Any]) -> bool:
            engines = status["engines"]
            return (
                all(value == 0 for value in status["requests"].values() if isinstance(value, int))
                and status["leases"] == 0
                and all(e["kv_blocks_used"] == 0 and not e["running"] and not e["waiting"] for e in engines)
            )

        result: dict[str, Any] = self.wait(idle, "idle", timeout_s)
        return result


def pressure() -> str:
    """How busy the machine is, for the text of a failure: load, and the share of time that tasks waited for a core."""
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    waits = Path("/proc/pressure/cpu")
    return f"load {load}" + (f", cpu {waits.read_text().splitlines()[0]}" if waits.exists() else "")


def config_file(
    directory: Path, source: str, change: Any = None, proxy: bool = False, board: int = 0
) -> Path:
    """A copy of `source`, a path from the folder deploy, whose application args went through `change(args)`.

    It has one ingress on every machine, whose figures are then those of the application, unless `change` asks for more,
    and a dashboard on the port `board` unless that is 0, with its runs in `directory`/runs. Serve's own port is served
    with `proxy` only: that takes a process more.
    """
    schema = yaml.safe_load((ROOT / "deploy" / source).read_text())
    if not proxy:
        schema["proxy_location"] = "Disabled"
    args = schema["applications"][0]["args"]
    if change is not None:
        change(args)
    args.setdefault("ingress", {}).setdefault("replicas", 1)
    if board:
        runs = {"folder": str(directory / "runs")}
        args["dashboard"] = {"port": board, "folder": str(directory / "dashboard"), "experiments": runs}
    args.setdefault("dashboard", {}).setdefault("port", 0)
    path = directory / Path(source).name
    path.write_text(yaml.safe_dump(schema))
    return path


@contextmanager
def serving(
    config: Path, join: str | None = None, mark: str | None = None, environment: dict[str, str] | None = None
) -> Iterator[App]:
    """Runs the config's application until the block ends; then Ctrl-C, and nothing may be left.

    With `join` it runs on the Ray cluster at that address, whose processes have the environment variable `mark`. Its
    processes have `environment` beside this one's.
    """
    port, http_port = free_ports(2)
    log = Path(tempfile.mkstemp(prefix="sluice-app-", suffix=".log")[1])
    command = [sys.executable, "-m", "app.serve", "--config", str(config)]
    command += ["--port", str(port), "--http-port", str(http_port)]
    command += [] if join is None else ["--address", join]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=env, start_new_session=True)
    app = App(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}", log, "sluice", mark=mark)
    try:
        _wait_ready(app)
        yield app
    finally:
        _stop(app)
        app.http.close()
        log.unlink(missing_ok=True)


def _wait_ready(app: App) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if app.process.poll() is not None:
            raise AssertionError(
                f"app.serve ended with {app.process.returncode}:\n{app.log.read_text()[-4000:]}"
            )
        try:
            if app.http.get(f"{app.url}/health/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"not ready within {START_TIMEOUT_S} s:\n{app.log.read_text()[-4000:]}")


def _stop(app: App) -> None:
    joined = app.mark is not None
    tree = app.processes() if app.process.poll() is None and not joined else []
    app.process.send_signal(signal.SIGINT)
    try:
        app.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        app.process.kill()
        raise AssertionError(
            f"Ctrl-C did not end it within {STOP_TIMEOUT_S} s:\n{app.log.read_text()[-4000:]}"
        ) from None
    finally:
        alive = still_running(tree, timeout_s=60)
        left = [command_line(p)[:100] for p in alive]
        kill_all(alive)
    assert not left, f"processes left after Ctrl-C: {left}"
