"""Applications of sim engines that are watched: their dashboard, which comes and goes while they run, and its readers.

The application is the one of the overhead benchmark (`benchmarks.live.targets`), and the dashboard a deployment of it.
To turn the dashboard on or off the changed file is deployed over the running one (`redeploy`), so that router, engines
and ingress stay the same processes.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.live import proctree
from benchmarks.live.measure import MeasureError
from benchmarks.live.servers import ADMIN_KEY, ROOT, Command, Server, administrator, free_ports, python
from benchmarks.live.targets import SimTiming, sim_args, sluice_app

START_S, START_EACH_S = 300.0, 6.0
"""Seconds that an application has to start, and seconds more for each engine: processes start one after the other."""
PATIENCE_S = 180.0
"""Seconds to wait for what must come, such as a dashboard; only what never comes takes that long."""
DASHBOARD = "replica Dashboard"
"""The role of the dashboard's process (`benchmarks.live.proctree`)."""
STEADY = ("ingress", "router", "prefill", "decode")
"""The roles of the processes that stay when the dashboard comes or goes."""
SETTLE_S = 2.0
"""Seconds after a change of what watches, in which connections end and begin. An ingress pushes once a second."""
FEW = 16
"""The number of engines above which each reserves less of the cores, so that Ray places all of them."""
_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # `redeploy` joins the cluster, and both ends must say alike whether a token is asked for
    "RAY_AUTH_MODE": "disabled",
}


def tracing(collector: str | None, share: float | None = None) -> dict[str, str]:
    """Returns the environment in which traces go to the URL `collector`, or none are made (None). The `share` of
    requests whose traces are kept is the default one if it is None.
    """
    made = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector or "", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}
    if share is not None:
        made |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": f"{share:g}"}
    return made


class Watched:
    """An application with two configurations: one has a dashboard, on port `board`, and the other has none.

    `args` replace arguments of the application, and `env` is added to its environment. Its files lie in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        prefill: int = 1,
        decode: int = 1,
        timing: SimTiming | None = None,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (self.board,) = free_ports(1)
        count = prefill + decode
        wanted = sim_args(timing or SimTiming(), prefill, decode) | dict(args or {})
        if count > FEW:
            wanted["engines"] = [{**group, "num_cpus": round(1 / count, 4)} for group in wanted["engines"]]
        self._commands: dict[bool, Command] = {}
        for board in (False, True):
            file = folder / ("dashboard.yaml" if board else "none.yaml")
            shown = {**wanted.get("dashboard", {}), "port": self.board if board else 0}
            shown["folder"] = str(folder / "dashboard")
            limit_s = START_S + START_EACH_S * count
            made = sluice_app(f"Sluice, {count} sim engines", file, {**wanted, "dashboard": shown}, limit_s)
            ports = (*made.ports, self.board)
            self._commands[board] = replace(made, ports=ports, env={**_RAY, **tracing(None), **(env or {})})

    def command(self, board: bool) -> Command:
        """Returns the command that starts the application, with its dashboard or without."""
        return self._commands[board]

    def switch(self, server: Server, board: bool) -> None:
        """Turns the dashboard of the running application on or off, and waits until it is so.

        Raises MeasureError if it does not become so, or if that restarts anything else.
        """
        before = _steady(server)
        ports = dict(zip(("--port", "--http-port"), server.command.all_ports, strict=False))
        argv = python("-m", "benchmarks.watching.redeploy", "--address", _ray_of(server))
        argv += ["--config", _config_of(self._commands[board])]
        for option, port in ports.items():
            argv += [option, str(port)]
        env = os.environ | dict(server.command.env)
        done = subprocess.run(
            argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if done.returncode:
            raise MeasureError(f"the changed configuration was not deployed:\n{done.stderr[-2000:]}")
        wait(
            lambda: bool(pids(server, DASHBOARD)) is board, f"the dashboard is {'there' if board else 'gone'}"
        )
        if board:
            self.wait_board()
        if _steady(server) != before:
            raise MeasureError("with the dashboard, other parts of the application have started or ended")
        time.sleep(SETTLE_S)

    def client(self) -> httpx.Client:
        """Returns a client that may see and change everything on the dashboard."""
        return administrator(self.board, 30.0)

    def wait_board(self) -> None:
        """Waits until the dashboard answers and an ingress tells it what it counts. Raises MeasureError."""
        with self.client() as client:

            def connected() -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    answer = client.get("/api/status")
                    return answer.is_success and answer.json()["replica"]["ingresses"] >= 1
                return False

            wait(connected, "the dashboard hears from an ingress")

    @contextlib.contextmanager
    def pages(self, count: int, browser: bool = False) -> Iterator[dict[str, Any]]:
        """A context in which `count` readers (`readers`) are connected, each of which has its first snapshot. After it
        the yielded dict has what they got. Raises MeasureError if one of them missed anything.
        """
        argv = python("-m", "benchmarks.watching.readers", "--port", str(self.board), "--count", str(count))
        argv += ["--browser"] if browser else []
        pipe, env = subprocess.PIPE, os.environ | {"SLUICE_ADMIN_KEY": ADMIN_KEY}
        process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)
        assert process.stdout is not None
        result: dict[str, Any] = {}
        try:
            said = process.stdout.readline().strip()
            if said != "ready":
                raise MeasureError(f"the readers of the dashboard did not start: {said or 'they ended'}")
            time.sleep(SETTLE_S)
            yield result
            told, _ = process.communicate("", timeout=PATIENCE_S)
            result |= json.loads(told)
            if process.returncode or result["problems"]:
                raise MeasureError(f"the readers of the dashboard did not get everything: {result}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)


def wait(condition: Callable[[], bool], what: str) -> None:
    """Polls until the condition holds. Raises MeasureError after `PATIENCE_S`."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise MeasureError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.1)


def pids(server: Server, role: str) -> list[int]:
    """Returns the ids of the live processes of a role below the server."""
    return sorted(pid for pid, found in _roles(server) if found == role)


def _steady(server: Server) -> list[tuple[int, str]]:
    return sorted((pid, role) for pid, role in _roles(server) if role in STEADY)


def _roles(server: Server) -> Iterator[tuple[int, str]]:
    for pid, line in _lines(server):
        role = proctree.name_of(line)
        if role is not None:
            yield pid, role


def _lines(server: Server) -> Iterator[tuple[int, list[str]]]:
    """Yields the process id and command line of every live process below the server."""
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            yield process.pid, process.cmdline()


def _ray_of(server: Server) -> str:
    """Returns the address of the control process of the server's Ray, which its raylet has on its command line."""
    mark = "--gcs-address="
    for _, line in _lines(server):
        for word in line:
            if word.startswith(mark):
                return word.removeprefix(mark)
    raise MeasureError(f"{server.command.name}: no process names Ray's address")


def _config_of(command: Command) -> str:
    return command.argv[list(command.argv).index("--config") + 1]
