"""The observers of an ingress (`app.dashboard`): once a second they get what this replica counts and what has happened.

Requests never wait for an observer. Of the requests that begin within a period only `MOST_REQUESTS` are kept, and of
what happens `MOST_NOTES`; the rest is counted. An observer that leaves more than `MOST_UNREAD_BYTES` unread gets
nothing until it has read, and one that is silent is lost like any peer. What is pushed is not kept for those who
missed it.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from actors.telemetry.facts import Answered
from actors.wire.channel import Channel, Identity
from actors.wire.link import Link
from actors.wire.messages import IngressObserved, Message, Note, ObserverInfo

log = logging.getLogger(__name__)

PERIOD_S = 1.0
# ASSUMPTION: a page shows 50 requests, and quantiles of 15 s need no more than some thousand
MOST_REQUESTS = 256
"""Most requests of one period whose facts are kept."""
MOST_NOTES = 64
"""Most notes of one period."""
MOST_UNREAD_BYTES = 4 * 2**20
"""Bytes that an observer may leave unread before it is sent no more; some twenty full pushes."""
LAST_READ_S = 0.5
"""Seconds that an observer gets to read the last push of a replica that stops. ASSUMPTION: a live one takes less."""


class _Watcher:
    """The link to one observer."""

    def __init__(self, me: Identity, info: ObserverInfo, changed: Callable[[], None]) -> None:
        self.info, self.listed = info, True
        self._changed = changed
        self.link = Link(me, self._find, self._refuse, self._up, self._down, f"observer {info.id}")

    async def _find(self) -> tuple[str, ...]:
        return self.info.addresses

    def _refuse(self, _: Channel, message: Message) -> None:
        raise ValueError(f"an ingress does not take {type(message).__name__} from an observer")

    def _up(self, _: Channel) -> None:
        self._changed()

    def _down(self, reason: str) -> None:
        log.info("observer %s lost (%s)", self.info.id, reason)
        self._changed()


class Observers:
    """All observers that the router named last. `now_s` is the clock of the requests; `present` returns a message with
    what this replica knows now, to which the requests and notes of the period are added.
    """

    def __init__(
        self, me: Identity, now_s: Callable[[], float], present: Callable[[], IngressObserved]
    ) -> None:
        self._me, self._now_s, self._present = me, now_s, present
        self._watchers: dict[str, _Watcher] = {}
        self._connected = False
        self._room = MOST_REQUESTS
        self._requests: list[Answered] = []
        self._notes: list[tuple[float, Note]] = []
        self._dropped = 0
        self._task: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------- what happens here

    def has_room(self) -> bool:
        """Returns whether the facts of a request that begins now are to be kept, and counts it."""
        if not self._connected:
            return False
        if self._room <= 0:
            self._dropped += 1
            return False
        self._room -= 1
        return True

    def ended(self, answered: Answered, traced: bool) -> None:
        """Takes over a request that has ended; `traced` says whether its trace is kept."""
        if not self._connected:
            return
        if len(self._requests) < MOST_REQUESTS:
            # the ids of a place are numbers too long for the wire, so that of the trace goes as text
            kept = dataclasses.replace(answered.kept, place=None, asked=None, at_s={}, engines={})
            trace_id = answered.kept.trace_id if traced else ""
            self._requests.append(answered._replace(kept=kept, trace_id=trace_id))
        else:
            self._dropped += 1

    def note(self, kind: Literal["retry", "migration"], text: str, engine: str | None) -> None:
        """Notes what happened to a request."""
        if not self._connected:
            return
        if len(self._notes) < MOST_NOTES:
            self._notes.append((self._now_s(), Note(kind, 0.0, text, engine)))
        else:
            self._dropped += 1

    # ------------------------------------------------------------------------------------------------- connections

    def update(self, infos: tuple[ObserverInfo, ...]) -> None:
        """Connects to the observers that the router names. One that it does not name any more is left when its
        connection ends, because a router that has just started knows none.
        """
        named = {info.id: info for info in infos}
        for name, watcher in list(self._watchers.items()):
            watcher.listed = name in named
            if not watcher.listed and watcher.link.channel is None:
                self._leave(name)
        for name, info in named.items():
            known = self._watchers.get(name)
            if known is None:
                made = self._watchers[name] = _Watcher(self._me, info, self._changed)
                made.link.start()
            else:
                known.info = info
        if self._watchers and self._task is None:
            self._task = asyncio.create_task(self._run(), name="observers")

    async def stop(self) -> None:
        """Tells observers what happened since the last push, and closes all links. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._push_safely()
        for name in list(self._watchers):
            self._leave(name)
        for task in list(self._stopping):
            await task

    def _leave(self, name: str) -> None:
        watcher = self._watchers.pop(name)
        # an observer that reads nothing must not hold this process
        task = asyncio.create_task(watcher.link.stop(LAST_READ_S))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _changed(self) -> None:
        self._connected = any(watcher.link.channel is not None for watcher in self._watchers.values())
        if not self._connected:
            self._take()

    # ------------------------------------------------------------------------------------------------------- pushes

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self._push_safely()

    def _push_safely(self) -> None:
        try:
            self.push()
        except Exception:
            # a bug; requests are served all the same
            log.exception("observers get nothing for a period")

    def push(self) -> None:
        """Sends the observers what happened since the last call, and begins a new period."""
        for name, watcher in list(self._watchers.items()):
            if not watcher.listed and watcher.link.channel is None:
                self._leave(name)
        if not self._connected:
            return
        requests, notes, dropped = self._take()
        now_s = self._now_s()
        told = [replace(note, ago_s=now_s - at_s) for at_s, note in notes]
        message = replace(self._present(), requests=requests, notes=told, dropped=dropped)
        for watcher in self._watchers.values():
            channel = watcher.link.channel
            if channel is not None and channel.unread_bytes() < MOST_UNREAD_BYTES:
                channel.send(message)

    def _take(self) -> tuple[list[Answered], list[tuple[float, Note]], int]:
        taken = self._requests, self._notes, self._dropped
        self._requests, self._notes, self._dropped = [], [], 0
        self._room = MOST_REQUESTS
        return taken
