"""Engines behind real sockets in one event loop, and an ingress that records what it gets. For tests."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from actors.engine.protocol import Engine
from actors.engine.server import EngineServer
from actors.wire.channel import Channel, Identity
from actors.wire.messages import (
    Cancel,
    Decode,
    Failed,
    KVRenewed,
    Message,
    Out,
    Prefill,
    PrefillDone,
    ReleaseKV,
    RenewKV,
    Tokens,
)
from actors.wire.sockets import connect

# The machine may be busy; no test depends on how long anything takes.
WAIT_S = 60.0
T = TypeVar("T")


async def until(condition: Callable[[], Any], what: str) -> None:
    """Waits until `condition()` is true. Raises AssertionError after WAIT_S."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"timed out: {what}"
        await asyncio.sleep(0.002)


class Client:
    """One ingress connection to one engine."""

    def __init__(self) -> None:
        self.inbox: list[Message] = []
        self.channel: Channel

    async def connect(
        self, addresses: tuple[str, ...], name: str = "ingress", secret: bytes | None = None
    ) -> None:
        me = Identity("ingress", name, secret)
        self.channel = await connect(addresses, lambda: Channel(me, lambda _, m: self.inbox.append(m)))

    def prefill(
        self, attempt_id: str, tokens: list[int], timeout_s: float = 60.0, priority: int = 0, **params: Any
    ) -> None:
        self.channel.send(Prefill(attempt_id, tokens, params, timeout_s, priority))

    def decode(
        self,
        attempt_id: str,
        tokens: list[int],
        handle: bytes | None = None,
        timeout_s: float = 60.0,
        priority: int = 0,
        **params: Any,
    ) -> None:
        self.channel.send(Decode(attempt_id, tokens, {"max_tokens": 8} | params, handle, timeout_s, priority))

    def cancel(self, attempt_id: str) -> None:
        self.channel.send(Cancel(attempt_id))

    def release(self, attempt_id: str) -> None:
        self.channel.send(ReleaseKV(attempt_id))

    def renew(self, attempt_id: str) -> None:
        self.channel.send(RenewKV(attempt_id))

    async def renewed(self, attempt_id: str) -> float:
        """Asks for a longer lease, and returns the engine's answer in seconds."""
        before = len(self._renewals(attempt_id))
        self.renew(attempt_id)
        await until(
            lambda: len(self._renewals(attempt_id)) > before, f"answer about the lease of {attempt_id}"
        )
        return self._renewals(attempt_id)[-1].lease_s

    def _renewals(self, attempt_id: str) -> list[KVRenewed]:
        return [m for m in self.inbox if isinstance(m, KVRenewed) and m.attempt_id == attempt_id]

    def of(self, attempt_id: str) -> list[Any]:
        """All messages about `attempt_id`, in order; Tokens are taken apart."""
        found: list[Any] = []
        for message in self.inbox:
            if isinstance(message, Tokens):
                found += [item for item in message.items if item.attempt_id == attempt_id]
            elif getattr(message, "attempt_id", None) == attempt_id:
                found.append(message)
        return found

    async def wait(self, attempt_id: str, kind: type[T]) -> T:
        """The first message of `kind` about `attempt_id`; fails at once if the request failed instead."""

        def ready() -> bool:
            messages = self.of(attempt_id)
            failed = [m for m in messages if isinstance(m, Failed)]
            assert kind is Failed or not failed, failed
            return any(isinstance(m, kind) for m in messages)

        await until(ready, f"{kind.__name__} of {attempt_id}")
        return next(m for m in self.of(attempt_id) if isinstance(m, kind))

    def outs(self, attempt_id: str, index: int = 0) -> list[Out]:
        return [m for m in self.of(attempt_id) if isinstance(m, Out) and m.index == index]

    async def text(self, attempt_id: str, index: int = 0) -> str:
        """The whole text of a choice, once it has finished."""
        await until(
            lambda: (
                (self.outs(attempt_id, index) and self.outs(attempt_id, index)[-1].finish)
                or any(isinstance(m, Failed) for m in self.of(attempt_id))
            ),
            f"end of {attempt_id}",
        )
        assert not [m for m in self.of(attempt_id) if isinstance(m, Failed)]
        return "".join(out.text for out in self.outs(attempt_id, index))


class Node:
    """An engine, its server, and a client of it."""

    def __init__(self, engine: Engine, server: EngineServer, client: Client) -> None:
        self.engine, self.server, self.client = engine, server, client
        self.free_at_start = engine.metrics().kv_blocks_free

    @property
    def used(self) -> int:
        return self.engine.metrics().kv_blocks_used

    async def prefilled(self, attempt_id: str, tokens: list[int], **params: Any) -> PrefillDone:
        self.client.prefill(attempt_id, tokens, **params)
        return await self.client.wait(attempt_id, PrefillDone)

    def at_rest(self) -> bool:
        """Every counter is where it was at the start."""
        status, metrics = self.engine.status(), self.engine.metrics()
        return (
            status.running == status.waiting == status.leases == status.kv_blocks_used == 0
            and metrics.kv_blocks_free == self.free_at_start
            and not status.tokens_in_flight
            and self.server.in_flight == 0
        )

    async def rests(self) -> None:
        await until(self.at_rest, f"{self.engine.info().id} at rest, is {self.engine.status()}")


class Rig:
    """Starts engines, and stops all of them at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.nodes: list[Node] = []

    async def __aenter__(self) -> "Rig":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.client.channel.close()
            await node.server.stop()

    async def node(self, engine: Engine, name: str, **server_options: Any) -> Node:
        address = f"unix:{self._directory}/{name}.sock"
        server = EngineServer(engine, Identity("engine", name), [address], node="n0", **server_options)
        await server.start()
        client = Client()
        await client.connect(server.addresses)
        node = Node(engine, server, client)
        self.nodes.append(node)
        return node

    async def client(self, node: Node, name: str) -> Client:
        """A further ingress."""
        client = Client()
        await client.connect(node.server.addresses, name)
        return client
