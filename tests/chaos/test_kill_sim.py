"""Sim engines through the whole application: each process is killed under load, serving goes on, nothing leaks."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.crowd import Crowd
from tests.live.serving import App, config_file, plain_client, serving

pytestmark = [pytest.mark.live, pytest.mark.chaos, pytest.mark.timeout(900)]

CLIENTS = 8
LEASE_S = 8.0
LEASE_MARGIN_S = 2.0


def sim(args: dict[str, Any]) -> None:
    # prompts take long enough for a kill to find some of them PREFILLING, on either prefill engine
    timing = {"prefill_base_s": 0.1, "decode_base_s": 0.01}
    options = {"slots": 64, "timing": timing, "lease_s": LEASE_S}
    args["engines"] = [
        {"name": "prefill", "role": "prefill", "kind": "sim", "replicas": 2, "options": options},
        {"name": "decode-a", "role": "decode", "kind": "sim", "options": options},
        {"name": "decode-b", "role": "decode", "kind": "sim", "options": options},
    ]
    args["router"] = {"dispatch": {"lease_margin_s": LEASE_MARGIN_S}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("kill"), "sim.yaml", sim)) as running:
        running.wait(lambda s: len(s["engines"]) == 4, "all four engines")
        yield running


class Load:
    """`clients` threads that ask for short answers one after another and keep what came back.

    `failures` are the status and code of each answer that is no 200, and `slowest_s` is the time of the slowest answer.
    """

    def __init__(self, app: App, clients: int = CLIENTS) -> None:
        self.statuses: list[int] = []
        self.failures: list[tuple[int, str]] = []
        self.broken: list[str] = []
        self.slowest_s = 0.0
        self._app, self._stop = app, threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        body = {"prompt": "one two three", "max_tokens": 20, "stream": False}
        with plain_client() as http:
            for _ in range(2000):
                if self._stop.is_set():
                    return
                began_s = time.monotonic()
                try:
                    answer = http.post(f"{self._app.url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.broken.append(repr(error))
                    continue
                self.statuses.append(answer.status_code)
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                if answer.status_code != 200:
                    self.failures.append((answer.status_code, answer.json()["error"]["code"]))


def grow(load: Load, by: int, app: App) -> None:
    """Waits until `by` more requests were answered with 200."""
    goal = load.statuses.count(200) + by
    app.wait(lambda _: load.statuses.count(200) >= goal, f"{by} more answers")


@pytest.mark.parametrize("victim", ["DecodeAEngine", "Router"])
def test_serving_goes_on_when_a_replica_is_killed(app: App, victim: str) -> None:
    pid = app.replica_pid(victim)
    with Load(app) as load:
        grow(load, 40, app)
        os.kill(pid, signal.SIGKILL)
        grow(load, 200, app)
        app.wait(lambda s: len(s["engines"]) == 4 and s["router"]["connected"], "the replacement")
        grow(load, 40, app)
    assert not load.broken, load.broken[:3]
    if victim == "Router":
        assert not load.failures
    else:
        # a request that was decoding on the killed engine ends with an error, at most one a client; nothing else does
        assert set(load.failures) <= {(502, "engine_dead")}
        assert len(load.failures) <= CLIENTS
        assert load.slowest_s < LEASE_S - LEASE_MARGIN_S, "an answer waited for the end of a lease"
    app.wait_idle()


def test_a_killed_ingress_frees_everything_that_it_owned(app: App) -> None:
    crowd = Crowd(app)
    crowd.send(100, 10, 2000, "ingress")
    app.wait(lambda s: s["replica"]["stages"]["decoding"] >= 90, "decoding")
    os.kill(app.replica_pid("Ingress"), signal.SIGKILL)
    app.wait(lambda s: s["ready"], "a new ingress")
    app.wait_idle()
    crowd.leave()


def test_a_thousand_clients_that_leave_at_once_leave_nothing_behind(app: App) -> None:
    crowd = Crowd(app)
    crowd.send(1000, 10, 2000, "mass")
    app.wait(lambda s: s["requests"]["in_flight"] >= 900, "in flight")
    crowd.leave()
    app.wait_idle()
