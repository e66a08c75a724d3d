"""A Ray Serve and a router in small, around a controller: replicas start and stop by counts as Serve 2.60 does it, and
engines take the roles and duties that they are given. A round is a second.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from actors.scaling.control import Controller, Decision
from actors.scaling.fleet import Deployed, Fleet, Group, Replica, engine_id, group_of
from policies.scaling.base import ScalingPolicy
from policies.scaling.observation import Duty, EngineView, Observation
from policies.scaling.registry import make
from policies.state.standby import Abilities
from policies.state.views import Role
from tests.policies.scaling.fixtures import seen as busy
from tests.policies.scaling.fleet import CAPABILITY


@dataclass
class Running:
    """A replica and its engine. It runs after `start_rounds`; with `placed` False it never does."""

    id: str
    node: str
    born: int
    role: Role
    duty: Duty
    since_s: float
    placed: bool = True
    loads: bool = False
    """Whether it has a node before it runs."""
    requests: int = 0
    stops_in: int | None = None
    connected: bool = True


@dataclass
class World:
    """All of it; `nodes` are those on which new replicas are placed in turn, the first is the head."""

    groups: dict[str, Group]
    policy: str = "fixed"
    nodes: tuple[str, ...] = ("n0",)
    start_rounds: int = 3
    room: int = 1_000
    params: dict[str, object] = field(default_factory=dict)
    now: int = 0
    deployed_s: float = 1.0
    deploying: bool = False
    companions: tuple[str, ...] = ()
    """The ids of the replicas of router and ingresses."""
    stopped_active: int = 0
    rate: float | None = None
    """Requests per second; None: no windows at all, as before the first one."""
    queued: int = 0
    """Requests that wait at the router."""
    abilities: Abilities | None = None
    serve_says: str = ""
    """The words of Serve about a group whose replicas do not run."""
    made: int = 0
    """Number of replicas that have been made, from which their ids follow."""
    budget: int | None = None
    """Most replicas; None: what the groups may have."""
    start_limit_s: float | None = None
    full: frozenset[str] = frozenset()
    """The groups whose replicas are never placed."""
    fails_after: int | None = None
    """Rounds after which a replica of a `full` group dies, so that another one is made in its place."""

    def __post_init__(self) -> None:
        self.targets = {name: group.deployed for name, group in self.groups.items()}
        self.replicas: dict[str, list[Running]] = {name: [] for name in self.groups}
        self.controller = self.new_controller()
        for name in self.groups:
            self._fill(name)
            for replica in self.replicas[name]:
                replica.born = -self.start_rounds

    def new_controller(self, memory: str | None = None) -> Controller:
        return Controller(self.made_policy, self.groups, "test", memory, self.start_limit_s)

    def made_policy(self, groups: Mapping[str, Group]) -> ScalingPolicy:
        roles = {role: [g for g in groups.values() if g.role is role] for role in Role}
        bounds: dict[str, int] = {}
        for role, own in roles.items():
            bounds[f"{role.value}_min"] = sum(g.least for g in own)
            bounds[f"{role.value}_max"] = sum(g.most for g in own)
        bounds["warm_min"] = sum(g.warm for g in groups.values())
        bounds["warm_max"] = sum(g.warm_most for g in groups.values())
        bounds["budget"] = self.budget or sum(g.most for g in groups.values())
        return make(self.policy, {**self.params, "limits": bounds})

    # -------------------------------------------------------------------------------------------------------- Serve

    def _fill(self, name: str) -> None:
        own = self.replicas[name]
        group = self.groups[name]
        while sum(r.stops_in is None for r in own) < self.targets[name]:
            self.made += 1
            active = sum(r.stops_in is None for r in own) < group.first
            duty = Duty.ACTIVE if active else Duty.WARM
            all_placed = sum(r.placed for rs in self.replicas.values() for r in rs)
            node = self.nodes[self.made % len(self.nodes)]
            replica = Running(
                f"{self.made:08d}", node, self.now, group.role, duty, float(self.now),
                all_placed < self.room and name not in self.full,
            )  # fmt: skip
            own.append(replica)

    def runs(self, replica: Running) -> bool:
        return replica.placed and self.now - replica.born >= self.start_rounds

    def _shrink(self, name: str) -> None:
        """Serve's order, written down a second time."""
        own = self.replicas[name]
        crowd = Counter(r.node for rs in self.replicas.values() for r in rs if self.runs(r))
        staying = [r for r in own if r.stops_in is None]
        over = len(staying) - self.targets[name]
        waiting = sorted((r for r in staying if not self.runs(r)), key=lambda r: (-r.born, r.id))
        running = sorted((r for r in staying if self.runs(r)), key=lambda r: (-r.born, r.id))
        running.sort(key=lambda r: (r.node == self.nodes[0], crowd[r.node], r.node))
        for replica in [*waiting, *running][: max(0, over)]:
            if self.runs(replica) and replica.duty is Duty.ACTIVE:
                self.stopped_active += 1
            replica.stops_in = 2

    def fleet(self) -> Fleet:
        groups = {
            name: Deployed(
                self.targets[name],
                tuple(
                    Replica(
                        r.id,
                        r.node if self.runs(r) or self.fails_after is not None or r.loads else None,
                        float(r.born),
                        self.runs(r),
                        r.stops_in is not None,
                    )
                    for r in own
                ),
                "" if all(self.runs(r) for r in own) else self.serve_says,
            )
            for name, own in self.replicas.items()
        }
        crowds = Counter(r.node for rs in self.replicas.values() for r in rs if self.runs(r))
        head = self.nodes[0]
        return Fleet(groups, dict(crowds), head, self.deployed_s, self.deploying, self.companions)

    def kill(self, dead: Running) -> None:
        """Ends a replica's process. Serve makes another one in the next round, unless it was to stop."""
        for name, own in self.replicas.items():
            self.replicas[name] = [r for r in own if r is not dead]

    def replace_all(self, name: str, ready: int | None = None) -> None:
        """Has Serve replace a group's replicas by new ones, whose ranks are above those of the old ones, so that all
        begin warm; `ready` of them (default: all) run already.
        """
        number = self.targets[name]
        for at in range(number):
            self.made += 1
            runs = ready is None or at < ready
            born = self.now - self.start_rounds if runs else self.now
            node, role = self.nodes[self.made % len(self.nodes)], self.groups[name].role
            self.replicas[name].append(
                Running(f"{self.made:08d}", node, born, role, Duty.WARM, float(self.now))
            )
        self.replicas[name] = self.replicas[name][-number:]

    # ------------------------------------------------------------------------------------------------------- router

    def seen(self, fitted: bool = True) -> Observation:
        engines = tuple(
            EngineView(engine_id(name, r.id), r.role, r.duty, r.since_s, r.requests)
            for name, own in self.replicas.items()
            for r in own
            if self.runs(r) and r.connected
        )
        if self.rate is not None:
            seen = busy(self.rate, engines, self.now // 10, float(self.now))
        else:
            seen = Observation(float(self.now), self.now, (), engines, CAPABILITY, queued=self.queued)
        return replace(seen, fitted=fitted)

    def engine(self, engine: str) -> Running:
        return next(r for r in self.replicas[group_of(engine)] if engine_id(group_of(engine), r.id) == engine)

    # ------------------------------------------------------------------------------------------------------- rounds

    def round(self, lost: bool = False, fitted: bool = True) -> Decision:
        """One observation and what follows; with `lost` the orders to engines are lost on the way."""
        made = self.controller.decide(self.seen(fitted), self.fleet(), self.abilities)
        for order in made.orders.engines:
            replica = self.engine(order.engine)
            if not lost and (replica.role, replica.duty) != (order.role, order.duty):
                replica.role, replica.duty, replica.since_s = order.role, order.duty, float(self.now)
        targets = dict(made.orders.targets)
        self.controller.trying(targets)
        self.targets |= targets
        self.controller.done(targets)
        self.tick()
        return made

    def tick(self) -> None:
        """Has Serve follow its counts, and lets a second pass."""
        for name, own in self.replicas.items():
            if name in self.full and self.fails_after is not None:
                self.replicas[name] = [r for r in own if r.placed or self.now - r.born < self.fails_after]
            self._fill(name)
            self._shrink(name)
        self.now += 1
        for name, own in self.replicas.items():
            for replica in own:
                if replica.stops_in is not None:
                    replica.stops_in -= 1
            self.replicas[name] = [r for r in own if r.stops_in is None or r.stops_in > 0]

    def settle(self, rounds: int = 60) -> None:
        """Rounds until nothing is ordered for ten of them. Fails if that takes more than `rounds`."""
        quiet = 0
        for _ in range(rounds):
            made = self.round()
            quiet = 0 if made.orders.engines or made.orders.targets else quiet + 1
            if quiet == 10:
                return
        raise AssertionError(f"orders after {rounds} rounds: {made.orders}")

    def last_refusal(self) -> str | None:
        """Returns why the policy's orders waited in the last round; None if they did not."""
        assert self.controller.last is not None
        return self.controller.last.held

    def counts(self) -> dict[str, tuple[int, int]]:
        """Active and warm engines by group."""
        return {
            name: (
                sum(r.duty is Duty.ACTIVE and self.runs(r) for r in own if r.stops_in is None),
                sum(r.duty is Duty.WARM and self.runs(r) for r in own if r.stops_in is None),
            )
            for name, own in self.replicas.items()
        }

    def roles(self) -> dict[Role, int]:
        """Active engines by role."""
        found: Counter[Role] = Counter(
            r.role for own in self.replicas.values() for r in own if r.duty is Duty.ACTIVE and self.runs(r)
        )
        return dict(found)


def two_groups(**decode: int) -> dict[str, Group]:
    """One prefill engine and two decode engines, at most four of each."""
    return {
        "prefill": Group("prefill", Role.PREFILL, 1, 4, 1, 0, 30.0),
        "decode": Group("decode", Role.DECODE, 1, 4, 2, decode.get("warm", 0), 30.0),
    }
