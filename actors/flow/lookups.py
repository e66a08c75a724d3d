"""Nodes that are looked up in the directory, and the messages that wait for the answer.

    SubmitFlow from an unknown node  -- waits, and so do later messages about the same read; all others pass
        found within `wait_s`        -> taken
        no answer by then            -> refused, so that its worker reads without permits; the lookup goes on
        there is no such node        -> taken by the desk, which ends the connection

A worker that joins an unknown node waits with all that it sends. It hears no beat meanwhile, because the agent holds no
flow of it, and so it reads without permits.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from actors.flow.desk import BadMessage
from actors.flow.directory import Directory
from actors.wire.channel import Channel
from actors.wire.messages import JoinNode, Message, SubmitFlow

log = logging.getLogger(__name__)

LOOK_UP_MOST_S = 5.0
"""Longest lookup of one node in seconds. ASSUMPTION: Ray's store answers earlier or not at all."""
MOST_WAITING = 10_000
"""Messages of one worker that may wait for the directory; a worker that sends more is taken for broken."""

JOIN = ""
"""The queue of a connection whose JoinNode waits. No flow has this name."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The agent's answers to a lookup: it takes the message that asked for it or refuses its read, takes later messages
    in as if they had come now, or ends the connection.
    """

    take: Callable[[Channel, Message], None]
    refuse: Callable[[Channel, SubmitFlow, str], None]
    take_in: Callable[[Channel, Message], None]
    end: Callable[[Channel, str], None]


class Lookups:
    """The lookups of one agent. Nodes that are found are added to `nodes`."""

    def __init__(self, nodes: set[str], directory: Directory | None, wait_s: float, owner: Owner) -> None:
        self._nodes, self._directory, self._wait_s, self._owner = nodes, directory, wait_s, owner
        self._queues: dict[Channel, dict[str, list[Message]]] = {}
        self._asked: dict[str, asyncio.Task[bool | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, channel: Channel, message: Message) -> bool:
        """Returns whether the message waits here now. Raises BadMessage if too many of its connection do."""
        queues = self._queues.get(channel, {})
        name = _queue_of(message)
        queue = queues.get(JOIN, queues.get(name))
        unknown = () if queue is not None else self._unknown(message)
        if queue is None and not unknown:
            return False
        if sum(map(len, queues.values())) >= MOST_WAITING:
            raise BadMessage(f"sends more than {MOST_WAITING} messages while nodes are looked up")
        if queue is not None:
            queue.append(message)
            return True
        self._queues.setdefault(channel, {})[name] = [message]
        task = asyncio.create_task(self._look_up(channel, name, unknown), name="flow directory")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def forget(self, channel: Channel) -> None:
        """Drops what waits of a connection that has ended."""
        self._queues.pop(channel, None)

    def stop(self) -> None:
        """Ends all lookups. Idempotent."""
        for task in (*self._tasks, *self._asked.values()):
            task.cancel()

    def _unknown(self, message: Message) -> tuple[str, ...]:
        """Returns the nodes that a message names and that only the directory may know."""
        if self._directory is None:
            return ()
        names: tuple[str, ...] = ()
        if isinstance(message, JoinNode):
            names = (message.node,)
        elif isinstance(message, SubmitFlow):
            names = (message.flow.source, message.flow.target)
        return tuple(name for name in names if name not in self._nodes)

    async def _look_up(self, channel: Channel, name: str, nodes: tuple[str, ...]) -> None:
        exist = await self._exist(nodes, LOOK_UP_MOST_S if name == JOIN else self._wait_s)
        waited = self._queues.get(channel, {}).pop(name, None)
        if waited is None:
            return
        first, *later = waited
        refused = exist is None and isinstance(first, SubmitFlow)
        if refused:
            assert isinstance(first, SubmitFlow)
            self._owner.refuse(
                channel, first, f"the directory does not say whether there is {' or '.join(nodes)}"
            )
        else:
            self._owner.take(channel, first)
        for message in later:
            self._owner.take_in(channel, message)
        if refused and await self._exist(nodes, LOOK_UP_MOST_S) is False:
            self._owner.end(channel, f"read from or to {' or '.join(nodes)}, which does not exist")

    async def _exist(self, nodes: tuple[str, ...], limit_s: float) -> bool | None:
        """Returns whether all nodes exist; None if the directory does not say so within the limit."""
        tasks = []
        for node in nodes:
            if node not in self._asked:
                self._asked[node] = asyncio.create_task(self._exists(node), name="flow directory")
            tasks.append(self._asked[node])
        _, pending = await asyncio.wait(tasks, timeout=limit_s)
        answers = {None if task in pending else task.result() for task in tasks}
        return False if False in answers else None if None in answers else True

    async def _exists(self, node: str) -> bool | None:
        assert self._directory is not None
        try:
            exists = await asyncio.wait_for(self._directory.exists(node), LOOK_UP_MOST_S)
        except Exception as error:
            # a directory may fail in any way; the worker reads without permits, and its next read asks again
            log.warning("node %s cannot be looked up: %r", node, error)
            return None
        finally:
            del self._asked[node]
        if exists:
            self._nodes.add(node)
        return exists


def _queue_of(message: Message) -> str:
    """Returns the name of the queue in which a message would wait: its flow's, if it is about one."""
    if isinstance(message, SubmitFlow):
        return message.flow.flow_id
    return getattr(message, "flow_id", JOIN)
