"""The order between requests: Algorithm 1 over an agent's flows, by hand, and a coordinator of two agents."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.flow.coordinator import Coordinator
from actors.flow.orders import OrderBook
from actors.wire.channel import Channel, Identity
from actors.wire.messages import ChunkDone, JoinNode, Message, Permitted, SubmitFlow
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

    def __init__(self, orders: list[Ordered], node: str, config: AgentConfig) -> None:
        self.orders = orders
        super().__init__(Identity("agent", node), node, {"a", "y", "z"}, config)

    def _ordered(self, ordered: Ordered) -> None:
        self.orders.append(ordered)
        super()._ordered(ordered)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
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
        for worker, name in zip(workers, ("fy", "fz"), strict=True):
            worker.channel.send(ChunkDone(name, 100, 0.1, True))
        await until(lambda: orders.count(Ordered(())) == 2)
    finally:
        for agent in agents:
            await agent.stop()
        await coordinator.stop()
