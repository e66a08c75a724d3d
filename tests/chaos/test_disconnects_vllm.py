"""Real vLLM engines, KV over NIXL: clients leave at every stage, an ingress, Serve's controller and a decode
replica are killed.

One app for all tests (`vllm_app`; start-up is the larger part). Reads are held for 0.5 s by the connector, so that the
transfer stage can be hit. Asserted is always the same: every counter is 0, every engine's KV
blocks are as at the start.
"""

import os
import random
import signal
import time

import httpx
import psutil
import pytest

from tests.chaos.crowd import Crowd, leave_at
from tests.live.serving import PATIENCE_S, App
from tests.live.vllm_app import CORE_PROCESSES, SLOTS, on_a_slow_device
from tests.processes import command_line, still_running

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.chaos, pytest.mark.timeout(900)]

NEED = 50


def answers(vllm_app: App) -> None:
    """The application still answers, and sensibly; the prompt's continuation is no near tie in any dtype."""
    body = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{vllm_app.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["text"]


LONG = 1500
"""Words of a prompt, or tokens of an output, that hold a stage until the cut."""

STAGES = {
    # stage: (requests a round, words of prompt, tokens of output, wanted in the stage before the cut)
    "queued": (SLOTS + 34, LONG, 4, 25),
    "prefill": (SLOTS, LONG, 4, 10),
    "pool": (SLOTS + 30, 20, LONG, 20),
    "transfer": (SLOTS, 20, 16, 8),
    "decode": (SLOTS, 20, LONG, 12),
}


COMPUTED = ("queued", "prefill")
"""Stages that last as long as prompts take to compute."""


@pytest.mark.parametrize(
    "stage", [pytest.param(one, marks=on_a_slow_device if one in COMPUTED else ()) for one in STAGES]
)
def test_fifty_clients_that_leave_in_one_stage_leave_nothing_behind(vllm_app: App, stage: str) -> None:
    count, words, tokens, want = STAGES[stage]
    cut = leave_at(
        vllm_app, stage, NEED, lambda crowd, n: crowd.send(count, words, tokens, f"{stage}{n}"), want
    )
    assert cut >= NEED
    vllm_app.wait_idle()
    answers(vllm_app)


def test_five_hundred_clients_that_leave_at_random_leave_nothing_behind(vllm_app: App) -> None:
    rng = random.Random(3)
    left = 0
    for n in range(10):
        crowd = Crowd(vllm_app)
        crowd.send(50, rng.choice((10, 60)), rng.choice((4, 100)), f"random{n}")
        for _ in range(5):
            time.sleep(rng.uniform(0.0, 0.6))
            crowd.leave(10)
            left += 10
    assert left == 500
    vllm_app.wait_idle()
    answers(vllm_app)


def test_a_killed_ingress_leaves_no_transfer_behind(vllm_app: App) -> None:
    """Both engines give everything back without a word from an ingress that died while KV was in transfer."""
    crowd, ingress = Crowd(vllm_app), vllm_app.replica_pid("Ingress")
    # transfers of one round are over after half a second, in which nobody may have looked
    for tries in range(10):
        crowd.send(SLOTS, 20, 16, f"ingress{tries}")
        end_s = time.monotonic() + 20
        while (under_way := vllm_app.status()["replica"]["stages"]["transferring"]) < 4:
            if time.monotonic() > end_s:
                break
        if under_way >= 4:
            break
    assert under_way >= 4, "transfers under way"
    os.kill(ingress, signal.SIGKILL)
    vllm_app.wait(lambda s: s["ready"], "a new ingress")
    vllm_app.wait_idle()
    crowd.leave()
    answers(vllm_app)


def test_a_restarted_serve_controller_keeps_the_engines(vllm_app: App) -> None:
    """A controller stops a replica that does not answer where its log is. That a killed ingress comes back shows that
    the new controller has met all replicas.
    """
    engines = {name: vllm_app.replica_pid(name) for name in ("PrefillEngine", "DecodeEngine")}
    controller = next(p for p in vllm_app.processes() if "ServeController" in command_line(p))
    controller.kill()
    alive = still_running([controller], timeout_s=60)
    assert not alive
    ingress = vllm_app.replica_pid("Ingress")
    os.kill(ingress, signal.SIGKILL)
    vllm_app.wait(
        lambda s: s["ready"] and vllm_app.replica_pids("Ingress") not in ([], [ingress]), "an ingress"
    )
    assert {name: vllm_app.replica_pid(name) for name in engines} == engines
    states = {engine["id"]: engine["state"] for engine in vllm_app.status()["engines"]}
    assert set(states.values()) == {"ready"}, states
    vllm_app.wait_idle()
    answers(vllm_app)


def test_a_killed_decode_replica_takes_its_processes_along_and_comes_back(vllm_app: App) -> None:
    victim = psutil.Process(vllm_app.replica_pid("DecodeEngine"))
    tree = victim.children(recursive=True)
    assert len(tree) >= CORE_PROCESSES, "a vLLM replica has an engine core, and on CPUs a worker"
    crowd = Crowd(vllm_app)
    crowd.send(30, 20, LONG, "kill")
    vllm_app.wait(lambda s: s["replica"]["stages"]["decoding"] >= 8, "decoding under load")
    os.kill(victim.pid, signal.SIGKILL)
    alive = still_running([victim, *tree], timeout_s=60)
    assert not alive, f"orphans of the killed replica: {alive}"
    # Whoever waits for the replacement has its lease renewed; the leases of those that leave are given back.
    crowd.leave()
    vllm_app.wait(
        lambda s: (
            s["replica"]["stages"]["decoding"] == 0
            and all(
                e["kv_blocks_used"] == 0 and e["leases"] == 0 for e in s["engines"] if e["role"] == "prefill"
            )
        ),
        "the prefill engine's blocks are free again, and nothing decodes",
    )
    vllm_app.wait(
        lambda s: any(e["role"] == "decode" and e["state"] == "ready" for e in s["engines"]),
        "replacement",
        timeout_s=400,
    )
    vllm_app.wait_idle()
    answers(vllm_app)
