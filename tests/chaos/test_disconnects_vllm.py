"""Real vLLM engines, KV over NIXL: clients that leave at every stage, and a decode replica killed under load.

One app for all tests (start-up is the larger part). Reads are held for 0.5 s by the connector, so that the transfer
stage can be hit. What is asserted is always the same: every counter is 0 and every engine's KV blocks are as at the start.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.crowd import Crowd, leave_at
from tests.live.serving import App, config_file, serving

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.chaos, pytest.mark.timeout(900)]

LEASE_S = 12
SLOTS = 16
NEED = 50


def chaos_config(args: dict[str, Any]) -> None:
    for group in args["engines"]:
        group["options"] |= {"slots": SLOTS, "lease_s": LEASE_S, "max_model_len": 2048}
        group["options"]["connector_args"] = {"hold_reads_s": 0.5}
    args["router"] = {"dispatch": {"lease_margin_s": 4.0}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("chaos"), "cpu.yaml", chaos_config)) as running:
        yield running


def answers(app: App) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


STAGES = {
    # stage: (requests a round, words of prompt, tokens of output, wanted in the stage before the cut)
    "queued": (SLOTS + 34, 150, 4, 25),
    "prefill": (SLOTS, 150, 4, 10),
    "pool": (SLOTS + 30, 20, 200, 20),
    "transfer": (SLOTS, 20, 16, 8),
    "decode": (SLOTS, 20, 200, 12),
}


@pytest.mark.parametrize("stage", list(STAGES))
def test_fifty_clients_that_leave_in_one_stage_leave_nothing_behind(app: App, stage: str) -> None:
    count, words, tokens, want = STAGES[stage]
    cut = leave_at(app, stage, NEED, lambda crowd, n: crowd.send(count, words, tokens, f"{stage}{n}"), want)
    assert cut >= NEED
    app.wait_idle(LEASE_S + 10)
    answers(app)


def test_five_hundred_clients_that_leave_at_random_leave_nothing_behind(app: App) -> None:
    rng = random.Random(3)
    left = 0
    for n in range(10):
        crowd = Crowd(app)
        crowd.send(50, rng.choice((10, 60)), rng.choice((4, 100)), f"random{n}")
        for _ in range(5):
            time.sleep(rng.uniform(0.0, 0.6))
            crowd.leave(10)
            left += 10
    assert left == 500
    app.wait_idle(LEASE_S + 10)
    answers(app)


def test_a_killed_decode_replica_takes_its_processes_along_and_comes_back(app: App) -> None:
    victim = psutil.Process(app.replica_pid("DecodeEngine"))
    tree = victim.children(recursive=True)
    assert len(tree) >= 2, "a vLLM replica has an engine core and a worker"
    crowd = Crowd(app)
    crowd.send(30, 20, 300, "kill")
    app.wait(lambda s: s["replica"]["jobs"]["decoding"] >= 8, 30, "decoding under load")
    os.kill(victim.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([victim, *tree], timeout=20)
    assert not alive, f"orphans of the killed replica: {alive}"
    survivors = app.wait(
        lambda s: all(
            e["kv_blocks_used"] == 0 and e["leases"] == 0 for e in s["engines"] if e["role"] == "prefill"
        ),
        LEASE_S + 15,
        "the prefill engine's blocks are free again",
    )
    assert survivors["replica"]["jobs"]["decoding"] == 0
    crowd.leave()
    app.wait(
        lambda s: any(e["role"] == "decode" and e["state"] == "ready" for e in s["engines"]),
        240,
        "replacement",
    )
    app.wait_idle(LEASE_S + 10)
    answers(app)
