"""The router on sockets: it turns messages into events, and the dispatcher's actions into messages. It decides nothing
itself.

The router has one thread with one event loop and no lock, and handles each message completely before the next. Whatever
is bound to a connection ends with it. When an ingress is lost, all its attempts are closed (`ingresses`). A lost engine
gets no new work from that moment on, and is forgotten a little later (`engines`).
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from actors import no_memory
from actors.router.admin import RouterAdmin
from actors.router.assigning import assign
from actors.router.autoscaler import Autoscaler
from actors.router.clock import clock_s
from actors.router.decisions import DecisionLog
from actors.router.engines import Engines
from actors.router.facts import FleetFacts
from actors.router.fleet import FleetReport
from actors.router.flows import FlowAgents, events_of
from actors.router.following import Following
from actors.router.forecasts import Forecasts
from actors.router.ingresses import Ingresses
from actors.router.journal import RouterJournal
from actors.router.kv_feed import KvFeed
from actors.router.network.feed import NetworkConfig, RouterNetwork
from actors.router.observers import Observers
from actors.router.records import Handled, Records
from actors.router.roles import Roles
from actors.router.weights import WeightSources
from actors.router.workers import adopted_of, failure_of, lend_of, place_of, request_of, standby_of, worker_of
from actors.wire import messages as wire
from actors.wire.channel import Channel, Generations, Identity, WireError
from actors.wire.sockets import listen, remove_sockets
from policies.dispatch.dispatcher import Action, Dispatcher, Reject, RouteDecode, RoutePrefill
from policies.request.ended import RequestEnd
from policies.request.stage import Outcome
from policies.routing.base import Needs, PolicyError
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.flowkv.role_switch import RoleSwitchConfig
from policies.routing.registry import prepare
from policies.state import events as ev
from policies.state.views import Request, WorkerId

if TYPE_CHECKING:
    from actors.telemetry.decisions import DecisionTraces

log = logging.getLogger(__name__)

TICK_S = 0.2
IDLE_TICK_S = 1.0
"""Seconds between two ticks of a dispatcher that has no request, no dropped content of an index to remove, and an
admission policy that is not asked (`Dispatcher.judges`). The comparison of workers is left to them, and the admission
policy's rates of service, which look no more often themselves (`policies.state.outliers.COMPARE_S`,
`policies.dispatch.gate.DOZES_S`).
"""
STATUS_S = 1.0
PATHS_S = 5.0
"""Seconds between two reports to observers about the network between nodes, which changes slowly."""
FORECAST_S = 0.05

SENDERS = (
    dict.fromkeys((wire.Announce, wire.Status, wire.KvEvents, wire.KvState, wire.FindWeights), "engine")
    | dict.fromkeys((wire.Assign, wire.ScaleAnswered, wire.Standby, wire.LeadsTold), "autoscaler")
    | {wire.FlowReport: "agent", wire.Observing: "observer"}
)
"""Kind of the peers that send a type of message; all other types come from ingresses, and questions of an administrator
from observers, too."""


class RouterServer:
    """One router. After `start`, `addresses` are those at which ingresses and engines can connect.

    `generation` is higher than that of every router before it (`actors.wire.channel.Identity`), or 0 if it is unknown.
    `autoscaler_generation` is the highest one that an autoscaler of the application has, or 0 if none is known.
    `regimes` are the thresholds by which the router reports how loaded its fleet is, and `role_switch` says for how
    long it lends idle engines to the other role (by default it lends none). `traces` take the decisions about sampled
    requests.
    """

    def __init__(
        self,
        me: Identity,
        dispatcher: Dispatcher,
        engine_grace_s: float = 2.0,
        forecasts: Forecasts | None = None,
        network: RouterNetwork | None = None,
        journal: RouterJournal | None = None,
        generation: int = 0,
        regimes: RegimeThresholds | None = None,
        role_switch: RoleSwitchConfig | None = None,
        traces: "DecisionTraces | None" = None,
        autoscaler_generation: int = 0,
    ) -> None:
        self._traces = traces
        self._following = Following(me.id)
        self.me = dataclasses.replace(me, generation=generation, generations=Generations(generation))
        self.dispatcher = dispatcher
        self._decisions = DecisionLog()
        self._records = Records(self._decisions, journal)
        self.addresses: tuple[str, ...] = ()
        self._ingresses = Ingresses()
        self._observers = Observers()
        self._flows = FlowAgents()
        self._weights = WeightSources()
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._forecasts = forecasts
        self._kv_feed = KvFeed(dispatcher.state, self._feed)
        self._kv_feed.want(Needs.HITS in dispatcher.needs)
        self._network = network or RouterNetwork(NetworkConfig())
        self._network.want(dispatcher.needs)
        self.engines = Engines(
            engine_grace_s, self._kv_feed, self._network, self._feed, self._broadcast_fleet
        )
        self._journal = journal
        self._report = FleetReport(
            dispatcher,
            self._decisions,
            self.engines,
            self._kv_feed,
            self._network,
            forecasts,
            journal,
            regimes,
            self._flows,
        )
        facts = FleetFacts(self.engines, self._network)
        self._admin = RouterAdmin(
            dispatcher,
            self._decisions,
            journal,
            self._feed,
            self._policies_changed,
            self._flows,
            facts,
            self._assign,
            self._tell_logs,
        )
        self._roles = Roles(
            dispatcher, self.engines, role_switch or RoleSwitchConfig(), regimes or RegimeThresholds()
        )
        self._autoscaler = Autoscaler(
            dispatcher, self.engines, self._ingresses, self._stands_by, autoscaler_generation
        )
        self._ticked_s = -math.inf
        self._quarantine_version = 0
        self._quarantined: tuple[tuple[WorkerId, str], ...] = ()
        self._stale = 0
        self._protocol_errors = 0
        self._silent_peers = dict.fromkeys(
            ("ingress", "engine", "router", "agent", "worker", "coordinator", "autoscaler", "observer"), 0
        )  # by their kind
        self._policy_errors = 0
        self._internal_errors = 0

    async def start(self, addresses: list[str]) -> None:
        """Listens on all `addresses` (`unix:/path`, `tcp:host:0`) and starts the periodic tasks. The policies' compiled
        code is loaded first, so that no decision and no change of policy waits for it; this takes seconds if none is
        cached yet.
        """
        prepare()
        for address in addresses:
            server, bound = await listen(address, self._new_channel, self.me.tls)
            self._servers.append(server)
            self.addresses += (bound,)
        self._tasks = [asyncio.create_task(self._every(TICK_S, self._tick))]
        self._tasks += [asyncio.create_task(self._every(STATUS_S, self._broadcast_status))]
        self._tasks += [asyncio.create_task(self._every(STATUS_S, self._look_after_roles))]
        self._tasks += [asyncio.create_task(self._every(PATHS_S, self._tell_paths))]
        if self._forecasts is not None:
            self._tasks += [asyncio.create_task(self._every(FORECAST_S, self._refresh_forecasts))]
        self._network.start(self._feed)
        if self._journal is not None:
            self._tasks += [asyncio.create_task(self._journal.run())]

    async def stop(self) -> None:
        """Closes every connection, and the ingresses then decide by their own fallback. Idempotent.

        The journal stops first, while everything else still runs, so that the last status sent counts the records that
        its disk did not take.
        """
        if self._journal is not None:
            self._records.catch_up()
            await self._journal.stop()
            self._broadcast_status()
        for task in self._tasks:
            task.cancel()
        for server in self._servers:
            server.close()
        self.engines.close("router stops")
        self._ingresses.close("router stops")
        self._observers.close("router stops")
        self._autoscaler.close("router stops")
        remove_sockets(self.addresses)
        if self._forecasts is not None:
            await self._forecasts.stop()
        self._network.stop()
        self._tasks, self._servers = [], []
        if self._traces is not None:
            await asyncio.to_thread(self._traces.stop)

    # --------------------------------------------------------------------------------------------- connections

    def _new_channel(self) -> Channel:
        return Channel(self.me, self._on_message, self._on_open, self._on_close)

    def _on_open(self, channel: Channel) -> None:
        assert channel.peer is not None
        if channel.peer.kind == "ingress":
            self._ingresses.add(channel)
            channel.send(self.fleet())
            channel.send(self.status())
        elif channel.peer.kind == "observer":
            if self._observers.add(channel):
                channel.send(self.fleet())
                channel.send(self.status())
        elif channel.peer.kind == "autoscaler":
            self._autoscaler.opened(channel)

    def _on_close(self, channel: Channel, reason: str) -> None:
        self._protocol_errors += channel.broken
        if channel.silent and channel.peer is not None:
            self._silent_peers[channel.peer.kind] += 1
        ingress = self._ingresses.lost(channel)
        if ingress is not None:
            log.info("ingress lost (%s): closing its %d requests", reason, len(ingress.requests))
            for attempt_id in list(ingress.requests):
                self._close(attempt_id, "cancelled", 0)
            self._following.lost(channel)
        self.engines.lost(channel, reason)
        self._flows.lost(channel)
        self._autoscaler.lost(channel)
        if self._observers.lost(channel):
            self._broadcast_fleet()

    # ------------------------------------------------------------------------------------------------ messages

    def _on_message(self, channel: Channel, message: wire.Message) -> None:
        kind = SENDERS.get(type(message), "ingress")
        if isinstance(message, wire.Admin) and channel.peer is not None and channel.peer.kind == "observer":
            kind = "observer"
        if channel.peer is None or channel.peer.kind != kind:
            raise WireError(f"{type(message).__name__} comes from {channel.peer_name}, which is no {kind}")
        try:
            self._take(channel, message)
        except MemoryError:
            no_memory.end()

    def _take(self, channel: Channel, message: wire.Message) -> None:
        match message:
            case wire.Submit():
                self._submit(channel, message)
            case wire.PrefillReported() | wire.LeaseRenewed():
                self._leased(channel, message)
            case wire.Progress():
                self._progress(channel, message)
            case wire.Transferred() | wire.TimesTold():
                self._explained(message)
            case wire.Closed():
                self._autoscaler.closed(message)
                failed = failure_of(message, clock_s(), self.engines.workers)
                self._close(message.attempt_id, message.outcome, message.output_tokens, failed, message.ended)
            case wire.Adopt():
                self._adopt(channel, message)
            case wire.Announce() | wire.Status() | wire.KvEvents() | wire.KvState() | wire.FindWeights():
                self._from_engine(channel, message)
            case wire.FlowReport():
                self._flow_reported(channel, message)
            case wire.Admin():
                self._asked(channel, message)
            case wire.Observing():
                self._observers.listens(channel, message.addresses)
                self._broadcast_fleet()
            case wire.Assign() | wire.ScaleAnswered() | wire.Standby() | wire.LeadsTold():
                self._autoscaler.heard(channel, message)
            case _:
                raise WireError(f"a router does not take {type(message).__name__}")

    def _flow_reported(self, channel: Channel, message: wire.FlowReport) -> None:
        self._flows.reported(channel, message)
        self.decisions.flowed(message.ended)
        if Needs.FLOWS in self.dispatcher.needs:
            for event in events_of(message, clock_s()):
                self._feed(event)

    def _asked(self, channel: Channel, message: wire.Admin) -> None:
        if message.what == "scale":
            self._autoscaler.asked(channel, message)
        else:
            self._records.catch_up()
            channel.send(self._admin.answer(message))

    def _from_engine(
        self,
        channel: Channel,
        message: wire.Announce | wire.Status | wire.KvEvents | wire.KvState | wire.FindWeights,
    ) -> None:
        if isinstance(message, wire.FindWeights):
            channel.send(self._weights.answer(message, self.engines.infos(), self._network.tier))
        elif isinstance(message, wire.Announce):
            joins = self.engines.channel(message.info.id) is not channel
            self.engines.announced(channel, message.info, message.duty_for_s, message.active_for_s)
            self._autoscaler.announced(message.info, joins)
        elif isinstance(message, wire.Status):
            self.engines.reported(message)
        else:
            self._kv_change(channel, message)

    def _kv_change(self, channel: Channel, message: wire.KvEvents | wire.KvState) -> None:
        worker = self.engines.worker(message.engine_id, message.rank)
        if isinstance(message, wire.KvState):
            self._kv_feed.state(worker, channel, message)
        else:
            self._kv_feed.events(worker, channel, message)

    def _submit(self, channel: Channel, message: wire.Submit) -> None:
        self._ingresses.own(channel, message.attempt_id)
        if message.client_request_id:
            self._decisions.name(message.attempt_id, message.client_request_id)
        if self._traces is not None:
            self._traces.follow(message.attempt_id, message.trace)
        if message.trace is not None:
            self._following.begin(message.attempt_id, channel)
        now_s = clock_s()
        request = self._request(message, now_s)
        if self._forecasts is not None:
            predicted = self._forecasts.arrived(message, now_s, Needs.LENGTHS in self.dispatcher.needs)
            request = dataclasses.replace(request, predicted_tokens=predicted)
        try:
            self._autoscaler.arrived(request, message.again)
        except MemoryError:
            raise
        except Exception:
            # a bug, of a predictor perhaps; the request is decided all the same
            self._internal_errors += 1
            log.exception("the autoscaler's windows cannot count attempt %s", message.attempt_id)
        self._feed(ev.Arrived(now_s, request))
        self._autoscaler.ring()

    def _leased(self, channel: Channel, message: wire.PrefillReported | wire.LeaseRenewed) -> None:
        """Notes that the KV of an attempt is held under a lease, or for longer than before."""
        now_s = clock_s()
        if isinstance(message, wire.LeaseRenewed):
            self._feed(ev.LeaseRenewed(now_s, message.attempt_id, now_s + message.lease_s))
            return
        if self._following:
            self._following.reported(message.attempt_id)
        self._kv_feed.prefilled(self.dispatcher.state.request(message.attempt_id), message.cached_tokens)
        worker = worker_of(message.engine_id or None, message.dp_rank)
        facts = (now_s + message.lease_s, message.kv_bytes, message.cached_tokens, worker, message.compute_s)
        if not self._fits(ev.PrefillDone(now_s, message.attempt_id, *facts)):
            channel.send(wire.Unknown(message.attempt_id))

    def _explained(self, message: wire.Transferred | wire.TimesTold) -> None:
        """Notes what `explain` shows beside decisions: the way of an attempt, or transfers. Those that were held come
        whether or not the estimator is on.
        """
        if isinstance(message, wire.TimesTold):
            self.decisions.timed(message.attempt_id, *self._following.ended(message))
            return
        if self._network.wants_transfers(self.dispatcher.needs):
            self._network.transferred(message, clock_s())
        self.decisions.transferred(message.items, clock_s())

    def _progress(self, channel: Channel, message: wire.Progress) -> None:
        now_s, unknown = clock_s(), dict[str, None]()
        for attempt_id in message.admitted:
            self._network.admitted(attempt_id)
            if not self._fits(ev.Admitted(now_s, attempt_id)):
                unknown[attempt_id] = None
        if self._forecasts is not None:
            for attempt_id, tokens in message.grown:
                self._forecasts.progressed(attempt_id, tokens)
        if message.grown:
            self._feed(ev.ProgressedMany(now_s, tuple(message.grown)))
            for attempt_id in self.dispatcher.state.take_refused():
                unknown[attempt_id] = None
        for attempt_id in unknown:
            channel.send(wire.Unknown(attempt_id))

    def _close(
        self,
        attempt_id: str,
        outcome: Outcome,
        output_tokens: int,
        failed: ev.AttemptFailed | None = None,
        ended: RequestEnd | None = None,
    ) -> None:
        """Ends an attempt; `failed` says which engine has failed it, and `ended` how its whole request went."""
        if not self._ingresses.disown(attempt_id):
            # the router has rejected this attempt, or it was submitted before the router restarted
            return
        self._network.closed(attempt_id)
        self._autoscaler.forget(attempt_id)
        if self._following:
            self._following.forget(attempt_id)
        if self._traces is not None:
            self._traces.forget(attempt_id)
        if self._forecasts is not None:
            self._forecasts.closed(attempt_id, outcome, output_tokens, clock_s())
        if failed is not None:
            self._feed(failed)
        self._feed(ev.Closed(clock_s(), attempt_id, outcome, output_tokens, ended))

    def _adopt(self, channel: Channel, message: wire.Adopt) -> None:
        self._ingresses.own(channel, message.submit.attempt_id)
        if self._traces is not None:
            self._traces.follow(message.submit.attempt_id, message.submit.trace)
        self._feed(adopted_of(message, clock_s(), self.engines.workers))

    def _request(self, message: wire.Submit, now_s: float) -> Request:
        """Returns the submitted request. It avoids all ranks of the engines that `message.avoid` names."""
        return request_of(message, now_s, self.engines.workers(message.avoid))

    # ----------------------------------------------------------------------------------------------- decisions

    @property
    def decisions(self) -> DecisionLog:
        """The log of decisions, with all that were made so far."""
        self._records.catch_up()
        return self._decisions

    def _feed(self, event: ev.Event) -> None:
        """Has the dispatcher handle an event, and carries out its actions."""
        self._fits(event)

    def _without(self, error: PolicyError) -> Sequence[Action]:
        """Returns what was decided in spite of a bug in a policy: all requests but the one that it cannot decide are
        served.
        """
        no_memory.end_if_behind(error.__cause__)
        self._policy_errors += 1
        log.error("%s", error, exc_info=error.__cause__)
        return error.decided

    def _fits(self, event: ev.Event) -> bool:
        """Has the dispatcher handle an event, and carries out its actions. Returns whether the event fitted the state.
        What is written down of the event follows behind its messages (`actors.router.records`).

        A bug never ends the connection of the peer whose message became the event: what was decided is sent, the fault
        is counted and logged. Only a refused PoliciesChanged raises, which its asker expects. Without memory this
        process ends: its successor asks the engines and ingresses for all that it has to know.
        """
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
        except PolicyError as error:
            actions, failure = self._without(error), error
        except MemoryError:
            no_memory.end()
        except Exception as unexpected:
            failure = unexpected
            if isinstance(event, ev.PoliciesChanged):
                raise
            self._internal_errors += 1
            log.exception("the dispatcher cannot take in %s", type(event).__name__)
        finally:
            took_s = time.perf_counter() - started_s
            used = dispatcher.prefill, dispatcher.decode, self._quarantined
            self._records.note(Handled(event, actions, failure, took_s, *used))
            fits = not isinstance(failure, ev.StaleEvent)
            # the error refers to this frame; a reference back to it would keep both until a garbage collection
            failure = None
        if actions:
            if self._traces is not None:
                names = dispatcher.prefill.name, dispatcher.decode.name
                self._traces.decided(event.now_s, took_s, actions, *names)
            if self._following:
                self._following.decided(event.now_s, took_s, actions)
            for action in actions:
                self._act(action)
        if dispatcher.state.quarantine_version != self._quarantine_version:
            self._quarantine_version = dispatcher.state.quarantine_version
            self._quarantined = self._report.quarantine_reasons()
            self._broadcast_fleet()
        return fits

    def _act(self, action: Action) -> None:
        owner = self._ingresses.owner(action.attempt_id)
        if owner is None:
            return
        match action:
            case RoutePrefill():
                request = self.dispatcher.state.request(action.attempt_id)
                if request is not None and not action.colocated:
                    self._kv_feed.prefill_routed(request, action.decision.worker)
                engine_id, rank = place_of(action.decision.worker)
                self._autoscaler.routed(action.attempt_id, engine_id, decodes=False)
                lend = lend_of(action.prefix, engine_id)
                owner.send(wire.RoutePrefill(action.attempt_id, engine_id, action.colocated, rank, lend))
            case RouteDecode():
                self._network.routed(action.intent, clock_s())
                engine_id, rank = place_of(action.decision.worker)
                self._autoscaler.routed(action.attempt_id, engine_id, decodes=True)
                tier = self._network.configured(action.intent.tier)
                owner.send(wire.RouteDecode(action.attempt_id, engine_id, rank, action.kv_due_s, tier))
            case Reject():
                self._ingresses.disown(action.attempt_id)
                self._autoscaler.forget(action.attempt_id)
                if self._traces is not None:
                    self._traces.forget(action.attempt_id)
                if self._forecasts is not None:
                    self._forecasts.closed(action.attempt_id, "rejected", 0, clock_s())
                why = action.reason, action.retry_after_s, action.detail
                owner.send(wire.Reject(action.attempt_id, action.status, *why))

    async def _every(self, period_s: float, what: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                what()
            except MemoryError:
                no_memory.end()
            except Exception:
                # a bug; the loop must go on, or the router would rescue no lease and expire no queued request
                self._internal_errors += 1
                log.exception("%s failed; it is tried again in %g s", what.__name__, period_s)

    def _refresh_forecasts(self) -> None:
        assert self._forecasts is not None
        for event in self._forecasts.refresh(clock_s(), self.dispatcher.horizon):
            self._feed(event)
        self._forecasts.maintain(clock_s())

    def _look_after_roles(self) -> None:
        """Reports to the autoscaler. Without one the router has idle engines lent by its own rule, as one decides at a
        time, and sees by itself that a fleet which slept is awake.
        """
        if self._autoscaler.connected:
            self._autoscaler.observe()
        else:
            self._autoscaler.look_after_phase()
            self._roles.look()

    def _tick(self) -> None:
        now_s, state = clock_s(), self.dispatcher.state
        busy = state.in_flight or self.dispatcher.judges(now_s)
        if (
            busy
            or any(index.sweeps for index in state.prefix_indexes)
            or now_s - self._ticked_s >= IDLE_TICK_S
        ):
            self._ticked_s = now_s
            self._feed(ev.Tick(now_s))
        self._kv_feed.tick()

    # ----------------------------------------------------------------------------------------------- broadcasts

    def _policies_changed(self) -> None:
        self._kv_feed.want(Needs.HITS in self.dispatcher.needs)
        self._network.want(self.dispatcher.needs)
        self._broadcast_fleet()

    def _tell_logs(self, message: wire.SetLogs) -> int:
        """Sends a change of log lines to all ingresses, engines, observers and the autoscaler. Returns how many got
        it.
        """
        channels = [self.engines.channel(info.id) for info in self.engines.infos()]
        told = [channel for channel in (*channels, self._autoscaler.channel) if channel is not None]
        for channel in told:
            channel.send(message)
        self._ingresses.broadcast(message)
        self._observers.broadcast(message)
        return len(told) + len(self._ingresses) + len(self._observers)

    def _stands_by(self, standby: wire.Standby) -> None:
        """Takes in that the fleet fell asleep, wakes, or is awake, and tells the ingresses."""
        self._feed(ev.StandbyChanged(clock_s(), standby_of(standby)))
        self._broadcast_fleet()

    def _broadcast_fleet(self) -> None:
        fleet = self.fleet()
        self._ingresses.broadcast(fleet)
        self._observers.broadcast(fleet)

    def _broadcast_status(self) -> None:
        if self._ingresses or self._observers:
            status = self.status()
            self._ingresses.broadcast(status)
            self._observers.broadcast(status)

    def _tell_paths(self) -> None:
        if self._observers:
            self._observers.broadcast(wire.PathsSeen(self._network.paths(self.engines.infos())))

    def _assign(self, engine_id: object, role: object, duty: object) -> dict[str, Any]:
        return assign(self.engines, self._autoscaler.connected, engine_id, role, duty)

    def fleet(self) -> wire.Fleet:
        """Returns the message about the fleet that every ingress and observer gets."""
        return self._report.fleet(self._autoscaler.standby, self._observers.infos())

    def status(self) -> wire.FleetStatus:
        """Returns the message with the figures of the router and its engines that every ingress and observer gets."""
        self._records.catch_up()
        refused = self._stale + self.dispatcher.state.refused_items
        return self._report.status(
            len(self._ingresses),
            {
                "stale_events": float(refused),
                "policy_errors": float(self._policy_errors),
                "internal_errors": float(self._internal_errors),
                "protocol_errors": float(self._protocol_errors),
                "role_switches": float(self._roles.switches),
                "assignments": float(self._autoscaler.assignments),
            }
            | {f"silent_peers_{kind}": float(count) for kind, count in self._silent_peers.items()}
            | self._trace_totals(),
            self._autoscaler.gauges,
        )

    def _trace_totals(self) -> dict[str, float]:
        totals = {} if self._traces is None else self._traces.totals
        return {f"traces_{result}": float(number) for result, number in totals.items()}
