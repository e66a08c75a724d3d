"""Agents and their directory: slow or failing lookups, a node that two agents own, a node that is gone."""

import asyncio
from pathlib import Path

import pytest

from actors.flow import agent as agents
from actors.flow import lookups, publisher
from actors.flow.directory import FixedDirectory
from actors.wire.link import Link
from actors.wire.messages import Unscheduled
from tests.actors.flow.agents import Reads, flow, made_agent, until


class SlowDirectory(FixedDirectory):
    """A directory that answers when `answers` is set, and fails while `fails` is."""

    def __init__(self, *nodes: str) -> None:
        super().__init__({}, set(nodes))
        self.answers, self.fails = asyncio.Event(), False

    async def exists(self, node: str) -> bool:
        await self.answers.wait()
        if self.fails:
            raise OSError("no store")
        return await super().exists(node)


async def test_other_reads_pass_while_a_node_is_looked_up(tmp_path: Path) -> None:
    directory = SlowDirectory("y", "z")
    agent, worker = made_agent("z", directory), Reads("z")
    try:
        await agent.start([f"unix:{tmp_path}/z.sock"])
        await worker.join(agent)
        worker.submit(flow("f", "y", "z"))
        worker.channel.send(Unscheduled("f", 4, "bound"))
        worker.submit(flow("g", "z", "z"))
        await until(lambda: agent.desk.totals["ended"] == 1, "a read of a known node waits")
        assert agent.desk.totals["submitted"] == 1
        directory.answers.set()
        await until(lambda: agent.desk.totals["unscheduled_reads_bound"] == 1, "what came next is lost")
        assert not worker.channel.closed.done()
    finally:
        await agent.stop()


@pytest.mark.parametrize("there", [True, False])
async def test_a_lookup_without_answer_refuses_the_read_and_its_late_answer_counts(
    tmp_path: Path, there: bool
) -> None:
    directory = SlowDirectory(*"yz" if there else "z")
    agent, worker = made_agent("z", directory, silent_s=0.05), Reads("z")
    try:
        await agent.start([f"unix:{tmp_path}/z.sock"])
        await worker.join(agent)
        worker.submit(flow("f", "y", "z"))
        await until(lambda: worker.refused == ["f"], "a read waits for the directory")
        directory.answers.set()
        if not there:
            await until(worker.channel.closed.done, "an unknown node is taken")
            return
        await until(lambda: "y" in agent._nodes, "the late answer does not count")
        worker.submit(flow("g", "y", "z"))
        await until(lambda: agent.desk.totals["ended"] == 1, "a found node is unknown")
        assert worker.refused == ["f"]
    finally:
        await agent.stop()


async def test_a_directory_that_fails_ends_no_connection(tmp_path: Path) -> None:
    directory = SlowDirectory("y", "z")
    directory.fails = True
    directory.answers.set()
    agent, worker = made_agent("z", directory), Reads("z")
    try:
        await agent.start([f"unix:{tmp_path}/z.sock"])
        await worker.join(agent)
        worker.submit(flow("f", "y", "z"))
        await until(lambda: worker.refused == ["f"], "a read waits for the directory")
        directory.fails = False
        worker.submit(flow("g", "y", "z"))
        await until(lambda: agent.desk.totals["ended"] == 1, "a found node is unknown")
    finally:
        await agent.stop()


async def test_a_flood_while_a_node_is_looked_up_ends_its_connection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MOST_WAITING", 50)
    agent, bad, good = made_agent("z", SlowDirectory("y", "z")), Reads("z"), Reads("z")
    try:
        await agent.start([f"unix:{tmp_path}/z.sock"])
        await bad.join(agent)
        await good.join(agent)
        for number in range(51):
            bad.submit(flow(f"f{number}", "y", "z"))
        await until(bad.channel.closed.done, "the flood is taken")
        good.submit(flow("g", "z", "z"))
        await until(lambda: agent.desk.totals["ended"] == 1, "it serves nobody")
    finally:
        await agent.stop()


class Store(FixedDirectory):
    """The addresses that agents have published, as in Ray's store."""

    async def publish(self, node: str, addresses: tuple[str, ...]) -> None:
        self.agents = {**self.agents, node: addresses}

    async def withdraw(self, node: str, addresses: tuple[str, ...]) -> None:
        if self.agents.get(node) == addresses:
            self.agents = {name: there for name, there in self.agents.items() if name != node}


async def test_two_agents_of_one_node_are_noticed_and_the_first_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher, "AGAIN_S", 0.02)
    store = Store()
    first, second = made_agent("z", store, "first"), made_agent("z", store, "second")
    try:
        await first.start([f"unix:{tmp_path}/first.sock"])
        await until(lambda: store.agents.get("z") == first.addresses, "it does not publish")
        await second.start([f"unix:{tmp_path}/second.sock"])
        await until(lambda: second.doubles == {"z"}, "the other agent is not noticed")
        assert store.agents["z"] == first.addresses
        assert first.doubles == frozenset()
        assert second.report().gauges["doubles"] == 1
        assert [record.message for record in caplog.records if "topology.node" in record.message]
        # its own workers read by permits all the same
        worker = Reads("z")
        await worker.join(second)
        worker.submit(flow("f", "z", "z"))
        await until(lambda: second.desk.totals["ended"] == 1, "it serves nobody")
        await first.stop()
        await until(lambda: store.agents.get("z") == second.addresses, "the node stays without an agent")
        assert second.doubles == frozenset()
    finally:
        await first.stop()
        await second.stop()


@pytest.mark.parametrize("before", [("dead.sock",), ("z.sock", "tcp:127.0.0.1:1")])
async def test_an_entry_of_an_earlier_agent_is_replaced(tmp_path: Path, before: tuple[str, ...]) -> None:
    store = Store({"z": (f"unix:{tmp_path}/{before[0]}", *before[1:])})
    agent = made_agent("z", store)
    try:
        await agent.start([f"unix:{tmp_path}/z.sock"])
        await until(lambda: store.agents.get("z") == agent.addresses, "it does not publish")
        assert agent.doubles == frozenset()
    finally:
        await agent.stop()
    assert store.agents == {}


GONE_S = 0.5
"""Seconds after which a node is gone: agents that live must meet within them, also on a busy machine."""


async def test_the_connection_to_a_node_that_is_gone_is_given_up(tmp_path: Path) -> None:
    store = Store({}, {"a", "z"})
    lender, reader = made_agent("a", store), made_agent("z", store, gone_s=GONE_S)
    worker = Reads("z")
    try:
        await lender.start([f"unix:{tmp_path}/a.sock"])
        await reader.start([f"unix:{tmp_path}/z.sock"])
        await until(lambda: "a" in store.agents, "it does not publish")
        await worker.join(reader)
        worker.submit(flow("first", "a", "z"))
        egresses = reader.desk.egresses
        assert egresses is not None
        await until(lambda: egresses.connected == ("a",), "the agents do not meet")
        await asyncio.sleep(2 * GONE_S)
        assert reader.sources == ("a",)
        worker.keep = True
        worker.submit(flow("held", "a", "z", 40))
        await until(lambda: worker.permits, "no permits")
        await lender.stop()
        await asyncio.sleep(2 * GONE_S)
        # something is read from there still
        assert reader.sources == ("a",)
        worker.keep = False
        worker.answer()
        worker.channel.abort("its engine is gone")
        await until(lambda: reader.sources == (), "the connection is tried for ever")
        lender = made_agent("a", store)
        await lender.start([f"unix:{tmp_path}/a.sock"])
        again = Reads("z")
        await again.join(reader)
        again.submit(flow("again", "a", "z"))
        await until(lambda: egresses.connected == ("a",), "the agents do not meet again")
    finally:
        await reader.stop()
        await lender.stop()


async def test_a_link_that_comes_up_as_its_node_is_given_up_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link to a node that is gone ends a turn of the loop after the node was dropped."""
    links: list[Link] = []

    class Late(Link):
        def start(self) -> None:
            links.append(self)
            super().start()

        async def stop(self, read_s: float = 1.0) -> None:
            await given_up.wait()
            await super().stop(read_s)

    given_up = asyncio.Event()
    monkeypatch.setattr(agents, "Link", Late)
    store = Store({}, {"a", "z"})
    reader, worker = made_agent("z", store, gone_s=0.05), Reads("z")
    lender = made_agent("a", Store({}, {"a", "z"}))
    try:
        await reader.start([f"unix:{tmp_path}/z.sock"])
        await worker.join(reader)
        worker.submit(flow("first", "a", "z"))
        await until(lambda: reader.sources == () and bool(links), "the node is not given up")
        (old,) = links
        # the agent of the node comes now, and the old link, which has not ended yet, finds it
        await lender.start([f"unix:{tmp_path}/a.sock"])
        store.agents["a"] = lender.addresses
        await until(lambda: old.channel is not None, "the old link does not come up")
        egresses = reader.desk.egresses
        assert egresses is not None and egresses.connected == ()
        assert old.channel is not None and not old.channel.closed.done()
        worker.submit(flow("again", "a", "z"))
        await until(lambda: egresses.connected == ("a",), "the agents do not meet")
        given_up.set()
        await until(lambda: old.channel is None, "the old link stays")
        assert egresses.connected == ("a",)
    finally:
        given_up.set()
        await reader.stop()
        await lender.stop()
