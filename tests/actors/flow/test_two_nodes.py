"""Agents of several nodes on sockets: one sender's egress is shared, agents die and come back, new nodes are found."""

from pathlib import Path

from actors.flow.agent import FlowAgent
from actors.flow.directory import FixedDirectory
from actors.wire.channel import Channel, Identity
from actors.wire.messages import JoinNode, Message, Permitted, SubmitFlow, Unscheduled
from actors.wire.sockets import connect
from tests.actors.flow.agents import PATIENT, Reads, flow, made_agent, until
from tests.actors.flow.rig import AgentProcess, ReadingWorker, ReportsOnly

SECRET = "s3"


def test_two_nodes_read_from_a_third_no_more_chunks_at_once_than_its_window(tmp_path: Path) -> None:
    secret = SECRET.encode()
    router = ReportsOnly(f"unix:{tmp_path}/router.sock", secret)
    more = ["--knows", "y", "--knows", "z", "--listen", "tcp:127.0.0.1:0", "--router", router.address]
    lender = AgentProcess(tmp_path, SECRET, "a", more, report_s=0.1, **PATIENT)
    unix, tcp = sorted(lender.addresses, reverse=True)
    agents = [lender]
    try:
        workers = []
        for node, address in (("y", unix), ("z", tcp)):
            agent = AgentProcess(tmp_path, SECRET, node, ["--peer", f"a={address}"], **PATIENT)
            agents.append(agent)
            workers.append(ReadingWorker(agent.address, f"w-{node}", secret, seconds=0.005, node=node))
        for one in workers:
            one.run(lambda one=one: one.client.connected)  # type: ignore[misc]
            # the first read of a node connects its agent to the sender's
            one.read("first", chunks=1)
            one.run(one.done("first"))
        both = lambda: router.reports and router.reports[-1].gauges["agents"] == 2  # noqa: E731
        for one in workers:
            one.run(both)
        names = [f"f{number}" for number in range(15)]
        for one in workers:
            for name in names:
                one.read(name, chunks=6)
        most = 0
        while not all(one.done(*names)() for one in workers):
            for one in workers:
                one.step()
            most = max(most, sum(one.moving for one in workers))
            workers[0].client.wait(0.001)
        assert all(one.client.reader.unscheduled == {} for one in workers)
        assert most == 2
    finally:
        for agent in agents:
            agent.kill()
        router.stop()


def with_peers(node: str, peers: dict[str, tuple[str, ...]], **config: float) -> FlowAgent:
    return made_agent(node, FixedDirectory(peers, {"a", "y", "z"}), **config)


async def test_an_agent_that_dies_is_done_without_and_its_successor_is_asked_again(tmp_path: Path) -> None:
    at_a = f"unix:{tmp_path}/a.sock"
    lender, reader = with_peers("a", {}), with_peers("z", {"a": (at_a,)}, silent_s=0.02)
    worker = Reads("z")
    try:
        await lender.start([at_a])
        await reader.start([f"unix:{tmp_path}/z.sock"])
        await worker.join(reader)
        worker.submit(flow("first", "a", "z"))
        egresses = reader.desk.egresses
        assert egresses is not None
        await until(lambda: egresses.connected == ("a",), "the agents do not meet")
        worker.submit(flow("asked", "a", "z"))
        await until(lambda: reader.desk.totals["ended"] == 2, "the reads do not end")
        assert lender.desk.totals["lent_permits"] >= 4
        # what was read before the agents met is counted, what was asked for is not
        assert reader.desk.totals["alone_reads_no_agent"] == 1
        worker.keep = True
        worker.submit(flow("held", "a", "z", 40))
        await until(lambda: len(worker.permits) == 2, "no permits")
        await lender.stop()
        await until(lambda: reader.desk.totals["alone_reads_agent_lost"] == 1, "it waits for the dead")
        lender = with_peers("a", {})
        await lender.start([at_a])
        await until(lambda: egresses.connected == ("a",), "the agents do not meet again")
        # the new agent knows what is in flight
        await until(lambda: lender.desk.totals["lent_submitted"] == 1, "the read is not submitted")
        worker.keep = False
        worker.answer()
        worker.submit(flow("again", "a", "z"))
        await until(lambda: reader.desk.totals["ended"] == 4, "the reads do not end")
        assert lender.desk.totals["lent_permits"] >= 4
        await until(lambda: not len(lender.desk), "the new agent keeps reads")
    finally:
        await reader.stop()
        await lender.stop()


async def test_a_silent_agent_is_not_waited_for_and_loses_its_permits(tmp_path: Path) -> None:
    """A reader's agent that stands still loses its connection at the sender, whose port is free for others then."""
    at_a = f"unix:{tmp_path}/a.sock"
    lender = with_peers("a", {}, lost_s=0.2)
    try:
        await lender.start([at_a])
        peers = []
        for name in ("y", "z"):
            # an agent of another node by hand: it asks, and then sends no beat
            taken: list[Message] = []
            channel = await connect(
                (at_a,),
                lambda name=name, taken=taken: Channel(  # type: ignore[misc]
                    Identity("agent", f"by-hand-{name}"), lambda channel, message: taken.append(message)
                ),
            )
            channel.send(JoinNode(name))
            channel.send(SubmitFlow(flow(f"f-{name}", "a", name, 40)))
            peers.append((channel, taken))
            await until(lambda: lender.desk.totals["lent_submitted"] == len(peers), "not submitted")
        (silent, held), (other, got) = peers
        await until(lambda: len([m for m in held if isinstance(m, Permitted)]) == 2, "no permits")
        assert not [m for m in got if isinstance(m, Permitted)]
        await until(silent.closed.done, "the silent agent keeps its permits")
        await until(
            lambda: other.closed.done() or [m for m in got if isinstance(m, Permitted)], "it gets nothing"
        )
        assert lender.desk.totals["lent_lost"] >= 1
    finally:
        await lender.stop()


async def test_a_node_that_came_later_is_looked_up_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    reader = with_peers("z", {})
    worker = Reads("z")
    try:
        await reader.start([f"unix:{tmp_path}/z.sock"])
        await worker.join(reader)
        worker.submit(flow("f", "y", "z"))
        worker.channel.send(Unscheduled("f", 4, "bound"))
        await until(lambda: reader.desk.totals["unscheduled_reads_bound"] == 1, "what came next is lost")
        assert not worker.channel.closed.done()
        worker.submit(flow("g", "nowhere", "z"))
        await until(worker.channel.closed.done, "an unknown node is taken")
    finally:
        await reader.stop()
