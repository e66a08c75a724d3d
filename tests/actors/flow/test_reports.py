"""The reports of an agent to its router."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.router.flows import FlowAgents
from actors.wire.channel import Channel, Identity
from actors.wire.messages import MOST_NODES, ChunkDone, FlowReport, JoinNode, Message, SubmitFlow
from actors.wire.sockets import listen
from app.fleet.figures import router_metric
from policies.state.views import NodeLoad, PortLoad
from tests.actors.flow.agents import until
from tests.actors.flow.test_desk import flow


class Broken(FlowAgent):
    """An agent whose first reports fail."""

    fails = 3

    def report(self) -> FlowReport:
        if self.fails:
            self.fails -= 1
            raise KeyError("no such flow")
        return super().report()


async def test_a_report_that_fails_is_said_and_not_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    came: list[Message] = []
    server, address = await listen(
        f"unix:{tmp_path}/router.sock",
        lambda: Channel(Identity("router", "r"), lambda channel, message: came.append(message)),
    )

    async def find_router() -> tuple[str, ...]:
        return (address,)

    agent = Broken(Identity("agent", "z"), "z", set(), AgentConfig(report_s=0.01), find_router)
    agent.fails = 0
    try:
        await agent.start([f"unix:{tmp_path}/z.sock"])
        await until(lambda: came, "the first report does not come")
        agent.fails = 3
        await until(lambda: not agent.fails, "the reports have ended")
        number = len(came)
        await until(lambda: len(came) > number, "the reports have ended")
        assert "no report" in caplog.text
    finally:
        await agent.stop()
        server.close()
        await asyncio.sleep(0)


async def test_a_report_has_the_flows_that_have_ended_and_the_time_held_by_level() -> None:
    """The port of `a` takes one chunk: `f` is not held, `g` is for 2 s. `h` is no flow of this node's workers."""

    async def find_router() -> tuple[str, ...]:
        raise AssertionError("the agent has not been started")

    config = AgentConfig(arbiter={"window": 1})
    agent = FlowAgent(Identity("agent", "z"), "z", {"a", "z"}, config, find_router)
    desk = agent.desk
    worker, other = desk.came("w", lambda message: None), desk.came("x", lambda message: None, agent=True)
    desk.take(worker, JoinNode("z"), 0.0)
    desk.take(other, JoinNode("a"), 0.0)
    for name in "fg":
        desk.take(worker, SubmitFlow(flow(name)), 0.0)
    desk.take(worker, ChunkDone("f", 100, 0.1, True), 2.0)
    desk.take(worker, ChunkDone("g", 100, 0.1, True), 5.0)
    lent = dataclasses.replace(flow("h"), source="z", target="a")
    desk.take(other, SubmitFlow(lent), 5.0)
    desk.take(other, ChunkDone("h", 100, 0.1, True), 9.0)
    totals = agent.report().totals
    by_level = {name: total for name, total in totals.items() if "_level_" in name and "bytes" not in name}
    level = desk.ended[0].last_level
    assert desk.ended[1].last_level == level
    assert by_level == {f"ended_level_{level}": 2.0, f"held_seconds_level_{level}": 2.0}
    assert totals["held_seconds"] == 2.0
    flows = FlowAgents()
    channel = Channel(Identity("router", "r"), lambda channel, message: None)
    flows.reported(channel, agent.report())
    told = flows.totals()
    metric, labels = router_metric(f"flow_held_seconds_level_{level}", "counter")
    assert told[f"flow_held_seconds_level_{level}"] == 2.0
    assert (metric.name, labels) == ("sluice_router_flow_held_seconds_level_total", (str(level),))
    assert router_metric(f"flow_ended_level_{level}", "counter")[0].unit == "flows"


async def test_a_report_has_what_is_still_to_move_at_the_ports_of_its_own_nodes() -> None:
    """Workers of z read `f` and `g` from a, and one of y reads `h` from z. Of `f` 60 of 100 bytes have arrived; the
    ports of a and y belong to other agents.
    """

    async def find_router() -> tuple[str, ...]:
        raise AssertionError("the agent has not been started")

    agent = FlowAgent(Identity("agent", "z"), "z", {"a", "y", "z"}, AgentConfig(), find_router)
    desk = agent.desk
    assert agent.report().loads == (NodeLoad("z", PortLoad(None), PortLoad(None)),)
    worker, other = desk.came("w", lambda message: None), desk.came("y", lambda message: None, agent=True)
    desk.take(worker, JoinNode("z"), 0.0)
    desk.take(other, JoinNode("y"), 0.0)
    for name in "fg":
        desk.take(worker, SubmitFlow(flow(name)), 0.0)
    desk.take(other, SubmitFlow(flow("h", 30, "z", "y")), 0.0)
    desk.take(worker, ChunkDone("f", 60, 0.1), 0.5)
    report = agent.report()
    (load,) = report.loads
    assert (load.node, load.egress.bytes_per_s) == ("z", None)
    # all are in no hurry, so they are in P_8 of MFS, where P2D transfers go by their latest start
    assert {(band.level, band.key[0]) for band in load.ingress.bands + load.egress.bands} == {(8, 1.0)}
    assert sum(band.size for band in load.ingress.bands) == 40 + 100
    assert sum(band.flows for band in load.ingress.bands) == 2
    assert [(band.flows, band.size) for band in load.egress.bands] == [(1, 30)]
    FlowAgents().reported(Channel(Identity("router", "r"), lambda channel, message: None), report)


async def test_a_report_has_no_more_nodes_than_a_router_takes() -> None:
    async def find_router() -> tuple[str, ...]:
        raise AssertionError("the agent has not been started")

    names = {f"n{number}" for number in range(MOST_NODES + 9)}
    agent = FlowAgent(Identity("agent", "z"), "z", names, AgentConfig(), find_router)
    for name in sorted(names):
        agent.desk.take(agent.desk.came(name, lambda message: None), JoinNode(name), 0.0)
    report = agent.report()
    assert len(report.loads) == MOST_NODES
    FlowAgents().reported(Channel(Identity("router", "r"), lambda channel, message: None), report)
