"""The autoscaler in the whole application on sim engines: replicas grow and shrink by hand under load without a failed
request, an autoscaler that is killed goes on where the other was, the command shows what would be done, and no
placement group is left over.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.live.serving import PATIENCE_S, App, config_file, serving
from tests.processes import command_line

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

SCALE = "/sluice/admin/scale"
JOINABLE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}
"""Environment of an application whose Ray other programs of these tests join."""
SEATS = 4
"""Decode engines for which the node has room: each takes one of a resource of this name."""


def scaled(journal: Path) -> Any:
    """Returns a change of the configuration: one prefill and two decode engines, one of these warm. All sleep when
    nothing comes. There may be one decode engine more than the node has room for.
    """

    def change(args: dict[str, Any]) -> None:
        small = {"kind": "sim", "num_cpus": 0.02}
        steps = {"timing": {"decode_base_s": 0.02}}
        args["engines"] = [
            {"name": "p", "role": "prefill", **small, "options": steps, "scaling": {"min": 0, "max": 2}},
            {
                "name": "d",
                "role": "decode",
                **small,
                "options": steps,
                "scaling": {"min": 0, "max": SEATS + 1, "warm": 1},
                "placement_group_bundles": [{"CPU": 0.02, "seat": 1}],
            },
        ]
        args["scaling"] = {
            "enabled": True,
            "policy": "fixed",
            "sleep_after_s": 12,
            "wake_limit_s": 120,
            "journal": {"folder": str(journal)},
        }

    return change


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, journal: Path) -> Path:
    return config_file(tmp_path_factory.mktemp("scaling"), "sim.yaml", scaled(journal))


@pytest.fixture(scope="module")
def app(file: Path) -> Iterator[App]:
    seats = {"RAY_OVERRIDE_RESOURCES": json.dumps({"seat": SEATS})}
    with serving(file, environment=JOINABLE | seats) as running:
        yield running


def scaling(app: App) -> dict[str, Any]:
    answer = app.http.get(app.url + SCALE)
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


def group(app: App, name: str) -> dict[str, Any]:
    """Returns what the autoscaler says of one group."""
    told: dict[str, Any] = next(one for one in scaling(app)["groups"] if one["name"] == name)
    return told


def duties(status: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Ready engines by group and duty."""
    found: dict[tuple[str, str], int] = {}
    for engine in status["engines"]:
        if engine["state"] == "ready":
            key = engine["id"].rpartition("-")[0], engine["duty"]
            found[key] = found.get(key, 0) + 1
    return found


def command(app: App, *arguments: str) -> str:
    """Returns the text that `sluice scale` prints."""
    run = [sys.executable, "-m", "sluice.cli", "scale", *arguments, "--base-url", app.url]
    done = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stream(app: App, tokens: int) -> str:
    body = {"model": "sim", "prompt": "the same prompt", "max_tokens": tokens, "stream": True, "seed": 1}
    text = ""
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                assert "error" not in piece, piece
                text += piece["choices"][0]["text"]
    return text


class Load:
    """Clients that stream the same answer again and again; `texts` has each answer, `errors` what failed."""

    def __init__(self, app: App, clients: int, tokens: int) -> None:
        self.texts: list[str] = []
        self.errors: list[BaseException] = []
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(app, tokens), daemon=True) for _ in range(clients)
        ]

    def _run(self, app: App, tokens: int) -> None:
        while not self._ended.is_set():
            try:
                self.texts.append(stream(app, tokens))
            except BaseException as error:
                self.errors.append(error)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def at_rest(app: App, **wanted: int) -> Any:
    """Returns whether a status has these ready engines, such as `d_active=3`, and none else, and an autoscaler is
    connected that has seen the same. The router knows each of them first.
    """
    keys = {(name.split("_")[0], name.split("_")[1]): n for name, n in wanted.items()}

    def condition(status: dict[str, Any]) -> bool:
        seen = {
            (group["name"], duty): group[duty]
            for group in scaling(app)["groups"]
            for duty in ("active", "warm")
            if group[duty]
        }
        return duties(status) == seen == keys

    return condition


def wait_awake(app: App) -> None:
    """Waits until one engine of each group serves and one decode engine is warm. Requests keep the fleet from going to
    sleep meanwhile, however long engines take to start.
    """
    rest = at_rest(app, p_active=1, d_active=1, d_warm=1)

    def awake(status: dict[str, Any]) -> bool:
        return bool(stream(app, 2)) and status["sleep"]["phase"] == "awake" and rest(status)

    app.wait(awake, "one of each serves, one decode engine is warm, and the fleet is called awake")


def test_replicas_grow_and_shrink_under_load_and_an_autoscaler_may_die(app: App, journal: Path) -> None:
    wait_awake(app)
    undisturbed = stream(app, 40)
    plan = command(app, "p=2", "d=3", "--plan")
    assert "activate d-" in plan and "2 prefill, 3 decode, 0 colocated serve, 1 warm" in plan
    assert "order     d: 4 replicas" in plan
    assert scaling(app)["mode"] == "auto"

    with Load(app, 6, 40) as load:
        assert "mode      manual (by an administrator)" in command(app, "p=2", "d=3")
        app.wait(lambda status: duties(status).get(("d", "active"), 0) >= 2, "the warm engine is active")
        # killed while replicas start
        os.kill(app.replica_pid("Autoscaler"), signal.SIGKILL)
        app.wait(at_rest(app, p_active=2, d_active=3, d_warm=1), "the counts are reached after the kill")
        assert scaling(app)["by"] == "an administrator"

        killed = app.replica_pid("Autoscaler")
        command(app, "p=1", "d=1")
        os.kill(killed, signal.SIGKILL)
        app.wait(at_rest(app, p_active=1, d_active=1, d_warm=1), "the counts are reached on the way down")
        before = len(load.texts)
        end_s = time.monotonic() + PATIENCE_S
        while len(load.texts) < before + 6:
            assert time.monotonic() < end_s
            time.sleep(0.1)
        # the policy, too, wants what there is
        assert command(app, "--plan").count("order") == 0
    assert load.errors == []
    assert set(load.texts) == {undisturbed}
    app.wait_idle()
    assert psutil.pid_exists(app.replica_pid("Autoscaler"))
    app.wait(lambda _: len(app.replica_pids("DEngine")) == 2, "no replica is left behind")
    wait_placement_groups(app, 2)

    assert "mode      auto" in command(app, "auto")
    refused = app.http.put(app.url + SCALE, json={"counts": {"d": 9}})
    assert refused.status_code == 400
    assert f"1..{SEATS + 1}, the bounds in engines.d.scaling" in refused.json()["error"]["message"]

    files = [str(path) for path in sorted(journal.iterdir())]
    # the files of one life of the autoscaler, of which there may be several, differ in the number at their end
    lives = {file.rpartition("-")[0] for file in files}
    assert len(lives) >= 3
    replayed = subprocess.run(
        [sys.executable, "-m", "app.replay", *files], capture_output=True, text=True, check=False
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count(" 0 different") == len(lives)


@pytest.mark.nightly
def test_plans_go_on_past_a_killed_controller_and_router_and_replicas_that_die_on_the_way(app: App) -> None:
    """Serve's controller, which starts and stops replicas, dies while some start; then the router dies, a replica that
    has just been activated, and one that is being given up.
    """
    wait_awake(app)
    undisturbed = stream(app, 40)
    with Load(app, 6, 40) as load:
        command(app, "p=2", "d=3")
        (controller,) = (p for p in app.processes() if "ServeController" in command_line(p))
        controller.kill()
        app.wait(lambda status: duties(status).get(("d", "active"), 0) >= 2, "the warm engine is active")
        os.kill(app.replica_pids("DEngine")[-1], signal.SIGKILL)
        os.kill(app.replica_pid("Router"), signal.SIGKILL)
        app.wait(at_rest(app, p_active=2, d_active=3, d_warm=1), "the counts are reached after the kills")

        before = app.replica_pids("DEngine")
        command(app, "p=1", "d=1")
        app.wait(lambda status: duties(status).get(("d", "active"), 0) < 3, "decode engines are given up")
        os.kill(before[0], signal.SIGKILL)
        app.wait(at_rest(app, p_active=1, d_active=1, d_warm=1), "the counts are reached on the way down")
    assert load.errors == []
    assert set(load.texts) == {undisturbed}
    app.wait_idle()
    app.wait(lambda _: len(app.replica_pids("DEngine")) == 2, "no replica is left behind")
    wait_placement_groups(app, 2)
    command(app, "auto")


@pytest.mark.nightly
def test_numbers_that_somebody_else_sets_are_adopted_and_outlast_a_deploy(app: App, file: Path) -> None:
    """Somebody else sets a number while a replica starts that an administrator has ordered, and another number while a
    deploy runs. The deploy has changed arguments, so it sets the file's numbers again, which are those of the start.
    """
    wait_awake(app)
    undisturbed = stream(app, 40)
    with Load(app, 6, 40) as load, outsider(app) as set_number, ThreadPoolExecutor(1) as pool:
        ordered = app.http.put(app.url + SCALE, json={"counts": {"p": 2}})
        assert ordered.status_code == 200, ordered.text
        app.wait(lambda _: group(app, "p")["replicas"] == 2, "another prefill engine is asked for")
        set_number("DEngine", 3)
        app.wait(lambda _: scaling(app)["by"] == "somebody else", "what somebody else has set is adopted")
        app.wait(at_rest(app, p_active=2, d_active=2, d_warm=1), "both numbers are reached")
        assert scaling(app)["mode"] == "manual"

        autoscaler = app.replica_pid("Autoscaler")
        changed = file.with_name("changed.yaml")
        changed.write_text(file.read_text().replace("sleep_after_s: 12", "sleep_after_s: 13"))
        ports = ["--port", app.url.rpartition(":")[2], "--http-port", app.serve_url.rpartition(":")[2]]
        module = ("benchmarks.watching.redeploy", "--address", ray_of(app), "--config", str(changed))
        deploy = pool.submit(joined, *module, *ports)
        app.wait(
            lambda _: autoscaler not in app.replica_pids("Autoscaler") or deploy.done(),
            "the deploy has begun",
        )
        set_number("DEngine", 4)
        deploy.result(PATIENCE_S)
        assert app.replica_pids("Autoscaler") not in ([], [autoscaler])
        app.wait(at_rest(app, p_active=2, d_active=3, d_warm=1), "the numbers are reached after the deploy")
        assert scaling(app)["by"] == "somebody else"
        command(app, "p=1", "d=1")
        app.wait(at_rest(app, p_active=1, d_active=1, d_warm=1), "the counts are reached on the way down")
    assert load.errors == []
    assert set(load.texts) == {undisturbed}
    wait_placement_groups(app, 2)
    command(app, "auto")
    app.wait_idle()


def steps_of(journal: Path, autoscaler: int) -> int:
    """Returns the number of lines that the autoscaler with this process id has written."""
    files = journal.glob(f"scaling-*-{autoscaler}-*.jsonl")
    return sum(len(file.read_text().splitlines()) for file in files)


@pytest.mark.nightly
def test_of_two_autoscalers_one_decides_and_the_one_that_is_left_goes_on(app: App, journal: Path) -> None:
    """Somebody asks Serve for a second replica of the autoscaler. The first one lives on beside its successor, also
    when the router is replaced; then one of them is stopped, which Serve chooses.
    """
    wait_awake(app)
    undisturbed = stream(app, 40)
    first = app.replica_pid("Autoscaler")
    with Load(app, 4, 40) as load, outsider(app) as set_number:
        # nothing sleeps while numbers rule
        command(app, "d=1")
        set_number("Autoscaler", 2)
        app.wait(lambda _: len(app.replica_pids("Autoscaler")) == 2, "a second autoscaler")
        (second,) = set(app.replica_pids("Autoscaler")) - {first}
        app.wait(lambda _: steps_of(journal, second) > 2, "the later one decides")
        before = steps_of(journal, first)
        command(app, "d=2")
        app.wait(at_rest(app, p_active=1, d_active=2, d_warm=1), "the counts are reached")
        assert scaling(app)["by"] == "an administrator"

        os.kill(app.replica_pid("Router"), signal.SIGKILL)
        steps = steps_of(journal, second)
        app.wait(lambda _: steps_of(journal, second) > steps + 2, "the later one goes on with a new router")
        assert sorted(app.replica_pids("Autoscaler")) == sorted([first, second])
        assert steps_of(journal, first) == before

        set_number("Autoscaler", 1)
        app.wait(lambda _: len(app.replica_pids("Autoscaler")) == 1, "one of them has gone")
        left = app.replica_pid("Autoscaler")
        steps = steps_of(journal, left)
        app.wait(lambda _: steps_of(journal, left) > steps + 2, "the one that is left decides")
        # it has taken over what the other one was ordered, and takes nothing for somebody else's
        told = scaling(app)
        assert (told["by"], next(g["wanted"] for g in told["groups"] if g["name"] == "d")) == (
            "an administrator", 2,
        )  # fmt: skip
        command(app, "d=1")
        app.wait(at_rest(app, p_active=1, d_active=1, d_warm=1), "the counts are reached on the way down")
    assert load.errors == []
    assert set(load.texts) == {undisturbed}
    command(app, "auto")
    app.wait_idle()


def test_a_replica_without_a_place_is_taken_back_once_it_is_not_needed(app: App) -> None:
    """The node has room for `SEATS` decode engines, and one more is asked for. It goes when one less is ordered, and
    when the order ends and the policy wants less; its placement group goes with it.
    """
    wait_awake(app)
    undisturbed = stream(app, 40)

    def waits_for_a_seat(status: dict[str, Any]) -> bool:
        own = group(app, "d")
        waits = (own["replicas"], own["starting"]) == (SEATS + 1, 1)
        return waits and bool(at_rest(app, p_active=1, d_active=SEATS)(status))

    command(app, f"d={SEATS}")
    app.wait(waits_for_a_seat, "every seat is taken, and one engine more is awaited")
    placed = sorted(app.replica_pids("DEngine"))
    assert len(placed) == SEATS
    wait_placement_groups(app, SEATS + 1)
    assert stream(app, 40) == undisturbed

    command(app, f"d={SEATS - 1}")
    app.wait(at_rest(app, p_active=1, d_active=SEATS - 1, d_warm=1), "one engine is warm again")
    wait_placement_groups(app, SEATS)
    assert sorted(app.replica_pids("DEngine")) == placed

    command(app, f"d={SEATS}")
    app.wait(waits_for_a_seat, "one engine more is awaited again")
    command(app, "auto")
    wait_awake(app)
    # nothing sleeps while numbers rule
    command(app, "d=1")
    wait_placement_groups(app, 2)
    app.wait(at_rest(app, p_active=1, d_active=1, d_warm=1), "as many as at first")
    command(app, "auto")


def ray_of(app: App) -> str:
    """Returns the address of the control process of the application's Ray, which its raylet has as an argument."""
    mark = "--gcs-address="
    words = (word for process in app.processes() for word in command_line(process).split())
    return next(word.removeprefix(mark) for word in words if word.startswith(mark))


def joined(*module_and_arguments: str) -> str:
    """Runs a program that joins the application's Ray, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", *module_and_arguments],
        env={**os.environ, **JOINABLE},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def outsider(app: App) -> Iterator[Callable[[str, int], None]]:
    """A context with somebody who has joined the application's Ray and sets a deployment's number of replicas."""
    run = [sys.executable, "-m", "tests.live.outside", ray_of(app)]
    with subprocess.Popen(
        run, env={**os.environ, **JOINABLE}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        to, answers = process.stdin, process.stdout

        def wait_for(word: str) -> None:
            assert any(line.strip() == word for line in answers), f"tests.live.outside ended before {word!r}"

        def set_number(deployment: str, number: int) -> None:
            print(deployment, number, file=to, flush=True)
            wait_for("done")

        wait_for("ready")
        yield set_number


def wait_placement_groups(app: App, number: int) -> None:
    """Waits until the application's Ray has this number of placement groups: one for each decode replica."""

    def counted(_: dict[str, Any]) -> bool:
        return int(joined("benchmarks.chaos.placement", ray_of(app)).split()[-1]) == number

    app.wait(counted, f"there are {number} placement groups")


def test_an_idle_application_has_no_engine_and_the_next_request_wakes_it(app: App) -> None:
    """From zero to the first token: Serve starts a replica of each group, and the request waits for both."""
    wait_awake(app)
    undisturbed = stream(app, 40)
    command(app, "auto")

    def asleep(status: dict[str, Any]) -> bool:
        return bool(status["sleep"]["phase"] == "asleep" and not status["engines"])

    app.wait(asleep, "every engine has gone")
    app.wait(
        lambda _: not app.replica_pids("DEngine") and not app.replica_pids("PEngine"), "no replica is left"
    )
    wait_placement_groups(app, 0)
    assert app.http.get(app.url + "/health/ready").status_code == 200
    assert app.http.get(app.url + "/v1/models").json()["data"][0]["max_model_len"]
    assert "engines   asleep" in command(app)
    # a router that has just started knows nothing of the sleep but from the autoscaler
    os.kill(app.replica_pid("Router"), signal.SIGKILL)
    begun_s = time.monotonic()
    assert stream(app, 40) == undisturbed
    print(f"from zero to the end of an answer, past a killed router: {time.monotonic() - begun_s:.1f} s")
    # the autoscaler calls the fleet awake in a round after its engines came, and the request may have ended before
    wait_awake(app)
