"""A flow agent and a router on sockets: figures, a change of the policy, and flows in `explain`."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.router.clock import clock_s
from actors.router.flows import FlowAgents
from actors.router.server import RouterServer
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from actors.wire.messages import FlowReport
from actors.wire.sockets import connect
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.flow.base import Flow, Stage
from policies.flow.mfs import SWEPT
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state.events import PolicyChoice
from policies.state.views import NodeLoad, PortBand, PortLoad
from tests.actors.router.test_admin import ask, route
from tests.actors.router.test_server import Peer, serving, until


@pytest.fixture
async def agent(router: RouterServer, tmp_path: Path) -> AsyncIterator[FlowAgent]:
    async def find() -> tuple[str, ...]:
        return router.addresses

    made = FlowAgent(Identity("agent", "x"), "z", {"a", "z"}, AgentConfig(report_s=0.05), find)
    await made.start([f"unix:{tmp_path}/agent.sock"])
    await until(lambda: router.status().gauges["flow_agents"] == 1)
    yield made
    await made.stop()


async def read(agent: FlowAgent, request_id: str) -> None:
    """Moves the KV of a request in one read by permit."""
    inbox: list[wire.Message] = []
    me = Identity("worker", "w")
    channel = await connect(agent.addresses, lambda: Channel(me, lambda c, m: inbox.append(m)))
    worker = Peer(channel, inbox)
    channel.send(wire.JoinNode("z"))
    flow = Flow(
        flow_id="f",
        request_id=request_id,
        batch="b",
        stage=Stage.P2D,
        source="a",
        target="z",
        size=1000,
        due_s=5.0,
    )
    channel.send(wire.SubmitFlow(flow))
    permit = await worker.get(wire.Permitted)
    assert isinstance(permit, wire.Permitted) and permit.whole
    channel.send(wire.ChunkDone("f", 1000, 0.25, True))
    await until(lambda: not len(agent.desk))
    channel.close()


async def test_flows_are_counted_and_explained(router: RouterServer, agent: FlowAgent) -> None:
    _, _, ingress = await serving(router)
    await route(ingress, "r1#0", "mine")
    await read(agent, "r1#0")
    await until(lambda: router.status().totals.get("flow_ended") == 1)
    totals = router.status().totals
    assert totals["flow_permits"] == totals["flow_submitted"] == 1
    assert totals["flow_moved_bytes"] == 1000
    status, told = await ask(ingress, "explain", {"id": "mine"})
    assert status == 200
    (shown,) = told["flows"]
    assert shown["first_level"] == shown["last_level"] >= 1 and shown["mlu"] < 1
    assert (shown["size"], shown["chunks"], shown["moved_s"], shown["unscheduled"]) == (1000, 1, 0.25, "")


async def test_the_status_shows_each_agent(router: RouterServer, agent: FlowAgent) -> None:
    await read(agent, "r1#0")
    await until(lambda: router.status().totals.get("flow_ended") == 1)
    (shown,) = router.status().flows
    assert (shown.node, shown.policy, shown.open, shown.held, shown.granted) == ("z", "mfs", 0, 0, 1)
    assert shown.unscheduled_share == 0.0
    await agent.stop()
    await until(lambda: not router.status().flows)


async def test_a_policy_is_set_at_all_agents_and_at_later_ones(
    router: RouterServer, agent: FlowAgent, tmp_path: Path
) -> None:
    _, _, ingress = await serving(router)
    status, told = await ask(ingress, "set_policy", {"flow": {"name": "edf"}})
    assert status == 200 and told["flow"]["name"] == "edf"
    await until(lambda: agent.desk.arbiter.policy.name == "edf")
    status, told = await ask(ingress, "set_policy", {"flow": "nothing"})
    assert status == 400 and "nothing" in told["message"]

    async def find() -> tuple[str, ...]:
        return router.addresses

    later = FlowAgent(Identity("agent", "y"), "y", {"y"}, AgentConfig(report_s=0.05), find)
    await later.start([f"unix:{tmp_path}/later.sock"])
    await until(lambda: later.desk.arbiter.policy.name == "edf")
    await later.stop()
    await until(lambda: router.status().gauges["flow_agents"] == 1)


async def test_the_policy_is_shown_with_the_parameters_that_the_agents_use(
    router: RouterServer, tmp_path: Path
) -> None:
    """Nobody has set a policy here: the agents have it from their configuration, as when Sluice starts."""
    _, _, ingress = await serving(router)

    async def find() -> tuple[str, ...]:
        return router.addresses

    config = AgentConfig(params=dict(SWEPT), report_s=0.05)
    agent = FlowAgent(Identity("agent", "x"), "z", {"z"}, config, find)
    await agent.start([f"unix:{tmp_path}/agent.sock"])
    await until(lambda: router.status().gauges["flow_agents"] == 1)
    _, told = await ask(ingress, "policy")
    assert told["flow"]["name"] == "mfs"
    assert told["flow"]["params"] == {"levels": 2, "scale": 4.0, "base": 4.0, "infeasible_above": 1.0}
    assert told["available"]["flow"]["mfs"]["params"]["scale"] == 0.5
    await agent.stop()


async def test_without_an_agent_there_is_no_flow_policy_to_set(router: RouterServer) -> None:
    _, _, ingress = await serving(router)
    status, told = await ask(ingress, "set_policy", {"flow": "edf"})
    assert status == 400 and "flow.enabled" in told["message"]
    _, told = await ask(ingress, "policy")
    assert told["flow"] is None and json.dumps(told["available"]["flow"]["mfs"])


async def test_the_reads_that_agents_hold_are_shown_by_level(router: RouterServer) -> None:
    channel = await connect(router.addresses, lambda: Channel(Identity("agent", "a"), lambda c, m: None))
    gauges = {"open": 4.0, "held": 3.0, "held_level_2": 1.0, "held_level_7": 2.0}
    channel.send(wire.FlowReport("z", "mfs", {}, gauges))
    await until(lambda: [one.held_by_level for one in router.status().flows] == [{"2": 1, "7": 2}])
    assert router.status().flows[0].held == 3
    channel.close()


async def test_an_agent_that_connects_again_is_not_counted_twice(router: RouterServer) -> None:
    me = Identity("agent", "again")
    for permits in (3.0, 5.0, 2.0):
        # the third one is of a process that began anew
        channel = await connect(router.addresses, lambda: Channel(me, lambda c, m: None))
        channel.send(wire.FlowReport("z", "mfs", {"permits": permits}, {}))
        await until(lambda: router.status().gauges["flow_agents"] == 1)
        channel.close()
        await until(lambda: router.status().gauges["flow_agents"] == 0)
    assert router.status().totals["flow_permits"] == 7


async def test_an_agent_that_reports_nonsense_loses_its_connection(router: RouterServer) -> None:
    me = Identity("agent", "bad")
    channel = await connect(router.addresses, lambda: Channel(me, lambda c, m: None))
    channel.send(wire.FlowReport("z", "mfs", {"permits": float("nan")}, {}))
    await asyncio.wait_for(channel.closed, 60)
    await until(lambda: router.status().totals["protocol_errors"] == 1)
    assert router.status().gauges["flow_agents"] == 0


def test_the_share_of_unscheduled_reads_is_that_of_the_engines_which_count_while_no_agent_does() -> None:
    """8 reads of an engine have ended, 4 of them without a permit in part. Another engine does not count them."""
    told = {"transfers": 6.0, "transfer_failures": 2.0, "transfers_unscheduled": 4.0}
    engines = [wire.Status(name, 0, 0, 0, 0, 0.0) for name in "dp"]
    engines[0].totals.update(told)
    engines[1].totals.update(transfers=9.0)
    assert FlowAgents().gauges(engines) == {"flow_agents": 0.0, "flow_unscheduled_share": 0.5}
    assert FlowAgents().gauges() == {"flow_agents": 0.0}


def test_an_agent_whose_policy_does_not_exist_is_refused() -> None:
    """The administrator's question for the policy could not be answered then."""
    agents = FlowAgents()
    with pytest.raises(ValueError, match="not known: 'none'"):
        agents.reported(None, FlowReport("n", "none", {}, {}))  # type: ignore[arg-type]
    assert len(agents) == 0


@pytest.mark.parametrize("params", [b"[4.0]", b"{", b"\xff", b'{"scale":-1}', b'{"speed":1}'])
def test_an_agent_whose_parameters_do_not_exist_is_refused(params: bytes) -> None:
    agents = FlowAgents()
    with pytest.raises(ValueError):
        agents.reported(None, FlowReport("n", "mfs", {}, {}, (), params))  # type: ignore[arg-type]
    assert len(agents) == 0


# --------------------------------------------------------------------------------------------------- loads of ports


@pytest.mark.parametrize(("lends", "known"), [(True, True), (False, False)])
async def test_what_is_to_move_at_ports_reaches_the_reducer_where_prefixes_are_lent(
    tmp_path: Path, lends: bool, known: bool
) -> None:
    policy = JoinShortestQueue()
    dispatcher = Dispatcher(DispatchConfig(lend_prefixes=lends), policy, policy)
    router = RouterServer(Identity("router", "r"), dispatcher)
    await router.start([f"unix:{tmp_path}/r.sock"])

    async def find() -> tuple[str, ...]:
        return router.addresses

    config = AgentConfig(params=dict(SWEPT), report_s=0.05)
    agent = FlowAgent(Identity("agent", "x"), "z", {"a", "z"}, config, find)
    await agent.start([f"unix:{tmp_path}/agent.sock"])
    inbox: list[wire.Message] = []
    channel = await connect(
        agent.addresses, lambda: Channel(Identity("worker", "w"), lambda c, m: inbox.append(m))
    )
    channel.send(wire.JoinNode("z"))
    flow = Flow(flow_id="f", request_id="r", batch="r", stage=Stage.REUSE, source="a", target="z", size=1000)
    channel.send(wire.SubmitFlow(flow))
    await until(lambda: inbox)

    def size() -> int | None:
        report = dispatcher.state.flow_report("z", clock_s())
        return None if report is None else sum(band.size for band in report.load.ingress.bands)

    if known:
        await until(lambda: size() == 1000)
        report = dispatcher.state.flow_report("z", clock_s())
        assert report is not None
        assert report.policy == PolicyChoice(
            "mfs", {"levels": 2, "scale": 4.0, "base": 4.0, "infeasible_above": 1.0}
        )
        assert [(band.level, band.flows) for band in report.load.ingress.bands] == [(2, 1)]
    channel.send(wire.ChunkDone("f", 1000, 0.25, True))
    await until(lambda: router.status().totals.get("flow_ended") == 1)
    await until(lambda: size() == (0 if known else None))
    channel.close()
    await agent.stop()
    await router.stop()


BAND = PortBand(2, (0.0, 1.0), 1, 1000)


@pytest.mark.parametrize(
    ("port", "why"),
    [
        (PortLoad(math.nan, (BAND,)), "bytes/s"),
        (PortLoad(0.0), "bytes/s"),
        (PortLoad(-1.0), "bytes/s"),
        (PortLoad(math.inf), "bytes/s"),
        (PortLoad(1e9, (BAND._replace(size=-1000),)), "bytes must be"),
        (PortLoad(1e9, (BAND, BAND._replace(size=0))), "bytes must be"),
        (PortLoad(1e9, (BAND._replace(flows=0),)), "flows"),
        (PortLoad(1e9, (BAND._replace(level=0),)), "level"),
        (PortLoad(1e9, (BAND._replace(level=67),)), "level"),
        (PortLoad(1e9, (BAND._replace(key=(0.0, math.nan)),)), "key"),
        (PortLoad(1e9, (BAND,) * 67), "67 bands"),
    ],
)
def test_a_load_that_cannot_be_is_refused_whichever_port_has_it(port: PortLoad, why: str) -> None:
    agents = FlowAgents()
    fine = NodeLoad("m", PortLoad(None), PortLoad(1e9, (BAND,)))
    for load in (NodeLoad("n", port, PortLoad(None)), NodeLoad("n", PortLoad(None), port)):
        with pytest.raises(ValueError, match=f"agent z reports a load of node n .*{why}"):
            agents.reported(None, FlowReport("z", "mfs", {}, {}, loads=(fine, load)))  # type: ignore[arg-type]
    assert len(agents) == 0


def test_a_report_of_too_many_nodes_is_refused() -> None:
    load = NodeLoad("n", PortLoad(None), PortLoad(None))
    with pytest.raises(ValueError, match=f"at most {wire.MOST_NODES}"):
        FlowAgents().reported(None, FlowReport("z", "mfs", {}, {}, loads=(load,) * (wire.MOST_NODES + 1)))  # type: ignore[arg-type]


async def test_an_agent_that_reports_a_load_that_cannot_be_loses_its_connection(router: RouterServer) -> None:
    channel = await connect(router.addresses, lambda: Channel(Identity("agent", "bad"), lambda c, m: None))
    load = NodeLoad("n", PortLoad(1e9, (BAND._replace(size=-1),)), PortLoad(None))
    channel.send(FlowReport("n", "mfs", {}, {}, loads=(load,)))
    await asyncio.wait_for(channel.closed, 60)
    await until(lambda: router.status().totals["protocol_errors"] == 1)
