"""The connections of one ingress replica to the router and the engines, and the requests that run over them.

An incoming message becomes an event of the request that it names (`policies.request.events`), and this module sends
what the requests want sent. Everything runs in callbacks on one event loop. The whole replica has two timers: one for
its progress reports to the router, and one for the sweep over all deadlines.

Without a router this replica has one of its own (`fallback`). Its decisions are counted, and `/sluice/status` shows the
mode, because it is a degraded one. At each change of routers every request tells the new one of itself: first those
that hold something, then those that wait, the most urgent first.
"""

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import orjson
from msgspec.structs import replace

from actors.router.workers import check_fleet, standby_of
from actors.telemetry import logs
from actors.telemetry.times import Stamps
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.link import Link
from actors.wire.messages import (
    AdminAnswer,
    Admitted,
    EngineInfo,
    Failed,
    Fleet,
    FleetStatus,
    Grown,
    IngressObserved,
    KVRenewed,
    Message,
    Out,
    PrefillDone,
    Progress,
    Reading,
    Reject,
    RouteDecode,
    RoutePrefill,
    SetLogs,
    Standby,
    Timed,
    Tokens,
    Transfer,
    Transferred,
    Unknown,
)
from app.fleet.calls import AdminCalls
from app.fleet.news import RouterNews
from app.ingress.alarms import Alarms
from app.ingress.config import IngressConfig
from app.ingress.fallback import LocalRouter, Reachable
from app.ingress.links import EngineLink, EngineLinks
from app.ingress.metrics import IngressMetrics
from app.ingress.observers import Observers
from policies.request import events as ev
from policies.request import troubles
from policies.request.attempts import attempt_id_of
from policies.request.killers import Killers
from policies.request.life import Life, Limits
from policies.request.stage import Stage, Task
from policies.state.standby import AWAKE

log = logging.getLogger(__name__)

READY_LOOK_S = 0.05
"""Seconds between two looks whether requests can be served, for those who wait for it."""

_UNFIT = {"stalled": troubles.STALLED, "quarantined": troubles.QUARANTINED, "down": "engine_dead"}
"""The states of an engine in which requests leave it, and the codes under which they do."""

IDLE_SWEEPS = 10
"""Periods of `sweep_interval_s` between two sweeps of a replica that has nothing to sweep: no request is open, a router
decides, and no link to an engine is new, missing or retired. Whatever changes this ends the longer pause at once.
"""

MOST_WAIT_S = 86_400.0
"""Longest wait that a router may have a client told: a day. No router of ours names more than a minute."""

LATE_S = 1.0
"""Delay of a sweep from which this process counts as held up. ASSUMPTION: a loop is never that late of itself."""

FORBEARANCE_S = 5.0
"""Seconds to read what engines sent while this process was held up. ASSUMPTION: longer than a full socket takes."""

# ASSUMPTION: an engine that lost its router finds the next one within its longest back-off (`actors.wire.link`) and an
# answer of Serve, some 3 s on a busy machine.
HANDOVER_S = 5.0
"""Longest time that this replica waits for a new router to know all engines before it leaves the decisions to it.

A router that has just started, or was stopped for a while, knows no engine until the engine has found it, and would
reject what it cannot place. As long as it knows none of the engines to which this replica is connected, this replica
goes on to decide. If this replica was stopped as well and has found no engine yet, its requests wait until one of both
has.
"""


def _check_lease(lease_s: float) -> None:
    if not 0 <= lease_s < math.inf:
        raise WireError(f"an engine grants a lease of {lease_s} s")


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(orjson.loads(data), dict)
    except orjson.JSONDecodeError:
        return False


class Connected(Life):
    """The life cycle of one prompt, as the connections see it.

    `out` is the piece of output that is being passed to the client. `tier` is that of the network over which the
    present attempt pulls its KV, as the router has said (`RouteDecode`); None where it has not.
    """

    __slots__ = ("out", "tier")

    out: Out
    tier: int | None

    def has(self, index: int) -> bool:
        """Returns whether the request has a choice of this number (`Out.index`)."""
        raise NotImplementedError

    def timed(self, stamps: Stamps) -> None:
        """Takes what an engine tells of the moments of its task. It does so only for requests that are followed."""


class IngressConnections:
    """The links of one replica to the router and the engines; `start` connects them.

    `fleet` and `fleet_status` are the router's latest messages of these kinds (None before the first). `live` maps the
    id of each open attempt to its request. `salt` keys the digests of clients' names (`app.ingress.digests`); without
    one it is random, and no other replica has these digests.
    """

    def __init__(
        self,
        config: IngressConfig,
        me: Identity,
        find_router: Callable[[], Awaitable[tuple[str, ...]]],
        metrics: IngressMetrics,
        salt: bytes | None = None,
    ) -> None:
        self.config = config
        self.name = me.id
        self.metrics = metrics
        self.limits = Limits(
            config.max_retries,
            config.lease_margin_s,
            config.max_migrations,
            config.prefill_limit_s,
            config.transfer_limit_s,
            config.token_gap_limit_s,
            config.idle_limit_s,
        )
        self.live: dict[str, Connected] = {}
        self.alarms = Alarms(config.sweep_interval_s)
        self.budgeted = 0
        """Attempts under way that count against the retry budget."""
        self.killers = Killers()
        """The requests that have killed engines. Each replica remembers its own."""
        self.fleet: Fleet | None = None
        self._standby: Standby | None = None
        self._was_whole = self._was_ready = False
        self.salt = secrets.token_bytes(32) if salt is None else salt
        self.fleet_status: FleetStatus | None = None
        self._engines = EngineLinks(me, self._from_engine, self._engine_lost, partial(self._ended, "engine"))
        metrics.bind_nodes(self._engines.nodes)
        self._router = Link(
            me,
            find_router,
            self._from_router,
            self._router_up,
            self._router_down,
            "router",
            partial(self._ended, "router"),
        )
        self.observers = Observers(me, self._clock, self._observed)
        self._router_news = RouterNews(self._router.lose)
        self._admin_calls = AdminCalls(self._router.send)
        self.ask_router = self._admin_calls.call
        self._router_connected = False
        self._local = LocalRouter(config, self._clock, self._happens, self._decided_here)
        # seconds since the connected router sent its first Fleet; None before it
        self._handover_s: float | None = None
        self._context_tokens: int | None = None
        self._attempt_prefix = secrets.token_hex(4)
        self._attempt_ids = itertools.count(1)
        self._admitted: list[str] = []
        self._transferred: list[tuple[float, Transfer]] = []  # each with the time of its end
        self._progressed: set[Connected] = set()
        self._progress_timer: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweeps_seldom = False
        # how long the sweeper waits for the next sweep, and until when
        self._sweep_period_s = self._sweep_due_s = 0.0
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        # not the loop's own clock: uvloop's has a resolution of 1 ms
        self.now_s = time.monotonic

    async def start(self) -> None:
        """Connects in the background; `ready()` says when requests can be served."""
        self._decide_here()
        self._router.start()
        self._sweep_after(self.config.sweep_interval_s)

    async def stop(self) -> None:
        """Cancels what still runs and closes all links. Idempotent."""
        self._stopping = True
        self._all(ev.Cancel())
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._progress_timer is not None:
            self._progress_timer.cancel()
        self._router_news.end()
        await self._router.stop()
        await self._engines.stop()
        await self.observers.stop()

    async def wait_ready(self, most_s: float) -> bool:
        """Waits until requests can be served, for `most_s` seconds at most, and returns whether they can."""
        for _ in range(round(most_s / READY_LOOK_S)):
            if self.ready() is None:
                return True
            await asyncio.sleep(READY_LOOK_S)
        return self.ready() is None

    # ----------------------------------------------------------------------------------------- what others ask

    def ready(self) -> str | None:
        """Returns None if a request can be served now, else the reason why not.

        Where prefill engines are expected, readiness begins with a colocated engine, or with a prefill and a decode
        engine of one group. After that an engine that decodes is enough, because decode engines compute prompts
        themselves while the prefill tier is away. Where none are expected, it is enough from the start. Warm engines
        begin nothing, but once there has been readiness, one of them is enough: requests wait for it to be activated.
        Engines that are asleep or woken are ready, because requests wait for them too.
        """
        if self.fleet is None:
            return "the router has not answered yet"
        if self._asleep() and self._context_tokens is not None:
            self._was_whole = self._was_ready = True
            return None
        ready = [link.info for link in self._engines.all() if link.connected and link.info.state == "ready"]
        if not ready:
            if self._standby is not None and self._standby.phase == "failed":
                return f"the engines do not wake ({self._standby.reason})"
            return "no engine is ready"
        infos = [info for info in ready if info.duty == "active"]
        if self._was_ready and len(infos) < len(ready):
            return None
        groups = {
            role: {i.group for i in infos if i.role == role} for role in ("prefill", "decode", "colocated")
        }
        if groups["colocated"] or groups["prefill"] & groups["decode"]:
            self._was_whole = True
        if not groups["colocated"] and not groups["decode"]:
            return "no engine that can decode is ready" + (" and active" if len(infos) < len(ready) else "")
        prefill_expected = (
            any(info.role == "prefill" for info in self.fleet.engines) or self.config.expects_prefill
        )
        if prefill_expected and not self._was_whole:
            return "no prefill engine is ready"
        self._was_ready = True
        return None

    def engines(self) -> list[EngineInfo]:
        """Returns the facts about each engine of the fleet, ordered by engine id."""
        return [link.info for link in self._engines.all()]

    def context_tokens(self) -> int | None:
        """Returns the smallest context of all engines, in tokens: each of them can serve it. None before the first
        engine.
        """
        return self._context_tokens

    def decoding_features(self) -> list[tuple[str, ...]]:
        """Returns the features of each engine that decodes; while all sleep, those that they had."""
        features = [info.features for info in self.engines() if info.role != "prefill"]
        if not features and self._standby is not None and self._standby.abilities is not None:
            features = [self._standby.abilities.features] if self._asleep() else []
        return features

    def standby(self) -> Standby | None:
        """Returns what the router has told last of the engines' sleep; None if they do not sleep."""
        return self._standby

    def router_connected(self) -> bool:
        """Returns whether this replica is connected to a router."""
        return self._router_connected

    def decides_here(self) -> bool:
        """Returns whether this replica decides itself where requests run, because no router does."""
        return self._local.is_open

    # ------------------------------------------------------------------------------------- what the requests do

    def new_attempt(self, life: Connected, request_id: str) -> str:
        """Registers the request under the id of its next attempt and returns that id; it begins with `request_id`."""
        attempt_id = attempt_id_of(request_id or self._attempt_prefix, next(self._attempt_ids))
        self.live[attempt_id] = life
        if self._sweeps_seldom:
            self._sweep_often()
        # this replica may decide about the next attempt itself, and it knows no tiers
        life.tier = None
        return attempt_id

    def forget(self, life: Connected) -> None:
        """Forgets an attempt that is over; later messages about it are ignored."""
        del self.live[life.attempt_id]
        self._progressed.discard(life)

    def to_router(self, message: Message) -> None:
        """Sends a message to the router that decides: the one that is connected, or this replica's own."""
        if self._local.is_open:
            self._local.hear(message)
        else:
            self._router.send(message)

    def send_work(self, engine_id: str, life: Life, message: Message) -> bool:
        """Sends work to an engine and notes that the attempt runs there. Returns False if it is not connected."""
        link = self._engines.attached(engine_id, life.attempt_id)
        if link is None or not link.send(message):
            return False
        link.live[life.attempt_id] = life
        return True

    def ask_engine(self, engine_id: str, life: Life, message: Message) -> None:
        """Sends a message about an attempt that runs at an engine. Nothing happens if the connection was lost."""
        link = self._engines.attached(engine_id, life.attempt_id)
        if link is not None:
            link.send(message)

    def end_work(self, engine_id: str, life: Life, message: Message | None) -> None:
        """Sends `message`, if any, to an engine and notes that the attempt no longer runs there.

        Nothing happens if the connection was lost, because the attempt was freed then.
        """
        link = self._engines.attached(engine_id, life.attempt_id)
        if link is not None:
            if message is not None:
                link.send(message)
            link.live.pop(life.attempt_id, None)

    def admitted(self, life: Connected, moved: bool) -> None:
        """Notes an admission to decode for the next progress report, and counts the transfer if KV `moved`.

        If the router wants transfers, or this one was held back, it is reported too.
        """
        self._admitted.append(life.attempt_id)
        admission = life.admission
        if moved and admission is not None:
            node = self._engines.node
            self.metrics.transferred(
                admission, life.tier, node(life.prefill_engine), node(life.decode_engine)
            )
        wanted = self.fleet is not None and self.fleet.wants_transfers
        if moved and admission is not None and (wanted or admission.held_s > 0):
            facts = (
                admission.transfer_bytes,
                admission.transfer_s,
                admission.descriptors,
                0.0,
                admission.held_s,
            )
            self._transferred.append((self.now_s(), Transfer(life.attempt_id, *facts)))
        self._schedule_progress()

    # ------------------------------------------------------------------------------------------------ engines

    def _from_engine(self, link: EngineLink, message: Message) -> None:
        match message:
            case Tokens():
                self._tokens(message)
            case Timed():
                if (life := self.live.get(message.attempt_id)) is not None:
                    life.timed(message.stamps)
            case PrefillDone():
                _check_lease(message.lease_s)
                done = ev.PrefillDone(
                    message.lease_s,
                    message.kv_bytes,
                    message.cached_tokens,
                    message.handle,
                    message.queue_s,
                    message.compute_s,
                    link.info.id,
                )
                self._happens(message.attempt_id, done)
            case KVRenewed():
                _check_lease(message.lease_s)
                self._happens(message.attempt_id, ev.Renewed(message.lease_s, link.info.id))
            case Reading():
                self._happens(message.attempt_id, ev.Reading())
            case Admitted():
                admitted = ev.Admitted(
                    message.transfer_bytes,
                    message.transfer_s,
                    message.descriptors,
                    message.cached_tokens,
                    message.held_s,
                    message.level,
                )
                self._happens(message.attempt_id, admitted)
            case Failed():
                if message.code == "kv_load" and message.attempt_id in self.live:
                    self.metrics.transfer_failures.inc()
                failed = ev.EngineFailed(
                    link.info.id,
                    message.task,
                    message.code,
                    message.message,
                    message.retryable,
                    message.param,
                    message.silent_s,
                )
                self._happens(message.attempt_id, failed)
            case _:
                raise WireError(f"an ingress does not take {type(message).__name__}")

    def _tokens(self, message: Tokens) -> None:
        live, progressed, now_s, decoding = self.live, self._progressed, self.now_s(), Stage.DECODING
        for out in message.items:
            life = live.get(out.attempt_id)
            if life is None:
                continue  # its cancellation is on the way
            usual = out.finish is None and out.n_tokens == 1
            # every request has choice 0
            if out.index and not life.has(out.index):
                raise WireError(f"output came of choice {out.index} of {out.attempt_id}")
            if out.delta is not None and not _is_object(out.delta):
                raise WireError(f"the delta of {out.attempt_id} is no JSON object: {out.delta[:50]!r}")
            life.out = out
            life.on(ev.ONE_TOKEN if usual else ev.Output(out.n_tokens, out.finish is not None), now_s)
            if life.stage is decoding:
                progressed.add(life)
        if progressed:
            self._schedule_progress()

    def _happens(self, attempt_id: str, event: ev.Event) -> None:
        life = self.live.get(attempt_id)
        if life is not None:
            life.on(event, self.now_s())

    def _all(self, event: ev.Event) -> None:
        """Delivers an event to every request; the end of one may end others that are part of the same answer."""
        for attempt_id in list(self.live):
            self._happens(attempt_id, event)

    def _engine_lost(self, link: EngineLink, reason: str) -> None:
        self._sweep_often()
        if self._local.is_open:
            self._local.engines(self._reachable())
        tied, link.live = list(link.live), {}
        if tied:
            log.warning("engine %s lost (%s) with %d requests", link.info.id, reason, len(tied))
        for attempt_id in tied:
            self._happens(attempt_id, ev.EngineLost(link.info.id, reason, link.silent_s))

    def _newly_unfit(self, engines: list[EngineInfo]) -> list[EngineInfo]:
        """Returns the engines that were fit by the router's last word and are not by its present one."""
        known = {link.info.id: link.info.state for link in self._engines.all()}
        return [
            info for info in engines if info.state in _UNFIT and known.get(info.id) not in (None, info.state)
        ]

    def _engine_unfit(self, info: EngineInfo) -> None:
        """Moves what runs at an engine that the router calls unfit. A draining engine ends its work itself."""
        link = self._engines.get(info.id)
        tied = [] if link is None else list(link.live)
        if tied:
            log.warning("engine %s is %s: moving %d requests", info.id, info.state, len(tied))
        for attempt_id in tied:
            event = ev.EngineUnfit(info.id, _UNFIT[info.state], f"the router calls it {info.state}")
            self._happens(attempt_id, event)

    # ------------------------------------------------------------------------------------------------- router

    def _from_router(self, _: Channel, message: Message) -> None:
        match message:
            case RoutePrefill():
                prefill = ev.RoutePrefill(message.engine_id, message.colocated, message.dp_rank, message.lend)
                self._happens(message.attempt_id, prefill)
            case RouteDecode():
                if (life := self.live.get(message.attempt_id)) is not None:
                    life.tier = message.tier
                decode = ev.RouteDecode(message.engine_id, message.dp_rank, message.kv_due_s)
                self._happens(message.attempt_id, decode)
            case Reject():
                if not 400 <= message.status <= 599:
                    raise WireError(f"a router rejects with status {message.status}, which is no error's")
                if not 0 <= message.retry_after_s <= MOST_WAIT_S:
                    raise WireError(f"a router has a client wait for {message.retry_after_s} s")
                why = message.reason, message.retry_after_s, message.detail
                self._happens(message.attempt_id, ev.Reject(message.status, *why))
            case Unknown():
                self._happens(message.attempt_id, ev.Unknown())
            case FleetStatus():
                self.fleet_status = message
                self._router_news.heard()
            case AdminAnswer():
                self._admin_calls.answer(message)
            case Fleet():
                self._fleet_is(message)
            case SetLogs():
                logs.change(message.level, message.logger, message.access)
            case _:
                raise WireError(f"an ingress does not take {type(message).__name__} from a router")

    def _fleet_is(self, fleet: Fleet) -> None:
        """Takes in a fleet. Raises ValueError for one that no router has, and then changes nothing: an engine of 2^53
        ranks would take all memory of a replica that decides alone, and blocks of no tokens fail every request.
        """
        check_fleet(fleet)
        self.fleet = fleet
        self.observers.update(fleet.observers)
        engines = fleet.engines
        self._engines_are([self._as_seen_here(info) for info in engines] if self._local.is_open else engines)
        # a router that has just restarted may know no engine yet, and has not heard of a sleep
        if engines:
            self._context_tokens = min(info.max_model_len for info in engines)
        if fleet.standby is not None and fleet.standby != self._standby:
            self._standby = fleet.standby
            if self._local.is_open:
                self._local.stands_by(standby_of(fleet.standby))
        if self._context_tokens is None and self._standby is not None and self._standby.abilities is not None:
            self._context_tokens = self._standby.abilities.context_tokens
        if self._handover_s is None:
            self._handover_s = 0.0
        self._hand_over()

    def _engines_are(self, engines: list[EngineInfo]) -> None:
        unfit = self._newly_unfit(engines)
        self._engines.update(engines)
        self._sweep_often()
        for info in unfit:
            self._engine_unfit(info)

    def _as_seen_here(self, info: EngineInfo) -> EngineInfo:
        """Returns the facts of an engine as the connected router states them, but for its state where that is
        "draining": the router may have lost an engine to which this replica is connected.
        """
        link = self._engines.get(info.id)
        if info.state != "draining" or link is None or not link.connected or link.info.pid != info.pid:
            return info
        return replace(info, state=link.info.state)

    def _router_up(self, _: Channel) -> None:
        self._router_connected, self._handover_s = True, None
        self._router_news.begin()

    def _router_down(self, reason: str) -> None:
        self._router_connected, self._handover_s = False, None
        self._router_news.end()
        self._admin_calls.lost()
        self._admitted.clear()
        if self._stopping:
            return
        log.warning("router lost (%s): deciding %d requests here until it is back", reason, len(self.live))
        if not self._local.is_open:
            self._decide_here()

    def _ended(self, kind: str, channel: Channel) -> None:
        """Counts the end of a connection that had a fault."""
        if channel.broken:
            self.metrics.protocol_errors.labels(kind).inc()
        if channel.silent:
            self.metrics.silent_peers.labels(kind).inc()

    def ingresses(self) -> int:
        """Returns the number of ingress replicas: those that are configured, or more if the router knows more."""
        told = self.fleet_status.ingresses if self.fleet_status is not None else 0
        return max(self.config.replicas, told)

    def _decide_here(self) -> None:
        """Opens this replica's own router, and tells it of every request."""
        standby = AWAKE if self._standby is None else standby_of(self._standby)
        self._local.open(self._reachable(), self.ingresses(), standby)
        self._sweep_often()
        self._introduce()

    def _hand_over(self) -> None:
        """Leaves the decisions to the connected router as soon as it knows the engines, or enough of them, or that all
        of them sleep.
        """
        if not self._local.is_open or self._handover_s is None or self.fleet is None:
            return
        ours = {engine.info.id for engine in self._reachable() if engine.ready}
        theirs = {info.id for info in self.fleet.engines if info.state == "ready"}
        waited = self._handover_s > HANDOVER_S
        if self._asleep() and not ours:
            # only an autoscaler can wake an engine, and this router has not heard of one yet
            waited = self.fleet.standby is not None
        if (theirs and ours <= theirs) or (waited and (ours & theirs or not ours)):
            self._local.close()
            self._engines_are(self.fleet.engines)
            self._introduce()

    def _observed(self) -> IngressObserved:
        """Returns what this replica tells its observers now, without the requests that have ended."""
        stages = Counter(life.stage.value for life in self.live.values())
        return IngressObserved(
            now_s=self.now_s(),
            model=self.config.served_names[0],
            detail=self.ready(),
            router_connected=self._router_connected,
            decides_here=self._local.is_open,
            stages=dict(stages),
            figures=self.metrics.figures(),
            requests=[],
            notes=[],
        )

    def _asleep(self) -> bool:
        """Returns whether engines that are not there come when a request arrives."""
        return self._standby is not None and self._standby.phase in ("asleep", "waking")

    def _introduce(self) -> None:
        """Tells the router that decides from now on of every request."""
        lives = sorted(
            self.live.values(),
            key=lambda life: (life.stage is Stage.QUEUED, life.terms.priority, life.times.submitted_s),
        )
        for life in lives:
            self._happens(life.attempt_id, ev.Unknown())

    def _reachable(self) -> list[Reachable]:
        """Returns every engine that this replica knows. A retired link has no new work."""
        return [
            Reachable(link.info, link.connected and link.info.state == "ready" and not link.retired)
            for link in self._engines.everything()
        ]

    def _decided_here(self, task: Task) -> None:
        self.metrics.fallbacks.labels(task).inc()

    def _clock(self) -> float:
        return self.now_s()

    def _schedule_progress(self) -> None:
        if self._progress_timer is None:
            self._progress_timer = self._loop.call_later(self.config.progress_interval_s, self._send_progress)

    def _send_progress(self) -> None:
        self._progress_timer = None
        admitted = [attempt_id for attempt_id in self._admitted if attempt_id in self.live]
        grown = [Grown(life.attempt_id, life.attempt_tokens) for life in self._progressed]
        transferred, self._transferred = self._transferred, []
        self._admitted.clear()
        self._progressed.clear()
        if admitted or grown:
            self.to_router(Progress(admitted, grown))
        if transferred and not self._local.is_open:
            now_s = self.now_s()
            self._router.send(
                Transferred([replace(item, ended_ago_s=now_s - ended_s) for ended_s, item in transferred])
            )

    # -------------------------------------------------------------------------------------------------- sweep

    def _sweep_routers(self, period_s: float) -> None:
        if not self._local.is_open:
            return
        self._local.engines(self._reachable())
        self._local.tick()
        if self._handover_s is not None:
            self._handover_s += period_s
            self._hand_over()

    def _sweep_after(self, period_s: float, seldom: bool = False) -> None:
        """Has the next sweep come after `period_s`, and not when it would have come before."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sweeps_seldom = seldom
        self._sweep_period_s, self._sweep_due_s = period_s, self.now_s() + period_s
        self._sweeper = self._loop.call_later(period_s, self._sweep)

    def _sweep_often(self) -> None:
        """Ends the longer pause between sweeps, because there may be something to sweep now."""
        if self._sweeps_seldom and not self._stopping:
            self._sweep_after(self.config.sweep_interval_s)

    def _sweep(self) -> None:
        now_s, period_s, often_s = self.now_s(), self._sweep_period_s, self.config.sweep_interval_s
        seldom = False
        try:
            # what engines sent meanwhile waits in the sockets: they have not stalled
            if now_s - self._sweep_due_s > LATE_S:
                for life in self.live.values():
                    life.forbear(now_s + FORBEARANCE_S)
            self._engines.sweep(period_s)
            self._sweep_routers(period_s)
            for woken in self.alarms.due(now_s):
                woken.wake(now_s)
            seldom = not self.live and not self._local.is_open and self._engines.settled()
        # a bug must not end the sweeps: no request would expire any more
        except Exception:
            self.metrics.internal_errors.inc()
            log.exception("the sweep failed; it is tried again in %g s", often_s)
        if not self._stopping:
            self._sweep_after(IDLE_SWEEPS * often_s if seldom else often_s, seldom)
