"""The router that an ingress has of its own, for as long as no other router decides for it.

It is the dispatcher of the real router (`policies.dispatch`), so the same rules hold: the engines' slots and KV are
limits, requests that find no room wait in order of priority and arrival, and what waits too long or is one too many is
rejected. It hears the messages that the real router would hear, and answers with the same events.

A warm engine gets nothing from it either: it is for the router's autoscaler to activate. While all engines sleep,
requests wait for a router to come back and hear of them, because nothing else would wake an engine.

It knows this replica's requests only. Each replica of the ingress therefore counts on an equal share of every engine's
slots and KV (at least one slot), so that all replicas together keep within what the engines have. It knows neither
the engines' reports nor where prompts are cached; it joins the shortest queue.

Tenants have their shares as at a router with the default policy (`policies.fairness`), whatever the configured one is.
The counters begin anew each time it opens, and each replica has its own. It has no forecasts: an output is expected to
be as long as the tenant's last ones.

What would miss its objective is refused by the admission policy `fallback_admission`, as by a router, and what has
become late is shed; no retry and nothing that goes on after a migration is. The rates are measured anew each time it
opens, from this replica's requests alone, those that it takes over among them. What other replicas have at the engines
is seen by what it costs: a prompt that waits there behind theirs counts as slow, and of slots and KV only the share is
expected. Until the first rates are known, waiting alone makes a request late.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from actors import no_memory
from actors.router.workers import (
    adopted_of,
    failure_of,
    health_of,
    place_of,
    request_of,
    ups,
    worker_of,
    workers_of,
)
from actors.wire.messages import (
    Adopt,
    Closed,
    EngineInfo,
    LeaseRenewed,
    Message,
    PrefillReported,
    Progress,
    Submit,
)
from app.ingress.config import IngressConfig
from policies.admission.registry import admission_policy
from policies.dispatch.config import DispatchConfig
from policies.dispatch.dispatcher import Action, Dispatcher, Reject, RouteDecode, RoutePrefill
from policies.fairness.registry import DEFAULT, fairness_policy
from policies.request import events as life
from policies.request.stage import Task
from policies.routing.base import PolicyError
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.standby import AWAKE, Standby
from policies.state.views import WorkerId

log = logging.getLogger(__name__)

HOLD_S = 3.0
"""Seconds for which requests wait while no known engine is ready, before they are told so. A process that stood still
has lost all its connections when it goes on, and is connected again within a second.
"""

NEVER_STALE_S = 1e9
"""Age from which an engine's report is stale. Here no engine reports: whether it is connected says that it lives."""


class Reachable(NamedTuple):
    """One engine as this replica sees it: its facts, and whether it is connected and takes new work."""

    info: EngineInfo
    ready: bool


class LocalRouter:
    """The dispatcher of one replica. `answer` gets an event for the life of an attempt, in a later iteration of the
    event loop than the message that caused it; `decided` is called for each engine chosen.

    Nothing but `open` may be called while it is closed.
    """

    def __init__(
        self,
        config: IngressConfig,
        now_s: Callable[[], float],
        answer: Callable[[str, life.Event], None],
        decided: Callable[[Task], None],
    ) -> None:
        self._limits = DispatchConfig(
            max_queue=config.fallback_queue,
            max_queue_tokens=config.fallback_queue_tokens,
            queue_timeout_s=config.fallback_wait_s,
            status_stale_s=NEVER_STALE_S,
            absence_s=HOLD_S,
        )
        self._admission = admission_policy(config.fallback_admission)
        self._now_s, self._answer, self._decided = now_s, answer, decided
        self._loop = asyncio.get_running_loop()
        self._dispatcher: Dispatcher | None = None
        self.is_open = False
        """Whether this router decides now."""
        self._share = 1
        self._known: dict[str, Reachable] = {}
        self._answers: list[tuple[str, life.Event]] = []

    def open(self, engines: Iterable[Reachable], replicas: int, standby: Standby = AWAKE) -> None:
        """Begins to decide, as one of `replicas` ingresses that do, in a fleet of this phase. It knows no request
        yet.
        """
        policy = JoinShortestQueue()
        self._dispatcher = Dispatcher(self._limits, policy, policy, self._admission, fairness_policy(DEFAULT))
        self.is_open = True
        self._share, self._known = max(1, replicas), {}
        self._feed(ev.StandbyChanged(self._now_s(), standby))
        self.engines(engines)

    def close(self) -> None:
        """Forgets everything, also what it has decided and not yet answered."""
        self._dispatcher, self.is_open = None, False
        self._answers.clear()

    def stands_by(self, standby: Standby) -> None:
        """Takes in the phase of the fleet."""
        self._feed(ev.StandbyChanged(self._now_s(), standby))

    def engines(self, engines: Iterable[Reachable]) -> None:
        """Takes in which engines there are. Engines that are unchanged cost nothing."""
        wanted = {engine.info.id: engine for engine in engines}
        for engine_id, known in list(self._known.items()):
            if engine_id not in wanted:
                del self._known[engine_id]
                for worker in workers_of(known.info):
                    self._feed(ev.EngineDown(self._now_s(), worker))
        for engine_id, engine in wanted.items():
            if self._known.get(engine_id) != engine:
                self._up(engine, new=engine_id not in self._known)
                self._known[engine_id] = engine

    def hear(self, message: Message) -> None:
        """Takes a message for the router; kinds that only a router with reports can use are ignored. A message that
        does not fit what is known is answered with Unknown.
        """
        now_s = self._now_s()
        match message:
            case Submit():
                self._feed(ev.Arrived(now_s, request_of(message, now_s, self._workers(message.avoid))))
            case PrefillReported():
                worker = worker_of(message.engine_id or None, message.dp_rank)
                facts = (
                    now_s + message.lease_s,
                    message.kv_bytes,
                    message.cached_tokens,
                    worker,
                    message.compute_s,
                )
                if not self._feed(ev.PrefillDone(now_s, message.attempt_id, *facts)):
                    self._say(message.attempt_id, life.Unknown())
            case LeaseRenewed():
                self._feed(ev.LeaseRenewed(now_s, message.attempt_id, now_s + message.lease_s))
            case Progress():
                for attempt_id in message.admitted:
                    if not self._feed(ev.Admitted(now_s, attempt_id)):
                        self._say(attempt_id, life.Unknown())
                self._feed(ev.ProgressedMany(now_s, tuple(message.grown)))
            case Adopt():
                self._feed(adopted_of(message, now_s, self._workers))
            case Closed():
                failed = failure_of(message, now_s, self._workers)
                if failed is not None:
                    self._feed(failed)
                self._feed(ev.Closed(now_s, message.attempt_id, message.outcome, message.output_tokens))

    def tick(self) -> None:
        """Rejects what has waited too long, and rescues leases that are about to end."""
        self._feed(ev.Tick(self._now_s()))

    # ------------------------------------------------------------------------------------------------- internals

    def _up(self, engine: Reachable, new: bool) -> None:
        info, now_s = engine.info, self._now_s()
        ranks = info.dp_ranks
        mine = replace(
            info,
            slots=max(ranks, info.slots // self._share),
            kv_blocks=max(ranks, info.kv_blocks // self._share),
        )
        health = health_of("ready" if engine.ready else "draining", info.duty)
        for up in ups(mine, health, now_s):
            self._feed(up)
            if new:
                self._feed(ev.EngineStatus(now_s, up.worker, 0, 0, 0, health))

    def _workers(self, engine_ids: Sequence[str]) -> tuple[WorkerId, ...]:
        known = [self._known[engine_id].info for engine_id in engine_ids if engine_id in self._known]
        return tuple(worker for info in known for worker in workers_of(info))

    def _feed(self, event: ev.Event) -> bool:
        """Has the dispatcher handle an event, and answers its actions. Returns whether the event fitted the state.
        Without memory this process ends, as a router does.
        """
        assert self._dispatcher is not None
        actions: Sequence[Action] = ()
        try:
            actions = self._dispatcher.handle(event)
        except ev.StaleEvent as stale:
            log.debug("stale: %s", stale)
            return False
        except PolicyError as error:
            no_memory.end_if_behind(error.__cause__)
            actions = error.decided
            log.exception("the ingress's own router cannot decide")
        except MemoryError:
            no_memory.end()
        for action in actions:
            match action:
                case RoutePrefill():
                    engine_id, rank = place_of(action.decision.worker)
                    self._decided("prefill")
                    self._say(action.attempt_id, life.RoutePrefill(engine_id, action.colocated, rank))
                case RouteDecode():
                    engine_id, rank = place_of(action.decision.worker)
                    self._decided("decode")
                    self._say(action.attempt_id, life.RouteDecode(engine_id, rank, action.kv_due_s))
                case Reject():
                    rejected = life.Reject(action.status, action.reason, action.retry_after_s, action.detail)
                    self._say(action.attempt_id, rejected)
        return True

    def _say(self, attempt_id: str, event: life.Event) -> None:
        if not self._answers:
            self._loop.call_soon(self._send_answers)
        self._answers.append((attempt_id, event))

    def _send_answers(self) -> None:
        answers, self._answers = self._answers, []
        for attempt_id, event in answers:
            self._answer(attempt_id, event)
