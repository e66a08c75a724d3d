"""A link keeps one connection up: it connects, reconnects with back-off, and reports when the connection is up or down.

Every engine and every ingress keeps a link to its router, and an ingress keeps one to each engine.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from actors import no_memory
from actors.loop_timeout import within
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import Message
from actors.wire.sockets import connect

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.05
BACKOFF_MOST_S = 2.0
STOOD_S = 1.0
"""Seconds that a connection must have stood before the back-off begins anew. ASSUMPTION: a peer that refuses what it
hears (an impossible announcement, a process that was replaced) does so within milliseconds of the handshake. Without
this bound such a peer would be asked some fifteen times a second without end, and its address looked up each time."""
FIND_TIMEOUT_S = 5.0
FIND_TIMEOUT_MOST_S = 60.0
"""Longest time in seconds that `find` gets. The limit doubles after each attempt that runs out of time, because a slow
machine would otherwise never get an answer."""

CLOSE_S = 5.0
"""Seconds that the peer gets to read its queued messages when the link is stopped."""

Find = Callable[[], Awaitable[tuple[str, ...]]]


def at(address: str) -> Find:
    """Returns a `find` for a peer whose address never changes."""

    async def find() -> tuple[str, ...]:
        return (address,)

    return find


class Link:
    """Keeps one Channel to the peer whose addresses `find` returns. Callbacks run on the event loop and must not raise.

    The link calls `find` before each attempt to connect, because a restarted peer listens at another address. `find`
    may fail or time out. The back-off grows with each attempt that fails, and with each connection that ends within
    `STOOD_S`. `on_end` runs first when a connection has ended, also if its handshake failed; the channel
    says how it ended (`broken`, `silent`).
    """

    def __init__(
        self,
        me: Identity,
        find: Find,
        on_message: Callable[[Channel, Message], None],
        on_up: Callable[[Channel], None],
        on_down: Callable[[str], None],
        name: str,
        on_end: Callable[[Channel], object] | None = None,
    ) -> None:
        self._me, self._find, self._name = me, find, name
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self.channel: Channel | None = None

    def start(self) -> None:
        """Starts to connect, in a background task."""
        self._task = asyncio.create_task(no_memory.or_end(self._keep()), name=f"link to {self._name}")

    async def stop(self, read_s: float = CLOSE_S) -> None:
        """Stops reconnecting, sends what is queued, and closes the connection, after `read_s` at most. `on_down` is
        called if the link was up. Idempotent.
        """
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self.channel is not None:
            channel = self.channel
            channel.close()
            if not await within(read_s, channel.closed):
                channel.abort("closed by us, and the peer does not read")

    def send(self, message: Message) -> bool:
        """Queues `message` and returns True. Without a connection it returns False, and the message is not sent."""
        if self.channel is None:
            return False
        self.channel.send(message)
        return True

    def lose(self, reason: str) -> None:
        """Drops the present connection, if there is one, whose peer gives no sign of life; then connects again."""
        if self.channel is not None:
            self.channel.lose(reason)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_s, find_s = BACKOFF_FIRST_S, FIND_TIMEOUT_S
        while True:
            try:
                # `wait_for` of Python 3.11 loses a cancellation that comes as `find` ends: the link would live on
                async with asyncio.timeout(find_s):
                    addresses = await self._find()
                find_s = FIND_TIMEOUT_S
                channel = await connect(addresses, self._new_channel, self._me.tls)
            except TimeoutError:
                # only `find` raises it: `connect` turns its own timeout into a ConnectionError
                log.info("%s: not found within %g s; next try in %.2f s", self._name, find_s, backoff_s)
                find_s = min(FIND_TIMEOUT_MOST_S, 2 * find_s)
            except (OSError, WireError) as error:
                log.info("%s: no connection (%s); next try in %.2f s", self._name, error, backoff_s)
            except MemoryError:
                raise
            except Exception as error:
                # `find` calls Ray, which raises many kinds of errors; the link must survive all of them
                log.warning("%s: cannot find it (%r); next try in %.2f s", self._name, error, backoff_s)
            else:
                stands_since_s = loop.time()
                # a cancelled link task must not cancel the channel's future
                await asyncio.shield(channel.closed)
                if loop.time() - stands_since_s >= STOOD_S:
                    backoff_s = BACKOFF_FIRST_S
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
            backoff_s = min(BACKOFF_MOST_S, 2 * backoff_s)

    def _new_channel(self) -> Channel:
        return Channel(self._me, self._on_message, self._up, self._down)

    def _up(self, channel: Channel) -> None:
        self.channel = channel
        self._on_up(channel)

    def _down(self, channel: Channel, reason: str) -> None:
        if self._on_end is not None:
            self._on_end(channel)
        if self.channel is channel:
            self.channel = None
            self._on_down(reason)
