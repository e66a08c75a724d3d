"""`make serve` loses a process of its own Ray: the control process is started again with its state, under load.

After the loss of the raylet, which takes every replica with it, the command starts over by itself.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.chaos.test_kill_sim import Load, grow
from tests.live.serving import PATIENCE_S, App, config_file, serving
from tests.processes import ended, name_of

pytestmark = [pytest.mark.live, pytest.mark.chaos, pytest.mark.timeout(900)]

DEPLOYMENTS = ("Router", "Ingress", "PrefillEngine", "DecodeEngine")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("gcs"), "sim.yaml")) as running:
        until_said(running, "ready: sim on")
        yield running


def of_ray(app: App, name: str) -> int:
    """The process of Ray's with this name. Other processes, and one before it of the same name, may end meanwhile."""
    (pid,) = [one.pid for one in app.processes() if name_of(one) == name and not ended(one.pid)]
    return pid


def until_said(app: App, text: str, times: int = 1) -> None:
    """Waits until the command has printed `text` so often."""
    end_s = time.monotonic() + PATIENCE_S
    while app.log.read_text().count(text) < times:
        assert time.monotonic() < end_s, app.log.read_text()[-3000:]
        time.sleep(0.05)


def replicas(app: App) -> dict[str, set[int]]:
    return {name: set(app.replica_pids(name)) for name in DEPLOYMENTS}


@pytest.mark.nightly
def test_a_killed_gcs_comes_back_and_no_request_fails(app: App) -> None:
    before = replicas(app)
    with Load(app, 4) as load:
        grow(load, 40, app)
        mended = app.log.read_text().count("Ray's GCS is back")
        os.kill(of_ray(app, "gcs_server"), signal.SIGKILL)
        until_said(app, "Ray's GCS is back", mended + 1)
        grow(load, 200, app)
    assert not load.bad, load.bad[:3]
    assert replicas(app) == before
    # the new control process replaces replicas as the old one did
    (victim,) = before["PrefillEngine"]
    os.kill(victim, signal.SIGKILL)
    app.wait(lambda s: replicas(app)["PrefillEngine"] not in ({victim}, set()), "a new prefill engine")
    app.wait(lambda s: sum(e["state"] == "ready" for e in s["engines"]) == 3 and s["ready"], "its readiness")


@pytest.mark.nightly
def test_the_command_starts_over_when_its_raylet_dies(app: App) -> None:
    before = app.process.pid
    os.kill(of_ray(app, "raylet"), signal.SIGKILL)
    until_said(app, "starting over")
    began_s = time.monotonic()
    until_said(app, "ready: sim on", times=2)
    print(f"ready again {time.monotonic() - began_s:.1f} s after the end of the broken cluster")
    assert app.process.pid == before
    assert app.process.poll() is None
    with Load(app, 2) as load:
        grow(load, 10, app)
        # The fresh cluster is watched as well, and Ctrl-C ends one whose GCS was started again.
        mended = app.log.read_text().count("Ray's GCS is back")
        os.kill(of_ray(app, "gcs_server"), signal.SIGKILL)
        until_said(app, "Ray's GCS is back", mended + 1)
        grow(load, 10, app)
    assert not load.bad, load.bad[:3]
