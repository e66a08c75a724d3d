"""Faults while the autoscaler of a whole application carries out plans, under load on sim engines: streams go on and
say the same, the plans are resumed, and no replica, lease or counter is left behind.

Ray gives the one node a resource of its own, `node:127.0.0.1`, of which there is 1: at 0.3 for each decode engine the
fourth one finds no place.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.steering import HandGiven
from tests.live.serving import PATIENCE_S, ROOT, App, command_line, config_file, serving
from tests.live.test_scaling_live import Load, answers, at_rest, command, duties, scaling, stream

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

SHORT, LONG = 40, 900
"""Tokens of the streams, of 20 ms each: the long ones outlast the 6 s for which an engine drains."""


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    # a path of pytest's own is too long for a socket
    folder = tempfile.mkdtemp(prefix="sl-")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, sockets: Path) -> Iterator[App]:
    def change(args: dict[str, Any]) -> None:
        small = {"kind": "sim", "num_cpus": 0.02}
        engine = {"timing": {"decode_base_s": 0.02}, "lease_s": 4.0}
        args["engines"] = [
            {"name": "p", "role": "prefill", **small, "options": engine},
            {
                "name": "d",
                "role": "decode",
                **small,
                "options": engine,
                "resources": {"node:127.0.0.1": 0.3},
                "scaling": {"max": 4, "warm": 1, "drain_s": 6},
            },
        ]
        args["scaling"] = {"enabled": True, "policy": "fixed"}
        args["wire"] = {"socket_dir": str(sockets)}

    file = config_file(tmp_path_factory.mktemp("faults"), "sim.yaml", change)
    with serving(file) as running:
        running.wait(at_rest(p_active=1, d_active=1, d_warm=1), "one of each serves, and one is warm")
        yield running


class Outsider:
    """A process of somebody else at the app's Ray (`tests.live.outsider`)."""

    def __init__(self, app: App) -> None:
        lines = [command_line(process) for process in app.processes()]
        (gcs,) = {
            word.partition("=")[2]
            for line in lines
            for word in line.split()
            if word.startswith("--gcs-address=")
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.live.outsider", gcs],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the outsider has ended"
        return json.loads(line)

    def replicas(self, deployment: str = "DEngine") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("replicas", deployment)
        return found

    def pid(self, engine: str) -> int:
        """Returns the process of an engine, whose id ends with its replica's."""
        (pid,) = [one["pid"] for one in self.replicas() if engine.endswith(one["id"])]
        return int(pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def outsider(app: App) -> Iterator[Outsider]:
    made = Outsider(app)
    yield made
    made.close()


@contextmanager
def loaded(app: App) -> Iterator[None]:
    """A context under load. Afterwards every stream has said the same as an undisturbed one, and nothing is left."""
    texts = {tokens: stream(app, tokens) for tokens in (SHORT, LONG)}
    with Load(app, 4, SHORT) as short, Load(app, 6, LONG) as long:
        yield
        before = len(short.texts)
        app.wait(lambda _: len(short.texts) >= before + 8, "streams go on after the fault, too")
    for load, tokens in ((short, SHORT), (long, LONG)):
        assert load.errors == []
        assert set(load.texts) == {texts[tokens]}
    app.wait_idle()


def engines(status: dict[str, Any], **wanted: str) -> list[str]:
    """Ids of the engines with these properties, such as duty="warm"."""
    return [e["id"] for e in status["engines"] if all(e[key] == value for key, value in wanted.items())]


def only(app: App, outsider: Outsider, running: int) -> None:
    """Waits until Serve has exactly these decode replicas, all running, and each is one process."""
    app.wait(
        lambda _: [one["state"] for one in outsider.replicas()] == ["RUNNING"] * running, "no replica more"
    )
    app.wait(lambda _: len(app.replica_pids("DEngine")) == running, "no process more")


def test_a_controller_of_serve_that_is_killed_mid_plan_delays_the_plan(app: App, outsider: Outsider) -> None:
    with loaded(app):
        command(app, "d=2")
        app.wait(lambda status: duties(status).get(("d", "active"), 0) == 2, "the warm engine is active")
        (controller,) = [
            process.pid for process in app.processes() if "ServeController" in command_line(process)
        ]
        os.kill(controller, signal.SIGKILL)
        app.wait(at_rest(p_active=1, d_active=2, d_warm=1), "the plan is carried out")
        command(app, "d=1")
        app.wait(at_rest(p_active=1, d_active=1, d_warm=1), "the plan back, too")
    only(app, outsider, 2)


def test_a_replica_that_finds_no_place_is_taken_back_once_it_is_not_needed(
    app: App, outsider: Outsider
) -> None:
    with loaded(app):
        command(app, "d=4")
        app.wait(at_rest(p_active=1, d_active=3), "those that have a place serve")
        states = sorted(one["state"] for one in outsider.replicas())
        assert states == ["RUNNING"] * 3 + ["STARTING"]
        command(app, "d=1")
        app.wait(at_rest(p_active=1, d_active=1, d_warm=1), "it is as before")
    only(app, outsider, 2)


def test_a_number_that_somebody_else_sets_is_adopted_under_load(app: App, outsider: Outsider) -> None:
    command(app, "auto")
    with loaded(app):
        outsider.ask("scale", "DEngine", "3")
        app.wait(at_rest(p_active=1, d_active=2, d_warm=1), "two serve, beside the warm one")
        assert scaling(app)["by"] == "somebody else"
        command(app, "auto")
        app.wait(at_rest(p_active=1, d_active=1, d_warm=1), "the policy decides again")
    only(app, outsider, 2)


def test_engines_that_die_while_they_are_warm_or_drain_are_replaced_and_cost_no_stream(
    app: App, outsider: Outsider
) -> None:
    with loaded(app):
        (warm,) = engines(app.status(), duty="warm")
        os.kill(outsider.pid(warm), signal.SIGKILL)
        app.wait(lambda status: warm not in engines(status), "the dead engine is forgotten")
        app.wait(at_rest(p_active=1, d_active=1, d_warm=1), "another one is warm")
        command(app, "d=2")
        app.wait(at_rest(p_active=1, d_active=2, d_warm=1), "one more serves")
        pids = {engine: outsider.pid(engine) for engine in engines(app.status(), role="decode")}
        command(app, "d=1")
        status = app.wait(lambda status: engines(status, state="draining", role="decode"), "one drains")
        (draining,) = engines(status, state="draining", role="decode")
        os.kill(pids[draining], signal.SIGKILL)
        app.wait(at_rest(p_active=1, d_active=1, d_warm=1), "the plan is carried out")
    only(app, outsider, 2)


def test_of_two_autoscalers_one_is_obeyed_and_the_other_changes_nothing(
    app: App, outsider: Outsider, sockets: Path
) -> None:
    """The later one orders by hand. The router that follows the one that obeyed it knows of no later one."""
    with loaded(app):
        (warm,) = engines(app.status(), duty="warm")
        hand = HandGiven(sockets)
        try:
            hand.assign(warm, "decode")
            app.wait(lambda status: duties(status).get(("d", "active"), 0) == 2, "its order is carried out")
            assert [one["state"] for one in outsider.replicas()] == ["RUNNING"] * 2
        finally:
            hand.close()
        os.kill(app.replica_pid("Router"), signal.SIGKILL)
        app.wait(lambda _: answers(app), "the app's own autoscaler is obeyed again")
        app.wait(at_rest(p_active=1, d_active=1, d_warm=1), "it is as the policy wants it")
    only(app, outsider, 2)
    assert psutil.pid_exists(app.replica_pid("Autoscaler"))
