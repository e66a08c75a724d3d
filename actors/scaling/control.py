"""The controller of an autoscaler: from what is observed to orders, again at every observation.

The policy decides on every observation, also while an administrator's counts rule: so it goes on learning, and its plan
can be shown. Counts rule from `scale` until `release`. A number of replicas that neither this controller nor a deploy
of the configuration has set was set by somebody else: it rules like an administrator's, and is said. While a deploy
runs, a number that is not the configuration's is not judged and not changed: the deploy may set numbers at any time
until Serve says that it is over.

Orders wait (`held`) while there is nothing to decide on: while the first replicas start, before the policy knows what
an engine carries, and after any error of the policy (`fault`). The plan before stays in force then; only the moves to
it are made anew. Before the first plan as many engines of each group serve as the configuration's `replicas` say, also
where Serve has replaced the replicas that began to serve. Nothing here does I/O; `memory` is what a later controller
needs to go on.

Bounds that an administrator has set (`bound`) rule until the configuration of their group has others than those that
they replaced, or the application is deployed anew after it was deleted. The policy is made anew for them.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from actors.scaling.bounds import BadScale, bounded, bounds_of
from actors.scaling.fleet import Fleet, Group, awaited, completed, group_of, not_started, overdue_words
from actors.scaling.orders import Order, Orders, moves_to, orders
from actors.scaling.waits import Waits
from policies.journal.codec import dumps, loads
from policies.scaling.base import Counts, Plan, ScalingPolicy, Step, Way
from policies.scaling.journal import ScalingJournalError, header_line, opened
from policies.scaling.memory import carried_over, rested
from policies.scaling.moves import moves
from policies.scaling.observation import Duty, Observation
from policies.scaling.sleep import NEEDS_CAPACITY, UNFITTED, MaySleep, PhaseSince, phase_after
from policies.scaling.starts import LeadTimes, StartSteps
from policies.state.standby import Abilities, Phase, Standby
from policies.state.views import Role

START_HOLD_S = 120.0
"""Longest wait for the first replicas. ASSUMPTION: longer than engines of equal kind start apart."""
BREAK_S = 60.0
"""Longest time between two decisions in which what lasts goes on without a break, such as the time without any
request. ASSUMPTION: an autoscaler that died is replaced sooner; with one that comes later everything begins anew."""
LOST_S = 60.0
"""Age from which a replica that Serve calls running, and whose engine the router does not know, may be given up.
ASSUMPTION: longer than engines take to find a new router."""


MEMORY = 2
"""Number of the form of a controller's memory."""


class FleetUnknown(RuntimeError):
    """An order cannot be judged before the first decision of a controller or of a connection to the router; the same
    order can be a moment later.
    """


@dataclass(frozen=True, slots=True)
class Manual:
    """Numbers of serving replicas by group that rule instead of the policy, and who set them."""

    counts: Mapping[str, int]
    by: str = "an administrator"


class Decision(NamedTuple):
    """One step: what was seen, the plan (None before the first) with its reasons, why the policy's orders wait, and the
    orders. `step` is the policy's own decision for the journal, and `before` its state before that step. If the policy
    has failed instead, `fault` says how.
    """

    seen: Observation
    plan: Plan | None
    reasons: tuple[str, ...]
    held: str | None
    orders: Orders
    step: Step | None = None
    before: Any = None
    fault: "Fault | None" = None


class Fault(NamedTuple):
    """An error of the policy: the exception, and whether it was raised by the step or by a plan that no orders can
    carry out.
    """

    error: Exception
    by_step: bool

    @property
    def words(self) -> str:
        """The fault as a sentence for an operator."""
        if not self.by_step:
            return f"the policy's plan cannot be carried out: {self.error!r}"
        if isinstance(self.error, ValueError):
            return f"the policy refuses this observation: {self.error}"
        return f"the policy failed: {self.error!r}"


class _Bounded(NamedTuple):
    """The groups with other bounds, with the policy made for them, its state, and the plan in force."""

    groups: Mapping[str, Group]
    policy: ScalingPolicy
    state: Any
    plan: Plan | None


class _Tried(NamedTuple):
    """A step of the policy with its orders, its state before, and why there is no step."""

    step: Step | None = None
    orders: Orders = Orders()
    before: Any = None
    held: str | None = None
    fault: Fault | None = None


class Controller:
    """Decides for one application. `make` returns the policy for groups, here at first the configured ones; it raises
    ValueError for bounds that the policy cannot keep.

    `memory` is that of the controller before, if there was one. Each part of it stands
    as long as what it depends on: learned states as `policies.scaling.memory` says, an administrator's counts and
    bounds as long as their groups. An engine that was awaited for `start_limit_s` seconds is overdue and no longer
    counts as capacity on its way; None: the limit follows from measured starts (`actors.scaling.waits`).
    """

    def __init__(
        self,
        make: Callable[[Mapping[str, Group]], ScalingPolicy],
        groups: Mapping[str, Group],
        version: str = "",
        memory: str | None = None,
        start_limit_s: float | None = None,
    ) -> None:
        self._make, self.configured, self._version = make, groups, version
        self.groups = groups
        """The groups with the bounds that rule; `configured` are those of the configuration."""
        self.policy = make(groups)
        self.manual: Manual | None = None
        self.last: Decision | None = None
        self.fleet: Fleet | None = None
        self._state: Any = None
        self._plan: Plan | None = None
        self._set: dict[str, int] | None = None
        self._tried: dict[str, int] = {}
        self._deployed_s: float | None = None
        self._first_s: float | None = None
        self._seen_s: float | None = None
        """The time of the last observation on which the policy decided."""
        self._others_seen_s: dict[str, float | None] = {}
        """The times of the memory's policies by name."""
        self._said: tuple[str, ...] = ()
        self._unknown_since_s: dict[str, float] = {}
        """The running replicas' engines that the router does not know, and since when."""
        self._serving: dict[str, int] = {}
        """The active engines of each group, as they were seen last when all of its running replicas were known."""
        self._unjudged: frozenset[str] = frozenset()
        """The groups whose number was changed during a deploy, to one that is not the configuration's."""
        self._opening: tuple[str, ...] = ()
        """Notes with which those of the first decision begin."""
        self._leads = LeadTimes()
        self._waits = Waits(start_limit_s)
        self.overdue: frozenset[str] = frozenset()
        """The engines that were awaited for too long at the last observation."""
        self._remembers = False
        self.phase = PhaseSince()
        self.abilities: Abilities | None = None
        """The abilities of the engines that were there last; None before the first one that decodes."""
        self._not_started = ""
        self._known: list[str] = []
        """The ids of the replicas that the memory knows."""
        self._states: dict[str, str] = {}
        """The memory's states of policies by name, as header lines of a journal."""
        if memory is not None:
            self._remember(memory)

    def begun_with(self, memory: str | None) -> "Controller":
        """Returns a new controller of the same application, which begins with this memory."""
        return Controller(self._make, self.configured, self._version, memory, self._waits.configured_s)

    def forget_fleet(self) -> None:
        """Has the orders of administrators wait for the next decision, because another controller may have decided
        since the last one.
        """
        if self.fleet is not None:
            self._known, self.fleet = _replica_ids(self.fleet), None

    # --------------------------------------------------------------------------------------------------- decisions

    def decide(
        self,
        seen: Observation,
        fleet: Fleet,
        abilities: Abilities | None = None,
        starts: Mapping[str, StartSteps] | None = None,
    ) -> Decision:
        """Returns the decision on an observation of engines with these abilities. Its numbers of replicas are `trying`
        before they are set, and `done` after. `starts` are those of engines that were measured, by the engine's id.
        """
        self.fleet = fleet
        self.abilities = abilities or self.abilities
        for engine, steps in (starts or {}).items():
            self._leads.started(engine, steps)
            self._waits.started(steps.total_s)
        self.overdue = self._waits.look(
            awaited(seen, fleet), {engine.engine for engine in seen.engines}, seen.now_s
        )
        seen = replace(seen, leads=self._leads.leads(seen.leads))
        seen = completed(seen, fleet, self.groups, self.overdue)
        self._said, self._opening = (*self._opening, *self._others(fleet), *self._after_break(seen.now_s)), ()
        lost = self._lost(seen, fleet)
        self._count_serving(seen)
        tried = self._step(seen, fleet, lost)
        if tried.step is not None:
            self._state, self._plan = tried.step.state, tried.step.plan
            self._seen_s = seen.now_s
        if self.manual is not None:
            made = self._manual_decision(seen, fleet, self.manual, self.groups)
        elif self._plan is None:
            made = Decision(seen, None, (), tried.held, self._first_serve(seen))
        elif tried.step is not None:
            made = Decision(seen, tried.step.plan, tried.step.reasons, None, tried.orders)
        else:
            plan = replace(self._plan, moves=moves(seen, self._plan.serving, self._plan.warm))
            made = Decision(seen, plan, (), tried.held, self._orders(plan, seen, fleet, lost))
        self._look_after_phase(seen, fleet)
        self.last = made._replace(
            held=tried.held,
            step=tried.step,
            before=tried.before,
            fault=tried.fault,
            orders=made.orders._replace(
                notes=(*self._said, *self.overdue_words.values(), *made.orders.notes),
                targets=tuple(target for target in made.orders.targets if target[0] not in self._unjudged),
            ),
        )
        return self.last

    def _after_break(self, now_s: float) -> tuple[str, ...]:
        """Has the policy begin anew what must last without a break, if it has not decided for long, or if the clock was
        set back. Returns what is to be said of it.
        """
        before_s = self._seen_s
        if before_s is None or self._state is None or abs(now_s - before_s) <= BREAK_S:
            return ()
        self._seen_s = None
        # another policy, so that the journal begins a file with the changed state
        self.policy = self._make(self.groups)
        self._state = rested(self.policy, self._state)
        gap_s = now_s - before_s
        why = (
            f"the policy has not decided for {gap_s:.0f} s"
            if gap_s > 0
            else f"the clock went back by {-gap_s:.0f} s"
        )
        return (f"{why}: times of calm and idleness begin anew",)

    @property
    def start_steps(self) -> StartSteps | None:
        """The learned quantile of each step of a start; None before the first one was measured."""
        return self._leads.steps()

    def _step(self, seen: Observation, fleet: Fleet, lost: frozenset[str]) -> _Tried:
        """Has the policy decide. Whatever error it makes, serving and an administrator's orders go on."""
        if self._first_s is None:
            self._first_s = seen.now_s
        starting = len(seen.with_duty(Duty.STARTING))
        if self._state is None and starting and seen.now_s - self._first_s < START_HOLD_S:
            return _Tried(held=f"{starting} of the first replicas have not started yet")
        may_sleep = isinstance(self.policy, MaySleep)
        if self.policy.name in NEEDS_CAPACITY and not seen.fitted and not may_sleep:
            return _Tried(held=UNFITTED)
        before, step = self._state, None
        try:
            before = self.policy.initial() if before is None else before
            step = self.policy.step(seen, before)
            return _Tried(step, self._orders(step.plan, seen, fleet, lost), before)
        except Exception as error:
            # a bug, or a report that makes no sense, such as NaN
            fault = Fault(error, by_step=step is None)
            return _Tried(before=before, held=fault.words, fault=fault)

    @property
    def overdue_words(self) -> dict[str, str]:
        """A sentence for an operator about the engines that are overdue, by group."""
        return {} if self.fleet is None else overdue_words(self.fleet, self.overdue, self._waits.limit_s)

    def _orders(
        self, plan: Plan, seen: Observation, fleet: Fleet, lost: frozenset[str] = frozenset()
    ) -> Orders:
        """Returns the orders for a policy's plan."""
        budget = self.policy.limits.budget
        return orders(plan, seen, fleet, self.groups, None, lost, self.overdue, budget)

    def _lost(self, seen: Observation, fleet: Fleet) -> frozenset[str]:
        """Returns the engines of running replicas that the router has not known for LOST_S."""
        coming = self.overdue | {engine.engine for engine in seen.with_duty(Duty.STARTING)}
        unknown = {e for e in coming if (replica := fleet.replica(e)) is not None and replica.running}
        self._unknown_since_s = {e: self._unknown_since_s.get(e, seen.now_s) for e in unknown}
        return frozenset(e for e, since_s in self._unknown_since_s.items() if seen.now_s - since_s >= LOST_S)

    def _first_serve(self, seen: Observation) -> Orders:
        """Returns the orders to activate warm engines until each group has its `first` active ones."""
        first = {name: max(g.least, min(g.most, g.first)) for name, g in self.groups.items()}
        to_first = moves_to(first, seen, self.groups)
        return Orders(
            tuple(Order(move.engine, move.role, Duty.ACTIVE) for move in to_first if move.way is Way.ACTIVATE)
        )

    # ------------------------------------------------------------------------------------------------------- sleep

    def _look_after_phase(self, seen: Observation, fleet: Fleet) -> None:
        """Notes the fleet's phase. While somebody's numbers rule, the policy's sleep does not."""
        if not isinstance(self.policy, MaySleep):
            return
        asleep = self.manual is None and self._state is not None and self._state.asleep
        self.phase = phase_after(self.phase, seen, asleep, self.policy.sleep.wake_limit_s)
        if self.phase.phase is Phase.FAILED:
            self._not_started = not_started(fleet)

    @property
    def standby(self) -> Standby:
        """The phase of the fleet, for the router and all who wait for an engine."""
        if not isinstance(self.policy, MaySleep):
            return Standby()
        roles = tuple(role for role in Role if self.policy.limits.least.of(role))
        phase, limit_s = self.phase.phase, self.policy.sleep.wake_limit_s
        return Standby(phase, roles, limit_s, self._not_started if phase is Phase.FAILED else "")

    def _manual_decision(
        self, seen: Observation, fleet: Fleet, manual: Manual, groups: Mapping[str, Group]
    ) -> Decision:
        by_role = dict.fromkeys(Role, 0)
        for name, number in manual.counts.items():
            by_role[groups[name].role] += number
        wanted = Counts(by_role[Role.PREFILL], by_role[Role.DECODE], by_role[Role.COLOCATED])
        fixed = _replicas(manual.counts, groups)
        plan = Plan(wanted, sum(fixed.values()) - wanted.total, moves_to(manual.counts, seen, groups))
        reasons = (
            f"{manual.by} set {shown(manual.counts)}; `sluice scale auto` gives it back to the policy",
        )
        return Decision(seen, plan, reasons, None, orders(plan, seen, fleet, groups, fixed))

    # ------------------------------------------------------------------------------------------- what others have set

    def _others(self, fleet: Fleet) -> tuple[str, ...]:
        """Adopts numbers of replicas that somebody else has set since, as far as bounds and budget allow, and returns
        what is to be said of them.
        """
        now = {name: deployed.target for name, deployed in fleet.groups.items()}
        known, self._set = self._set, dict(now)
        deployed_since = self._deployed_s is not None and fleet.deployed_s != self._deployed_s
        self._deployed_s = fleet.deployed_s
        self._unjudged = frozenset()
        if known is None:
            return ()
        remembers, self._remembers = self._remembers, False
        if remembers and deployed_since and not set(self._known) & set(_replica_ids(fleet)):
            # it was deleted in between; a deploy of a changed configuration leaves replicas, at least stopping ones
            self.manual, self._state, self._states, self._tried = None, None, {}, {}
            if self.groups != self.configured:
                self.groups, self.policy = self.configured, self._make(self.configured)
            return ("the application was deployed anew: what ruled before is forgotten",)
        changed = {
            name: n for name, n in now.items() if n != known.get(name, n) and n != self._tried.get(name)
        }
        for name in [name for name, n in self._tried.items() if now.get(name) == n]:
            del self._tried[name]
        said: tuple[str, ...] = ()
        if deployed_since or fleet.deploying:
            by_deploy = {name: n for name, n in changed.items() if n == self.groups[name].deployed}
            waiting = {name: n for name, n in changed.items() if name not in by_deploy}
            self._unjudged, changed = frozenset(waiting), {}
            self._set |= {name: known[name] for name in waiting}
            if by_deploy:
                said += (f"a deploy has set {shown(by_deploy)} replicas; what is wanted is set again",)
            if waiting:
                said += (
                    f"{shown(waiting)} replicas were set while a deploy runs: they stay until it is over",
                )
        if not changed:
            return said
        counts = {
            name: self._serving_of(name, changed.get(name, self.groups[name].deployed))
            for name in self.groups
        }
        if self.manual is not None:
            counts = {**self.manual.counts, **{name: counts[name] for name in changed}}
        else:
            counts |= {name: self._now_serving(name, fleet) for name in self.groups if name not in changed}
        for name in changed:
            least = _by_hand(self.groups[name])
            while counts[name] > least and _over_budget(counts, self.groups, self.policy):
                counts[name] -= 1
        self.manual = Manual(counts, "somebody else")
        return (f"somebody else has set {shown(changed)} replicas: adopted, {shown(counts)} serve",)

    def _serving_of(self, name: str, replicas: int) -> int:
        """Returns how many of a group's replicas are to serve when it has this number of them."""
        group = self.groups[name]
        return max(_by_hand(group), min(group.most, replicas - group.warm))

    def _now_serving(self, name: str, fleet: Fleet) -> int:
        """Returns how many engines of a group serve now, within its bounds."""
        if self.last is None:
            return self._serving_of(name, fleet.groups[name].target)
        return max(_by_hand(self.groups[name]), min(self.groups[name].most, self._serving[name]))

    def _count_serving(self, seen: Observation) -> None:
        """Counts each group's active engines. While the router does not know a replica that runs, the number before
        stands, at most for LOST_S: a new router learns of engines one by one, and none has gone.
        """
        soon = {group_of(e) for e, since_s in self._unknown_since_s.items() if seen.now_s - since_s < LOST_S}
        for name in self.groups:
            if name not in soon or name not in self._serving:
                active = seen.with_duty(Duty.ACTIVE)
                self._serving[name] = sum(group_of(engine.engine) == name for engine in active)

    def trying(self, targets: Mapping[str, int]) -> None:
        """Notes numbers of replicas that are about to be set, so that they are not taken for somebody else's."""
        self._tried |= targets

    def done(self, targets: Mapping[str, int]) -> None:
        """Notes numbers of replicas that have been set."""
        if self._set is not None:
            self._set |= targets

    # ------------------------------------------------------------------------------------------------- administrators

    def checked(self, counts: Mapping[str, Any]) -> Manual:
        """Returns these numbers of serving replicas, with the present ones for the groups that are not named.

        Raises BadScale, or FleetUnknown before the first decision.
        """
        for name, number in counts.items():
            group = self.groups.get(name)
            if group is None:
                raise BadScale(f"there is no group {name!r}; there are {', '.join(self.groups)}")
            whole = isinstance(number, int) and not isinstance(number, bool)
            if not whole or not _by_hand(group) <= number <= group.most:
                zero = "" if group.least else "; only the policy has a group sleep, because it wakes it again"
                where = f"in engines.{name}.scaling"
                if bounds_of(group) != bounds_of(self.configured[name]):
                    where = "that an administrator has set"
                raise BadScale(
                    f"{name} is {number!r}: it must be a whole number {_by_hand(group)}..{group.most}, the bounds"
                    f" {where}{zero}"
                )
        fleet = self._known_fleet()
        rest = self.manual.counts if self.manual is not None else {}
        whole_fleet = {
            name: counts[name] if name in counts else rest.get(name, self._now_serving(name, fleet))
            for name in self.groups
        }
        why = _over_budget(whole_fleet, self.groups, self.policy)
        if why is not None:
            raise BadScale(why)
        return Manual(whole_fleet)

    def _known_fleet(self) -> Fleet:
        """Returns the fleet of the last decision. Raises FleetUnknown before the first one."""
        if self.fleet is None:
            raise FleetUnknown("the autoscaler has just met this router and does not know the fleet yet")
        return self.fleet

    def scale(self, counts: Mapping[str, Any]) -> None:
        """Has these numbers of serving replicas rule from the next decision on. Raises what `checked` does."""
        self.manual = self.checked(counts)
        if self._set is not None:
            for name in counts:
                # the order is the last word on a group, whoever has set its number before, also since the last look
                self._set.pop(name, None)

    def release(self) -> None:
        """Has the policy rule from the next decision on. Raises FleetUnknown before the first one."""
        self._known_fleet()
        self.manual = None

    def bound(self, asked: Mapping[str, Any]) -> None:
        """Has these bounds (`actors.scaling.bounds`) rule from the next decision on. Raises BadScale, or FleetUnknown
        before the first decision.
        """
        made = self._bounded(asked)
        self._known_fleet()
        self.groups, self.policy, self._state, self._plan = made

    def _bounded(self, asked: Mapping[str, Any]) -> _Bounded:
        """Returns what would rule with these bounds. Raises BadScale."""
        groups = bounded(self.groups, asked)
        try:
            policy = self._make(groups)
        except ValueError as error:
            raise BadScale(str(error)) from None
        if isinstance(policy, MaySleep) is not isinstance(self.policy, MaySleep) and (
            self.phase.phase is not Phase.AWAKE
        ):
            raise BadScale(
                f"the engines are {self.phase.phase.value}: whether they may sleep (min 0) can be changed while they"
                " are awake; send a request, and try again when it is answered"
            )
        if self.manual is not None:
            for name, number in self.manual.counts.items():
                low, high = _by_hand(groups[name]), groups[name].most
                if not low <= number <= high:
                    raise BadScale(
                        f"{name} is set to {number} by {self.manual.by}, outside {low}..{high}: set another number"
                        " first, or give it back to the policy"
                    )
            why = _over_budget(self.manual.counts, groups, policy)
            if why is not None:
                raise BadScale(why)
        state = carried_over(self.policy, self._state, policy)
        plan = self._plan
        if plan is not None and self.phase.phase is Phase.AWAKE:
            plan = Plan(*policy.limits.kept(plan.serving, plan.warm))
        return _Bounded(groups, policy, state, plan)

    def preview(
        self, counts: Mapping[str, Any] | None, bounds: Mapping[str, Any] | None = None
    ) -> Decision | None:
        """Returns the decision that these counts, the policy within these bounds, or without both the policy would make
        on the last observation; None before the first. Raises BadScale.
        """
        changed = None if bounds is None else self._bounded(bounds)
        if self.last is None or self.fleet is None:
            return None
        if changed is not None:
            return self._preview_bounds(self.last, self.fleet, changed)
        if counts:
            asked = self.checked(counts)
            made = self._manual_decision(self.last.seen, self.fleet, asked, self.groups)
            return made._replace(reasons=(f"{shown(asked.counts)} would serve; nothing is set",))
        if self._plan is None:
            none = self.last._replace(plan=None, reasons=(), orders=Orders())
            return self.last if self.manual is None else none
        plan = replace(self._plan, moves=moves(self.last.seen, self._plan.serving, self._plan.warm))
        reasons = self.last.step.reasons if self.last.step is not None else ()
        ordered = self._orders(plan, self.last.seen, self.fleet)
        return self.last._replace(plan=plan, reasons=reasons, orders=ordered)

    def _preview_bounds(self, last: Decision, fleet: Fleet, changed: _Bounded) -> Decision:
        if self.manual is not None:
            return self._manual_decision(last.seen, fleet, self.manual, changed.groups)
        if changed.plan is None or changed.state is None:
            # the policy has not begun, and what holds it back does not depend on bounds
            return last
        step = changed.policy.step(last.seen, changed.state)
        budget = changed.policy.limits.budget
        made = orders(step.plan, last.seen, fleet, changed.groups, overdue=self.overdue, budget=budget)
        return Decision(last.seen, step.plan, step.reasons, None, made)

    # --------------------------------------------------------------------------------------------------------- memory

    def memory(self) -> str:
        """Returns what a later controller of the same application needs to go on, as one line."""
        states = dict(self._states)
        if self._state is not None:
            # a state that no journal can hold is the policy's bug; the rest is remembered
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                states[self.policy.name] = header_line(self.policy, self._state, self._version)
        manual = None
        if self.manual is not None:
            manual = {"counts": dict(self.manual.counts), "by": self.manual.by}
        return dumps(
            {
                "memory": MEMORY,
                "manual": manual,
                "bounds": {
                    name: {"set": bounds_of(group), "instead_of": bounds_of(self.configured[name])}
                    for name, group in self.groups.items()
                    if bounds_of(group) != bounds_of(self.configured[name])
                },
                "set": self._set,
                "tried": self._tried,
                "deployed_s": self._deployed_s,
                "seen_s": {**self._others_seen_s, self.policy.name: self._seen_s},
                "phase": [self.phase.phase.value, self.phase.since_s],
                "abilities": None if self.abilities is None else list(self.abilities),
                "replicas": self._known if self.fleet is None else _replica_ids(self.fleet),
                "states": states,
            }
        )

    def _remember(self, memory: str) -> None:
        """Takes over an earlier controller's memory, each part as far as the present configuration lets it stand."""
        told = loads(memory)
        if not isinstance(told, dict) or told.get("memory") != MEMORY:
            self._opening = ("the memory of another version is not read: it begins anew",)
            return
        self._remembers = True
        if told["set"] is not None:
            self._set = {name: n for name, n in told["set"].items() if name in self.groups}
        self._tried = {name: n for name, n in told["tried"].items() if name in self.groups}
        self._deployed_s, self._known = told["deployed_s"], told["replicas"]
        phase, since_s = told["phase"]
        self.phase = PhaseSince(Phase(phase), since_s)
        if told["abilities"] is not None:
            context_tokens, features = told["abilities"]
            self.abilities = Abilities(context_tokens, tuple(features))
        self._remember_bounds(told.get("bounds", {}))
        if told["manual"] is not None:
            self._remember_manual(told["manual"]["counts"], told["manual"]["by"])
        self._states = told["states"]
        self._others_seen_s = told.get("seen_s", {})
        line = self._states.get(self.policy.name)
        if line is None:
            return
        try:
            former, state = opened(line)
        except ScalingJournalError:
            # its form has changed since
            return
        self._state = carried_over(former, state, self.policy)
        self._seen_s = self._others_seen_s.get(self.policy.name)

    def _remember_manual(self, told: Mapping[str, int], by: str) -> None:
        """Has an earlier controller's numbers rule, within the groups' present bounds; a group that is new has its
        configured number.
        """
        counts = {
            name: max(_by_hand(group), min(group.most, told.get(name, group.first)))
            for name, group in self.groups.items()
        }
        why = _over_budget(counts, self.groups, self.policy)
        if why is None:
            self.manual = Manual(counts, by)
        else:
            self._opening += (f"{why}: the policy decides",)

    def _remember_bounds(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Has the bounds that an administrator has set rule, where the configuration is as it was then: all of them
        together, as they ruled, or else those that hold one by one.
        """
        stand: dict[str, Any] = {}
        for name, one in told.items():
            group = self.configured.get(name)
            if group is None:
                continue
            if one["instead_of"] != bounds_of(group):
                self._opening += (f"the configuration has other bounds of {name} than before: they rule",)
            else:
                stand[name] = one["set"]
        if not stand or self._bounds_hold(stand) is None:
            return
        for name, own in stand.items():
            why = self._bounds_hold({name: own})
            if why is not None:
                self._opening += (f"the bounds that were set of {name} do not hold any more: {why}",)

    def _bounds_hold(self, asked: Mapping[str, Any]) -> str | None:
        """Has these bounds of groups rule, and returns None, or why they cannot."""
        try:
            groups = bounded(self.groups, asked)
            self.policy, self.groups = self._make(groups), groups
        except ValueError as error:
            return str(error)
        return None


def _replica_ids(fleet: Fleet) -> list[str]:
    """Returns the ids of the application's replicas; those of router and ingresses are there also while it sleeps."""
    return sorted([*fleet.companions, *(r.id for group in fleet.groups.values() for r in group.replicas)])


def _replicas(counts: Mapping[str, int], groups: Mapping[str, Group]) -> dict[str, int]:
    """Returns the numbers of replicas for these numbers of serving ones: warm ones are added, up to the group's
    most.
    """
    return {name: min(group.most, counts[name] + group.warm) for name, group in groups.items()}


def _over_budget(counts: Mapping[str, int], groups: Mapping[str, Group], policy: ScalingPolicy) -> str | None:
    """Returns why these numbers of serving replicas, with the warm ones, do not fit the budget; None if they do."""
    budget, serving = policy.limits.budget, sum(counts.values())
    whole = sum(_replicas(counts, groups).values())
    if whole <= budget:
        return None
    warm = f", with {whole - serving} warm {whole} replicas," if whole > serving else ""
    return f"{shown(counts)}{warm} are more than scaling.budget, {budget}, allows"


def _by_hand(group: Group) -> int:
    """Returns the least number that somebody may set: none at all would wake by no request."""
    return max(1, group.least)


def shown(counts: Mapping[str, int]) -> str:
    """Returns counts as `prefill=2 decode=3`."""
    return " ".join(f"{name}={number}" for name, number in counts.items())
