"""The client of a run against sim engines behind real sockets, in this process."""

import asyncio
import contextlib
import dataclasses
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
from benchmarks.live.kept import Parts
from benchmarks.mfs import __main__ as command
from benchmarks.mfs import reports as reports_module
from benchmarks.mfs.drive import Client, Promise
from benchmarks.mfs.engines import (
    LAYER_GROUPS,
    SECRET,
    UNSCHEDULED,
    OneMachine,
    Running,
    Sizes,
    sim_nodes,
    sim_options,
)
from benchmarks.mfs.report import cell
from benchmarks.mfs.reports import Reports
from benchmarks.mfs.workload import KINDS, Kind, Workload, arrivals

# no machine is so slow that its agent seems to be silent
SIZES = Sizes(decodes=2, others=1, silent_s=60.0)
WORKLOAD = Workload(requests=24, tight_tokens=64, loose_tokens=512, tight_prompts=4, loose_prompts=2)
PROMISES: dict[Kind, Promise] = {"tight": Promise(60.0, 1.0), "loose": Promise(120.0, 2.0)}


@contextlib.asynccontextmanager
async def engines(
    folder: Path,
    agent: str = "",
    router: str = "",
    sizes: Sizes = SIZES,
    gated: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Running, list[EngineServer]]]:
    servers = []
    for name in SIZES.names:
        role = name.partition("-")[0]
        own = sim_options(name, sizes, agent, gated) | options
        engine = ENGINES["sim"].make(engine_config("sim", {"engine_id": name, "role": role}, own))
        server = EngineServer(
            engine, Identity("engine", name, SECRET.encode()), [f"unix:{folder}/{name}"], node=name
        )
        await server.start()
        servers.append(server)
    try:
        addresses = [f"unix:{folder}/{name}" for name in SIZES.names]
        yield Running(tuple(addresses[:2]), tuple(addresses[2:]), router), servers
    finally:
        for server in servers:
            await server.stop()


@contextlib.asynccontextmanager
async def agent(folder: Path, policy: str) -> AsyncIterator[tuple[str, str]]:
    """Runs the agent of all nodes, and yields its address and that of the router to which it reports."""
    router = f"unix:{folder}/router"

    async def find_router() -> tuple[str, ...]:
        return (router,)

    nodes = sim_nodes(SIZES)
    config = AgentConfig(policy=policy, report_s=0.05)
    made = FlowAgent(
        Identity("agent", "agent", SECRET.encode()), nodes[0], frozenset(nodes), config, find_router
    )
    await made.start([f"unix:{folder}/agent"])
    try:
        yield f"unix:{folder}/agent", router
    finally:
        await made.stop()


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
        for server in servers[2:]:
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
    async with (
        agent(tmp_path, policy) as (address, router),
        engines(tmp_path, address, router) as (running, servers),
    ):
        # a read of an engine that does not know its agent yet waits for no permit
        async with asyncio.timeout(60.0):
            while not all(server.engine._mover.connected for server in servers):
                await asyncio.sleep(0.01)
        client, reports = Client(running, WORKLOAD, PROMISES), Reports(router)
        await reports.start()
        await client.connect()
        # 24 reads at once over two links
        asks = await client.run(arrivals(WORKLOAD, 1e6, 2, seed=1))
        flows, lost = await reports.taken()
        client.close()
        reports.stop()
    assert [ask.failed for ask in asks] == [None] * 24
    assert sum(ask.held_s > 0 for ask in asks) > 0
    assert all(ask.bytes > 0 for ask in asks)
    found = cell(asks, PROMISES, 0, flows, lost)
    assert found["unscheduled"] == {}
    p2d = found["stages"]["p2d"]
    # each read is a flow; 11.8 MB of a loose one are many chunks of 10 ms at 50 MB/s
    assert p2d["flows"] == 24
    assert p2d["chunks"] > 24
    assert p2d["mb"] == round(sum(ask.bytes for ask in asks) / 1e6, 3)


async def test_a_cold_engine_reads_the_prefix_that_the_first_one_lends_or_computes_it(tmp_path: Path) -> None:
    workload = dataclasses.replace(WORKLOAD, cold_share=0.5, fresh=True)
    async with (
        agent(tmp_path, "mfs") as (address, router),
        engines(tmp_path, address, router, gated=True) as (running, servers),
    ):
        client, reports = Client(running, workload, PROMISES), Reports(router)
        await reports.start()
        await client.connect()
        found, computed = {}, {}
        for place, lends in enumerate((True, False)):
            requests = arrivals(workload, 50.0, 2, 1, first_fresh=100 * place, others=1)
            filled = await client.fill(requests)
            assert [ask.failed for ask in filled] == [None] * 24
            await reports.taken()
            before = servers[1].metrics().prefill_tokens
            client.lends = lends
            asks = await client.run(requests)
            assert [ask.failed for ask in asks] == [None] * 24
            found[lends] = cell(asks, PROMISES, 0, *await reports.taken())
            computed[lends] = servers[1].metrics().prefill_tokens - before
        client.close()
        reports.stop()
    cold = [request for request in requests if request.prefill]
    assert 0 < len(cold) < 24
    tokens = sum(workload.tokens(request.kind) for request in cold)
    own = sum(workload.tokens(request.kind) - workload.prefix_tokens(request.kind) for request in cold)
    assert computed == {True: own, False: tokens}
    # a flow for each group of layers of each lent prefix
    assert found[True]["stages"]["reuse"]["flows"] == LAYER_GROUPS * len(cold)
    assert "reuse" not in found[False]["stages"]
    # two flows after each group of layers of each step
    assert all(one["stages"]["collective"]["flows"] >= 2 * LAYER_GROUPS for one in found.values())
    assert all(one["stages"]["p2d"]["flows"] == 24 for one in found.values())


@pytest.mark.nightly
async def test_the_bandwidth_is_that_of_the_time_in_which_bytes_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time that an engine takes before and after the bytes is no time of the link, which others can use then."""
    # a link so slow, and a median of three, that a machine that stands still does not show
    sizes = dataclasses.replace(SIZES, bytes_per_s=10e6)
    monkeypatch.setattr(command, "LONE", 3)
    workload = dataclasses.replace(WORKLOAD, fresh=True, cold_share=0.5)
    plan = command.Plan("sim", (UNSCHEDULED,), (0.8,), 1, 4 * 10**8, workload, sizes)
    bench = command.Bench(plan, OneMachine(sizes), None, tmp_path, Parts("x", {}, {}, tmp_path), print)
    async with engines(tmp_path, sizes=sizes, hold_transfers_s=0.3) as (running, _):
        lone = await bench._alone(Client(running, workload, {}))
    # 512 tokens of 23,040 bytes at 10 MB/s, and 1 ms of latency: 1.18 s
    assert lone["bytes"] == {"tight": 64 * 23_040, "loose": 512 * 23_040}
    assert 9e6 < lone["bytes_per_s"] < 10e6
    # the 300 ms beside it are not counted
    assert lone["transfer_s"]["loose"] - lone["bytes"]["loose"] / lone["bytes_per_s"] > 0.29


async def test_an_agent_that_says_nothing_any_more_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports_module, "PATIENCE_S", 0.1)
    reports = Reports(f"unix:{tmp_path}/router")
    await reports.start()
    with pytest.raises(ConnectionError, match="no report of the flow agent"):
        await reports.taken()
    reports.stop()


async def test_a_lost_engine_ends_the_run_with_a_cause(tmp_path: Path) -> None:
    async with engines(tmp_path, hold_transfers_s=3_600.0) as (running, servers):
        client = Client(running, WORKLOAD, PROMISES)
        await client.connect()
        first, *_ = arrivals(WORKLOAD, 500.0, 1, seed=1)
        ask = client.send(first)
        await servers[2].stop()
        await ask.ended.wait()
        client.close()
    assert ask.failed is not None
