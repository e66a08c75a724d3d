"""The order between requests: Algorithm 1 over an agent's flows, by hand, and a coordinator of two agents."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.flow.coordinator import Coordinator
from actors.flow.ordering import Ordering
from actors.flow.orders import ORDER_S, OrderBook, OrderMaker, Pace
from actors.wire.channel import Channel, Identity
from actors.wire.link import Find
from actors.wire.messages import (
    BatchArrived,
    BatchLeft,
    ChunkDone,
    JoinNode,
    Message,
    Permitted,
    SubmitFlow,
)
from actors.wire.sockets import connect
from policies.flow.base import FixedPorts, Flow, Stage
from policies.flow.events import Ordered


def flow(
    name: str, batch: str, due_s: float | None, size: int = 100, target: str = "z", source: str = "a"
) -> Flow:
    return Flow(
        flow_id=name,
        request_id=f"r-{name}",
        batch=batch,
        stage=Stage.P2D,
        source=source,
        target=target,
        size=size,
        due_s=due_s,
    )


def changed(book: OrderBook) -> bool:
    """Returns whether the order must be made anew."""
    return book.changed


def test_batches_are_ordered_by_red_and_the_largest_request_of_a_late_one_is_pruned() -> None:
    book = OrderBook(drop_share=0.5)
    # at 100 bytes/s: b1 is due at 9 s, b2 at 2 s
    book.arrived(flow("slow", "b1", 9.0, 300), 0.0)
    book.arrived(flow("small", "b2", 2.0, 50), 0.0)
    assert book.order(FixedPorts(100.0), 0.0) == Ordered(("b2", "b1"), ())
    # b2 now takes (50 + 900) / 100 = 9.5 s until 2 s: the request of 900 bytes is pruned, b1 then ends at 3.5 s
    book.arrived(flow("big", "b2", 2.0, 900), 0.0)
    assert changed(book)
    assert book.order(FixedPorts(100.0), 0.0) == Ordered(("b2", "b1"), ("r-big",))
    assert not changed(book)


def test_the_order_changes_when_a_batch_comes_or_goes_and_flows_without_deadline_have_no_part() -> None:
    book = OrderBook(drop_share=0.0)
    book.arrived(flow("free", "b0", None), 0.0)
    assert not changed(book)
    book.arrived(flow("one", "b1", 1.0), 0.0)
    book.arrived(flow("two", "b1", 2.0), 0.0)
    assert book.order(FixedPorts(100.0), 0.0) == Ordered(("b1",), ())
    book.left("one")
    book.left("free")
    assert not changed(book)
    book.left("two")
    assert changed(book)
    assert book.order(FixedPorts(100.0), 0.0) == Ordered((), ())
    assert [each.due_s for each in book.open_flows(0.0)] == []


def test_an_order_is_made_of_the_bytes_that_are_left() -> None:
    book = OrderBook(drop_share=1.0)
    # at 100 bytes/s 900 bytes cannot be there in 2 s, the last 50 of them can
    book.arrived(flow("big", "b", 2.0, 900), 0.0)
    assert book.order(FixedPorts(100.0), 0.0) == Ordered(("b",), ("r-big",))
    book.moved("big", 850)
    book.moved("unknown", 1)
    assert book.order(FixedPorts(100.0), 0.0) == Ordered(("b",), ())
    assert [(each.size, each.due_s) for each in book.open_flows(0.5)] == [(50, 1.5)]
    # a coordinator hears the same flow again, with what is left of it: it is no second one
    book.arrived(flow("big", "b", 1.0, 20), 1.0)
    book.left("big")
    assert (len(book), book.open_flows(1.0)) == (0, [])


def test_orders_take_a_twentieth_of_the_time_at_most() -> None:
    assert Pace(0.0).wait_s() == ORDER_S
    assert Pace(0.060).wait_s() == pytest.approx(19 * 0.060)


async def test_an_order_of_many_flows_is_made_between_other_work() -> None:
    """Each look at this clock takes 0.1 ms, so that a slice of 1 ms has ten steps at most."""
    now_s: list[float] = [0.0]
    orders: list[Ordered] = []

    def clock() -> float:
        now_s[0] += 0.0001
        return now_s[0]

    book = OrderBook(drop_share=0.2)
    maker = OrderMaker(book, FixedPorts(100.0), clock, orders.append)
    for number in range(60):
        book.arrived(flow(f"f{number}", f"b{number // 3}", 1.0 + number % 7, target="yz"[number % 2]), 0.0)
    # the time at which the maker begins
    expected = book.order(FixedPorts(100.0), 0.0001)
    assert expected.pruned
    book.changed = True
    maker.plan()
    seen = set()
    while not orders:
        # other work sees the clock of each slice's end
        await asyncio.sleep(0.0)
        seen.add(now_s[0])
        if len(seen) == 4:
            book.arrived(flow("late", "late", 0.5), 0.0)
            maker.plan()
    # 60 flows, their 20 batches three times, and what is pruned, ten in a slice
    assert len(seen) >= 12
    assert orders == [expected]
    await until(lambda: len(orders) == 2)
    assert "late" in orders[1].batches
    maker.stop()


async def test_an_order_that_fails_is_said_and_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenPorts(FixedPorts):
        broken = True

        def rate(self, source: str, target: str) -> float:
            if self.broken:
                raise RuntimeError("broken")
            return super().rate(source, target)

    orders: list[Ordered] = []
    book, ports = OrderBook(drop_share=0.0), BrokenPorts(100.0)
    maker = OrderMaker(book, ports, asyncio.get_running_loop().time, orders.append)
    book.arrived(flow("one", "b1", 9.0), 0.0)
    maker.plan()
    await until(lambda: "no order" in caplog.text)
    ports.broken = False
    book.arrived(flow("two", "b2", 9.0), 0.0)
    maker.plan()
    await until(lambda: orders == [Ordered(("b1", "b2"))])


async def test_an_agent_keeps_the_pace_of_orders() -> None:
    """An order takes 1 s of the agent's clock here, so the next one comes 19 s later."""
    now_s, orders = [0.0], []

    class SlowPorts(FixedPorts):
        def rate(self, source: str, target: str) -> float:
            now_s[0] += 1.0
            return super().rate(source, target)

    ordering = Ordering(Identity("agent", "z"), "", 0.0, SlowPorts(100.0), lambda: now_s[0], orders.append)
    ordering.arrived(flow("one", "b1", 9.0), 0.0)
    await until(lambda: orders == [Ordered(("b1",))])
    ordering.arrived(flow("two", "b2", 9.0), 0.0)
    assert ordering.next_order_s() == pytest.approx(19.0, abs=1.0)
    await ordering.stop()
    assert ordering.next_order_s() is None


class Worker:
    """A worker that keeps what it was permitted."""

    def __init__(self) -> None:
        self.permits: list[Permitted] = []
        self.channel: Channel

    async def join(self, agent: FlowAgent, node: str) -> None:
        """Connects to the agent as a worker of this node."""
        me = Identity("worker", f"w-{node}")
        self.channel = await connect(agent.addresses, lambda: Channel(me, self._take))
        self.channel.send(JoinNode(node))

    def _take(self, channel: Channel, message: Message) -> None:
        if isinstance(message, Permitted):
            self.permits.append(message)


class Watched(FlowAgent):
    """An agent that adds each order which it takes to `orders`."""

    def __init__(
        self, orders: list[Ordered], node: str, config: AgentConfig, find_coordinator: Find | None = None
    ) -> None:
        self.orders = orders
        me = Identity("agent", node)
        super().__init__(me, node, {"a", "y", "z"}, config, find_coordinator=find_coordinator)

    def _ordered(self, ordered: Ordered) -> None:
        self.orders.append(ordered)
        super()._ordered(ordered)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("loses_coordinator", [False, True])
async def test_two_agents_get_one_order_and_go_on_alone_without_their_coordinator(
    tmp_path: Path, loses_coordinator: bool
) -> None:
    coordinator = Coordinator(Identity("coordinator", "c"), 0.0, 100.0)
    await coordinator.start([f"unix:{tmp_path}/c.sock"])
    config = AgentConfig(coordinator=coordinator.addresses[0])
    orders: list[Ordered] = []
    agents = [Watched(orders, node, config) for node in "yz"]
    workers = [Worker(), Worker()]
    try:
        for agent, worker, node in zip(agents, workers, "yz", strict=True):
            await agent.start([f"unix:{tmp_path}/{node}.sock"])
            await worker.join(agent, node)
        await until(lambda: all(agent.coordinated for agent in agents))
        if loses_coordinator:
            await coordinator.stop()
            await until(lambda: not any(agent.coordinated for agent in agents))
        workers[0].channel.send(SubmitFlow(flow("fy", "late", 9.0, target="y")))
        workers[1].channel.send(SubmitFlow(flow("fz", "soon", 1.0, target="z")))
        if loses_coordinator:
            await until(lambda: Ordered(("late",)) in orders and Ordered(("soon",)) in orders)
        else:
            await until(lambda: orders.count(Ordered(("soon", "late"))) == 2)
        await until(lambda: all(worker.permits for worker in workers))
        if not loses_coordinator:
            # the coordinator hears what is left of a flow that has moved
            workers[0].channel.send(ChunkDone("fy", 40, 0.1))
            await until(lambda: {each.size for each in coordinator.open_flows()} == {60, 100})
            workers[0].channel.send(ChunkDone("fy", 60, 0.1, True))
            workers[1].channel.send(ChunkDone("fz", 100, 0.1, True))
            await until(lambda: orders.count(Ordered(())) == 2)
            return
        for worker, name in zip(workers, ("fy", "fz"), strict=True):
            worker.channel.send(ChunkDone(name, 100, 0.1, True))
        await until(lambda: orders.count(Ordered(())) == 2)
    finally:
        for agent in agents:
            await agent.stop()
        await coordinator.stop()


class CoordinatorProcess:
    """`python -m actors.flow.host --coordinate` on a unix socket."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/c.sock"
        command = [sys.executable, "-m", "actors.flow.host", "--coordinate", "--listen", self.address]
        env = {**os.environ, "SLUICE_WIRE_SECRET": ""}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ready ")

    def kill(self) -> None:
        """Kills the process, also a stopped one, and waits for its end."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def test_agents_order_alone_while_a_coordinator_is_silent_and_take_its_order_when_it_speaks(
    tmp_path: Path,
) -> None:
    """A stopped process keeps its connections for some seconds, in which it names no batch that arrives."""
    coordinator = CoordinatorProcess(tmp_path)
    orders: dict[str, list[Ordered]] = {"y": [], "z": []}
    config = AgentConfig(coordinator=coordinator.address)
    agents = [Watched(orders[node], node, config) for node in "yz"]
    workers = [Worker(), Worker()]

    def all_have(order: Ordered) -> bool:
        return all(came[-1:] == [order] for came in orders.values())

    try:
        for agent, worker, node in zip(agents, workers, "yz", strict=True):
            await agent.start([f"unix:{tmp_path}/{node}.sock"])
            await worker.join(agent, node)
        await until(lambda: all(agent.coordinated for agent in agents))
        workers[0].channel.send(SubmitFlow(flow("fy", "late", 900.0, target="y")))
        workers[1].channel.send(SubmitFlow(flow("fz", "soon", 600.0, target="z")))
        await until(lambda: all_have(Ordered(("soon", "late"))))
        coordinator.process.send_signal(signal.SIGSTOP)
        workers[0].channel.send(SubmitFlow(flow("gy", "next", 300.0, target="y")))
        await until(lambda: orders["y"][-1] == Ordered(("next", "late")))
        assert agents[0]._ordering.connected and not agents[0].coordinated
        await until(lambda: orders["z"][-1] == Ordered(("soon",)))
        coordinator.process.send_signal(signal.SIGCONT)
        await until(lambda: all_have(Ordered(("next", "soon", "late"))))
        assert all(agent.coordinated for agent in agents)
    finally:
        for agent in agents:
            await agent.stop()
        coordinator.kill()


async def test_an_agent_that_connects_hears_the_latest_order(tmp_path: Path) -> None:
    """An agent may hold lent flows alone, of which the coordinator hears from others, so that no new order comes."""
    coordinator = Coordinator(Identity("coordinator", "c"), 0.0, 100.0)
    await coordinator.start([f"unix:{tmp_path}/c.sock"])
    config = AgentConfig(coordinator=coordinator.addresses[0])
    first: list[Ordered] = []
    later: list[Ordered] = []
    agents = [Watched(first, "y", config), Watched(later, "z", config)]
    worker = Worker()
    try:
        await agents[0].start([f"unix:{tmp_path}/y.sock"])
        await worker.join(agents[0], "y")
        await until(lambda: agents[0].coordinated)
        worker.channel.send(SubmitFlow(flow("f", "soon", 900.0, target="y")))
        await until(lambda: first == [Ordered(("soon",))])
        await agents[1].start([f"unix:{tmp_path}/z.sock"])
        await until(lambda: later == [Ordered(("soon",))])
    finally:
        for agent in agents:
            await agent.stop()
        await coordinator.stop()


async def test_a_coordinator_prunes_by_what_the_agents_have_learned(tmp_path: Path) -> None:
    """At the 100 bytes/s of the agents' ports 900 bytes cannot be there in 2 s; at the coordinator's own 1e9 they can.
    A request of two flows keeps the one that has not ended.
    """
    coordinator = Coordinator(Identity("coordinator", "c"), 0.5, 1e9)
    await coordinator.start([f"unix:{tmp_path}/c.sock"])
    orders: list[Ordered] = []
    ports = {"port_bytes_per_s": 100.0}
    config = AgentConfig(coordinator=coordinator.addresses[0], arbiter=ports, drop_share=0.0)
    agent, worker = Watched(orders, "y", config), Worker()
    try:
        await agent.start([f"unix:{tmp_path}/y.sock"])
        await worker.join(agent, "y")
        await until(lambda: agent.coordinated)
        worker.channel.send(SubmitFlow(flow("small", "b", 2.0, 50, target="y")))
        worker.channel.send(SubmitFlow(flow("big", "b", 2.0, 900, target="y")))
        await until(lambda: Ordered(("b",), ("r-big",)) in orders)
        other_rank = dataclasses.replace(flow("rank1", "b", 2.0, 70, target="y"), request_id="r-small")
        worker.channel.send(SubmitFlow(other_rank))
        await until(lambda: len(coordinator.open_flows()) == 3)
        worker.channel.send(ChunkDone("small", 50, 0.1, True))
        await until(lambda: len(coordinator.open_flows()) == 2)
        assert {each.size for each in coordinator.open_flows()} == {70, 900}
    finally:
        await agent.stop()
        await coordinator.stop()


async def test_a_coordinator_parts_from_an_agent_that_tells_no_bandwidth(tmp_path: Path) -> None:
    coordinator = Coordinator(Identity("coordinator", "c"), 0.5, 1e9)
    await coordinator.start([f"unix:{tmp_path}/c.sock"])
    try:
        for wrong in ((), (0.0,), (float("nan"),), (float("inf"),)):
            channel = await connect(
                coordinator.addresses, lambda: Channel(Identity("agent", "y"), lambda channel, message: None)
            )
            await until(lambda: coordinator.agents == 1)
            channel.send(BatchArrived("b", (flow("f", "b", 2.0),), wrong))
            await until(lambda: coordinator.agents == 0)
            assert coordinator.open_flows() == []
    finally:
        await coordinator.stop()


@pytest.mark.parametrize("flood", ["flows", "pairs of nodes"])
async def test_a_coordinator_parts_from_an_agent_that_floods_it_and_serves_the_others(
    tmp_path: Path, flood: str
) -> None:
    """Three flows at once are more than the two that an agent may have; a flow that comes again is no further one."""
    coordinator = Coordinator(Identity("coordinator", "c"), 0.5, 1e9, most_flows=2)
    await coordinator.start([f"unix:{tmp_path}/c.sock"])
    orders: list[Ordered] = []
    good = Watched(orders, "x", AgentConfig(coordinator=coordinator.addresses[0]))
    worker = Worker()
    try:
        await good.start([f"unix:{tmp_path}/x.sock"])
        await worker.join(good, "x")
        await until(lambda: good.coordinated)
        worker.channel.send(SubmitFlow(flow("mine", "b", 2.0, target="x")))
        await until(lambda: len(coordinator.open_flows()) == 1)
        channel = await connect(
            coordinator.addresses, lambda: Channel(Identity("agent", "y"), lambda channel, message: None)
        )
        await until(lambda: coordinator.agents == 2)
        for number in (0, 1, 1):
            channel.send(BatchArrived("b", (flow(f"f{number}", "b", 2.0),), (1e9,)))
        await until(lambda: len(coordinator.open_flows()) == 3)
        if flood == "flows":
            channel.send(BatchArrived("b", (flow("f2", "b", 2.0),), (1e9,)))
        else:
            for number in (0, 1, 2):
                channel.send(BatchLeft("b", ("f0",)))
                channel.send(BatchArrived("b", (flow("f0", "b", 2.0, target=f"n{number}"),), (1e9,)))
        await until(lambda: coordinator.agents == 1)
        assert [each.request_id for each in coordinator.open_flows()] == ["r-mine"]
        assert good.coordinated
    finally:
        await good.stop()
        await coordinator.stop()


async def test_an_agent_finds_a_coordinator_that_comes_later_and_its_successor_elsewhere(
    tmp_path: Path,
) -> None:
    """Until there is one the agent orders alone; flows that are open then are told to each coordinator."""
    found: list[str] = []

    async def find() -> tuple[str, ...]:
        return tuple(found)

    orders: list[Ordered] = []
    agent = Watched(orders, "y", AgentConfig(), find)
    worker = Worker()
    coordinators: list[Coordinator] = []

    async def coordinator(name: str) -> Coordinator:
        made = Coordinator(Identity("coordinator", name), 0.0, 100.0)
        coordinators.append(made)
        await made.start([f"unix:{tmp_path}/{name}.sock"])
        found[:] = made.addresses
        return made

    try:
        await agent.start([f"unix:{tmp_path}/y.sock"])
        await worker.join(agent, "y")
        worker.channel.send(SubmitFlow(flow("f", "soon", 9.0, target="y")))
        await until(lambda: orders == [Ordered(("soon",))])
        assert not agent.coordinated
        first = await coordinator("c1")
        await until(lambda: agent.coordinated and first.open_flows())
        await first.stop()
        await until(lambda: not agent.coordinated)
        second = await coordinator("c2")
        await until(lambda: agent.coordinated and second.open_flows())
        assert [(each.request_id, each.size) for each in second.open_flows()] == [("r-f", 100)]
        assert (first.agents, second.agents) == (0, 1)
    finally:
        await agent.stop()
        for each in coordinators:
            await each.stop()
