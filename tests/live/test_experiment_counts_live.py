"""An experiment that sets numbers of engines where an autoscaler decides, and gives them back to its policy."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.dashboard.store import RunStore
from benchmarks.live.experiment.stored import load
from tests.live.serving import PATIENCE_S, ROOT, App, config_file, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

LOAD_S = 20.0


def scaled(args: dict[str, Any]) -> None:
    """Makes one prefill and one decode engine, of which there may be up to three. One more decode engine waits warm, so
    that a higher number serves at once, however long a process takes to start.
    """
    small = {"kind": "sim", "num_cpus": 0.02}
    args["engines"] = [
        {"name": "p", "role": "prefill", **small, "scaling": {"min": 1, "max": 1}},
        {"name": "d", "role": "decode", **small, "replicas": 1, "scaling": {"min": 1, "max": 3, "warm": 1}},
    ]
    args["scaling"] = {"enabled": True, "policy": "fixed"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("counts"), "sim.yaml", scaled)) as running:
        yield running


@pytest.fixture(autouse=True)
def _at_rest(app: App) -> None:
    """Waits until the autoscaler has seen the fleet, and the engines that a test before asked for have gone."""

    def at_rest(status: dict[str, Any]) -> bool:
        ready = sorted((e["role"], e["duty"]) for e in status["engines"] if e["state"] == "ready")
        return ready == [("decode", "active"), ("decode", "warm"), ("prefill", "active")] and [
            group["replicas"] for group in scaling(app)["groups"]
        ] == [1, 2]

    app.wait(at_rest, "one engine of each group serves, and the autoscaler knows them")


def scaling(app: App) -> dict[str, Any]:
    answer = app.http.get(f"{app.url}/sluice/admin/scale")
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


def run(app: App, folder: Path, seconds: float, actions: list[dict[str, Any]]) -> subprocess.Popen[str]:
    classes = {"interactive": {"prompt_tokens": 20, "output_tokens": 20, "ttft_slo_ms": 2000}}
    phases = [{"name": "all", "for_s": seconds, "rate_per_s": 5}]
    plan = {"name": "counts", "load": {"classes": classes, "phases": phases}, "actions": actions}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    argv = [
        sys.executable,
        "-m",
        "sluice.cli",
        "experiment",
        "run",
        str(folder / "plan.yaml"),
        "--url",
        app.url,
    ]
    argv += ["--json", "--runs", str(folder / "runs")]
    env = {k: v for k, v in os.environ.items() if k != "SLUICE_ADMIN_KEY"}
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def test_numbers_are_set_and_given_back_to_the_policy(app: App, tmp_path: Path) -> None:
    assert scaling(app)["mode"] == "auto"
    process = run(app, tmp_path, LOAD_S, [{"at_s": 2, "scale": {"d": 2}}])
    out, _ = process.communicate(timeout=PATIENCE_S)
    ended = json.loads(out.splitlines()[-1])
    assert (process.returncode, ended["state"], ended["summary"]["failed"]) == (0, "done", 0), ended
    assert '"what": "scale: d 2"' in out and "put back: scale: auto" in out
    assert scaling(app)["mode"] == "auto"
    store = RunStore(tmp_path / "runs")
    [trial] = load(store, store.ids()[0]).trials
    active = [sample["engines_active"] for sample in trial.samples]
    assert active[0] == 2 and max(active) == 3
    # two engines for all of the time are less than what served, and three are more
    assert 2 * LOAD_S / 3600 < ended["summary"]["engine_hours"] < 3 * LOAD_S / 3600


def test_numbers_by_hand_are_put_back_as_they_were_after_a_kill(app: App, tmp_path: Path) -> None:
    app.http.put(f"{app.url}/sluice/admin/scale", json={"counts": {"d": 2}}).raise_for_status()
    process = run(app, tmp_path, 120, [{"at_s": 1, "scale": {"d": 3}}])
    assert process.stdout is not None
    next(line for line in process.stdout if json.loads(line)["event"] == "action")
    wanted = {group["name"]: group["wanted"] for group in scaling(app)["groups"]}
    assert wanted["d"] == 3
    process.kill()
    process.wait()
    end_s = time.monotonic() + PATIENCE_S
    while (told := scaling(app))["groups"][1]["wanted"] != 2:
        assert time.monotonic() < end_s, told
        time.sleep(0.2)
    assert told["mode"] == "manual"
    app.http.put(f"{app.url}/sluice/admin/scale", json={"mode": "auto"}).raise_for_status()


def test_numbers_beyond_a_group_s_bounds_are_refused_before_the_load(app: App, tmp_path: Path) -> None:
    process = run(app, tmp_path, 5, [{"at_s": 1, "scale": {"d": 9}}])
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and "the group may have 1 to 3" in out
