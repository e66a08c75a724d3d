"""The router's side of the autoscaler: it observes the fleet for it, passes its orders to the engines, and forwards the
questions of administrators.

One autoscaler is obeyed at a time, the one of the highest generation. The connection of an earlier one ends when a
later one connects, and an earlier one that comes afterwards is refused. A router that has just started knows the
highest generation that was given (`app.replicas`), so it waits for the latest autoscaler as the router before it did.
When the later one has been away for `GONE_S` an earlier one is obeyed, because one that lives is better than none.

Nothing else is remembered for a new router or autoscaler: engines announce their role and duty, and orders are given
again until they are seen carried out.
"""

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from actors.router.engines import Engines
from actors.router.ingresses import Ingresses
from actors.router.observing import FleetObserver
from actors.router.workers import check_standby
from actors.wire.channel import Channel
from actors.wire.messages import (
    Admin,
    AdminAnswer,
    Assign,
    Closed,
    EngineInfo,
    LeadsTold,
    ScaleAnswered,
    ScaleAsked,
    SetRole,
    Standby,
)
from policies.dispatch.dispatcher import Dispatcher
from policies.journal.codec import dumps
from policies.scaling.observation import Leads
from policies.scaling.starts import LeadTimes
from policies.state.views import Request

log = logging.getLogger(__name__)

MOST_QUESTIONS = 64
"""Most questions that wait for the autoscaler; the oldest is answered with 503 when one more comes."""

NOBODY = (
    "No autoscaler is connected to the router: set `scaling` in the configuration, or wait until the autoscaler that"
    " it names has started."
)
LEFT = "The autoscaler was lost before it answered; whether it acted is not known."

GONE_S = 30.0
"""Seconds without the autoscaler of the highest generation after which an earlier one is obeyed. ASSUMPTION: one that
lives is back sooner (`actors.wire.link.BACKOFF_MOST_S`), and one that has died is replaced sooner, by a later one.
"""
GIVEN_AGAIN_S = 10.0
"""Seconds after which an order that is not given again is no order any more. ASSUMPTION: ten rounds of an autoscaler,
which gives an order in each one until it is carried out."""


class _Sent(NamedTuple):
    """An order that its engine has not carried out yet: since when it is given, when it was given last, and the
    engine's duty before.
    """

    order: Assign
    since_s: float
    last_s: float
    duty: str


class Autoscaler:
    """The autoscaler that is connected, if one is. The fleet is observed from the first connection on, so that a later
    autoscaler finds complete windows. `stands_by` gets each change of the fleet's phase. `generation` is the highest
    one that an autoscaler of this application is known to have, or 0 if none is known.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        engines: Engines,
        ingresses: Ingresses,
        stands_by: Callable[[Standby], None],
        generation: int = 0,
    ) -> None:
        self._dispatcher, self._engines, self._ingresses = dispatcher, engines, ingresses
        self._stands_by = stands_by
        self.standby: Standby | None = None
        """The phase of the fleet as an autoscaler said last. It stays when the autoscaler is lost, until an engine that
        decodes serves.
        """
        self._rung = False
        # whether the autoscaler of this connection has had an observation that was due
        self._told = False
        self._channel: Channel | None = None
        self._generation = generation
        # since when no autoscaler is connected, while none is
        self._left_s = time.monotonic()
        self._observer: FleetObserver | None = None
        self._numbers = itertools.count(1)
        # by number: who asked, and under which number of its own
        self._questions: OrderedDict[int, tuple[Channel, int]] = OrderedDict()
        self._sent: dict[str, _Sent] = {}
        self._leads = LeadTimes()
        self.gauges: Mapping[str, float] = {}
        """The figures that the connected autoscaler told last (`LeadsTold`), by the names of metrics."""
        self.assignments = 0
        """Number of orders that were passed on to engines."""

    @property
    def connected(self) -> bool:
        """Whether an autoscaler decides now."""
        return self._channel is not None

    @property
    def channel(self) -> Channel | None:
        """The connection of the autoscaler that is obeyed, if there is one."""
        return self._channel

    # -------------------------------------------------------------------------------------------------- connection

    def opened(self, channel: Channel) -> None:
        """Obeys the autoscaler of a new connection from now on, unless a later one is here or may come back."""
        assert channel.peer is not None
        generation = channel.peer.generation
        expected = self._channel is not None or time.monotonic() - self._left_s < GONE_S
        if expected and 0 < generation < self._generation:
            channel.abort(
                f"this autoscaler of generation {generation} was replaced by one of {self._generation}"
            )
            return
        # one without a generation leaves the bound as it is
        self._generation = generation or self._generation
        former, self._channel, self._told = self._channel, channel, False
        if former is not None:
            self._no_answer()
            former.abort(f"{channel.peer_name} of generation {generation} takes over")
        if self._observer is None:
            self._observer = FleetObserver(self._dispatcher, self._engines)
        log.info("%s of generation %d decides about the fleet", channel.peer_name, generation)

    def lost(self, channel: Channel) -> None:
        """Notes that a connection has ended; nothing happens if it is not the autoscaler's."""
        for number, (asker, _) in list(self._questions.items()):
            if asker is channel:
                del self._questions[number]
        if channel is self._channel:
            self._channel, self._left_s = None, time.monotonic()
            self.gauges = {}
            self._sent.clear()
            self._no_answer()

    def close(self, reason: str) -> None:
        """Closes the autoscaler's connection, if there is one."""
        if self._channel is not None:
            self._channel.close(reason)

    # ------------------------------------------------------------------------------------------------ observations

    def arrived(self, request: Request, again: bool) -> None:
        """Counts a request, unless an attempt of it was counted `again`."""
        if self._observer is not None and not again:
            self._observer.arrived(request, self.connected)

    def closed(self, message: Closed) -> None:
        """Counts the end of a request; called before the router forgets the attempt."""
        if self._observer is not None and message.ended is not None:
            self._observer.ended(message.attempt_id, message.ended)

    def routed(self, attempt_id: str, engine_id: str, decodes: bool) -> None:
        """Notes the engine that computes an attempt's prompt, or the one that `decodes` it."""
        if self._observer is not None:
            self._observer.routed(attempt_id, engine_id, decodes)

    def forget(self, attempt_id: str) -> None:
        """Forgets an attempt that has ended, however it ended."""
        if self._observer is not None:
            self._observer.forget(attempt_id)

    def observe(self) -> None:
        """Sends the autoscaler what it decides by; called about once a second. Orders to engines that have been
        forgotten are forgotten, too, and those that the autoscaler gives no longer.
        """
        oldest_s = time.monotonic() - GIVEN_AGAIN_S
        self._sent = {
            e: sent
            for e, sent in self._sent.items()
            if self._engines.channel(e) is not None and sent.last_s >= oldest_s
        }
        if self._channel is not None and self._observer is not None:
            self._rung, self._told = False, True
            leads = self._leads.leads(Leads())
            self._channel.send(self._observer.observed(len(self._ingresses), self._ingresses.version, leads))

    def look_after_phase(self) -> None:
        """Calls the fleet awake when an engine that decodes serves; called about once a second while no autoscaler is
        there to say so, because it was turned off, say. What it said last would have requests wait for a wake that
        nobody makes.
        """
        if self.standby is None or self.standby.phase == "awake":
            return
        serving = (info for info in self._engines.infos() if info.state == "ready" and info.duty == "active")
        if any(info.role != "prefill" for info in serving):
            self._stand_by(msgspec.structs.replace(self.standby, phase="awake", reason=""))

    def _stand_by(self, told: Standby) -> None:
        self.standby = told
        self._stands_by(told)

    def ring(self) -> None:
        """Sends an observation at once if a request waits and the fleet sleeps; further requests wait for the next one
        that is due.
        """
        if self.standby is None or self.standby.phase != "asleep":
            return
        if self._dispatcher.queue_size:
            self._observe_early()

    def _observe_early(self) -> None:
        """Sends an observation at once, and no other until the next one that is due."""
        if not self._rung and self._channel is not None:
            self.observe()
            self._rung = True

    # ------------------------------------------------------------------------------------------------------ orders

    def heard(self, channel: Channel, message: Assign | ScaleAnswered | Standby | LeadsTold) -> None:
        """Takes an order, an answer, the fleet's phase or figures; those of an autoscaler that was replaced are
        dropped.
        """
        if channel is not self._channel:
            log.info("%s from %s is dropped: it was replaced", type(message).__name__, channel.peer_name)
        elif isinstance(message, Assign):
            self._assign(message)
        elif isinstance(message, Standby):
            if message != self.standby:
                check_standby(message)
                self._stand_by(message)
        elif isinstance(message, LeadsTold):
            self.gauges = message.figures
        else:
            self._answer(message)

    def _assign(self, message: Assign) -> None:
        """Passes an order on to its engine, unless the engine is not known."""
        engine = self._engines.channel(message.engine_id)
        if engine is None:
            log.info("order for engine %s, which is not known, is dropped", message.engine_id)
            return
        engine.send(SetRole(message.role, message.duty))
        self.assignments += 1
        sent, now_s = self._sent.get(message.engine_id), time.monotonic()
        if sent is None or sent.order != message:
            duty = next(info.duty for info in self._engines.infos() if info.id == message.engine_id)
            self._sent[message.engine_id] = _Sent(message, now_s, now_s, duty)
        else:
            self._sent[message.engine_id] = sent._replace(last_s=now_s)

    def announced(self, info: EngineInfo, joins: bool = False) -> None:
        """Notes what an engine announces: an order that it has carried out took from its first sending until now.

        An engine that joins and is warm may be wanted as an active one, as each is that starts for a plan. So it is
        observed at once, with those that join until the next observation is due. Before the first one that was due all
        engines join, those of a router that was replaced, too; a part of them is no fleet to decide by.
        """
        if joins and info.duty == "warm" and self._told:
            self._observe_early()
        sent = self._sent.get(info.id)
        if sent is None or (info.role, info.duty) != (sent.order.role, sent.order.duty):
            return
        del self._sent[info.id]
        if info.duty == "active":
            took_s = time.monotonic() - sent.since_s
            (self._leads.activated if sent.duty == "warm" else self._leads.switched)(took_s)

    # --------------------------------------------------------------------------------------------------- questions

    def asked(self, channel: Channel, message: Admin) -> None:
        """Forwards an administrator's question; without an autoscaler it is answered at once."""
        if self._channel is None:
            _refuse(channel, message.ask, 404, NOBODY)
            return
        number = next(self._numbers)
        self._questions[number] = channel, message.ask
        self._channel.send(ScaleAsked(number, message.body))
        if len(self._questions) > MOST_QUESTIONS:
            _, (asker, ask) = self._questions.popitem(last=False)
            _refuse(asker, ask, 503, "The autoscaler answers too slowly; whether it acted is not known.")

    def _answer(self, message: ScaleAnswered) -> None:
        """Hands an answer to the ingress that asked; it is dropped if nobody waits for it any more."""
        asker, ask = self._questions.pop(message.id, (None, 0))
        if asker is not None:
            asker.send(AdminAnswer(ask, message.status, message.body))

    def _no_answer(self) -> None:
        questions, self._questions = self._questions, OrderedDict()
        for asker, ask in questions.values():
            _refuse(asker, ask, 503, LEFT)


def _refuse(channel: Channel, ask: int, status: int, why: str) -> None:
    channel.send(AdminAnswer(ask, status, dumps({"message": why}).encode("ascii")))
