"""The client of a run against sim engines behind real sockets, in this process."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.registry import ENGINES, engine_config
from actors.engine.server import EngineServer
from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.wire.channel import Identity
from actors.wire.messages import Decode
from benchmarks.mfs.drive import Client, Promise
from benchmarks.mfs.engines import SECRET, Running, Sizes, sim_options
from benchmarks.mfs.report import cell
from benchmarks.mfs.workload import KINDS, Kind, Workload, arrivals

WORKLOAD = Workload(requests=24, tight_tokens=64, loose_tokens=512, tight_prompts=4, loose_prompts=2)
PROMISES: dict[Kind, Promise] = {"tight": Promise(60.0, 1.0), "loose": Promise(120.0, 2.0)}


@contextlib.asynccontextmanager
async def engines(
    folder: Path, agent: str = "", **options: Any
) -> AsyncIterator[tuple[Running, list[EngineServer]]]:
    servers = []
    for name in ("prefill-0", "decode-0", "decode-1"):
        role = name.partition("-")[0]
        own = sim_options(role, Sizes(), agent) | options
        engine = ENGINES["sim"].make(engine_config("sim", {"engine_id": name, "role": role}, own))
        server = EngineServer(
            engine, Identity("engine", name, SECRET.encode()), [f"unix:{folder}/{name}"], node=name
        )
        await server.start()
        servers.append(server)
    try:
        yield (
            Running(f"unix:{folder}/prefill-0", (f"unix:{folder}/decode-0", f"unix:{folder}/decode-1"), ()),
            servers,
        )
    finally:
        for server in servers:
            await server.stop()


async def test_every_request_is_prefilled_read_and_answered_in_that_order(tmp_path: Path) -> None:
    async with engines(tmp_path) as (running, _):
        client = Client(running, WORKLOAD, PROMISES)
        await client.connect()
        asks = await client.run(arrivals(WORKLOAD, 500.0, 2, seed=1))
        client.close()
    assert [ask.failed for ask in asks] == [None] * 24
    for ask in asks:
        stages = [ask.sent_s, ask.prefilled_s, ask.asked_s, ask.reading_s, ask.admitted_s, ask.first_s]
        assert None not in stages
        assert stages == sorted(stages)
        assert ask.bytes > 0
    found = cell(asks, PROMISES, 0)
    # 77 % of 24
    assert (found["tight"]["requests"], found["loose"]["requests"]) == (18, 6)
    assert (found["tight"]["in_time"], found["loose"]["in_time"]) == (18, 6)
    # loose prompts have eight times the KV; a decode engine that has the prompt from before reads less
    most = {kind: max(ask.bytes for ask in asks if ask.arrival.kind == kind) for kind in KINDS}
    assert most["loose"] == 8 * most["tight"]


def note(monkeypatch: pytest.MonkeyPatch, server: EngineServer, seen: list[Decode]) -> None:
    """Has the engine of a server add each Decode to `seen` before it works on it."""
    decode = server.engine.decode

    def noted(msg: Decode) -> None:
        seen.append(msg)
        decode(msg)

    monkeypatch.setattr(server.engine, "decode", noted)


async def test_the_kv_is_due_when_the_promise_of_the_class_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Decode] = []
    async with engines(tmp_path) as (running, servers):
        for server in servers[1:]:
            note(monkeypatch, server, seen)
        client = Client(running, WORKLOAD, PROMISES)
        await client.connect()
        asks = await client.run(arrivals(WORKLOAD, 500.0, 2, seed=1))
        client.close()
    due_s = {msg.attempt_id: msg.kv_due_s for msg in seen}
    for ask in asks:
        assert ask.asked_s is not None
        promise = PROMISES[ask.arrival.kind]
        assert due_s[ask.attempt_id] == promise.ttft_s - (ask.asked_s - ask.sent_s) - promise.after_kv_s


@pytest.mark.parametrize("policy", ["mfs", "edf"])
async def test_an_agent_holds_reads_that_contend_and_all_are_answered(tmp_path: Path, policy: str) -> None:
    address = f"unix:{tmp_path}/agent"
    agent = FlowAgent(
        Identity("agent", "agent", SECRET.encode()),
        "decode",
        frozenset({"decode", "prefill"}),
        AgentConfig(policy=policy),
        None,
    )
    await agent.start([address])
    async with engines(tmp_path, address) as (running, _):
        client = Client(running, WORKLOAD, PROMISES)
        await client.connect()
        # 24 reads at once over one link
        asks = await client.run(arrivals(WORKLOAD, 1e6, 2, seed=1))
        client.close()
    await agent.stop()
    assert [ask.failed for ask in asks] == [None] * 24
    assert sum(ask.held_s > 0 for ask in asks) > 0
    assert all(ask.bytes > 0 for ask in asks)


async def test_a_lost_engine_ends_the_run_with_a_cause(tmp_path: Path) -> None:
    async with engines(tmp_path, hold_transfers_s=3_600.0) as (running, servers):
        client = Client(running, WORKLOAD, PROMISES)
        await client.connect()
        first, *_ = arrivals(WORKLOAD, 500.0, 1, seed=1)
        ask = client.send(first)
        await servers[1].stop()
        await ask.ended.wait()
        client.close()
    assert ask.failed is not None
