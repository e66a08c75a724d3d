"""The dashboard on sockets: it connects to the router as an observer, listens for ingresses, and feeds what they say.

Nothing of serving waits for this process. While it has no router it shows what ingresses push, and finds the next one.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import orjson

from actors.telemetry import logs
from actors.wire.channel import Channel, Identity
from actors.wire.link import Find, Link
from actors.wire.messages import (
    AdminAnswer,
    Fleet,
    FleetStatus,
    IngressObserved,
    Message,
    Observing,
    PathsSeen,
    SetLogs,
)
from actors.wire.sockets import listen, remove_sockets
from app.dashboard.feed import Feed
from app.fleet.calls import AdminCalls
from app.fleet.news import RouterNews

log = logging.getLogger("ray.serve.dashboard")

TICK_S = 1.0
PLAN_S = 3.0
"""Seconds between two questions to the autoscaler about its plan."""
POLICIES_S = 1.0
"""Seconds between two questions to the router about its policies, while it tells of the fleet."""


class Observer:
    """One observer. `find` returns the router's addresses; `told` gets the delta of each second."""

    def __init__(
        self,
        me: Identity,
        find: Find,
        feed: Feed,
        told: Callable[[dict[str, object]], None],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.feed = feed
        self.addresses: tuple[str, ...] = ()
        self._me, self._told, self.now_s = me, told, now_s
        self._router = Link(me, find, self._from_router, self._router_up, self._router_down, "router")
        self._calls = AdminCalls(self._router.send)
        self._ingresses: dict[Channel, str] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._news = RouterNews(self._router.lose)
        self._policies_due = False

    async def start(self, addresses: list[str]) -> None:
        """Listens at `addresses`, connects in the background, and begins to tell deltas."""
        for address in addresses:
            server, bound = await listen(address, self._new_channel, self._me.tls)
            self._servers.append(server)
            self.addresses += (bound,)
        self._router.start()
        self.tick()
        self._tasks = [
            asyncio.create_task(self._every(TICK_S, self.tick), name="dashboard"),
            asyncio.create_task(self._every(PLAN_S, self._ask_plan), name="dashboard plan"),
            asyncio.create_task(self._every(POLICIES_S, self._ask_policies), name="dashboard policies"),
        ]

    async def stop(self) -> None:
        """Closes all connections. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._news.end()
        await self._router.stop()
        for server in self._servers:
            server.close()
        for channel in list(self._ingresses):
            channel.close("the dashboard stops")
        remove_sockets(self.addresses)

    def check(self) -> None:
        """Raises RuntimeError if the ticks have ended, which they must not."""
        if any(task.done() for task in self._tasks):
            raise RuntimeError("a task of the dashboard has ended")

    async def ask(self, what: str, body: bytes = b"") -> tuple[int, bytes]:
        """Returns the router's answer to a question of an administrator: an HTTP status and JSON, which is {"message"}
        for any status but 200.
        """
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def answered(status: int, body: bytes) -> None:
            if not answer.done():
                answer.set_result((status, body))

        self._calls.call(what, body, answered)
        return await answer

    def tick(self) -> None:
        """Ends a second: takes in what happened, and tells the delta."""
        self._told(self.feed.tick(self.now_s()))

    async def _every(self, period_s: float, what: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + period_s
        while True:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            # after a pause the ticks that were missed are left out
            due_s = max(due_s + period_s, loop.time())
            try:
                what()
            except Exception:
                log.exception("%s failed; it is tried again in %g s", what.__name__, period_s)

    def _ask_plan(self) -> None:
        def answered(status: int, body: bytes) -> None:
            found = orjson.loads(body)
            if status == 200:
                self.feed.scaled(self.now_s(), found, "")
            elif status == 404:
                self.feed.scaled(self.now_s(), None, str(found["message"]))

        if self._router.channel is not None:
            self._calls.call("scale", b"", answered)

    def _ask_policies(self) -> None:
        """Asks for the policies where the router has told of the fleet since, as it does after each change of them."""

        def answered(status: int, body: bytes) -> None:
            if status == 200:
                self.feed.policies_are(self.now_s(), orjson.loads(body))
            elif status == 504:
                self._policies_due = True

        if self._policies_due and self._router.channel is not None:
            self._policies_due = False
            self._calls.call("policy", b"", answered)

    # ------------------------------------------------------------------------------------------------------ router

    def _router_up(self, channel: Channel) -> None:
        channel.send(Observing(self.addresses))
        self.feed.router_up(self.now_s())
        self._news.begin()

    def _router_down(self, reason: str) -> None:
        self._news.end()
        self._calls.lost()
        self.feed.router_down(self.now_s(), reason)

    def _from_router(self, _: Channel, message: Message) -> None:
        match message:
            case FleetStatus():
                self._news.heard()
                self.feed.status_is(message, self.now_s())
            case Fleet():
                self.feed.fleet_is(message)
                self._policies_due = True
            case PathsSeen():
                self.feed.paths_are(message)
            case AdminAnswer():
                self._calls.answer(message)
            case SetLogs():
                logs.change(message.level, message.logger, message.access)
            case _:
                raise ValueError(f"an observer does not take {type(message).__name__} from a router")

    # --------------------------------------------------------------------------------------------------- ingresses

    def _new_channel(self) -> Channel:
        return Channel(self._me, self._from_ingress, self._ingress_up, self._ingress_down)

    def _ingress_up(self, channel: Channel) -> None:
        assert channel.peer is not None
        if channel.peer.kind != "ingress":
            channel.abort(f"an observer takes ingresses only, and no {channel.peer.kind}")
            return
        self._ingresses[channel] = channel.peer.id
        self.feed.ingress_up(channel.peer.id, self.now_s())

    def _ingress_down(self, channel: Channel, reason: str) -> None:
        ingress = self._ingresses.pop(channel, None)
        # a replica that has connected again is there by its later connection
        if ingress is not None and ingress not in self._ingresses.values():
            self.feed.ingress_down(ingress, self.now_s(), reason)

    def _from_ingress(self, channel: Channel, message: Message) -> None:
        if not isinstance(message, IngressObserved) or channel not in self._ingresses:
            raise ValueError(f"an observer does not take {type(message).__name__} from {channel.peer_name}")
        self.feed.observed(self._ingresses[channel], message, self.now_s())
