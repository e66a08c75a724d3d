"""The socket of a flow agent: workers that break its protocol in every way that it names, and others at random.

A finding is a connection that outlives what must end it, a worker beside it whose reads do not end, flows that stay
open when their worker has gone, an error in the log, or memory that grows.
"""

import asyncio
import logging
import math
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from actors.flow.agent import FlowAgent, clock_s
from actors.flow.config import AgentConfig
from actors.flow.desk import MOST_FLOWS_A_WORKER
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from actors.wire.frames import DECODER, HEADER, proof
from actors.wire.messages import PROTOCOL_VERSION, Hello, Prove
from tests.actors.flow.agents import CHUNKED, PATIENT, Reads, flow
from tests.fuzz import mutate
from tests.fuzz.frames import FLOATS, INTEGERS, deliver, frame
from tests.fuzz.watch import Watch

SECRET = b"the secret of the fuzzer's wire"
NODE, OTHER, NOWHERE = "p", "a", "nowhere"
"""The agent's own node, one that it knows, and one that does not exist."""
HANG_S = 60.0
SAMPLE = 64
FRAMES = 20
"""Most frames of one connection."""
TAKEN: tuple[Any, ...] = tuple(
    inspect.type_info(one)
    for one in (
        wire.JoinNode, wire.SubmitFlow, wire.ChunkPosted, wire.ChunkDone, wire.AdvanceFlow, wire.WithdrawFlow,
        wire.Unscheduled, wire.Beat,
    )
)  # fmt: skip

NAN, INF = math.nan, math.inf


def plain(message: wire.Message) -> Any:
    """Returns a message as arrays, numbers and texts, which can be changed to what no message is."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def submit(name: str = "f", **wrong: Any) -> Any:
    """Returns a submitted flow as it goes over the wire, with other fields."""
    message = plain(wire.SubmitFlow(flow(name, OTHER, NODE)))
    message[1] |= wrong
    return message


JOIN = plain(wire.JoinNode(NODE))
FAULTS: dict[str, Callable[[Random], list[Any]]] = {
    "joins an unknown node": lambda rng: [plain(wire.JoinNode(NOWHERE))],
    "joins two nodes": lambda rng: [JOIN, plain(wire.JoinNode(OTHER))],
    "submits before it joins": lambda rng: [submit()],
    "unknown source": lambda rng: [JOIN, submit(source=NOWHERE)],
    "unknown target": lambda rng: [JOIN, submit(target=NOWHERE)],
    "reads into another node": lambda rng: [JOIN, submit(source=NODE, target=OTHER)],
    "size": lambda rng: [
        JOIN, submit(size=rng.choice((0, -1, -(2**63), 1.5, NAN, INF, -INF, "4", None, True, [])))
    ],
    "deadline": lambda rng: [JOIN, submit(due_s=rng.choice((NAN, INF, -INF, "1", [])))],
    "compute": lambda rng: [JOIN, submit(compute_s=rng.choice((NAN, -1.0, INF, None)))],
    "least part": lambda rng: [JOIN, submit(least=rng.choice((0, -1, 0.5, NAN, "1", None)))],
    "engines": lambda rng: [JOIN, submit(engines=rng.choice((1, None, [])))],
    "layer": lambda rng: [JOIN, submit(rli=rng.choice((-1, 0.5, NAN, "1")))],
    "stage": lambda rng: [JOIN, submit(stage=rng.choice((0, 5, -1, "3", None)))],
    "no name": lambda rng: [JOIN, submit("f", **{rng.choice(("flow_id", "request_id", "batch", "source")): ""})],
    "the same flow twice": lambda rng: [JOIN, submit("f"), submit("f")],
    "a flow that is not open": lambda rng: [
        JOIN,
        plain(
            rng.choice(
                (
                    wire.ChunkDone("f", 1, 0.1), wire.AdvanceFlow("f", 1), wire.WithdrawFlow("f", 0),
                    wire.Unscheduled("f", 1, "silent"),
                )
            )
        ),
    ],
    "more bytes than there are": lambda rng: [JOIN, submit(), plain(wire.ChunkDone("f", 2**62, 0.1))],
    "negative bytes": lambda rng: [JOIN, submit(), plain(wire.ChunkDone("f", -1, 0.1))],
    "no duration": lambda rng: [
        JOIN, submit(), plain(wire.ChunkDone("f", 1, rng.choice((NAN, INF, -INF, -1.0))))
    ],
    "posts as an agent": lambda rng: [JOIN, submit(), plain(wire.ChunkPosted("f"))],
    "a message for others": lambda rng: [JOIN, plain(wire.Cancel("r"))],
    "a second hello": lambda rng: [plain(Hello(PROTOCOL_VERSION, "worker", "w"))],
    "no message": lambda rng: [JOIN, mutate.TEXTS[1]],
}  # fmt: skip
"""Faults that end a connection, each with the messages of one that has greeted well. The last is the fault."""

HELLOS: dict[str, dict[str, Any]] = {
    "wrong secret": {"secret": b"another"},
    "old protocol": {"version": PROTOCOL_VERSION - 1},
    "new protocol": {"version": PROTOCOL_VERSION + 1},
    "another kind": {"kind": "ingress"},
    "its own name": {"kind": "agent", "name": "agent-p"},
    "no proof": {"secret": None},
}
"""Greetings that end a connection."""


class Stranger:
    """A connection to the agent of which every byte is ours."""

    def __init__(self, agent: FlowAgent) -> None:
        self._agent = agent
        self.ours: socket.socket
        self.channel: Channel

    async def greet(
        self,
        kind: str = "worker",
        name: str = "w",
        version: int = PROTOCOL_VERSION,
        secret: bytes | None = SECRET,
    ) -> None:
        """Connects and says who it is; with no `secret` it sends a message where its proof should be."""
        loop = asyncio.get_running_loop()
        self.ours, theirs = socket.socketpair()
        self.ours.setblocking(False)
        _, self.channel = await loop.connect_accepted_socket(self._agent._new_channel, theirs)
        size = HEADER.unpack(await self._read(HEADER.size))[0]
        hello = DECODER.decode(await self._read(size))[0]
        assert isinstance(hello, Hello)
        nonce = secrets.token_bytes(16)
        messages = [plain(Hello(version, kind, name, nonce))]  # type: ignore[arg-type]
        if secret is None:
            messages.append(JOIN)
        else:
            messages.append(plain(Prove(proof(secret, hello.nonce, nonce, kind, name, self._agent.me.id))))
        await self.send(messages)

    async def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += await asyncio.get_running_loop().sock_recv(self.ours, size - len(data))
        return data

    async def send(self, messages: list[Any]) -> None:
        """Sends messages in one frame."""
        body = msgspec.msgpack.encode(messages)
        await self.write(HEADER.pack(len(body)) + body)

    async def write(self, data: bytes) -> None:
        """Sends bytes, and waits until the agent has read them or closed."""
        await deliver(self.channel, self.ours, data)

    @property
    def closed(self) -> bool:
        return self.channel._closed

    async def leave(self) -> None:
        """Ends the connection, and waits until the agent has noticed."""
        self.ours.close()
        await self.until_closed()

    async def until_closed(self) -> None:
        """Waits until the agent has closed it. Raises TimeoutError."""
        async with asyncio.timeout(HANG_S):
            await asyncio.shield(self.channel.closed)


def likely(rng: Random) -> Any:
    """Returns a message that a worker in order could send at some moment."""
    name = rng.choice("abcdef")
    size = rng.choice((0, 1, 2, 3, 4, rng.choice(INTEGERS)))
    match rng.randrange(8):
        case 0 | 1 | 2 | 3:
            right = {
                "stage": rng.randint(1, 4),
                "source": rng.choice((NODE, OTHER)),
                "size": rng.randint(1, 9),
            }
            return submit(name, **right)
        case 4:
            return plain(wire.ChunkDone(name, size, rng.choice(FLOATS), rng.random() < 0.5))
        case 5:
            return plain(wire.AdvanceFlow(name, size))
        case 6:
            return plain(wire.WithdrawFlow(name, size))
    return plain(wire.Unscheduled(name, size, "silent"))


async def _random(watch: Watch, agent: FlowAgent, rng: Random) -> None:
    """One connection of a worker or of another agent that sends anything."""
    one = Stranger(agent)
    await one.greet(rng.choice(("worker", "worker", "agent")), rng.choice(("w", "é" * 40, "")) or "w")
    await one.send([JOIN])
    for _ in range(rng.randint(1, FRAMES)):
        if one.closed:
            break
        if rng.random() < 0.7:
            await one.send([likely(rng) for _ in range(rng.choice((1, 1, 2, 5)))])
        else:
            await one.write(frame(rng, TAKEN))
        watch.count("ended" if one.closed else "taken")
    await one.leave()


async def _fault(watch: Watch, agent: FlowAgent, rng: Random) -> None:
    """One connection that breaks the protocol in one way."""
    one = Stranger(agent)
    if rng.random() < 0.2:
        name, greeting = rng.choice(list(HELLOS.items()))
        await one.greet(**greeting)
    else:
        name, made = rng.choice(list(FAULTS.items()))
        await one.greet()
        *right, wrong = made(rng)
        if rng.random() < 0.3:
            await one.send([*right, wrong])
        else:
            await one.send(right)
            if one.closed or not one.channel.open:
                watch.note(f"{name}: ended before its fault: {one.channel._close_reason}")
            await one.send([wrong])
    await _ends(watch, one, name)


async def _flood(watch: Watch, agent: FlowAgent) -> None:
    """A worker that opens more flows than any has."""
    one = Stranger(agent)
    await one.greet()
    await one.send([JOIN])
    flows = [submit(f"f{number}") for number in range(MOST_FLOWS_A_WORKER + 1)]
    await one.send(flows[:-1])
    if one.closed:
        watch.note("a worker with as many flows as one may have was ended")
    await one.send(flows[-1:])
    await _ends(watch, one, "flood")


async def _ends(watch: Watch, one: Stranger, name: str) -> None:
    try:
        await one.until_closed()
        watch.count(name)
    except TimeoutError:
        watch.note(f"{name}: the connection goes on")
    one.ours.close()


async def _read(watch: Watch, good: Reads, name: str) -> None:
    """Notes a read of the worker in order that does not end."""
    try:
        async with asyncio.timeout(HANG_S):
            while good.left[name]:
                await asyncio.sleep(0.001)
    except TimeoutError:
        watch.note(f"the read {name} of another worker does not end: {good.left[name]} bytes are left")
    del good.left[name]


async def run(watch: Watch, seed: int, connections: int, folder: Path) -> None:
    """Makes this number of connections, one after another, beside a worker in order that reads all the time."""
    for name in ("actors.flow", "actors.wire"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rng, me = Random(f"{seed}/agent"), Identity("agent", "agent-p", SECRET)
    options = AgentConfig(arbiter=CHUNKED, **PATIENT)  # type: ignore[arg-type]
    agent, good = FlowAgent(me, NODE, {OTHER, "b", "d"}, options), Reads(NODE, SECRET)
    await agent.start([f"unix:{folder}/agent.sock"])
    try:
        await good.join(agent)
        every = max(1, connections // SAMPLE)
        for number in range(connections):
            if watch.over:
                break
            good.submit(flow(f"good{number}", OTHER, NODE))
            try:
                await (_fault if rng.random() < 0.5 else _random)(watch, agent, rng)
            except Exception as error:
                watch.fail(error)
                break
            await _read(watch, good, f"good{number}")
            if number % every == 0:
                watch.sample()
        await _flood(watch, agent)
        good.submit(flow("last", OTHER, NODE))
        await _read(watch, good, "last")
        await _settled(watch, agent, good)
    finally:
        good.channel.close()
        await agent.stop()


async def _settled(watch: Watch, agent: FlowAgent, good: Reads) -> None:
    """Notes what is still open when all but the worker in order have gone."""
    try:
        async with asyncio.timeout(HANG_S):
            while agent.desk.open or len(agent._workers) > 1:
                await asyncio.sleep(0.001)
    except TimeoutError:
        watch.note(f"{agent.desk.open} flows of {len(agent._workers)} connections are open")
    for name, left in (("owned", len(agent.desk)), ("held", agent.desk.held(clock_s()).total())):
        if left:
            watch.note(f"{left} {name} flows are left")
    if good.refused or not good.channel.open:
        watch.note(f"another worker was refused {len(good.refused)} reads, open: {good.channel.open}")
    report = agent.report()
    for name, value in (report.totals | report.gauges).items():
        if not math.isfinite(value):
            watch.note(f"{name} is {value}")
