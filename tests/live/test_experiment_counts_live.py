"""An application with an autoscaler: experiments that set numbers of engines and give them back to its policy, and the
dashboard's page in a real browser, whose figures are those of status and metrics, and whose changes hold.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from playwright.sync_api import Browser, expect

from app.admin_key import key_path
from app.dashboard.store import BEFORE, RunStore
from benchmarks.live.experiment.stored import load
from benchmarks.live.servers import free_ports
from benchmarks.watching.chromium import Opened, browser, open_page
from sluice import Sluice, SluiceError
from sluice.admin import Dashboard
from tests.dashboard.browsing import needs_chromium
from tests.live.serving import PATIENCE_S, ROOT, App, config_file, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

LOAD_S = 20.0


def scaled(args: dict[str, Any]) -> None:
    """Makes one prefill and one decode engine, of which there may be up to three. One more decode engine waits warm, so
    that a higher number serves at once, however long a process takes to start.
    """
    small = {"kind": "sim", "num_cpus": 0.02}
    slow = {"timing": {"decode_base_s": 0.02}}
    bounds = {"min": 1, "max": 3, "warm": 1}
    args["engines"] = [
        {"name": "p", "role": "prefill", **small, "scaling": {"min": 1, "max": 1}},
        {"name": "d", "role": "decode", **small, "options": slow, "replicas": 1, "scaling": bounds},
    ]
    args["scaling"] = {"enabled": True, "policy": "fixed"}


@pytest.fixture(scope="module")
def port() -> int:
    """The dashboard's port."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counts")


@pytest.fixture(scope="module")
def app(folder: Path, port: int) -> Iterator[App]:
    with serving(config_file(folder, "sim.yaml", scaled, board=port)) as running:
        yield running


@pytest.fixture(autouse=True)
def _at_rest(app: App) -> None:
    """Waits until the autoscaler has seen the fleet, and the engines that a test before asked for have gone."""

    def at_rest(status: dict[str, Any]) -> bool:
        # one that stops is held until it has gone
        held = sorted((e["role"], e["duty"], e["state"]) for e in status["engines"] if e["state"] != "down")
        three = [("decode", "active"), ("decode", "warm"), ("prefill", "active")]
        replicas = [group["replicas"] for group in scaling(app)["groups"]]
        return held == [(*one, "ready") for one in three] and replicas == [1, 2]

    app.wait(at_rest, "one engine of each group serves, and the autoscaler knows them")


def scaling(app: App) -> dict[str, Any]:
    answer = app.http.get(f"{app.url}/sluice/admin/scale")
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


def plan(seconds: float, actions: list[dict[str, Any]]) -> str:
    classes = {"interactive": {"prompt_tokens": 20, "output_tokens": 20, "ttft_slo_ms": 2000}}
    phases = [{"name": "all", "for_s": seconds, "rate_per_s": 5}]
    return yaml.safe_dump(
        {"name": "counts", "load": {"classes": classes, "phases": phases}, "actions": actions}
    )


def run(app: App, folder: Path, seconds: float, actions: list[dict[str, Any]]) -> subprocess.Popen[str]:
    (folder / "plan.yaml").write_text(plan(seconds, actions))
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
    held = [sample["engines_held"] for sample in trial.samples]
    # one more is warm all of the time
    assert held[0] == 3 and ended["summary"]["engine_hours"] > ended["summary"]["serving_hours"]
    # two engines for all of the time are less than what served, and three are more
    assert 2 * LOAD_S / 3600 < ended["summary"]["serving_hours"] < 3 * LOAD_S / 3600


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_dashboard_and_router_are_killed_in_an_experiment_of_the_page(
    app: App, port: int, folder: Path
) -> None:
    """The runner ends with the dashboard that holds its leash, and there is no router to put anything back."""
    policy = app.http.get(f"{app.url}/sluice/admin/policy").json()["decode"]["name"]
    actions = [{"at_s": 0.5, "policy": {"decode": "round_robin"}}, {"at_s": 1, "scale": {"d": 2}}]
    with Dashboard(f"http://127.0.0.1:{port}") as dashboard:
        started = dashboard.start_experiment(plan(120, actions))
    assert started.id is not None
    end_s = time.monotonic() + PATIENCE_S
    while scaling(app)["mode"] != "manual":
        assert time.monotonic() < end_s, app.log.read_text()[-2000:]
        time.sleep(0.2)
    for deployment in ("Router", "Dashboard"):
        os.kill(app.replica_pid(deployment), signal.SIGKILL)
    store = RunStore(folder / "runs")
    while store.read(started.id)["state"] == "running" or (store.path(started.id) / BEFORE).exists():
        assert time.monotonic() < end_s, store.read(started.id)
        time.sleep(0.2)
    found = store.read(started.id)
    assert "by the end of what started it" in found["message"] and found["took_s"] < 110, found
    assert scaling(app)["mode"] == "auto"
    assert app.http.get(f"{app.url}/sluice/admin/policy").json()["decode"]["name"] == policy
    app.wait_idle()


# ------------------------------------------------------------------------------------------------------------ the page


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def opened(app: App, port: int, chromium: Browser) -> Iterator[Opened]:
    """A page that an administrator has opened, for one test, because sessions end with a dashboard that is killed.
    Nothing may be said on its console, and no other host asked.
    """
    end_s, url = time.monotonic() + PATIENCE_S, f"http://127.0.0.1:{port}"
    while not (key_path(port).exists() and answers(url)):
        assert time.monotonic() < end_s, app.log.read_text()[-2000:]
        time.sleep(0.2)
    page = open_page(chromium, url, key_path(port).read_text().strip(), width=1920)
    yield page
    page.close()
    assert (page.said, page.foreign) == ([], [])


def answers(url: str) -> bool:
    """Whether somebody answers there; the dashboard may be starting again."""
    try:
        return httpx.get(url, timeout=5.0).is_success
    except httpx.TransportError:
        return False


def until(opened: Opened, condition: Callable[[], Any], what: str) -> Any:
    """Polls until the condition returns something true, and returns that; the page goes on meanwhile."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end_s, what
        opened.page.wait_for_timeout(100)
    return found


@contextmanager
def streams(app: App, number: int) -> Iterator[None]:
    """Keeps this many answers under way, each of a minute and more."""
    ends = threading.Event()

    def read() -> None:
        # a stream that ends is followed by another
        with Sluice(app.url) as client:
            while not ends.is_set():
                with (
                    contextlib.suppress(SluiceError),
                    client.stream_completions("a", max_tokens=6000) as stream,
                ):
                    for _ in stream:
                        if ends.is_set():
                            break

    threads = [threading.Thread(target=read) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        app.wait_idle()


READ = """() => ({
  cells: Object.fromEntries([...document.querySelectorAll(".state-line .cell")].map((cell) =>
    [cell.querySelector(".name").textContent, cell.querySelector(".value").textContent])),
  lanes: [...document.querySelectorAll(".lane:not(.lane-names)")].map((lane) => ({
    id: lane.querySelector(".id").textContent, role: lane.querySelector(".role").getAttribute("title"),
    slots: lane.querySelector(".bar-text").textContent,
    counts: [...lane.querySelectorAll(".n")].map((one) => one.textContent),
  })),
})"""


def shown_by_status(status: dict[str, Any]) -> dict[str, Any]:
    """Returns what the page is to show of `/sluice/status`, in its words."""
    requests = status["requests"]
    cells = {"queue": requests["queued"], "pool": requests["pool"], "in flight": requests["in_flight"]}
    return {
        "cells": {name: str(n) for name, n in (cells | {"leases": status["leases"]}).items()},
        "lanes": {
            one["id"]: [
                one["role"],
                f"{one['running']} / {one['slots']}",
                str(one["waiting"]),
                str(one["leases"]),
            ]
            for one in status["engines"]
        },
    }


def shown_by_metrics(app: App, engines: list[str]) -> dict[str, Any]:
    """Returns the same of `/metrics`, but for roles."""

    def figure(name: str, **labels: str) -> str:
        return str(int(app.metric(f"sluice_{name}", **labels)))

    names = {"queue": "queued", "pool": "pool", "in flight": "in_flight", "leases": "leases"}
    return {
        "cells": {cell: figure(f"router_{name}") for cell, name in names.items()},
        "lanes": {
            one: [
                f"{figure('engine_running', engine=one)} / {figure('engine_slots', engine=one)}",
                figure("engine_waiting", engine=one),
                figure("engine_leases", engine=one),
            ]
            for one in engines
        },
    }


@pytest.mark.browser
@needs_chromium
def test_figures_on_the_page_are_those_of_status_and_metrics(app: App, opened: Opened) -> None:
    opened.go("engines")
    last: list[Any] = []

    def page_says_the_same(running: int) -> bool:
        """Figures that are read within one second may be of two; they are read again until all of them agree."""
        before = shown_by_status(app.status())
        metrics = shown_by_metrics(app, list(before["lanes"]))
        page = opened.page.evaluate(READ)
        shown = {
            "cells": {name: page["cells"][name] for name in before["cells"]},
            "lanes": {one["id"]: [one["role"], one["slots"], *one["counts"]] for one in page["lanes"]},
        }
        without_roles = {one: figures[1:] for one, figures in shown["lanes"].items()}
        last[:] = [shown, before, metrics]
        return (
            shown == before == shown_by_status(app.status())
            and {"cells": shown["cells"], "lanes": without_roles} == metrics
            and shown["cells"]["in flight"] == str(running)
        )

    with streams(app, 3):
        until(opened, lambda: page_says_the_same(3), f"page, status and metrics with 3 streams: {last}")
        assert page_tokens(app, opened) == pytest.approx(1.0, abs=0.2)
    until(opened, lambda: page_says_the_same(0), f"page, status and metrics of an idle application: {last}")


def page_tokens(app: App, opened: Opened) -> float:
    """Returns the output tokens per second that the page showed for ten seconds, as a share of what `/metrics` counted
    in that time. Their seconds do not begin together, so two of ten may differ.
    """
    began_s, before = time.monotonic(), app.metric("sluice_engine_decode_tokens_total")
    shown: dict[float, float] = {}
    read = """async () => {
      const { feed } = await import("/static/js/live.js");
      return [feed.at, document.querySelectorAll(".state-line .cell .value")[3].firstChild.textContent];
    }"""
    while len(shown) < 10:
        at, text = opened.page.evaluate(read)
        shown[at] = float(text.replace(",", ""))
        assert time.monotonic() - began_s < PATIENCE_S, shown
        opened.page.wait_for_timeout(100)
    counted = app.metric("sluice_engine_decode_tokens_total") - before
    return sum(shown.values()) / len(shown) / (counted / (time.monotonic() - began_s))


@pytest.mark.browser
@needs_chromium
def test_a_policy_that_is_switched_on_the_page_decides_the_next_request(app: App, opened: Opened) -> None:
    page, dialog = opened.page, opened.page.get_by_role("dialog")
    opened.go("control")
    page.get_by_role("tab", name="Decode").click()
    before = app.http.get(f"{app.url}/sluice/admin/policy").json()["decode"]["name"]
    assert before != "round_robin"
    page.get_by_label("Policy", exact=True).select_option("round_robin")
    page.get_by_role("button", name="Review the change").click()
    dialog.get_by_role("button", name="Change", exact=True).click()
    expect(dialog).to_have_count(0)
    assert decided(app, opened) == "round_robin"
    opened.go("control")
    undo(opened)
    assert decided(app, opened) == before


def decided(app: App, opened: Opened) -> str:
    """Returns the decode policy that decided a new request, as `explain` says it; the page must say the same."""
    with Sluice(app.url) as client:
        answer = client.completions("who decides", max_tokens=3)
        assert answer.request_id is not None
        route = client.explain(answer.id).decisions[-1]
    assert route.action == "RouteDecode" and route.policy is not None
    opened.go("requests", answer.request_id)
    formula = opened.page.locator(".decision").last.locator("dd").first
    expect(formula).to_contain_text(route.policy.name)
    return route.policy.name


def serving_engines(status: dict[str, Any]) -> int:
    """Returns the number of engines that are ready and get requests."""
    return sum((one["state"], one["duty"]) == ("ready", "active") for one in status["engines"])


def undo(opened: Opened) -> None:
    """Undoes the last change that can be undone, on the Control view."""
    log, dialog = opened.page.locator("section", has_text="Audit log").last, opened.page.get_by_role("dialog")
    log.get_by_role("button", name="Undo").first.click()
    dialog.get_by_role("button", name="Undo").click()
    expect(dialog).to_have_count(0)


@pytest.mark.browser
@needs_chromium
def test_numbers_and_bounds_are_changed_on_the_page_and_undone(app: App, opened: Opened, port: int) -> None:
    page, dialog = opened.page, opened.page.get_by_role("dialog")
    opened.go("control")
    page.get_by_label("engines of d", exact=True).fill("2")
    page.get_by_role("button", name="Set these numbers").click()
    dialog.get_by_role("button", name="Set", exact=True).click()
    expect(dialog).to_have_count(0)
    app.wait(lambda status: serving_engines(status) == 3, "a second decode engine")
    engines = page.locator(".state-line .cell", has_text="engines")
    expect(engines).to_contain_text("3 ready", timeout=30_000)
    page.get_by_label("max of d", exact=True).fill("2")
    page.get_by_role("button", name="Set these bounds").click()
    dialog.get_by_role("button", name="Set", exact=True).click()
    expect(dialog).to_have_count(0)
    assert [group["max"] for group in scaling(app)["groups"]] == [1, 2]
    # what the page says of it, the SDK says, too
    with Dashboard(f"http://127.0.0.1:{port}") as dashboard:
        assert [one.what for one in dashboard.changes()[:2]] == ["bounds: d max 2", "numbers of engines: d 2"]
    undo(opened)
    assert [group["max"] for group in scaling(app)["groups"]] == [1, 3]
    undo(opened)
    assert scaling(app)["mode"] == "auto"
    # back to one decode engine, which is where the other tests begin
    app.http.put(f"{app.url}/sluice/admin/scale", json={"counts": {"d": 1}}).raise_for_status()
    app.wait(lambda status: serving_engines(status) == 2, "one decode engine")
    app.http.put(f"{app.url}/sluice/admin/scale", json={"mode": "auto"}).raise_for_status()
