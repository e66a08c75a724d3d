"""The connected engines, each with its last announcement and report, both of which the dispatcher gets as events.

A lost engine gets no new work from that moment on. It is forgotten only after a grace period, because its process may
have lost nothing but the connection. An impossible announcement or report ends the engine's connection.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from actors.router.acquaintance import Introductions
from actors.router.clock import clock_s
from actors.router.kv_feed import KvFeed
from actors.router.network.feed import RouterNetwork
from actors.router.workers import check, health_of, reports, ups, workers_of
from actors.wire.channel import Channel
from actors.wire.messages import KV_EVENTS, EngineInfo, EngineState, Status
from policies.state import events as ev
from policies.state.views import WorkerId

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Engine:
    """A connected engine with its last announcement and report."""

    info: EngineInfo
    channel: Channel
    status: Status | None = None
    reported_s: float = 0.0
    duty_since_s: float = 0.0
    active_since_s: float = 0.0
    forget: asyncio.TimerHandle | None = None


class Engines:
    """All engines that are connected or were lost within the grace period of `grace_s`. `feed` takes the events;
    `changed` runs when the fleet that ingresses see has changed.
    """

    def __init__(
        self,
        grace_s: float,
        kv_feed: KvFeed,
        network: RouterNetwork,
        feed: Callable[[ev.Event], None],
        changed: Callable[[], None],
    ) -> None:
        self._grace_s, self._kv_feed, self._network = grace_s, kv_feed, network
        self._feed, self._tell_ingresses = feed, changed
        self._engines: dict[str, _Engine] = {}
        self._introductions = Introductions()

    # ---------------------------------------------------------------------------------------------------- messages

    def announced(
        self, channel: Channel, info: EngineInfo, duty_for_s: float = 0.0, active_for_s: float = 0.0
    ) -> None:
        """Takes in the facts of an engine that is new, back, or changed; the seconds are those of `Announce`. Raises
        ValueError for impossible facts, and then changes nothing.
        """
        check(info)
        workers = workers_of(info)
        known = self._engines.get(info.id)
        if known is not None:
            if known.forget is not None:
                known.forget.cancel()
            self._drop([worker for worker in workers_of(known.info) if worker not in workers])
        now_s, status = clock_s(), known.status if known else None
        engine = self._engines[info.id] = _Engine(
            info, channel, status, now_s, now_s - duty_for_s, now_s - active_for_s
        )
        self._network.engine(info)
        self._set_state(engine, info.state)
        if KV_EVENTS in info.features:
            for rank, worker in enumerate(workers):
                self._kv_feed.announced(worker, rank, channel)
        self._changed()

    def reported(self, status: Status) -> None:
        """Takes in an engine's counts. Raises ValueError if they do not cover all the ranks that the engine
        announced.
        """
        engine = self._engines.get(status.engine_id)
        if engine is None:
            # an engine announces itself before it reports, so this is a late report of a forgotten engine
            return
        told = reports(engine.info, status, clock_s())
        engine.status, engine.reported_s = status, clock_s()
        if status.state != engine.info.state:
            self._set_state(engine, status.state)
            self._changed()
        for event in told:
            self._feed(event)

    def lost(self, channel: Channel, reason: str) -> None:
        """Marks the engine of a connection that has ended as draining, to be forgotten after `grace_s`. Does nothing if
        the connection is no engine's.
        """
        for engine in list(self._engines.values()):
            if engine.channel is channel:
                log.warning("engine %s lost (%s)", engine.info.id, reason)
                self._set_state(engine, "draining")
                loop = asyncio.get_running_loop()
                engine.forget = loop.call_later(self._grace_s, self._forget, engine)
                self._changed()

    def close(self, reason: str) -> None:
        """Closes the connections of all engines."""
        for engine in self._engines.values():
            engine.channel.close(reason)

    def _changed(self) -> None:
        """Tells ingresses and engines of a change of the fleet."""
        self._tell_ingresses()
        connected = {name: engine.channel for name, engine in self._engines.items() if engine.forget is None}
        self._introductions.tell([self._engines[name].info for name in sorted(connected)], connected)

    def _set_state(self, engine: _Engine, state: EngineState) -> None:
        engine.info = msgspec.structs.replace(engine.info, state=state)
        for event in ups(engine.info, health_of(state, engine.info.duty), clock_s()):
            self._feed(event)

    def _forget(self, engine: _Engine) -> None:
        if self._engines.get(engine.info.id) is engine:
            del self._engines[engine.info.id]
            self._network.forget(engine.info.id)
            self._drop(workers_of(engine.info))
            self._changed()

    def _drop(self, workers: Sequence[WorkerId]) -> None:
        for worker in workers:
            self._feed(ev.EngineDown(clock_s(), worker))
            self._kv_feed.gone(worker)

    # ----------------------------------------------------------------------------------------------------- queries

    def infos(self) -> list[EngineInfo]:
        """Returns the facts of all engines, sorted by engine id."""
        return sorted((engine.info for engine in self._engines.values()), key=lambda info: info.id)

    def is_lost(self, engine_id: str) -> bool:
        """Returns whether an engine's connection has ended, so that it is forgotten soon unless it comes back."""
        engine = self._engines.get(engine_id)
        return engine is not None and engine.forget is not None

    def statuses(self) -> list[Status]:
        """Returns the last report of each engine that has sent one."""
        return [engine.status for engine in self._engines.values() if engine.status is not None]

    def longest_silence_s(self) -> float:
        """Returns for how long the engine that was silent longest has neither announced itself nor reported."""
        return max((clock_s() - engine.reported_s for engine in self._engines.values()), default=0.0)

    def duty_since_s(self, engine_id: str) -> float | None:
        """Returns the time on the router's clock since which an engine has had its duty; None for an unknown engine."""
        engine = self._engines.get(engine_id)
        return None if engine is None else engine.duty_since_s

    def active_since_s(self, engine_id: str) -> float | None:
        """Returns the time on the router's clock at which an engine became ready, was activated, or changed its role
        last; None for an unknown engine.
        """
        engine = self._engines.get(engine_id)
        return None if engine is None else engine.active_since_s

    def channel(self, engine_id: str) -> Channel | None:
        """Returns the engine's last connection, open or closed, or None for an unknown or forgotten engine."""
        engine = self._engines.get(engine_id)
        return None if engine is None else engine.channel

    def worker(self, engine_id: str, rank: int) -> WorkerId:
        """Returns the worker that an engine's message is about. For an unknown engine or rank it returns the engine's
        id.
        """
        engine = self._engines.get(engine_id)
        workers = (engine_id,) if engine is None else workers_of(engine.info)
        return workers[rank] if 0 <= rank < len(workers) else engine_id

    def workers(self, engine_ids: Sequence[str]) -> tuple[WorkerId, ...]:
        """Returns all workers of the engines named. Of an engine that is not known (yet), the engine's id is taken as
        its only worker.
        """
        engines = self._engines
        return tuple(
            worker
            for engine_id in engine_ids
            for worker in (workers_of(engines[engine_id].info) if engine_id in engines else (engine_id,))
        )
