"""The parts of a fast start together, in a whole application on vLLM engines: under a load that one engine does not
carry, the policy `joint` has a second one start. It starts in a process that waited with its imports done, and its
weights come from the first engine. Both give the same text, and nothing is left of an engine that has gone.

It takes some minutes, since an engine, a process that waits and another engine start one after the other.
"""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.models import resolve
from tests.live.serving import PATIENCE_S, App, config_file, serving
from tests.live.test_failing_starts import log_of
from tests.live.test_role_switch_vllm import way
from tests.live.test_scaling_live import JOINABLE, at_rest, command, scaling, wait_placement_groups
from tests.live.vllm_app import DTYPE, LEASE_S, MODEL, cpu_only
from tests.processes import still_running

pytestmark = [
    pytest.mark.live,
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    cpu_only("the placement groups have CPUs only"),
]

PROMPT = "Once upon a time there was a lighthouse keeper"
"""A text shorter than a KV block, so that nothing of it is cached when it comes again."""
TOKENS = 40
SLOTS, CLIENTS = 2, 6
"""Sequences that an engine decodes at once, and requests that are open at once under load: for a third of them, one
engine has room."""
PREWARMED = "sluice_router_prewarmed_processes"


def two_engines(args: dict[str, Any]) -> None:
    """Changes the configuration: one engine serves, there may be two, and a process waits for the second one."""
    options = {
        "dtype": DTYPE,
        "slots": SLOTS,
        "max_model_len": 1024,
        "kv_space_gib": 0.25,
        "lease_s": LEASE_S,
    }
    args["engines"] = [
        {
            "name": "c",
            "role": "colocated",
            "options": {**options, "weights_from": "peer"},
            "placement_group_bundles": [{"CPU": 0.1}],
            "scaling": {"max": 2},
        }
    ]
    # idle engines get requests in turn
    shortest = {"name": "join_shortest_queue"}
    args["router"] = {"prefill": shortest, "decode": shortest}
    args["scaling"] = {"enabled": True, "policy": "joint", "prewarmed": 1}


def complete(app: App) -> httpx.Response:
    """Returns a greedy answer."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer


def asked(app: App) -> tuple[str, str]:
    """Returns the text of a greedy answer and the engine that gave it."""
    answer = complete(app)
    (engine,) = set(way(app, answer.headers["x-request-id"]))
    text: str = answer.json()["choices"][0]["text"]
    return text, engine


@contextmanager
def load(app: App) -> Iterator[None]:
    """A context in which clients ask again and again. A request that fails fails the test."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            complete(app)

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            ended.set()
        for one in asking:
            one.result(PATIENCE_S)


def start_of(app: App, engine: str) -> dict[str, Any]:
    """Returns what the replica of an engine has logged of its start (`app.replicas.start_of`)."""
    mark = f"start of {engine}: "
    (line,) = [line for line in log_of(app, "CEngine").splitlines() if mark in line]
    told: dict[str, Any] = json.loads(line.partition(mark)[2])
    return told


def engines(app: App) -> set[str]:
    return {engine["id"] for engine in app.status()["engines"]}


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def test_joint_has_an_engine_start_in_a_waiting_process_with_weights_from_its_peer(tmp_path: Path) -> None:
    file = config_file(tmp_path, "cpu.yaml", two_engines)
    size = sum(part.stat().st_size for part in Path(resolve(MODEL)).glob("*.safetensors"))
    with serving(file, environment=JOINABLE) as app:
        app.wait(at_rest(app, c_active=1), "one engine serves")
        (first,) = engines(app)
        undisturbed, by = asked(app)
        assert by == first
        app.wait(lambda _: app.metric(PREWARMED, state="waiting") == 1, "a process waits")
        assert app.metric(PREWARMED, state="taken") == 0

        with load(app):
            app.wait(at_rest(app, c_active=2), "the policy has a second engine serve", 2 * PATIENCE_S)
        told = scaling(app)
        assert (told["mode"], told["policy"]["name"]) == ("auto", "joint")
        (second,) = engines(app) - {first}

        app.wait(lambda _: app.metric(PREWARMED, state="taken") == 1, "the process is counted as taken")
        read, lent = "sluice_engine_start_weights_bytes", "sluice_engine_weights_lent_bytes_total"
        assert app.metric(read, engine=second, source="peer") == size
        app.wait(lambda _: app.metric(lent, engine=first) == size, "the first engine tells what it has lent")
        ordinary, fast = start_of(app, first), start_of(app, second)
        assert not ordinary["prewarmed"] and ordinary["weights"]["source"] == "disk"
        assert fast["prewarmed"], fast
        weights = fast["weights"]
        assert (weights["source"], weights["peer"], weights["bytes"]) == ("peer", first, size), weights
        print(f"\nordinary: {ordinary}\npre-warmed, weights from a peer: {fast}")

        app.wait_idle()
        texts: dict[str, str] = {}
        end_s = time.monotonic() + PATIENCE_S
        while set(texts) != {first, second}:
            assert time.monotonic() < end_s, f"only {set(texts)} got requests"
            text, engine = asked(app)
            texts[engine] = text
        assert texts == {first: undisturbed, second: undisturbed}

        # the policy goes on to decide, within a bound of one
        wait_placement_groups(app, 2)
        trees = {pid: tree(pid) for pid in app.replica_pids("CEngine")}
        command(app, "c.max=1")
        app.wait(at_rest(app, c_active=1), "one engine serves again", 2 * PATIENCE_S)
        app.wait(lambda _: len(app.replica_pids("CEngine")) == 1, "one replica is left")
        for pid in trees.keys() - set(app.replica_pids("CEngine")):
            assert still_running(trees[pid], timeout_s=60) == []
        wait_placement_groups(app, 1)
        assert asked(app)[0] == undisturbed
        app.wait(lambda _: app.metric(PREWARMED, state="waiting") == 1, "another process waits")
        app.wait_idle()
