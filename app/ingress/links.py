"""The ingress's connections to the engines of the fleet.

Every engine of the router's last `Fleet` has a link. The router may only have lost sight of an engine that left the
list, so the requests that run there go on: the link is retired, and its connection ends with the last request.
"""

import asyncio
import logging
import math
from collections.abc import Callable

from actors.wire.channel import Channel, Identity
from actors.wire.link import Link
from actors.wire.messages import EngineInfo, Message
from policies.request.life import Life

log = logging.getLogger(__name__)

# ASSUMPTION: these times are round guesses, not measured. They are counted in sweeps of this process, not by the clock:
# after a pause of the process, the engine's answer is read before the time is up.

CONNECT_GRACE_S = 10.0
"""Seconds to keep work for an engine to which the first connection is still being set up."""

REUNION_GRACE_S = 3.0
"""Seconds to keep work for an engine that gave this process up while it stood still. The engine is connected again
within a second, but the router may be found first, and knows the engine as ready.
"""

MISSING_GRACE_S = 15.0
"""Seconds to keep an engine that is connected but missing from the router's list.

A router that has just restarted does not know an engine until the engine announces itself.
"""


class EngineLink:
    """One engine: its facts, its connection, and the attempts that have work or KV there, by id (`live`)."""

    def __init__(
        self,
        me: Identity,
        info: EngineInfo,
        on_message: Callable[["EngineLink", Message], None],
        on_lost: Callable[["EngineLink", str], None],
        on_end: Callable[[Channel], object],
    ) -> None:
        self.info = info
        self.live: dict[str, Life] = {}
        self.retired = False
        # how long the engine had been silent when it was lost; infinite if it was never connected, or if this process
        # had stood still
        self.silent_s = math.inf
        # seconds since the engine left the router's list; None while it is listed
        self.missing_s: float | None = None
        self._on_message, self._on_lost, self._on_end = on_message, on_lost, on_end
        self._early: list[Message] = []
        self._waited_s: float | None = 0.0  # None once connected or given up
        self._grace_s = CONNECT_GRACE_S
        self._link = Link(
            me, self._find, self._received, self._up, self._down, f"engine {info.id}", self._ended
        )
        self._link.start()

    @property
    def connected(self) -> bool:
        return self._link.channel is not None

    def send(self, message: Message) -> bool:
        """Sends a message, or keeps it while the connection is being set up for the first time, or again after this
        process stood still. Returns False if neither is possible.
        """
        if self._link.send(message):
            return True
        if self._waited_s is None:
            return False
        self._early.append(message)
        return True

    def sweep(self, period_s: float) -> None:
        """Counts `period_s` more seconds, and gives up on a connection that is being set up after its time of grace.

        If messages were kept for the engine, it is reported as lost then.
        """
        if self.missing_s is not None:
            self.missing_s += period_s
        if self._waited_s is None:
            return
        self._waited_s += period_s
        if self._waited_s > self._grace_s:
            self._waited_s = None
            if self._early:
                self._early.clear()
                self.silent_s = math.inf
                self._on_lost(self, "cannot be reached")

    @property
    def settled(self) -> bool:
        """Whether `sweep` has nothing to count for this link."""
        return self._waited_s is None and self.missing_s is None

    async def stop(self) -> None:
        self._waited_s = None
        await self._link.stop()

    async def _find(self) -> tuple[str, ...]:
        return self.info.addresses

    def _up(self, channel: Channel) -> None:
        self._waited_s = None
        early, self._early = self._early, []
        for message in early:
            channel.send(message)

    def _ended(self, channel: Channel) -> None:
        if channel is self._link.channel:
            self.silent_s = math.inf if channel.stood_still else channel.quiet_s
            if channel.stood_still:
                self._waited_s, self._grace_s = 0.0, REUNION_GRACE_S
        self._on_end(channel)

    def _down(self, reason: str) -> None:
        self._on_lost(self, reason)

    def _received(self, _: Channel, message: Message) -> None:
        self._on_message(self, message)


class EngineLinks:
    """The links to the engines of the fleet by engine id, and the retired links."""

    def __init__(
        self,
        me: Identity,
        on_message: Callable[[EngineLink, Message], None],
        on_lost: Callable[[EngineLink, str], None],
        on_end: Callable[[Channel], object],
    ) -> None:
        self._me, self._on_message, self._on_lost, self._on_end = me, on_message, on_lost, on_end
        self._links: dict[str, EngineLink] = {}
        self._retired: set[EngineLink] = set()
        self._stopping: set[asyncio.Task[None]] = set()

    def update(self, engines: list[EngineInfo]) -> None:
        """Makes the links match the fleet.

        An engine that came back as another process or at other addresses gets a new link. The link of an engine that is
        no longer listed is kept for a while.
        """
        wanted = {info.id: info for info in engines}
        for engine_id, link in list(self._links.items()):
            info = wanted.get(engine_id)
            if info is None:
                if link.missing_s is None:
                    link.missing_s = 0.0
            elif (info.addresses, info.pid) != (link.info.addresses, link.info.pid):
                self._retire(link)
        for info in engines:
            known = self._links.get(info.id)
            if known is None:
                self._links[info.id] = EngineLink(
                    self._me, info, self._on_message, self._on_lost, self._on_end
                )
            else:
                known.info, known.missing_s = info, None

    def get(self, engine_id: str) -> EngineLink | None:
        """Returns the link of an engine of the fleet, or None."""
        return self._links.get(engine_id)

    def attached(self, engine_id: str, attempt_id: str) -> EngineLink | None:
        """Returns the link over which `attempt_id` runs at the engine; a retired link keeps serving its own attempts.

        For any other attempt the link of the fleet is returned, or None.
        """
        link = self._links.get(engine_id)
        if link is not None and attempt_id in link.live:
            return link
        for retired in self._retired:
            if retired.info.id == engine_id and attempt_id in retired.live:
                return retired
        return link

    def node(self, engine_id: str | None) -> str | None:
        """Returns the node of an engine that is linked or has just retired, else None."""
        link = None if engine_id is None else self._links.get(engine_id)
        if link is None:
            link = next((retired for retired in self._retired if retired.info.id == engine_id), None)
        return None if link is None else link.info.node

    def nodes(self) -> set[str]:
        """Returns the nodes of all engines that are linked, also over retired links."""
        return {link.info.node for link in (*self._links.values(), *self._retired)}

    def all(self) -> list[EngineLink]:
        """Returns the links of the fleet, ordered by engine id."""
        return [self._links[engine_id] for engine_id in sorted(self._links)]

    def everything(self) -> list[EngineLink]:
        """Returns the links of the fleet, and the retired links of engines that have no other."""
        retired = [link for link in self._retired if link.info.id not in self._links]
        return [*retired, *self.all()]

    def settled(self) -> bool:
        """Returns whether no link changes with time: none is being set up, missing or retired."""
        return not self._retired and all(link.settled for link in self._links.values())

    def sweep(self, period_s: float) -> None:
        """Counts `period_s` more seconds for every link; called every `period_s` seconds.

        Engines that are missing for too long lose their place in the fleet, and retired links without work are stopped.
        """
        for link in (*self._links.values(), *self._retired):
            link.sweep(period_s)
            if link.missing_s is not None and (not link.connected or link.missing_s > MISSING_GRACE_S):
                self._retire(link)
            if link.retired and (not link.live or not link.connected):
                self._stop(link)

    async def stop(self) -> None:
        links = [*self._links.values(), *self._retired]
        self._links.clear()
        self._retired.clear()
        await asyncio.gather(*(link.stop() for link in links), *self._stopping)

    def _retire(self, link: EngineLink) -> None:
        self._links.pop(link.info.id, None)
        link.missing_s = None
        link.retired = True
        self._retired.add(link)

    def _stop(self, link: EngineLink) -> None:
        self._retired.discard(link)
        if link.live:
            self._on_lost(link, "engine left the fleet")
        task = asyncio.create_task(link.stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
