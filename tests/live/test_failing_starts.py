"""An engine that fails at each of its starts, in the whole application on sim engines: serving goes on without it, the
command and the autoscaler's log say why, and it serves once the cause is gone.

The cause is a range `wire.ports` that is too short: router and one engine take two of its three ports, and this test
takes the third.
"""

import socket
from pathlib import Path
from typing import Any

import pytest

from app.own_ray import STORAGE_PATH
from tests.live.serving import App, config_file, serving
from tests.live.test_scaling_live import JOINABLE, Load, at_rest, command, duties, group, stream
from tests.processes import command_line

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]

LIMIT_S = 10
"""Time after which a replica is overdue. On a busy machine no start has failed by then, and the log says why later."""
PORTS = range(21_000, 32_000)
"""Ports of which this test takes some: Linux gives those from 32768 on to whoever names none."""


def consecutive(number: int) -> list[socket.socket]:
    """Listens on this number of ports of loopback that follow one another, and returns the sockets in their order."""
    for first in PORTS:
        taken: list[socket.socket] = []
        try:
            for port in range(first, first + number):
                taken.append(socket.create_server(("127.0.0.1", port)))
        except OSError:
            for one in taken:
                one.close()
        else:
            return taken
    raise AssertionError(f"no {number} ports that follow one another are free")


def one_engine(ports: str) -> Any:
    """Returns a change of the configuration: one engine, and perhaps another one, in nodes that talk over `ports`."""

    def change(args: dict[str, Any]) -> None:
        steps = {"timing": {"decode_base_s": 0.02}}
        engine = {"name": "c", "role": "colocated", "kind": "sim", "num_cpus": 0.02, "options": steps}
        args["engines"] = [{**engine, "scaling": {"max": 2}}]
        args["wire"] = {"interface": "127.0.0.0/8", "ports": ports}
        args["scaling"] = {"enabled": True, "policy": "fixed", "start_limit_s": LIMIT_S}

    return change


def log_of(app: App, deployment: str) -> str:
    """Returns what the replicas of a deployment have logged."""
    raylet = next(p for p in app.processes() if "--gcs-address=" in command_line(p))
    logs = Path(raylet.environ()[STORAGE_PATH]).parent / "session_latest" / "logs" / "serve"
    return "".join(file.read_text(errors="replace") for file in logs.glob(f"replica_*{deployment}*.log"))


def test_serving_goes_on_without_an_engine_that_fails_at_each_start_and_the_reason_is_shown(
    tmp_path: Path,
) -> None:
    *unused, held = consecutive(3)
    ports = f"{unused[0].getsockname()[1]}-{held.getsockname()[1]}"
    for one in unused:
        one.close()
    file = config_file(tmp_path, "sim.yaml", one_engine(ports))
    secret = {"SLUICE_WIRE_SECRET": "a secret of one test"}
    with held, serving(file, environment=JOINABLE | secret) as app:
        app.wait(at_rest(app, c_active=1), "one engine serves")
        undisturbed = stream(app, 40)
        with Load(app, 2, 40) as load:
            command(app, "c=2")
            app.wait(lambda _: group(app, "c")["overdue"] == 1, "the second engine is overdue")
            assert f"note      c: 1 of 2 replicas have not started within {LIMIT_S} s" in command(app)
            reason = f"all ports {ports} of 127.0.0.1 are in use: make the range longer"

            def warned(_: dict[str, Any]) -> bool:
                log = log_of(app, "Autoscaler").splitlines()
                return any("scaling.start_limit_s" in line and reason in line for line in log)

            app.wait(warned, "the autoscaler warns with Serve's words")
            assert duties(app.status()) == {("c", "active"): 1}

            held.close()
            app.wait(at_rest(app, c_active=2), "both engines serve once there is a port")
        assert load.errors == []
        assert set(load.texts) == {undisturbed}
        app.wait(lambda _: group(app, "c")["overdue"] == 0, "no engine is overdue")
        app.wait_idle()
