"""An engine's connection to the router: it announces the engine, and reports its status and the changes of its prefix
cache. A lost router is found again.
"""

import asyncio
import contextlib
import dataclasses
import logging
from typing import Protocol

import msgspec

from actors.engine.kv_mirror import KvMirror
from actors.engine.protocol import EngineMetrics
from actors.telemetry import logs
from actors.wire.channel import Channel, Identity
from actors.wire.link import Find, Link
from actors.wire.messages import (
    KV_EVENTS,
    Announce,
    Duty,
    EngineInfo,
    EngineState,
    KvReplay,
    KvStop,
    Message,
    Peers,
    Role,
    SetLogs,
    SetRole,
    Status,
)
from policies.engine_model.blocks import Change

log = logging.getLogger(__name__)

STATUS_CHANGED_S = 0.1
"""Least seconds between two reports. ASSUMPTION: the router counts the work that it sends, so faster reports add
nothing."""

STATUS_ALWAYS_S = 1.0
"""Most seconds between two reports. The router counts a status as stale after a few of these."""

QUIET_ROUNDS = 10
"""Rounds of `STATUS_CHANGED_S` without work and without a change, after which an engine is idle. ASSUMPTION: what an
engine tells of its last work comes within a second.
"""


_TOTALS = tuple(field.name for field in dataclasses.fields(EngineMetrics))


class Reportable(Protocol):
    """The source of the reports, which is an `EngineServer`."""

    def info(self) -> EngineInfo: ...
    def status(self) -> Status: ...
    def metrics(self) -> EngineMetrics: ...
    def kv_events(self, rank: int = 0) -> list[Change]: ...
    def set_role(self, role: Role, duty: Duty, lent: bool) -> None: ...
    def connected(self) -> None: ...
    def meet(self, peers: tuple[bytes, ...]) -> None: ...

    news: asyncio.Event
    """Is set when work comes or the state changes."""

    @property
    def duty_for_s(self) -> float: ...
    @property
    def active_for_s(self) -> float: ...


class Reporter:
    """Keeps the router informed. It sends Announce at each connect and change of state, role or duty. It sends Status
    when the status changes (at most 10 a second) and at least every second. If the router asked for them, it sends
    KvEvents within a tenth of a second of each change of the prefix cache. An engine that is idle (`QUIET_ROUNDS`) is
    looked at once a second until there is `news`, since the looks are most of what it costs. An engine has one Reporter
    for its whole life, since it mirrors the cache.
    """

    def __init__(self, me: Identity, server: Reportable, find_router: Find) -> None:
        self._server = server
        self._link = Link(me, find_router, self._on_message, self._on_up, lambda reason: None, "router")
        self._task: asyncio.Task[None] | None = None
        self._state: EngineState = "ready"
        self._mirrors: list[KvMirror] = []
        self._readers: set[int] = set()  # ranks whose changes the router wants
        self._quiet = 0

    def start(self) -> None:
        """Connects to the router and reports until `stop`. The engine must have started."""
        info = self._server.info()
        ranks = info.dp_ranks if KV_EVENTS in info.features else 0
        self._mirrors = [KvMirror(info.id, rank) for rank in range(ranks)]
        self._link.start()
        self._task = asyncio.create_task(self._report(), name="status to router")

    async def stop(self) -> None:
        """Ends the reports. The router forgets the engine shortly after."""
        if self._task is not None:
            self._task.cancel()
        await self._link.stop()

    def announce(self) -> None:
        """Sends the engine's facts and state at once; a change of state that nobody announces is noticed within a tenth
        of a second.
        """
        info = self._server.info()
        self._state = info.state
        self._link.send(Announce(info, self._server.duty_for_s, self._server.active_for_s))

    def _on_up(self, channel: Channel) -> None:
        self._readers.clear()
        self._server.connected()
        self.announce()
        self._link.send(self._status())

    def _on_message(self, channel: Channel, message: Message) -> None:
        if isinstance(message, SetRole):
            self._server.set_role(message.role, message.duty, message.lent)
            self._server.news.set()
            self.announce()
            return
        if isinstance(message, SetLogs):
            logs.change(message.level, message.logger, message.access)
            return
        if isinstance(message, Peers):
            self._server.meet(message.peers)
            return
        if not isinstance(message, (KvReplay, KvStop)) or not 0 <= message.rank < len(self._mirrors):
            log.warning("the router sent %s to engine %s: ignored", message, self._server.info().id)
            return
        # The mirror takes the latest changes first, so that its answer is up to date.
        self._send_kv_events()
        if isinstance(message, KvStop):
            self._readers.discard(message.rank)
            return
        self._readers.add(message.rank)
        for answer in self._mirrors[message.rank].answer(message):
            self._link.send(answer)

    def _send_kv_events(self) -> bool:
        """Returns whether the prefix cache has changed."""
        changed = False
        for rank, mirror in enumerate(self._mirrors):
            changes = self._server.kv_events(rank)
            changed = changed or bool(changes)
            if rank not in self._readers:
                mirror.follow(changes)
                continue
            for batch in mirror.take(changes):
                # Without a connection the batch is lost; the router asks for it after the next connect.
                self._link.send(batch)
        return changed

    def _status(self) -> Status:
        metrics = self._server.metrics()
        # without `dataclasses.asdict`, whose deep copies take as long as all else that a report costs
        counts = [(name, getattr(metrics, name)) for name in _TOTALS]
        totals = {name: float(count) for name, count in counts if count is not None}
        return msgspec.structs.replace(self._server.status(), totals=totals)

    async def _report(self) -> None:
        last, sent_s, loop = None, 0.0, asyncio.get_running_loop()
        while True:
            await self._pause()
            try:
                changed = self._send_kv_events()
                status = self._status()
                if status.state != self._state:
                    self.announce()
            except Exception:
                # A bug. The loop must go on: an engine without reports would get no work, for no visible reason.
                log.exception("engine %s cannot report; it is tried again", self._server.info().id)
                continue
            busy = status.running or status.waiting or status.leases
            self._quiet = 0 if busy or changed or status != last else self._quiet + 1
            # one that would be late at the next look is sent at this one
            due = status != last or loop.time() - sent_s > STATUS_ALWAYS_S - STATUS_CHANGED_S
            if due and self._link.send(status):
                last, sent_s = status, loop.time()

    async def _pause(self) -> None:
        """Waits until the next look: a tenth of a second, or while the engine is idle until news, for a second."""
        news, loop = self._server.news, asyncio.get_running_loop()
        looks_at_s = loop.time() + STATUS_CHANGED_S
        if self._quiet >= QUIET_ROUNDS:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_ALWAYS_S):
                    await news.wait()
        if (left_s := looks_at_s - loop.time()) > 0:
            await asyncio.sleep(left_s)
        if news.is_set():
            news.clear()
            self._quiet = 0
