"""Sim engines whose reads wait for the permits of a flow agent: real agent, real sockets, one event loop."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.engine.sim.links import SimLink
from actors.engine.sim.peers import Puller, SimHandle
from actors.engine.sim.ranks import sim_engine
from actors.flow.agent import FlowAgent
from actors.flow.client import ReadsClient
from actors.flow.config import AgentConfig
from actors.flow.reader import Finished, Post
from actors.wire.channel import Identity
from actors.wire.messages import Admitted, Decode, Failed
from tests.actors.engine.rig import Node, Rig, until

NODES = frozenset({"a", "z"})
# 1 MB of KV: 50 tokens of 20 kB
PROMPT, KV = list(range(10, 60)), {"kv_bytes_per_token": 20_000}


class Site:
    """A prefill engine on node `a`, decode engines on node `z`, and the agent of `z`."""

    def __init__(self, directory: Path, rig: Rig) -> None:
        self.rig = rig
        self.address = f"unix:{directory}/agent.sock"
        self.agent: FlowAgent | None = None

    async def start_agent(self, beat_s: float = 0.005, **arbiter: Any) -> FlowAgent:
        config = AgentConfig(arbiter=arbiter, beat_s=beat_s)
        self.agent = FlowAgent(Identity("agent", "agent-z"), "z", NODES, config)
        await self.agent.start([self.address])
        return self.agent

    async def node(self, name: str, role: Any, **options: Any) -> Node:
        on = "a" if role == "prefill" else "z"
        timing = KV | options.pop("timing", {})
        config = SimEngineConfig(name, role, flow_agent=self.address, flow_node=on, timing=timing, **options)
        return await self.rig.node(sim_engine(config), name)

    async def joined(self, *engines: Node) -> None:
        """Waits until the agent and these engines know each other."""
        agent = self.agent
        assert agent is not None
        await until(lambda: agent.report().gauges["workers"] >= len(engines), "engines at the agent")
        movers = [cast(SimEngine, node.engine)._mover for node in engines]
        await until(lambda: all(mover.connected for mover in movers), "the agent at the engines")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with Rig(tmp_path) as rig:
        made = Site(tmp_path, rig)
        yield made
        if made.agent is not None:
            await made.agent.stop()


async def read(p: Node, d: Node, attempt_id: str, prompt: list[int], due_s: float | None = None) -> None:
    """Has `d` decode what `p` has computed."""
    done = await p.prefilled(attempt_id, prompt)
    d.client.channel.send(Decode(attempt_id, prompt, {"max_tokens": 4}, done.handle, 60.0, kv_due_s=due_s))


@pytest.mark.parametrize("paced", [False, True])
async def test_a_read_by_permit_moves_every_byte_and_says_the_same(site: Site, paced: bool) -> None:
    agent = await site.start_agent()
    p = await site.node("p", "prefill", links={"*": SimLink(20e6)} if paced else {})
    d = await site.node("d", "decode", timing={"transfer_bandwidth_bytes_per_s": 20e6})
    await site.joined(p, d)
    texts = []
    for n in range(3):
        prompt = [n + 1, *PROMPT]
        await read(p, d, f"r{n}", prompt, 5.0)
        texts.append(await d.client.text(f"r{n}"))
        admitted = await d.client.wait(f"r{n}", Admitted)
        assert admitted.transfer_bytes == 51 * 20_000
        assert admitted.transfer_s > 0 and admitted.held_s >= 0
        assert admitted.level is not None and admitted.level >= 1
    c = await site.rig.node(sim_engine(SimEngineConfig("c")), "c")
    for n in range(3):
        c.client.decode(f"r{n}", [n + 1, *PROMPT], max_tokens=4)
        assert await c.client.text(f"r{n}") == texts[n]
    assert d.engine.metrics().transfer_bytes == 3 * 51 * 20_000
    # none that no agent schedules is counted
    assert c.engine.metrics().transfers_unscheduled is None
    await p.rests()
    await d.rests()
    await until(lambda: not len(agent.desk), "no flow is open")


async def test_a_read_names_its_engines_to_the_agent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await site.start_agent()
    p, d = await site.node("p", "prefill"), await site.node("d", "decode")
    await site.joined(p, d)
    told: list[str] = []
    arrived = agent.desk.book.arrived
    monkeypatch.setattr(
        agent.desk.book, "arrived", lambda flow, *rest: (told.append(flow.engines), arrived(flow, *rest))
    )
    await read(p, d, "r", PROMPT, 5.0)
    await d.client.text("r")
    assert told == ["p>d"]


async def test_reads_of_one_node_share_it_by_permits_and_holds_are_told(site: Site) -> None:
    agent = await site.start_agent(window=1, whole_read_when_alone=False)
    p = await site.node("p", "prefill", links={"*": SimLink(10e6)})
    decoders = [await site.node(f"d{n}", "decode") for n in range(2)]
    await site.joined(p, *decoders)
    for n in range(4):
        await read(p, decoders[n % 2], f"r{n}", [n + 1, *PROMPT], 5.0)
    admitted = [await decoders[n % 2].client.wait(f"r{n}", Admitted) for n in range(4)]
    # with one chunk on its way at a time somebody waited
    assert sum(one.held_s for one in admitted) > 0
    assert agent.desk.totals["permits"] >= 1
    for node in (p, *decoders):
        await node.rests()


@pytest.mark.parametrize(("silent_s", "unscheduled"), [(0.02, True), (60.0, False)])
async def test_a_held_read_waits_for_a_silent_agent_as_long_as_the_option_says(
    site: Site, silent_s: float, unscheduled: bool
) -> None:
    """An agent without beats says nothing while a chunk of 64 KiB at 1 MB/s is on its way."""
    agent = await site.start_agent(beat_s=60.0, window=1, whole_read_when_alone=False, port_bytes_per_s=1e6)
    p = await site.node("p", "prefill", links={"*": SimLink(1e6)})
    timing = {"transfer_bandwidth_bytes_per_s": 1e6}
    decoders = [await site.node(f"d{n}", "decode", timing=timing, flow_silent_s=silent_s) for n in range(2)]
    await site.joined(p, *decoders)
    for n, d in enumerate(decoders):
        await read(p, d, f"r{n}", [n + 1, *PROMPT], 5.0)
    for n, d in enumerate(decoders):
        assert (await d.client.wait(f"r{n}", Admitted)).transfer_bytes == 51 * 20_000
    assert (agent.desk.totals["unscheduled_reads_silent"] > 0) == unscheduled


def test_a_silence_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="flow_silent_s is 0"):
        SimEngineConfig("e", flow_silent_s=0.0)


async def test_without_an_agent_at_the_address_reads_go_on(site: Site) -> None:
    p, d = await site.node("p", "prefill"), await site.node("d", "decode")
    await read(p, d, "r", PROMPT, 5.0)
    assert (await d.client.wait("r", Admitted)).transfer_bytes == 50 * 20_000
    await d.client.text("r")
    await p.rests()
    assert (d.engine.metrics().transfers, d.engine.metrics().transfers_unscheduled) == (1, 1)


async def test_an_agent_that_goes_holds_no_read_up(site: Site) -> None:
    agent = await site.start_agent()
    p = await site.node("p", "prefill", links={"*": SimLink(5e6)})
    d = await site.node("d", "decode")
    await site.joined(p, d)
    for n in range(3):
        await read(p, d, f"r{n}", [n + 1, *PROMPT], 5.0)
    await agent.stop()
    for n in range(3):
        assert (await d.client.wait(f"r{n}", Admitted)).transfer_bytes == 51 * 20_000
        await d.client.text(f"r{n}")
    await p.rests()
    await d.rests()


async def test_a_cancelled_read_posts_nothing_more_and_leaves_nothing(site: Site) -> None:
    # 1 MB at 200 kB/s: 5 s in chunks of 64 KiB, of which the test sees the beginning
    agent = await site.start_agent(whole_read_when_alone=False, port_bytes_per_s=2e5)
    p = await site.node("p", "prefill", links={"*": SimLink(2e5)})
    d = await site.node("d", "decode", timing={"transfer_bandwidth_bytes_per_s": 2e5})
    await site.joined(p, d)
    await read(p, d, "r", PROMPT, 5.0)
    await until(lambda: len(agent.desk), "an open flow")
    d.client.cancel("r")
    await d.rests()
    await p.rests()
    await until(lambda: not len(agent.desk), "no flow is open")
    assert not [m for m in d.client.of("r") if isinstance(m, Admitted | Failed)]


async def test_a_lender_that_goes_in_the_middle_fails_the_read(site: Site) -> None:
    agent = await site.start_agent()
    p = await site.node("p", "prefill", links={"*": SimLink(2e5)})
    d = await site.node("d", "decode", timing={"transfer_bandwidth_bytes_per_s": 2e5})
    await site.joined(p, d)
    await read(p, d, "r", PROMPT, 5.0)
    await until(lambda: len(agent.desk), "an open flow")
    await p.server.stop()
    failed = await d.client.wait("r", Failed)
    assert (failed.code, failed.retryable) == ("kv_load", True)
    await d.rests()
    await until(lambda: not len(agent.desk), "no flow is open")


async def test_an_error_in_a_step_ends_no_read_but_its_own(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line breaks down in one step, and the post of one read fails: that read fails, the next one goes on."""
    post, step, steps = Puller.chunk, ReadsClient.step, [0]

    def chunk(puller: Puller, handle: SimHandle, number: int, n_bytes: int) -> None:
        if handle.kv_bytes == 51 * 20_000:
            raise OSError("no route")
        post(puller, handle, number, n_bytes)

    def stepped(client: ReadsClient) -> list[Post | Finished]:
        steps[0] += 1
        if steps[0] == 3:
            raise OSError("the line breaks down")
        return step(client)

    agent = await site.start_agent(window=1)
    p = await site.node("p", "prefill", links={"*": SimLink(10e6)})
    d = await site.node("d", "decode")
    await site.joined(p, d)
    monkeypatch.setattr(Puller, "chunk", chunk)
    monkeypatch.setattr(ReadsClient, "step", stepped)
    await read(p, d, "bad", [1, *PROMPT], 5.0)
    failed = await d.client.wait("bad", Failed)
    assert "no route" in failed.message
    await read(p, d, "good", PROMPT, 5.0)
    assert (await d.client.wait("good", Admitted)).transfer_bytes == 50 * 20_000
    await d.client.text("good")
    await d.rests()
    # the copy of the bad one, too, which nobody reads any more, is free
    await p.rests()
    await until(lambda: not len(agent.desk), "no flow is open")


def test_an_agent_without_a_node_is_refused() -> None:
    with pytest.raises(ValueError, match="flow_node is not"):
        SimEngineConfig("e", flow_agent="unix:/agent.sock")


async def test_the_line_to_the_agent_rests_without_reads(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without reads steps its line ten times a second, not a thousand times."""
    steps, plain = [0], ReadsClient.step

    def step(client: ReadsClient) -> list[Post | Finished]:
        steps[0] += 1
        return plain(client)

    await site.start_agent()
    d = await site.node("d", "decode")
    await site.joined(d)
    monkeypatch.setattr(ReadsClient, "step", step)
    loop = asyncio.get_running_loop()
    await until(lambda: steps[0] >= 1, "a step")
    begun_s, before = loop.time(), steps[0]
    await until(lambda: steps[0] >= before + 3, "three more")
    # a busy machine makes fewer steps in this time, and never more
    assert steps[0] - before <= 10.0 * (loop.time() - begun_s) + 1.0
