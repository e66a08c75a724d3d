"""The publication of the nodes whose ports an agent owns, so that the agents of other nodes find it.

One agent owns the ports of a node. Where another living agent has published the same name, because two machines were
given one (`topology.node`), this one does not take its place: it says so in the log and in `doubles`, orders the reads
of its own workers, and publishes the node when the other is gone.
"""

import asyncio
import logging
from collections.abc import Iterable

from actors.flow.directory import Directory
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import Message
from actors.wire.sockets import connect

log = logging.getLogger(__name__)

AGAIN_S = 2.0
"""Seconds until a publication that did not succeed is tried again."""
LOOK_S = 30.0
"""Seconds between two looks at what is published: a store that has lost it gets it again. ASSUMPTION: it costs one
question to Ray's store for each agent, and two agents of one name that came at the same time are found soon enough.
"""


class Publisher:
    """The nodes of one agent in a directory (None: there is none)."""

    def __init__(self, me: Identity, directory: Directory | None) -> None:
        self._me, self._directory = me, directory
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._published: set[str] = set()
        self._addresses: tuple[str, ...] = ()
        self.doubles: set[str] = set()
        """Nodes of this agent that another living agent owns, too."""

    def publish(self, nodes: Iterable[str], addresses: tuple[str, ...]) -> None:
        """Sees to it that nodes are published from now on. Does nothing for those that are already."""
        self._addresses = addresses
        if self._directory is None or not addresses:
            return
        for node in sorted(nodes):
            if node not in self._tasks:
                self._tasks[node] = asyncio.create_task(self._keep(node), name="flow directory")

    async def stop(self) -> None:
        """Takes the nodes back. Idempotent."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        published, self._published = sorted(self._published), set()
        for node in published:
            assert self._directory is not None
            try:
                await self._directory.withdraw(node, self._addresses)
            except Exception as error:
                # a directory may fail in any way; its entry is then found to lead nowhere
                log.warning("node %s is still in the directory: %r", node, error)

    async def _keep(self, node: str) -> None:
        while True:
            try:
                await self._publish(node)
            except Exception as error:
                # a directory may fail in any way; agents of other nodes order their reads alone meanwhile
                log.warning("node %s is not published: %r; tried again", node, error)
                await asyncio.sleep(AGAIN_S)
            else:
                await asyncio.sleep(AGAIN_S if node in self.doubles else LOOK_S)

    async def _publish(self, node: str) -> None:
        assert self._directory is not None
        there = await self._directory.addresses(node)
        if there and set(there).isdisjoint(self._addresses) and await self._is_anothers(there):
            if node not in self.doubles:
                log.error(
                    "node %s belongs to the agent at %s already: give each machine a topology.node of its own; "
                    "until then reads from here are not ordered together",
                    node,
                    there[-1],
                )
            self.doubles.add(node)
            self._published.discard(node)
            return
        if there != self._addresses:
            # a restarted agent has the unix path of the one before it, and perhaps another TCP port
            await self._directory.publish(node, self._addresses)
        self._published.add(node)
        self.doubles.discard(node)

    async def _is_anothers(self, addresses: tuple[str, ...]) -> bool:
        """Returns whether another living agent listens at the addresses."""
        try:
            channel = await connect(addresses, lambda: Channel(self._me, _ignore), self._me.tls)
        except (OSError, WireError):
            return False
        peer = channel.peer
        channel.close("it lives")
        return peer is not None and peer.kind == "agent" and peer.id != self._me.id


def _ignore(channel: Channel, message: Message) -> None:
    """Does nothing: all that counts is that the peer answers."""
