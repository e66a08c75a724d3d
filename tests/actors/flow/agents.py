"""Agents in this process, and a worker that keeps or answers its permits."""

import asyncio
from collections.abc import Callable

from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.flow.directory import Directory
from actors.wire.channel import Channel, Identity
from actors.wire.messages import ChunkDone, FlowRefused, JoinNode, Message, Permitted, SubmitFlow
from actors.wire.sockets import connect
from policies.flow.base import Flow, Stage

# a busy machine keeps processes waiting, which is no fault of theirs here
PATIENT: dict[str, float] = {"silent_s": 30.0, "lost_s": 30.0}
CHUNKED = {"whole_read_when_alone": False, "learn": False, "port_bytes_per_s": 100.0, "least_chunk_bytes": 1}


def flow(name: str, source: str, target: str, size: int = 4) -> Flow:
    """Returns a transfer that is due in 5 s."""
    return Flow(
        flow_id=name,
        request_id=f"r-{name}",
        batch=f"b-{name}",
        stage=Stage.P2D,
        source=source,
        target=target,
        size=size,
        due_s=5.0,
    )


class Reads:
    """A worker of one node that answers each permit at once, unless it shall keep them."""

    def __init__(self, node: str, secret: bytes | None = None) -> None:
        self.node, self.secret = node, secret
        self.keep = False
        self.permits: list[Permitted] = []
        self.refused: list[str] = []
        self.left: dict[str, int] = {}
        self.channel: Channel

    async def join(self, agent: FlowAgent) -> None:
        """Connects to the agent."""
        me = Identity("worker", f"w-{self.node}", self.secret)
        self.channel = await connect(agent.addresses, lambda: Channel(me, self._take))
        self.channel.send(JoinNode(self.node))

    def submit(self, made: Flow) -> None:
        """Submits a read."""
        self.left[made.flow_id] = made.size
        self.channel.send(SubmitFlow(made))

    def _take(self, channel: Channel, message: Message) -> None:
        if isinstance(message, FlowRefused):
            self.refused.append(message.flow_id)
        if isinstance(message, Permitted):
            self.permits.append(message)
            if not self.keep:
                self.answer()

    def answer(self) -> None:
        """Ends all chunks that were permitted."""
        while self.permits:
            permit = self.permits.pop()
            name, size = permit.flow_id, min(permit.size, self.left[permit.flow_id])
            self.left[name] -= size
            self.channel.send(ChunkDone(name, size, 0.01, not self.left[name]))


async def until(condition: Callable[[], object], what: str) -> None:
    """Waits until a condition holds. Raises TimeoutError after a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)
    assert condition(), what


def made_agent(node: str, directory: Directory | None, name: str = "", **config: float) -> FlowAgent:
    """Returns an agent that owns a node and knows no other."""
    options = AgentConfig(arbiter=CHUNKED, **{**PATIENT, **config})  # type: ignore[arg-type]
    return FlowAgent(Identity("agent", name or f"agent-{node}"), node, {node}, options, directory=directory)
