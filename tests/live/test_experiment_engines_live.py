"""Experiments that order single engines through the dashboard of an application without Ray; dashboard and router die
during some. Whatever happens, role, duty and policies are put back.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.dashboard.store import BEFORE, RunStore
from benchmarks.live.experiment.guardian import NOT_YET
from sluice import SluiceError
from sluice.admin import Dashboard
from tests.benchmarks.live.experiment.bare_app import KEY, Bare, bare_app
from tests.benchmarks.live.experiment.commands import PATIENCE_S, decode_policy, plan, start, until, wait
from tests.processes import still_running

pytestmark = [pytest.mark.live, pytest.mark.timeout(300), pytest.mark.nightly]

ACTIVE, WARM = ("decode", "active"), ("decode", "warm")
COMPUTES = ("prefill", "active")
AT_REST = [COMPUTES, COMPUTES, ACTIVE, ACTIVE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("board")


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[Bare]:
    """Two engines that compute prompts, and two that decode; by their names the former come first."""
    options = {"timing": {"prefill_base_s": 0.005, "decode_base_s": 0.005}, "slots": 32, "vocab_size": 32_000}
    sim = {"kind": "sim", "replicas": 2, "options": options}
    engines = [{"name": "compute", "role": "prefill", **sim}, {"name": "decode", "role": "decode", **sim}]
    with bare_app(folder, board=True, engines=engines) as made:
        yield made


@pytest.fixture(autouse=True)
def _at_rest(app: Bare) -> Iterator[None]:
    """Each test finds all engines and the dashboard, and leaves engines as it has found them."""
    wait("four engines", lambda: engines(app) == AT_REST)
    with Dashboard(app.dashboard, key=KEY) as board:
        wait("a dashboard that has a router", lambda: knows_router(board))
    yield
    wait("all is put back", lambda: engines(app) == AT_REST)


def engines(app: Bare) -> list[tuple[str | None, str | None]]:
    """Returns role and duty of each engine that is ready, ordered by its id."""
    with app.client() as client:
        return [
            (one.role, one.duty)
            for one in sorted(client.status().engines, key=lambda one: one.id or "")
            if one.state == "ready"
        ]


def knows_router(board: Dashboard) -> bool:
    try:
        return board.status().router.connected is True
    except SluiceError:
        return False


def kill(app: Bare, title: str) -> None:
    process = app.process(title)
    os.kill(process.pid, signal.SIGKILL)
    assert not still_running([process], timeout_s=30)


def test_role_drain_and_activate_are_carried_out_and_put_back(app: Bare, tmp_path: Path) -> None:
    """In the end the only engine that decodes is one that computed prompts, so it must be put back last."""
    actions = [
        {"at_s": 0.5, "role": {"engine": "compute", "role": "decode"}},
        {"at_s": 1, "drain": "decode"},
        {"at_s": 1.5, "activate": "decode"},
        {"at_s": 2, "drain": "decode"},
        {"at_s": 2.5, "drain": "decode"},
    ]
    process = start(app, tmp_path, plan(3.5, actions=actions), "--dashboard", str(app.dashboard))
    role = until(process, "action", "role of compute-")["what"]
    assert role.endswith("prefill -> decode") and sorted(engines(app)) == sorted(
        [ACTIVE, COMPUTES, ACTIVE, ACTIVE]
    )
    for what, decoding in (
        ("drain", [WARM, ACTIVE]), ("activate", [ACTIVE, ACTIVE]), ("drain", [WARM, ACTIVE]), ("drain", [WARM, WARM]),
    ):  # fmt: skip
        until(process, "action", f"{what} decode-")
        assert engines(app)[2:] == decoding, what
    ended = until(process, "ended")
    assert (process.wait(PATIENCE_S), ended["state"], ended["summary"]["failed"]) == (0, "done", 0), ended
    assert engines(app) == AT_REST
    store = RunStore(tmp_path / "runs")
    [run_id] = store.ids()
    lines = (store.path(run_id) / "actions.jsonl").read_text().splitlines()
    assert sum("put back: engine" in line for line in lines) == 3
    assert not (store.path(run_id) / BEFORE).exists()


def test_a_dashboard_that_is_killed_ends_its_experiment_which_is_put_back(app: Bare, folder: Path) -> None:
    """The runner's leash ends with the dashboard, which its orders to engines need until there is another one."""
    before = decode_policy(app)
    actions = [{"at_s": 0.2, "policy": {"decode": "round_robin"}}, {"at_s": 0.5, "drain": "decode"}]
    with Dashboard(app.dashboard, key=KEY) as board:
        run = board.start_experiment(plan(60, actions=actions))
    assert run.id is not None
    wait("a drained engine", lambda: engines(app)[2:] == [WARM, ACTIVE])
    assert decode_policy(app) == "round_robin"
    kill(app, "Dashboard")
    store = RunStore(folder / "runs")
    wait("the end of the run", lambda: store.read(run.id)["state"] != "running")
    wait("all is put back", lambda: not (store.path(run.id) / BEFORE).exists())
    assert (engines(app), decode_policy(app)) == (AT_REST, before)
    found = store.read(run.id)
    assert "by the end of what started it" in found["message"], found
    # its load had ended long before its time
    assert found["took_s"] < 55
    with app.client() as client:
        wait("no load", lambda: not client.status().requests.in_flight)


def test_what_is_not_put_back_for_want_of_a_router_is_put_back_when_there_is_one(
    app: Bare, tmp_path: Path
) -> None:
    """The router dies in the run and comes back after its end, while the engine is still drained."""
    text = plan(2.5, actions=[{"at_s": 0.5, "drain": "decode"}])
    process = start(app, tmp_path, text, "--dashboard", str(app.dashboard))
    until(process, "action", "drain decode-")
    supervisor = app.process("Router").parent()
    assert supervisor is not None
    supervisor.suspend()
    try:
        kill(app, "Router")
        ended = until(process, "ended")
        process.wait(PATIENCE_S)
    finally:
        supervisor.resume()
    # the ingress decided meanwhile
    assert (ended["state"], ended["summary"]["failed"]) == ("failed", 0), ended
    assert NOT_YET in ended["message"]
    store = RunStore(tmp_path / "runs")
    [run_id] = store.ids()
    assert engines(app)[2:] == [WARM, ACTIVE]
    wait("all is put back", lambda: not (store.path(run_id) / BEFORE).exists())
    assert engines(app) == AT_REST
    wait("the end is noted", lambda: "then put back: engine decode-" in store.read(run_id)["message"])
