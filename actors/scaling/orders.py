"""From a plan to orders: a role and a duty for single engines, and a number of replicas for each group.

A plan names the engines that leave, but Serve chooses which replicas stop (`fleet.stop_order`). So for each replica
that is to go, Serve's next one is taken instead, and changes places with the engine that the plan named: that engine
takes over its role and duty. A replica is given up only when it is warm, and idle or warm for its group's drain time:
before that no work is under way there, so nothing has to end. An active replica whose place nobody can take yet stays.

Everything follows from what is, so orders that are lost are given again. Nothing here does I/O.
"""

from collections import Counter
from collections.abc import Mapping, Set
from typing import NamedTuple

from actors.scaling.fleet import Fleet, Group, Replica, engine_id, group_of, stop_order
from policies.scaling.base import Move, Plan, Way
from policies.scaling.observation import Duty, EngineView, Observation
from policies.scaling.warm_pool import first_to_activate, first_to_leave
from policies.state.views import Role

OVER_BUDGET = "scaling.budget allows no more beside them"


class Order(NamedTuple):
    """One engine's role and duty, which is ACTIVE or WARM."""

    engine: str
    role: Role
    duty: Duty


class Orders(NamedTuple):
    """The orders of one step: engines that change, groups whose number of replicas changes, and notes in words."""

    engines: tuple[Order, ...] = ()
    targets: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


def moves_to(counts: Mapping[str, int], seen: Observation, groups: Mapping[str, Group]) -> tuple[Move, ...]:
    """Returns the moves to these numbers of serving engines by group, each in its group's own role.

    A STOP is of an engine that serves no longer; whether its replica stops is for `orders` to say.
    """
    found: list[Move] = []
    for name, wanted in counts.items():
        home = groups[name].role
        own = [e for e in seen.engines if group_of(e.engine) == name]
        active = [e for e in own if e.duty is Duty.ACTIVE]
        away = [e for e in active if e.role is not home]
        leaving = first_to_leave(away) + first_to_leave(e for e in active if e.role is home)
        leaving = leaving[: max(0, len(active) - wanted)]
        found += [Move(Way.STOP, e.engine, e.role) for e in leaving]
        found += [Move(Way.SWITCH, e.engine, home) for e in away if e not in leaving]
        idle = first_to_activate(e for e in own if e.duty is Duty.WARM)
        found += [Move(Way.ACTIVATE, e.engine, home) for e in idle[: max(0, wanted - len(active))]]
    return tuple(found)


def orders(
    plan: Plan,
    seen: Observation,
    fleet: Fleet,
    groups: Mapping[str, Group],
    fixed: Mapping[str, int] | None = None,
    lost: Set[str] = frozenset(),
    overdue: Set[str] = frozenset(),
    budget: int | None = None,
) -> Orders:
    """Returns the orders for a plan on the completed observation `seen`.

    With `fixed`, the groups get these numbers of replicas; otherwise the plan's starts and stops decide them. `lost`
    names engines of running replicas that have not come to the router: they are given up like those that start.

    `overdue` names engines that are awaited and that `seen` leaves out, so the plan starts others. Another replica of
    the same group would lack the same, so these starts go to a group that waits for none, and an overdue replica that
    has no place yet is given up for each. One that has a place may be loading, so it stays, as one does of a group with
    its least number; the other one then starts only if all groups together get no more than `budget` replicas. Where
    there is no such group, the overdue replicas stay wanted.
    """
    return _Work(plan, seen, fleet, groups, fixed, lost, overdue, budget).done()


class _Work:
    """The making of one step's orders; each method takes in one part of the plan."""

    def __init__(
        self,
        plan: Plan,
        seen: Observation,
        fleet: Fleet,
        groups: Mapping[str, Group],
        fixed: Mapping[str, int] | None,
        lost: Set[str],
        overdue: Set[str],
        budget: int | None,
    ) -> None:
        self.lost, self.budget = lost, budget
        self.overdue = Counter(group_of(engine) for engine in overdue)
        self.instead = len(overdue)
        """The starts to come that are in the place of an overdue replica."""
        self.given_up: Counter[str] = Counter()
        """The overdue replicas of each group in whose place another group starts one."""
        self.taken_back: Counter[str] = Counter()
        """The replicas of each group that have not started and are not needed any more."""
        self.plan, self.seen, self.fleet, self.groups, self.fixed = plan, seen, fleet, groups, fixed
        self.views = {engine.engine: engine for engine in seen.engines}
        self.now = {name: deployed.target for name, deployed in fleet.groups.items()}
        self.target = Counter(self.now)
        self.given: dict[str, tuple[Role, Duty]] = {}
        self.leaving: list[str] = []
        self.notes: list[str] = []

    def done(self) -> Orders:
        for move in self.plan.moves:
            if move.way in (Way.SWITCH, Way.ACTIVATE):
                self.given[move.engine] = (move.role, Duty.ACTIVE)
            elif move.way is Way.STOP:
                self.leaving.append(move.engine)
            elif move.way is Way.START and self.fixed is None:
                self._start(move.role)
        for move in self.plan.moves:
            if move.way is Way.DEACTIVATE:
                self._deactivate(self.views[move.engine])
        if self.fixed is None:
            self._leave_full_groups()
            fewer = self._fewer()
            self.target = Counter({name: max(self.groups[name].least, n) for name, n in self.target.items()})
        else:
            wanted = {name: self._within(name, self.fixed.get(name, n)) for name, n in self.now.items()}
            self.target = Counter({name: max(n, self.now[name]) for name, n in wanted.items()})
            fewer = {name: self.now[name] - n for name, n in wanted.items() if n < self.now[name]}
        self._stop(fewer)
        changed = (
            Order(engine, *wanted)
            for engine, wanted in self.given.items()
            if wanted != (self.views[engine].role, self.views[engine].duty)
        )
        targets = ((name, n) for name, n in self.target.items() if n != self.now[name])
        return Orders(tuple(changed), tuple(targets), tuple(self.notes))

    # ------------------------------------------------------------------------------------------------------ numbers

    def _within(self, name: str, number: int) -> int:
        group = self.groups[name]
        return max(group.least, min(group.most, number))

    def _start(self, role: Role) -> None:
        """Asks for one more replica: of a group of this role, else of another one, whose engine then gets the role."""
        free = [group for name, group in self.groups.items() if self.target[name] < group.most]
        if self.instead:
            self.instead -= 1
            self._start_instead(role, [group for group in free if not self.overdue[group.name]])
        elif not free:
            self.notes.append(f"no group may have one more replica, so nothing is started for {role.value}")
        elif self.overdue and not self._has_budget():
            self._note(f"nothing more is started for {role.value} while replicas are overdue: {OVER_BUDGET}")
        else:
            self.target[self._best(role, free)] += 1

    def _has_budget(self) -> bool:
        """Returns whether there may be one more replica. Plans keep the budget without those that are overdue."""
        return self.budget is None or self.target.total() - self.given_up.total() < self.budget

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _best(self, role: Role, free: list[Group]) -> str:
        """Returns the name of the group that gets one more replica for a role."""
        best = min(
            free,
            key=lambda g: (
                self.overdue[g.name] > 0, g.role is not role, self.target[g.name] >= g.least,
                self.target[g.name] - g.most, g.name,
            ),
        )  # fmt: skip
        return best.name

    def _start_instead(self, role: Role, free: list[Group]) -> None:
        """Asks for one more replica of these groups in the place of an overdue one, which is given up if nothing that
        has begun is lost by it, and its group has enough without it.
        """
        leaves = [
            name
            for name, number in self.overdue.items()
            if self.given_up[name] < min(number, self._without_place(name))
            and self.now[name] - self.given_up[name] > self.groups[name].least
        ]
        why = None
        if not free:
            why = "no group without such replicas may have one more"
        elif leaves:
            self.given_up[min(leaves, key=lambda name: (self.groups[name].role is not role, name))] += 1
        elif not self._has_budget():
            why = OVER_BUDGET
        if why is None:
            self.target[self._best(role, free)] += 1
        else:
            self._note(
                f"nothing is started for {role.value} in the place of replicas that are overdue: {why}"
            )

    def _leave_full_groups(self) -> None:
        """Has engines leave a group that has more replicas than it may have, since its bounds were changed. The plan
        counts by role, so it names none while another group of the role has room.
        """
        for name, group in self.groups.items():
            ids = [engine_id(name, replica.id) for replica in stop_order(self.fleet, name)]
            over = self.now[name] - group.most - sum(engine in self.leaving for engine in ids)
            known = [engine for engine in ids if engine in self.views and engine not in self.leaving]
            self.leaving += sorted(known, key=lambda engine: engine in self.given)[: max(0, over)]

    def _fewer(self) -> dict[str, int]:
        """Returns how many replicas each group gives up: the engines that the plan stops, and starting ones that it no
        longer needs, which the plan does not name because the router does not know them.
        """
        fewer = {name: self.given_up[name] for name in self.now}
        for engine in self.leaving:
            own = group_of(engine)
            free = [
                group
                for name, group in self.groups.items()
                if min(self.target[name], self.now[name]) - fewer[name] > group.least
            ]
            if not free:
                self.notes.append(f"{engine} stays, warm: every group has its least number of replicas")
                continue
            role = self.views[engine].role
            fewer[min(free, key=lambda g: (g.name != own, g.role is not role, g.name)).name] += 1
        staying = [e for e in self.seen.engines if e.duty is not Duty.DRAINING]
        ready = sum(e.duty is not Duty.STARTING for e in staying)
        begun = self.target.total() - sum(self.now.values())
        wanted = self.plan.serving.total + self.plan.warm + sum(fewer.values()) - self.given_up.total()
        over = len(staying) + begun - wanted
        # An overdue replica stays until engines are ready in its place, also when other groups have begun to start
        # some: it may come before them, and if every start took long, none would end.
        missing = max(0, wanted - ready)
        for name in self.groups:
            self._take_back(name, self.overdue[name] - self.given_up[name] - missing, fewer)
        for name in self.groups:
            over -= self._take_back(name, over, fewer)
        return {name: n for name, n in fewer.items() if n > 0}

    def _take_back(self, name: str, most: int, fewer: dict[str, int]) -> int:
        """Has a group give up at most `most` replicas that have not started, and returns how many."""
        starting = self._not_running(name) + sum(group_of(engine) == name for engine in self.lost)
        starting -= self.given_up[name] + self.taken_back[name]
        back = max(0, min(most, starting, self.target[name] - fewer[name] - self.groups[name].least))
        if back:
            fewer[name] += back
            self.taken_back[name] += back
            self.notes.append(f"{name}: {back} that did not start yet is no longer needed")
        return back

    def _not_running(self, name: str) -> int:
        deployed = self.fleet.groups[name]
        staying = deployed.staying
        return sum(not r.running for r in staying) + max(0, deployed.target - len(staying))

    def _without_place(self, name: str) -> int:
        """Returns how many replicas of a group no node has; 0 while another one starts, because Serve might stop that
        one instead.
        """
        if any(not r.running and r.node is not None for r in self.fleet.groups[name].staying):
            return 0
        return self._not_running(name)

    # ------------------------------------------------------------------------------------------------------ engines

    def _intended(self, engine: EngineView) -> tuple[Role, Duty]:
        return self.given.get(engine.engine, (engine.role, engine.duty))

    def _deactivate(self, named: EngineView) -> None:
        """Makes an engine warm: of the active ones of its group and role, the one that Serve would stop first."""
        ordered = self.fleet.groups.get(group_of(named.engine))
        ids = stop_order(self.fleet, group_of(named.engine)) if ordered else []
        for replica in ids:
            view = self.views.get(engine_id(group_of(named.engine), replica.id))
            if view is None or view.engine in self.given or view.engine in self.leaving:
                continue
            if view.duty is Duty.ACTIVE and view.role is named.role:
                named = view
                break
        self.given[named.engine] = (named.role, Duty.WARM)

    def _stop(self, fewer: Mapping[str, int]) -> None:
        """Lowers targets by `fewer` as far as Serve's next replicas can go now; the others are made ready to go."""
        going = {
            name: [engine_id(name, r.id) for r in self._next(name, number)] for name, number in fewer.items()
        }
        victims = {engine for engines in going.values() for engine in engines}
        free = [self.views[e] for e in self.leaving if e not in victims]
        ready: dict[str, list[bool]] = {}
        for name, engines in going.items():
            # replicas that Serve has not made yet, or that do not run, go first
            unborn = fewer[name] - len(engines)
            ready[name] = [True] * max(0, unborn)
            ready[name] += [self._makes_way(self.views.get(e), free, victims) for e in engines]
        for engine in free:
            if engine.duty is Duty.ACTIVE and engine.engine not in self.given:
                self.given[engine.engine] = (engine.role, Duty.WARM)
        for name, can_go in ready.items():
            number = can_go.index(False) if False in can_go else len(can_go)
            self.target[name] = max(self.groups[name].least, self.target[name] - number)

    def _next(self, name: str, number: int) -> list[Replica]:
        """Returns the replicas that Serve would stop next, less those that it has not made yet."""
        deployed = self.fleet.groups[name]
        unborn = max(0, deployed.target - len(deployed.staying))
        over = max(0, len(deployed.staying) - deployed.target)
        return stop_order(self.fleet, name)[over : over + max(0, number - unborn)]

    def _makes_way(self, view: EngineView | None, free: list[EngineView], victims: set[str]) -> bool:
        """Has the engine of Serve's next replica become warm, and another one take its place if the plan needs it.
        Returns whether the replica can stop now.
        """
        if view is None or view.duty not in (Duty.ACTIVE, Duty.WARM):
            return True
        role, duty = self._intended(view)
        if duty is Duty.ACTIVE and view.engine not in self.leaving:
            other = self._stand_in(view, role, free, victims)
            if other is None:
                self.notes.append(
                    f"{view.engine} is next to stop and still serves: another one must be ready first"
                )
                return False
            self.given[other.engine] = (role, Duty.ACTIVE)
        elif duty is Duty.WARM and free:
            # the engine that the plan stops stays in its place, warm
            other = free.pop(0)
            self.given[other.engine] = (other.role, Duty.WARM)
        self.given[view.engine] = (view.role, Duty.WARM)
        if view.duty is not Duty.WARM:
            return False
        idle = not view.running and not view.waiting
        drain_s = self.groups[group_of(view.engine)].drain_s
        return idle or self.seen.now_s - view.since_s >= drain_s

    def _stand_in(
        self, goer: EngineView, role: Role, free: list[EngineView], victims: set[str]
    ) -> EngineView | None:
        """Returns the engine that takes the goer's place: one that was to leave, best of its role, else a warm one.
        With `fixed` numbers it is one of the same group.
        """
        own = group_of(goer.engine)

        def may(engine: EngineView) -> bool:
            return self.fixed is None or group_of(engine.engine) == own

        leaving = [e for e in free if may(e)]
        if leaving:
            best = min(leaving, key=lambda e: (e.role is not role, e.duty is not Duty.ACTIVE, e.engine))
            free.remove(best)
            return best
        warm = [
            e
            for e in self.seen.with_duty(Duty.WARM)
            if may(e) and e.engine not in victims and e.engine not in self.given
        ]
        return min(warm, key=lambda e: (e.role is not role, e.distance, e.since_s, e.engine), default=None)
