"""The router on sockets: messages become events, the dispatcher's actions become messages. No Ray, no decisions.

One thread, one event loop, no lock: each message is handled to its end before the next. Everything bound to a
connection ends with it: a lost ingress closes all its requests, a lost engine gets no new work at once and is forgotten
after `engine_grace_s` (its own process may only have lost the link).
"""

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from actors.router.admin import RouterAdmin
from actors.router.decisions import DECISION_BOUNDS_S, DecisionLog
from actors.router.forecasts import Forecasts
from actors.router.journal import RouterJournal
from actors.router.kv_feed import KvFeed
from actors.router.network import NetworkConfig, RouterNetwork
from actors.router.workers import place_of, reports, ups, worker_of, workers_of
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity, listen, remove_sockets
from actors.wire.kv import unpack_hashes
from policies.dispatch import Action, Dispatcher, Reject, RouteDecode, RoutePrefill
from policies.routing.base import PolicyError
from policies.routing.registry import USES_HITS
from policies.state import events as ev
from policies.state.views import Health, Mode, Request, WorkerId

log = logging.getLogger(__name__)

TICK_S = 0.2
STATUS_S = 1.0
FORECAST_S = 0.05


@dataclass(slots=True)
class _Engine:
    """A connected engine: what it announced and reported last."""

    info: wire.EngineInfo
    channel: Channel
    status: wire.Status | None = None
    forget: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Ingress:
    """A connected ingress and the requests that it owns."""

    channel: Channel
    requests: set[str] = field(default_factory=set)


class RouterServer:
    """`start` listens on the addresses; `addresses` are what others connect to. `now` is injectable for tests."""

    def __init__(
        self,
        me: Identity,
        dispatcher: Dispatcher,
        engine_grace_s: float = 2.0,
        forecasts: Forecasts | None = None,
        network: RouterNetwork | None = None,
        journal: RouterJournal | None = None,
    ) -> None:
        self.me = me
        self.dispatcher = dispatcher
        self.decisions = DecisionLog()
        self.addresses: tuple[str, ...] = ()
        self._engine_grace_s = engine_grace_s
        self._engines: dict[str, _Engine] = {}
        self._ingresses: dict[Channel, _Ingress] = {}
        self._owner: dict[str, _Ingress] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._forecasts = forecasts
        self._kv_feed = KvFeed(dispatcher.state, self._feed)
        self._kv_feed.want(self._looks_at_hits())
        self._network = network or RouterNetwork(NetworkConfig())
        self._journal = journal
        self._admin = RouterAdmin(dispatcher, self.decisions, journal, self._feed, self._policies_changed)
        self._stale = 0
        self._policy_errors = 0

    async def start(self, addresses: list[str]) -> None:
        """Listens on all `addresses` (`unix:/path`, `tcp:host:0`) and starts the clock."""
        for address in addresses:
            server, bound = await listen(address, self._new_channel)
            self._servers.append(server)
            self.addresses += (bound,)
        self._tasks = [asyncio.create_task(self._every(TICK_S, self._tick))]
        self._tasks += [asyncio.create_task(self._every(STATUS_S, self._broadcast_status))]
        if self._forecasts is not None:
            self._tasks += [asyncio.create_task(self._every(FORECAST_S, self._refresh_forecasts))]
        self._network.start(self._feed)
        if self._journal is not None:
            self._tasks += [asyncio.create_task(self._journal.run())]

    async def stop(self) -> None:
        """Closes every connection; ingresses fall back to their local policy. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for server in self._servers:
            server.close()
        channels = [e.channel for e in self._engines.values()] + list(self._ingresses)
        for channel in channels:
            channel.close("router stops")
        remove_sockets(self.addresses)
        if self._forecasts is not None:
            self._forecasts.stop()
        self._network.stop()
        if self._journal is not None:
            await self._journal.stop()
        self._tasks, self._servers = [], []

    # --------------------------------------------------------------------------------------------- connections

    def _new_channel(self) -> Channel:
        return Channel(self.me, self._on_message, self._on_open, self._on_close)

    def _on_open(self, channel: Channel) -> None:
        assert channel.peer is not None
        if channel.peer.kind == "ingress":
            self._ingresses[channel] = _Ingress(channel)
            channel.send(self._fleet())
            channel.send(self._fleet_status())

    def _on_close(self, channel: Channel, reason: str) -> None:
        ingress = self._ingresses.pop(channel, None)
        if ingress is not None:
            log.info("ingress lost (%s): closing its %d requests", reason, len(ingress.requests))
            for rid in list(ingress.requests):
                self._close(rid, "cancelled", 0)
        for engine in list(self._engines.values()):
            if engine.channel is channel:
                self._engine_lost(engine, reason)

    def _engine_lost(self, engine: _Engine, reason: str) -> None:
        log.warning("engine %s lost (%s)", engine.info.id, reason)
        self._set_health(engine, Health.DRAINING)
        loop = asyncio.get_running_loop()
        engine.forget = loop.call_later(self._engine_grace_s, self._forget, engine)
        self._broadcast_fleet()

    def _forget(self, engine: _Engine) -> None:
        if self._engines.get(engine.info.id) is engine:
            del self._engines[engine.info.id]
            self._network.forget(engine.info.id)
            for worker in workers_of(engine.info):
                self._feed(ev.EngineDown(time.time(), worker))
                self._kv_feed.gone(worker)
            self._broadcast_fleet()

    # ------------------------------------------------------------------------------------------------ messages

    def _on_message(self, channel: Channel, message: wire.Message) -> None:
        match message:
            case wire.Submit():
                self._submit(channel, message)
            case wire.Prefilled():
                now_s = time.time()
                lease_s = now_s + message.lease_s
                self._kv_feed.prefilled(self.dispatcher.state.request(message.rid), message.cached_tokens)
                self._feed(
                    ev.PrefillDone(now_s, message.rid, lease_s, message.kv_bytes, message.cached_tokens)
                )
            case wire.Progress():
                self._progress(message)
            case wire.Transferred():
                self._network.transferred(message, time.time())
            case wire.Closed():
                self._close(message.rid, message.outcome, message.output_tokens)
            case wire.Adopt():
                self._adopt(channel, message)
            case wire.Announce():
                self._announce(channel, message.info)
            case wire.Status():
                self._status(message)
            case wire.KvEvents():
                self._kv_feed.events(self._worker(message.engine_id, message.rank), channel, message)
            case wire.KvState():
                self._kv_feed.state(self._worker(message.engine_id, message.rank), channel, message)
            case wire.Admin():
                channel.send(self._admin.answer(message))
            case _:
                raise ValueError(f"a router does not take {type(message).__name__}")

    def _submit(self, channel: Channel, message: wire.Submit) -> None:
        self._own(channel, message.rid)
        if message.request_id:
            self.decisions.name(message.rid, message.request_id)
        now_s = time.time()
        request = self._request(message, now_s)
        if self._forecasts is not None:
            predicted = self._forecasts.arrived(message, now_s)
            request = dataclasses.replace(request, predicted_tokens=predicted)
        self._feed(ev.Arrived(now_s, request))

    def _own(self, channel: Channel, rid: str) -> None:
        ingress = self._ingresses[channel]
        ingress.requests.add(rid)
        self._owner[rid] = ingress

    def _progress(self, message: wire.Progress) -> None:
        now_s = time.time()
        grown: list[tuple[str, int]] = []
        for rid, what, value in message.items:
            if what == "tokens":
                if self._forecasts is not None:
                    self._forecasts.progressed(rid, value)
                grown.append((rid, value))
            elif what == "admitted":
                self._feed(ev.Admitted(now_s, rid))
        if grown:
            self._feed(ev.ProgressedMany(now_s, tuple(grown)))

    def _close(self, rid: str, outcome: str, output_tokens: int) -> None:
        owner = self._owner.pop(rid, None)
        if owner is None:
            return  # rejected by us, or from before a restart
        owner.requests.discard(rid)
        self._network.closed(rid)
        if self._forecasts is not None:
            self._forecasts.closed(rid, outcome, output_tokens, time.time())
        self._feed(ev.Closed(time.time(), rid, outcome, output_tokens))  # type: ignore[arg-type]

    def _adopt(self, channel: Channel, message: wire.Adopt) -> None:
        self._own(channel, message.submit.rid)
        now_s = time.time()
        self._feed(
            ev.Adopted(
                now_s,
                self._request(message.submit, now_s),
                message.stage,
                worker_of(message.engine_id, message.dp_rank),
                worker_of(message.decode_engine_id, message.decode_dp_rank),
                message.tokens,
                now_s + message.lease_s,
                message.kv_bytes,
            )
        )

    # ------------------------------------------------------------------------------------------------- engines

    def _announce(self, channel: Channel, info: wire.EngineInfo) -> None:
        known = self._engines.get(info.id)
        if known is not None and known.forget is not None:
            known.forget.cancel()
        engine = _Engine(info, channel, known.status if known else None)
        self._engines[info.id] = engine
        self._network.engine(info)
        self._set_health(engine, _health(info.state))
        if wire.KV_EVENTS in info.features:
            for rank, worker in enumerate(workers_of(info)):
                self._kv_feed.announced(worker, rank, channel)
        self._broadcast_fleet()

    def _set_health(self, engine: _Engine, health: Health) -> None:
        info = engine.info
        state: wire.EngineState = "ready" if health is Health.READY else "draining"
        engine.info = msgspec.structs.replace(info, state=state)
        for event in ups(info, health, time.time()):
            self._feed(event)

    def _status(self, message: wire.Status) -> None:
        engine = self._engines.get(message.engine_id)
        if engine is None:
            return  # announced before it reports; a late report of a forgotten engine is nothing
        engine.status = message
        health = _health(message.state)
        if message.state != engine.info.state:
            self._set_health(engine, health)
            self._broadcast_fleet()
        for event in reports(engine.info, message, time.time()):
            self._feed(event)

    def _worker(self, engine_id: str, rank: int) -> WorkerId:
        """The worker that an engine's message is about; the engine's own name for an unknown one."""
        engine = self._engines.get(engine_id)
        workers = (engine_id,) if engine is None else workers_of(engine.info)
        return workers[rank] if 0 <= rank < len(workers) else engine_id

    def _request(self, message: wire.Submit, now_s: float) -> Request:
        """The request; an engine that it avoids is all its ranks."""
        request = _request(message, now_s)
        if not request.avoid:
            return request
        engines = (self._engines.get(engine_id) for engine_id in request.avoid)
        avoid = tuple(
            worker for engine in engines if engine is not None for worker in workers_of(engine.info)
        )
        return dataclasses.replace(request, avoid=avoid)

    # ----------------------------------------------------------------------------------------------- decisions

    def _feed(self, event: ev.Event) -> None:
        started_s = time.perf_counter()
        dispatcher = self.dispatcher
        actions: Sequence[Action] = ()
        failure: Exception | None = None
        try:
            actions = dispatcher.handle(event)
        except ev.StaleEvent as stale:
            self._stale += 1
            failure = stale
            log.debug("stale: %s", stale)
        except (
            PolicyError
        ) as error:  # a bug in a policy: its request waits on, the others go on, and it is loud
            self._policy_errors += 1
            actions, failure = error.decided, error
            log.error("%s", error)
        except Exception as unexpected:
            failure = unexpected
            raise
        finally:
            if self._journal is not None:
                self._journal.record(event, actions, failure)
            failure = None  # or it and this frame would wait for the collector together
        if actions:
            took_s = time.perf_counter() - started_s
            self.decisions.record(event.now_s, actions, took_s, dispatcher.prefill, dispatcher.decode)
            for action in actions:
                self._act(action)

    def _act(self, action: Action) -> None:
        owner = self._owner.get(action.rid)
        if owner is None:
            return
        match action:
            case RoutePrefill():
                mode = "colocated" if action.colocated else "prefill"
                request = self.dispatcher.state.request(action.rid)
                if request is not None and not action.colocated:
                    self._kv_feed.prefill_routed(request, action.decision.worker, request.arrived_s)
                engine_id, rank = place_of(action.decision.worker)
                owner.channel.send(
                    wire.RoutePrefill(action.rid, engine_id, mode, action.waited_s, rank)  # type: ignore[arg-type]
                )
            case RouteDecode():
                self._network.routed(action.intent, time.time())
                engine_id, rank = place_of(action.decision.worker)
                owner.channel.send(wire.RouteDecode(action.rid, engine_id, action.waited_s, rank))
            case Reject():
                del self._owner[action.rid]
                owner.requests.discard(action.rid)
                if self._forecasts is not None:
                    self._forecasts.closed(action.rid, "rejected", 0, time.time())
                owner.channel.send(
                    wire.Reject(action.rid, action.status, action.reason, action.retry_after_s)
                )

    async def _every(self, period_s: float, what: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(period_s)
            what()

    def _refresh_forecasts(self) -> None:
        assert self._forecasts is not None
        for event in self._forecasts.refresh(time.time()):
            self._feed(event)
        self._forecasts.maintain(time.time())

    def _tick(self) -> None:
        self._feed(ev.Tick(time.time()))
        self._kv_feed.tick()

    # ----------------------------------------------------------------------------------------------- broadcasts

    def _fleet(self) -> wire.Fleet:
        infos = sorted((engine.info for engine in self._engines.values()), key=lambda info: info.id)
        decode = self.dispatcher.decode.name
        return wire.Fleet(
            infos,
            self.dispatcher.prefill.name,
            decode,
            wants_hints=self._forecasts is not None,
            block_tokens=self._block_tokens(infos),
            wants_transfers=self._network.wants_transfers(decode),
        )

    def _block_tokens(self, infos: list[wire.EngineInfo]) -> int | None:
        """In blocks of how many tokens prompts are to be hashed: those of most engines that tell what they cache (no
        prompt ever hits in blocks of another size); None where no policy would look at hits.
        """
        if not self._looks_at_hits():
            return None
        sizes = Counter(info.block_size_tokens for info in infos if wire.KV_EVENTS in info.features)
        return max(sizes, key=lambda size: (sizes[size], size), default=None)

    def _looks_at_hits(self) -> bool:
        return bool({self.dispatcher.prefill.name, self.dispatcher.decode.name} & USES_HITS)

    def _policies_changed(self) -> None:
        self._kv_feed.want(self._looks_at_hits())
        self._broadcast_fleet()

    def _broadcast_fleet(self) -> None:
        fleet = self._fleet()
        for channel in self._ingresses:
            channel.send(fleet)

    def _fleet_status(self) -> wire.FleetStatus:
        state = self.dispatcher.state
        totals = {f"decisions_{name}": float(count) for name, count in self.decisions.totals.items()}
        totals["stale_events"] = float(self._stale + state.refused_items)
        totals["policy_errors"] = float(self._policy_errors)
        totals |= self._kv_feed.totals() | self._network.totals()
        gauges = self._kv_feed.gauges() | self._network.gauges(time.time())
        if self._forecasts is not None:
            totals |= self._forecasts.totals()
            gauges |= self._forecasts.gauges()
        if self._journal is not None:
            totals |= self._journal.totals()
        return wire.FleetStatus(
            statuses=[engine.status for engine in self._engines.values() if engine.status is not None],
            queued=self.dispatcher.queue_size,
            pool=state.pool_size,
            in_flight=state.in_flight,
            leases=state.leases,
            totals=totals,
            decision_bounds_s=DECISION_BOUNDS_S,
            decision_buckets=self.decisions.cumulative(),
            decision_sum_s=self.decisions.sum_s,
            gauges=gauges,
        )

    def _broadcast_status(self) -> None:
        if self._ingresses:
            status = self._fleet_status()
            for channel in self._ingresses:
                channel.send(status)

    def status(self) -> wire.FleetStatus:
        """What `/sluice/status` shows of the router."""
        return self._fleet_status()


def _health(state: str) -> Health:
    return Health.READY if state == "ready" else Health.DRAINING


def _request(message: wire.Submit, now_s: float) -> Request:
    return Request(
        rid=message.rid,
        arrived_s=now_s,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        slots=message.slots,
        priority=message.priority,
        request_class=message.request_class,
        ttft_slo_s=message.ttft_slo_s,
        tpot_slo_s=message.tpot_slo_s,
        session=message.session,
        deadline_s=now_s + message.deadline_s,
        local=message.local,
        avoid=message.avoid,
        block_hashes=unpack_hashes(message.block_hashes),
        block_tokens=message.block_tokens,
        mode=Mode(message.mode) if message.mode else None,
    )
