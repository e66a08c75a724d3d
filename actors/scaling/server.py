"""The autoscaler's process: it hears the router's observations, has the controller decide, and carries the orders out.

Each observation (one a second) is a round: Serve's counts are read, the controller decides, orders to engines go to the
router, and numbers of replicas to Serve. What fails in a round is tried in the next one, since every round begins with
what is. Without a router nothing is done, so of two autoscalers only the one that the router obeys acts. What the other
one was ordered and has set until the router left it, this one reads from the store in the first round of a connection.
An administrator's order that comes before that round is refused, because the memory that is read would replace it.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Protocol

from actors.scaling.asked import answer
from actors.scaling.control import Controller, Decision
from actors.scaling.fleet import Fleet, figures, start_steps
from actors.scaling.journal import ScalingJournal
from actors.telemetry import logs
from actors.wire.channel import Channel, Identity
from actors.wire.link import Find, Link
from actors.wire.messages import (
    Assign,
    FleetObserved,
    LeadsTold,
    Message,
    ScaleAnswered,
    ScaleAsked,
    SetLogs,
    Standby,
)
from actors.wire.messages import Duty as WireDuty
from policies.journal.codec import CodecError, decoder, loads
from policies.scaling.observation import Duty, Observation
from policies.scaling.timing_fit import Fit

# Serve writes its own loggers, and those below them, to the replica's log.
log = logging.getLogger("ray.serve.autoscaler")

STALE_S = 5.0
"""Age from which an observation is not acted on. ASSUMPTION: five rounds; a busy router is late by less."""
SAVE_S = 20.0
"""Longest time for which the policy's state is not saved, where no order needs it sooner."""

_OBSERVATION = decoder(Observation)


def observation_of(message: FleetObserved) -> Observation:
    """Returns the observation in a message, with the timing profile that its fit leads to, and whether each coefficient
    of it was measured. Raises CodecError, UnicodeDecodeError or another ValueError for a message that holds none.
    """
    assert _OBSERVATION is not None
    seen: Observation = _OBSERVATION(loads(message.observation.decode()))
    if not message.fitted_rows:
        return dataclasses.replace(seen, fitted=False)
    fit = Fit(seen.capability.profile, message.fit_matrix, message.fit_vector, message.fitted_rows)
    capability = dataclasses.replace(seen.capability, profile=fit.profile())
    return dataclasses.replace(seen, capability=capability, fitted=fit.whole)


class Counts(Protocol):
    """The numbers of replicas, which live in Ray Serve. Both methods raise any error where Serve is away."""

    async def read(self) -> Fleet:
        """Returns what Serve has now."""

    async def set(self, targets: Mapping[str, int]) -> None:
        """Sets the numbers of replicas of these groups."""


class Store(Protocol):
    """Where the controller's memory outlives its process. Both methods raise any error where the store is away."""

    async def load(self) -> str | None:
        """Returns what was saved last, or None."""

    async def save(self, memory: str) -> None:
        """Saves the controller's memory."""


class Autoscaler:
    """One autoscaler. `find` returns the router's addresses, and `gauges` further figures for the router's metrics."""

    def __init__(
        self,
        me: Identity,
        find: Find,
        controller: Controller,
        counts: Counts,
        store: Store,
        journal: ScalingJournal | None = None,
        gauges: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._gauges = gauges
        self.controller = controller
        self._counts, self._store, self._journal = counts, store, journal
        self._link = Link(me, find, self._on_message, self._up, self._down, "router")
        self._latest: tuple[FleetObserved, float] | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._saved_s = 0.0
        self._unsaved: list[tuple[Channel, ScaleAnswered]] = []
        """Answers to orders that are not saved yet: who has one knows that it outlives this process."""
        self._connections = 0
        """Number of connections to a router that were made."""
        self._caught_up = 0
        """Number of the connection at which the store was read last."""
        self._own: str | None = None
        """The memory that this autoscaler has saved last."""
        self._told: object = None
        self._overdue: dict[str, tuple[str, str]] = {}
        """The words of the last warning of each overdue group, and the first sentence of Serve's words."""
        self.rounds = 0
        """Number of observations that were acted on."""

    def start(self) -> None:
        """Connects to the router and begins to decide, in background tasks."""
        self._task = asyncio.create_task(self._run(), name="autoscaler")
        self._link.start()

    async def stop(self) -> None:
        """Ends the connection and closes the journal. What was ordered stays. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        await self._link.stop()
        if self._journal is not None:
            self._journal.close()

    def check(self) -> None:
        """Raises RuntimeError if the rounds have ended, which they must not."""
        if self._task is not None and self._task.done():
            raise RuntimeError("the autoscaler's task has ended")

    # ---------------------------------------------------------------------------------------------------- messages

    def _up(self, channel: Channel) -> None:
        log.info("the autoscaler is connected to %s", channel.peer_name)
        self._connections += 1
        self.controller.forget_fleet()
        # a router that has just started must know at once that requests wake the fleet
        channel.send(self._standby())

    def _down(self, reason: str) -> None:
        log.info("the autoscaler has no router (%s): nothing is changed", reason)
        self._latest = None

    def _on_message(self, channel: Channel, message: Message) -> None:
        match message:
            case FleetObserved():
                self._latest = (message, time.monotonic())
                self._news.set()
            case ScaleAsked():
                self._answer(channel, message)
            case SetLogs():
                logs.change(message.level, message.logger, message.access)
            case _:
                raise ValueError(f"an autoscaler does not take {type(message).__name__}")

    def _answer(self, channel: Channel, asked: ScaleAsked) -> None:
        """Answers an administrator. The answer to an order waits until the order is saved."""
        age_s = None if self._latest is None else time.monotonic() - self._latest[1]
        status, body, changed = answer(self.controller, asked.body, age_s)
        answered = ScaleAnswered(asked.id, status, body)
        if not changed:
            channel.send(answered)
            return
        log.info("an administrator ordered %s", asked.body.decode(errors="replace"))
        self._unsaved.append((channel, answered))
        # a round now, and not only at the next observation
        self._news.set()

    def _standby(self) -> Standby:
        told = self.controller.standby
        return Standby(
            told.phase.value,
            tuple(role.value for role in told.roles),
            told.wake_limit_s,
            told.reason,
            self.controller.abilities,
        )

    # ------------------------------------------------------------------------------------------------------ rounds

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._round()
            except Exception as error:
                # Ray's client raises errors of many kinds
                log.warning("the autoscaler could not act (%r); it goes on at the next observation", error)

    def _observed(self) -> FleetObserved | None:
        """Returns the last observation; None if it is too old to act on, or the router has been lost since."""
        if self._latest is None or time.monotonic() - self._latest[1] > STALE_S:
            return None
        return self._latest[0]

    async def _round(self) -> None:
        connection = self._connections
        if self._unsaved and self._caught_up == connection:
            await self._save()
        fleet = await self._counts.read()
        if self._caught_up != connection:
            # after the look at Serve: whatever number another autoscaler has set, it had saved before
            await self._catch_up()
            self._caught_up = connection
        if self._connections != connection:
            # another autoscaler may have acted since the look at Serve
            return
        observed = self._observed()
        if observed is None:
            return
        try:
            seen = observation_of(observed)
        except (CodecError, UnicodeDecodeError, ValueError) as error:
            log.error("the router's observation cannot be read: %s", error)
            return
        # the newest start last, since the newest ones count
        in_order = sorted(observed.starts.items(), key=lambda told: told[1].began_s)
        found = ((engine, start_steps(engine, one, fleet)) for engine, one in in_order)
        starts = {engine: steps for engine, steps in found if steps is not None}
        ruled = self.controller.manual
        made = self.controller.decide(seen, fleet, observed.abilities, starts)
        others_rule = self.controller.manual is not ruled
        known = figures(made.seen, fleet, made.plan, self.controller.groups, self.controller.overdue)
        self._tell_figures(made.seen, known)
        self._tell_overdue(fleet)
        decided = made.fault if made.step is None else made.step
        if decided is not None and self._journal is not None:
            self._journal.write(self.controller.policy, made.before, made.seen, decided)
        self._tell(made)
        self._link.send(self._standby())
        for order in made.orders.engines:
            duty: WireDuty = "warm" if order.duty is Duty.WARM else "active"
            self._link.send(Assign(order.engine, order.role.value, duty))
        await self._set(dict(made.orders.targets))
        if others_rule or time.monotonic() - self._saved_s > SAVE_S:
            await self._save()
        self.rounds += 1

    async def _catch_up(self) -> None:
        """Goes on from what is in the store, unless this autoscaler has saved it itself: then nobody else has decided
        since, and it knows more than it has saved.
        """
        memory = await self._store.load()
        if memory != self._own:
            self.controller, self._own = self.controller.begun_with(memory), memory
            # their connections have ended
            self._unsaved = []

    async def _set(self, targets: dict[str, int]) -> None:
        """Sets numbers of replicas. They are saved before, so that a controller that goes on after this process has
        died does not take them for somebody else's. Nothing is set if the router has been lost meanwhile: it may obey
        another autoscaler by now.
        """
        if not targets:
            return
        self.controller.trying(targets)
        await self._save()
        if self._observed() is None:
            return
        await self._counts.set(targets)
        self.controller.done(targets)

    async def _save(self) -> None:
        """Saves the controller's memory, then answers the orders that it has. An order that comes meanwhile waits for
        the next time; so do all where the store is away.
        """
        orders, self._unsaved = self._unsaved, []
        memory = self.controller.memory()
        try:
            await self._store.save(memory)
        except BaseException:
            self._unsaved = orders + self._unsaved
            raise
        self._own, self._saved_s = memory, time.monotonic()
        for channel, answered in orders:
            channel.send(answered)

    def _tell_figures(self, seen: Observation, known: Mapping[str, float]) -> None:
        """Tells the router leads, steps and what is `known` of the fleet for its metrics, in every round: it may be a
        new one.
        """
        seconds = {f"lead_seconds_{name[:-2]}": value for name, value in asdict(seen.leads).items()}
        steps = self.controller.start_steps
        if steps is not None:
            seconds |= {f"start_step_seconds_{name[:-2]}": value for name, value in asdict(steps).items()}
        self._link.send(LeadsTold({**seconds, **known, **self._gauges()}))

    def _tell_overdue(self, fleet: Fleet) -> None:
        """Warns of replicas that are overdue, with what Serve says of their groups, once for each change. Serve may
        learn the reason later, and tells it with other details after each attempt, so its first sentence counts.
        """
        before, self._overdue = self._overdue, {}
        for name, words in self.controller.overdue_words.items():
            why = " ".join(fleet.groups[name].message.split())
            self._overdue[name] = words, why.partition(". ")[0]
            if before.get(name) != self._overdue[name]:
                log.warning("%s%s", words, f"; Serve says: {why}" if why else "")
        for name in before.keys() - self._overdue.keys():
            log.info("%s: no replica is overdue any more", name)

    def _tell(self, made: Decision) -> None:
        """Logs a decision that differs from the one before."""
        plan = made.plan
        told = (
            None if plan is None else (plan.serving, plan.warm),
            made.held,
            made.orders,
        )
        if told == self._told:
            return
        self._told = told
        if made.fault is not None:
            log.error("%s; the plan before stays in force", made.fault.words, exc_info=made.fault.error)
        wanted = "nothing yet" if plan is None else f"{plan.serving} and {plan.warm} warm"
        why = "; ".join((*made.reasons, *([f"held: {made.held}"] if made.held else ()), *made.orders.notes))
        orders = [f"{o.engine}: {o.role.value}, {o.duty.value}" for o in made.orders.engines]
        orders += [f"{name}: {number} replicas" for name, number in made.orders.targets]
        log.info("wanted: %s (%s); orders: %s", wanted, why or "no reason", ", ".join(orders) or "none")
