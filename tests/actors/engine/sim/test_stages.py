"""Stages 1 and 2 of sim engines under the permits of a flow agent: real agent, real sockets, one event loop."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.engine.sim.links import SimLink
from actors.engine.sim.peers import Puller
from actors.engine.sim.ranks import sim_engine
from actors.flow import client
from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.flow.desk import Desk, Worker
from actors.flow.reader import Reader, ReaderConfig
from actors.wire.channel import Identity
from actors.wire.messages import AdvanceFlow, Message, Prefill, PrefillDone, SubmitFlow, Unscheduled
from policies.flow.base import Flow, Stage
from policies.flow.stages import home_of
from policies.journal.flows import replay
from tests.actors.engine.rig import Node, Rig, until

NODES = frozenset({"l", "p0", "p1", "p2"})
# 4 blocks of 16 tokens and one token more, then the rest of the prompt; 20 kB a token
HEAD, PROMPT = list(range(10, 75)), list(range(10, 110))
KV = {"kv_bytes_per_token": 20_000}
LENT_BYTES = 64 * 20_000
GROUPS = 4


class Site:
    """A lender on node `l`, a prefill engine over the nodes `p0` and `p1` (or more), and one agent for all nodes.

    `told` are all messages that the agent has taken from workers.
    """

    def __init__(self, directory: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig, self.directory = rig, directory
        self.address = f"unix:{directory}/agent.sock"
        self.agent: FlowAgent | None = None
        self.told: list[Message] = []
        take = Desk.take

        def taken(desk: Desk, worker: Worker, message: Message, now_s: float) -> None:
            self.told.append(message)
            take(desk, worker, message, now_s)

        monkeypatch.setattr(Desk, "take", taken)

    async def start_agent(self, **arbiter: Any) -> FlowAgent:
        config = AgentConfig(arbiter=arbiter, journal=str(self.directory / "journal"))
        self.agent = FlowAgent(Identity("agent", "agent"), "p0", NODES, config)
        await self.agent.start([self.address])
        return self.agent

    async def lender(self, bytes_per_s: float | None = 50e6) -> Node:
        links = {} if bytes_per_s is None else {"*": SimLink(bytes_per_s)}
        return await self._node("l", flow_node="l", links=links)

    async def prefill(self, **options: Any) -> Node:
        return await self._node("p", flow_node="p0", **options)

    async def _node(self, name: str, **options: Any) -> Node:
        timing = KV | options.pop("timing", {})
        address = options.pop("flow_agent", self.address)
        config = SimEngineConfig(name, "prefill", flow_agent=address, timing=timing, **options)
        return await self.rig.node(sim_engine(config), name)

    async def joined(self, workers: int) -> None:
        agent = self.agent
        assert agent is not None
        await until(lambda: agent.report().gauges["workers"] >= workers, "engines at the agent")
        engines = [cast(SimEngine, node.engine) for node in self.rig.nodes]
        await until(lambda: all(engine._mover.connected for engine in engines), "the agent at the engines")

    def flows(self, stage: Stage) -> list[Flow]:
        """Returns the flows of a stage that were submitted, each once."""
        found = {
            m.flow.flow_id: m.flow
            for m in reversed(self.told)
            if isinstance(m, SubmitFlow) and m.flow.stage is stage
        }
        return list(found.values())[::-1]

    async def at_rest(self, *nodes: Node) -> None:
        for node in nodes:
            await node.rests()
        if self.agent is not None:
            agent = self.agent
            await until(lambda: not len(agent.desk), "no flow is open")


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    async with Rig(tmp_path) as rig:
        made = Site(tmp_path, rig, monkeypatch)
        yield made
        if made.agent is not None:
            await made.agent.stop()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers wait long for a silent agent, which on a busy machine may only wait for its turn."""
    monkeypatch.setattr(client, "Reader", lambda config: Reader(config or ReaderConfig(silent_s=30.0)))


async def borrowed(lender: Node, p: Node, attempt_id: str = "r", prompt: list[int] = PROMPT) -> PrefillDone:
    lent = await lender.prefilled(attempt_id, prompt[:65])
    p.client.channel.send(Prefill(attempt_id, prompt, {}, 60.0, prefix=lent.handle))
    return await p.client.wait(attempt_id, PrefillDone)


# ------------------------------------------------------------------------------------------------------------ stage 1


@pytest.mark.parametrize("paced", [False, True])
async def test_a_whole_prefix_is_one_flow_of_stage_1(patient: None, site: Site, paced: bool) -> None:
    agent = await site.start_agent()
    lender, p = await site.lender(50e6 if paced else None), await site.prefill()
    await site.joined(2)
    done = await borrowed(lender, p)
    assert done.cached_tokens == 64
    (flow,) = site.flows(Stage.REUSE)
    assert (flow.source, flow.target, flow.size, flow.due_s, flow.rli) == ("l", "p0", LENT_BYTES, None, 0)
    assert agent.desk.totals["permits"] >= 1
    metrics = p.engine.metrics()
    assert (metrics.transfers, metrics.transfer_bytes) == (1, LENT_BYTES)
    p.client.release("r")
    await site.at_rest(lender, p)
    ended = [record for record in agent.desk.ended if record.stage == Stage.REUSE]
    assert [record.size for record in ended] == [LENT_BYTES]


async def test_a_whole_prefix_is_needed_sooner_when_a_request_before_it_leaves(
    patient: None, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read is ordered while those before it are still open, which here no permit ends."""
    await site.start_agent()
    monkeypatch.setattr(Desk, "_permit", lambda desk, permit: None)
    lender, p = await site.lender(), await site.prefill()
    await site.joined(2)
    for number, name in enumerate("abc"):
        prompt = [number + 1, *PROMPT]
        lent = await lender.prefilled(name, prompt[:65])
        p.client.channel.send(Prefill(name, prompt, {}, 60.0, prefix=lent.handle))
        await until(lambda number=number: len(site.flows(Stage.REUSE)) == number + 1, "its flow")
    assert {flow.request_id: flow.rli for flow in site.flows(Stage.REUSE)} == {"a": 0, "b": 1, "c": 2}
    p.client.cancel("a")

    def advanced() -> list[tuple[str, int]]:
        names = {flow.flow_id: flow.request_id for flow in site.flows(Stage.REUSE)}
        return [(names[m.flow_id], m.rli) for m in site.told if isinstance(m, AdvanceFlow)]

    await until(lambda: advanced() == [("b", 0), ("c", 1)], "both come nearer")
    p.client.cancel("b")
    p.client.cancel("c")
    await site.at_rest(lender, p)


@pytest.mark.parametrize("agent", [True, False])
async def test_layer_groups_are_flows_with_laxity_that_falls_as_groups_end(
    patient: None, site: Site, agent: bool
) -> None:
    if agent:
        await site.start_agent(window=1, whole_read_when_alone=False)
    # 1.28 MB in groups of 320 kB at 8 MB/s: 40 ms each, while a group computes for 5 ms
    lender = await site.lender(8e6)
    p = await site.prefill(
        layer_groups=GROUPS, timing={"prefill_base_s": 0.02}, flow_agent=site.address if agent else ""
    )
    if agent:
        await site.joined(2)
    done = await borrowed(lender, p)
    assert done.cached_tokens == 64
    metrics = p.engine.metrics()
    assert metrics.prefill_tokens == 100 - 64
    assert (metrics.transfers, metrics.transfer_bytes) == (1, LENT_BYTES)
    assert metrics.reuse_wait_s is not None and metrics.reuse_wait_s > 0.05
    if agent:
        flows = site.flows(Stage.REUSE)
        assert [flow.rli for flow in flows] == [0, 1, 2, 3]
        assert [flow.size for flow in flows] == [LENT_BYTES // GROUPS] * GROUPS
        assert len({flow.batch for flow in flows}) == 1
        # a flow that is held when a group ends comes nearer
        told = [m for m in site.told if isinstance(m, AdvanceFlow)]
        assert told and all(m.rli < int(m.flow_id[-1]) for m in told)
    p.client.release("r")
    await site.at_rest(lender, p)
    # the blocks are in the cache like computed ones: the next prompt of this head reads nothing
    again = await borrowed(lender, p, "s")
    assert again.cached_tokens == 96 and p.engine.metrics().transfers == 1


async def test_a_lender_that_dies_while_a_group_waits_costs_the_prefill_nothing_but_time(
    patient: None, site: Site
) -> None:
    await site.start_agent()
    lender, p = await site.lender(1e4), await site.prefill(layer_groups=GROUPS)
    await site.joined(2)
    lent = await lender.prefilled("r", HEAD)
    p.client.channel.send(Prefill("r", PROMPT, {}, 60.0, prefix=lent.handle))
    await until(lambda: len(site.flows(Stage.REUSE)) == GROUPS, "the flows of the groups")
    await lender.server.stop()
    done = await p.client.wait("r", PrefillDone)
    assert done.cached_tokens == 0
    metrics = p.engine.metrics()
    assert (metrics.transfers, metrics.transfer_failures) == (0, 1)
    p.client.release("r")
    await site.at_rest(p)


@pytest.mark.parametrize("groups", [1, GROUPS])
async def test_a_read_that_breaks_down_at_the_reader_leaves_nothing_at_its_lender(
    patient: None, site: Site, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    def chunk(puller: Puller, *_: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(Puller, "chunk", chunk)
    await site.start_agent()
    lender, p = await site.lender(), await site.prefill(layer_groups=groups)
    await site.joined(2)
    assert (await borrowed(lender, p)).cached_tokens == 0
    assert p.engine.metrics().transfer_failures == 1
    p.client.release("r")
    await site.at_rest(lender, p)


async def test_a_cancelled_prefill_keeps_its_blocks_until_what_is_on_its_way_has_arrived(
    patient: None, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counter[str]()
    chunk = Puller.chunk

    def counted(puller: Puller, *about: Any) -> None:
        asked["chunks"] += 1
        chunk(puller, *about)

    monkeypatch.setattr(Puller, "chunk", counted)
    await site.start_agent(window=1, whole_read_when_alone=False, port_bytes_per_s=2e4)
    lender = await site.lender(2e4)
    p = await site.prefill(layer_groups=GROUPS, timing={"transfer_bandwidth_bytes_per_s": 2e4})
    await site.joined(2)
    lent = await lender.prefilled("r", HEAD)
    p.client.channel.send(Prefill("r", PROMPT, {}, 60.0, prefix=lent.handle))
    await until(lambda: asked["chunks"], "a chunk")
    p.client.cancel("r")
    await until(lambda: not p.engine.status().running, "no slot is held")
    # 64 KiB at 20 kB/s take three seconds
    assert p.used
    await site.at_rest(lender, p)
    assert p.engine.metrics().transfers == 0
    # the engine goes on
    await p.prefilled("s", PROMPT)
    p.client.release("s")
    await p.rests()


@pytest.mark.parametrize("groups", [1, GROUPS])
async def test_an_agent_that_goes_holds_no_prefix_up(site: Site, groups: int) -> None:
    agent = await site.start_agent(window=1, whole_read_when_alone=False)
    lender, p = await site.lender(5e6), await site.prefill(layer_groups=groups)
    await site.joined(2)
    lent = await lender.prefilled("r", HEAD)
    p.client.channel.send(Prefill("r", PROMPT, {}, 60.0, prefix=lent.handle))
    await until(lambda: site.flows(Stage.REUSE), "a flow")
    await agent.stop()
    done = await p.client.wait("r", PrefillDone)
    assert done.cached_tokens == 64


# ------------------------------------------------------------------------------------------------------------ stage 2

SPAN = {"span": {"p1": ""}, "layer_groups": GROUPS, "collective_bytes_per_token": 10_000.0}


@pytest.mark.parametrize("agent", [True, False])
async def test_the_nodes_of_an_instance_exchange_after_each_group(
    patient: None, site: Site, agent: bool
) -> None:
    if agent:
        await site.start_agent()
    address = site.address if agent else ""
    p = await site.prefill(flow_agent=address, links={"*": SimLink(50e6)}, **SPAN)
    if agent:
        # a worker of each node, because a flow is submitted to the agent of its target
        await site.joined(2)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await p.prefilled("r", PROMPT)
    # 100 tokens of 10 kB: 1 MB over two links of 50 MB/s, for each of 4 groups
    assert loop.time() - began_s >= 4 * 0.0095
    metrics = p.engine.metrics()
    assert metrics.collectives == GROUPS
    assert metrics.collective_s is not None and metrics.collective_s >= 4 * 0.0095
    if agent:
        flows = site.flows(Stage.COLLECTIVE)
        pairs = Counter((flow.source, flow.target, flow.size) for flow in flows)
        assert pairs == {("p0", "p1", 500_000): GROUPS, ("p1", "p0", 500_000): GROUPS}
        assert len({flow.batch for flow in flows}) == 1 and {flow.rli for flow in flows} == {0}
    p.client.release("r")
    await site.at_rest(p)


async def test_reads_and_collectives_share_the_links_of_a_node(site: Site) -> None:
    """A read of KV from the node and a collective out of it take twice as long together as the collective alone."""
    p = await site.prefill(flow_agent="", links={"*": SimLink(20e6)}, **SPAN)
    d = await site.rig.node(sim_engine(SimEngineConfig("d", "decode", timing=KV)), "d")
    lent = await p.prefilled("a", [1, *PROMPT])
    alone_s = p.engine.metrics().collective_s
    assert alone_s is not None
    # 2 MB of KV on one of the two nodes: 100 ms alone, as long as the four collectives take
    d.client.decode("a", [1, *PROMPT], lent.handle)
    await p.prefilled("b", [2, *PROMPT])
    both_s = p.engine.metrics().collective_s
    assert both_s is not None and both_s - alone_s > 1.3 * alone_s
    for name in "ab":
        p.client.release(name)
    await d.client.text("a")
    await p.rests()


async def test_an_agent_that_goes_holds_no_collective_up(site: Site) -> None:
    agent = await site.start_agent()
    p = await site.prefill(links={"*": SimLink(5e6)}, **SPAN)
    await site.joined(2)
    p.client.prefill("r", PROMPT)
    await until(lambda: site.flows(Stage.COLLECTIVE), "a collective")
    await agent.stop()
    await p.client.wait("r", PrefillDone)
    assert p.engine.metrics().collectives == GROUPS


async def test_collectives_that_need_no_permit_are_neither_held_nor_told_of(
    patient: None, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.start_agent()
    monkeypatch.setattr(Desk, "_permit", lambda desk, permit: None)
    p = await site.prefill(links={"*": SimLink(50e6)}, collectives_by_permit=False, **SPAN)
    await site.joined(2)
    await p.prefilled("r", PROMPT)
    assert p.engine.metrics().collectives == GROUPS
    assert site.flows(Stage.COLLECTIVE) == []
    assert not [m for m in site.told if isinstance(m, Unscheduled)]


async def test_a_collective_that_is_held_for_too_long_is_posted_all_the_same(
    patient: None, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent lives and never permits anything: half of a stall's time later the flows are posted."""
    agent = await site.start_agent()
    monkeypatch.setattr(Desk, "_permit", lambda desk, permit: None)
    p = await site.prefill(stall_s=3.0, span={"p1": ""}, collective_bytes_per_token=10.0)
    await site.joined(2)
    await p.prefilled("r", PROMPT)
    told = [m for m in site.told if isinstance(m, Unscheduled)]
    assert [m.reason for m in told] == ["bound", "bound"]
    assert agent.desk.totals["permits"] == 0 and p.engine.metrics().stalls == 0


# -------------------------------------------------------------------------------------------------------- all stages


async def test_the_journal_of_all_stages_replays_to_the_same_permits(patient: None, site: Site) -> None:
    agent = await site.start_agent(window=1, whole_read_when_alone=False)
    lender, p = await site.lender(20e6), await site.prefill(links={"*": SimLink(20e6)}, **SPAN)
    config = SimEngineConfig("d", "decode", flow_agent=site.address, flow_node="p2", timing=KV)
    d = await site.rig.node(sim_engine(config), "d")
    await site.joined(4)
    done = []
    for n in range(4):
        prompt = [n + 1, *PROMPT]
        done.append(await borrowed(lender, p, f"r{n}-1", prompt))
        d.client.decode(f"r{n}-1", prompt, done[-1].handle)
    for n in range(4):
        await d.client.text(f"r{n}-1")
    # the KV of a request lies on one node of the instance, from which its read leaves
    homes = {flow.request_id: flow.source for flow in site.flows(Stage.P2D)}
    assert homes == {f"r{n}": home_of(f"r{n}", ("p0", "p1")) for n in range(4)}
    assert {flow.target for flow in site.flows(Stage.REUSE)} == set(homes.values())
    await site.at_rest(lender, p, d)
    await agent.stop()
    site.agent = None
    (journal,) = (site.directory / "journal").iterdir()
    steps = list(replay(journal.read_text().splitlines(keepends=True)))
    assert steps and all(step.equal for step in steps)
    events = Counter(type(step.event).__name__ for step in steps)
    assert events["Submitted"] >= 4 * (1 + GROUPS + 2 * GROUPS) and events["Advanced"] >= 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"span": {"p1": ""}}, "flow_node"),
        ({"span": {"p0": ""}, "flow_node": "p0"}, "flow_node"),
        ({"collective_bytes_per_token": 1.0, "flow_node": "p0"}, "span is not"),
        ({"collective_bytes_per_token": -1.0}, "at least 0"),
        ({"layer_groups": 0}, "layer_groups"),
        ({"layer_groups": 2, "dp_ranks": 2, "barrier": True}, "barrier"),
    ],
)
def test_stages_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SimEngineConfig("e", **options)


def test_stages_are_off_unless_they_are_configured() -> None:
    config = SimEngineConfig("e")
    assert not config.staged and config.nodes == ("",) and config.agent_of("") == ""
    assert dataclasses.replace(config, layer_groups=2).staged
