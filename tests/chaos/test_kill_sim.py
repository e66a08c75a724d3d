"""Sim engines through the whole application: each process is killed or stopped under load, and no request notices.

Every answer is compared with the function that defines the engines' text. The load is such that requests are
PREFILLING, POOLED and DECODING at the moment of the fault, which the status confirms before it.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from app.ingress.tokenizer import WordCodec
from benchmarks.chaos.answers import Answer
from benchmarks.chaos.asks import Ask, answer_of, difference
from tests.chaos.crowd import Crowd
from tests.live.serving import App, config_file, plain_client, serving

pytestmark = [pytest.mark.live, pytest.mark.chaos, pytest.mark.timeout(900)]

CLIENTS = 16
LEASE_S = 24.0
LEASE_MARGIN_S = 2.0
STOP_S = 20.0
MOST_WAIT_S = 0.6 * STOP_S
"""Longest time without a piece of an answer, in time for which the clients ran. A request that nobody takes away from a
stopped process waits for `STOP_S`. A silent process is given up after 5 s; what comes in one piece takes longer, which
is the prompt, a wait for a slot, and the whole output where it is not streamed, and so does a busy machine."""
TICK_S = 0.05


def sim(args: dict[str, Any]) -> None:
    # A prefill takes half a second, and there are fewer slots than clients, so that some requests wait in the pool.
    timing = {"prefill_base_s": 0.5, "decode_base_s": 0.02}
    prefill = {"timing": timing, "lease_s": LEASE_S}
    decode = {**prefill, "slots": 4}
    args["engines"] = [
        {"name": "prefill", "role": "prefill", "kind": "sim", "replicas": 2, "options": prefill},
        {"name": "decode-a", "role": "decode", "kind": "sim", "options": decode},
        {"name": "decode-b", "role": "decode", "kind": "sim", "options": decode},
    ]
    args["router"] = {"dispatch": {"lease_margin_s": LEASE_MARGIN_S}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("kill"), "sim.yaml", sim)) as running:
        running.wait(lambda s: len(s["engines"]) == 4, "all four engines")
        yield running


class Load:
    """`clients` threads that ask one question after another, half of them for streams, and judge every answer.

    `bad` describes each answer that did not come, or is not the right one; `slowest_s` is the time of the slowest, and
    `longest_wait_s` the longest time without a piece of an answer. That is counted in time for which this process
    lived: a thread wakes twenty times a second, and counts two of its periods each time at most.
    """

    def __init__(self, app: App, clients: int = CLIENTS) -> None:
        self.right = 0
        self.bad: list[str] = []
        self.slowest_s = self.longest_wait_s = self.lived_s = 0.0
        self._app, self._stop, self._numbers = app, threading.Event(), itertools.count()
        targets = [self._tick, *[self._run] * clients]
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def _tick(self) -> None:
        last_s = time.monotonic()
        while not self._stop.is_set():
            time.sleep(TICK_S)
            now_s = time.monotonic()
            self.lived_s += min(now_s - last_s, 2 * TICK_S)
            last_s = now_s

    def _run(self) -> None:
        with plain_client() as http:
            while not self._stop.is_set():
                ask = self._ask(next(self._numbers))
                began_s = time.monotonic()
                try:
                    why = self._answer(http, ask)
                except httpx.HTTPError as error:
                    why = repr(error)
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                if why is None:
                    self.right += 1
                else:
                    self.bad.append(why)

    @staticmethod
    def _ask(number: int) -> Ask:
        prompt = f"one two three {number}"
        body = {"prompt": prompt, "max_tokens": 40, "seed": number, "stream": number % 2 == 0}
        expected = (answer_of(WordCodec().encode(prompt, True), body, 0),)
        return Ask("/v1/completions", body, 0.8, "", expected)

    def _answer(self, http: httpx.Client, ask: Ask) -> str | None:
        answer, last_s = Answer(ask.stream), self.lived_s
        with http.stream("POST", self._app.url + ask.path, json=ask.body, timeout=100) as response:
            answer.head(response.status_code)
            for piece in response.iter_bytes():
                if answer.feed(piece):
                    self.longest_wait_s = max(self.longest_wait_s, self.lived_s - last_s)
                    last_s = self.lived_s
        self.longest_wait_s = max(self.longest_wait_s, self.lived_s - last_s)
        answer.end()
        if answer.status != 200 or answer.error is not None:
            return f"{answer.status} {answer.error} {answer.message}"
        return difference(ask, answer)


def grow(load: Load, by: int, app: App) -> None:
    """Waits until `by` more requests were answered rightly."""
    goal = load.right + by
    app.wait(lambda _: load.right >= goal, f"{by} more answers; bad: {load.bad[:3]}")


def in_every_stage(status: dict[str, Any]) -> bool:
    """Whether requests are being prefilled, wait in the pool, and are being decoded."""
    stages = status["replica"]["stages"]
    return all(stages[stage] >= 2 for stage in ("prefilling", "pooled", "decoding"))


def whole(status: dict[str, Any]) -> bool:
    ready = [engine for engine in status["engines"] if engine["state"] == "ready"]
    return len(ready) == 4 and status["router"]["connected"]


VICTIMS = ["PrefillEngine", "DecodeAEngine", "Router"]


@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_is_lost_when_a_replica_is_killed(app: App, victim: str) -> None:
    pid = app.replica_pids(victim)[0]
    with Load(app) as load:
        grow(load, 20, app)
        app.wait(in_every_stage, "requests in every stage")
        os.kill(pid, signal.SIGKILL)
        grow(load, 60, app)
        app.wait(whole, "the replacement")
        grow(load, 20, app)
    assert not load.bad, load.bad[:3]
    assert load.slowest_s < LEASE_S - LEASE_MARGIN_S, "an answer waited for the end of a lease"
    app.wait_idle()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still during the block, and for `STOP_S` at least."""
    began_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
        time.sleep(max(0.0, STOP_S - (time.monotonic() - began_s)))
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "victim", [pytest.param(one, marks=pytest.mark.nightly) for one in VICTIMS[:2]] + VICTIMS[2:]
)
def test_no_request_waits_for_a_process_that_stands_still(app: App, victim: str) -> None:
    pid = app.replica_pids(victim)[0]
    with Load(app) as load:
        grow(load, 20, app)
        app.wait(in_every_stage, "requests in every stage")
        with stopped(pid):
            grow(load, 60, app)
        app.wait(whole, "the process is back")
        grow(load, 20, app)
    assert not load.bad, load.bad[:3]
    assert load.longest_wait_s < MOST_WAIT_S, "a request waited for the stopped process"
    app.wait_idle()


def test_a_killed_ingress_frees_everything_that_it_owned(app: App) -> None:
    crowd = Crowd(app)
    crowd.send(100, 10, 2000, "ingress")
    app.wait(lambda s: s["replica"]["stages"]["decoding"] >= 8 and s["replica"]["in_flight"] >= 90, "a load")
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
