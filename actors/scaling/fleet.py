"""The fleet of an autoscaler: configured groups, the replicas that Ray Serve has of them, and the observed engines.

Ray Serve takes a count of replicas and chooses itself which of them stop (`ray.serve._private.deployment_scheduler`,
Ray 2.60): those that do not run, then those off the head node, then those on the node with the fewest replicas of all
deployments, then the newest. `stop_order` is that order. It is a forecast: Serve's own records decide, and between
nodes with equally many replicas it may choose otherwise.

An engine's id is its group's name and its replica's id (`engine_id`), so an engine is found in Serve's lists.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from actors.wire.messages import Started
from policies.scaling.base import Plan
from policies.scaling.observation import Duty, EngineView, Observation
from policies.scaling.starts import StartSteps
from policies.state.views import Role


@dataclass(frozen=True, slots=True)
class Group:
    """A group of equal engines.

    It has `least` to `most` replicas, of which `warm` wait and at most `warm_max` may (default: `warm`). When the
    application is deployed, `first` replicas serve and `first_warm` more wait (default: `warm`); the configuration says
    both. A replica has `drain_s` to end its running work.
    """

    name: str
    role: Role
    least: int
    most: int
    first: int
    warm: int = 0
    drain_s: float = 35.0
    warm_max: int | None = None
    first_warm: int | None = None

    @property
    def warm_most(self) -> int:
        """Most replicas that may wait warm."""
        return self.warm if self.warm_max is None else self.warm_max

    @property
    def deployed(self) -> int:
        """Number of replicas that a deploy of the configuration asks for."""
        return self.first + (self.warm if self.first_warm is None else self.first_warm)


class Replica(NamedTuple):
    """One replica that Serve has. `node` is None while it is not placed, and `started_s` is Serve's time."""

    id: str
    node: str | None
    started_s: float
    running: bool = True
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Deployed:
    """Ray Serve's view of one group: the number of replicas that it is to have, and those that there are. `message` is
    what Serve says about the group ("": nothing).
    """

    target: int
    replicas: tuple[Replica, ...] = ()
    message: str = ""

    @property
    def staying(self) -> tuple[Replica, ...]:
        """The replicas that do not stop."""
        return tuple(replica for replica in self.replicas if not replica.stopping)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Ray Serve's replicas at one moment, by the group's name.

    `crowds` counts the running replicas of all deployments by node, `head` is the id of the head node, and `deployed_s`
    the time of the application's last deploy, as Serve tells it. `deploying` says that a deploy is not over: its new
    numbers and replicas are still to come. `companions` are the ids of the application's replicas that are no engines.
    """

    groups: Mapping[str, Deployed]
    crowds: Mapping[str, int] = field(default_factory=dict)
    head: str | None = None
    deployed_s: float = 0.0
    deploying: bool = False
    companions: tuple[str, ...] = ()

    def replica(self, engine: str) -> Replica | None:
        """Returns the replica of an engine, or None for one that Serve does not have."""
        group, _, own = engine.rpartition("-")
        deployed = self.groups.get(group)
        return next((r for r in deployed.replicas if r.id == own), None) if deployed else None


def engine_id(group: str, replica: str) -> str:
    """Returns the id of the engine in a group's replica."""
    return f"{group}-{replica}"


def group_of(engine: str) -> str:
    """Returns the name of an engine's group."""
    return engine.rpartition("-")[0]


def start_steps(engine: str, started: Started, fleet: Fleet) -> StartSteps | None:
    """Returns the five steps in which an engine has started; None before it has announced itself, without its replica,
    and where it announces a time that is none. `reserve` lasts from when Serve made the replica until its process
    began, by two nodes' clocks.
    """
    replica = fleet.replica(engine)
    if replica is None or started.announce_s is None or not replica.started_s:
        return None
    reserve_s = max(0.0, started.began_s - replica.started_s)
    steps_s = (reserve_s, started.process_s, started.weights_s, started.post_load_s, started.announce_s)
    if not all(math.isfinite(step_s) and step_s >= 0.0 for step_s in steps_s):
        # one engine's nonsense must not end the rounds of all
        return None
    return StartSteps(*steps_s)


def figures(
    seen: Observation,
    fleet: Fleet,
    plan: Plan | None,
    groups: Mapping[str, Group],
    overdue: Set[str] = frozenset(),
) -> dict[str, float]:
    """Returns what operators watch of a completed observation, by the names of metrics: engines that wait warm and how
    many are wanted, replicas that are wanted, and for how long the oldest replica without an engine has been starting,
    which may be an `overdue` one.
    """
    warm_wanted = sum(group.warm for group in groups.values()) if plan is None else plan.warm
    starting = overdue | {engine.engine for engine in seen.with_duty(Duty.STARTING)}
    since_s = [
        replica.started_s
        for name, deployed in fleet.groups.items()
        for replica in deployed.staying
        if replica.started_s and engine_id(name, replica.id) in starting
    ]
    return {
        "warm_engines": float(len(seen.with_duty(Duty.WARM))),
        "warm_wanted": float(warm_wanted),
        "replicas_wanted": float(sum(deployed.target for deployed in fleet.groups.values())),
        "replica_start_seconds_max": max((seen.now_s - at_s for at_s in since_s), default=0.0),
    }


def stop_order(fleet: Fleet, group: str) -> list[Replica]:
    """Returns the replicas of a group in the order in which Serve would stop them; those that stop already are left
    out.
    """

    def place(replica: Replica) -> tuple[bool, bool, int, str]:
        node = replica.node or ""
        return replica.running, node == fleet.head, fleet.crowds.get(node, 0), node

    newest_first = sorted(fleet.groups[group].staying, key=lambda r: (-r.started_s, r.id))
    return sorted(newest_first, key=place)


def not_started(fleet: Fleet, most_chars: int = 300) -> str:
    """Returns in words which replicas that are wanted do not run, with what Serve says, of `most_chars` at most."""
    said = []
    for name, deployed in fleet.groups.items():
        running = sum(r.running for r in deployed.staying)
        if running < deployed.target:
            why = " ".join(deployed.message.split())
            said.append(f"{name}: {running} of {deployed.target} replicas run{why and f': {why}'}")
    text = "; ".join(said) or "the replicas run, and none is connected and active"
    return text if len(text) <= most_chars else text[: most_chars - 1] + "…"


def overdue_words(fleet: Fleet, overdue: Set[str], limit_s: float) -> dict[str, str]:
    """Returns for each group with engines that are `overdue` how many these are, and what an operator can do."""
    said = {}
    for name, deployed in fleet.groups.items():
        number = sum(group_of(engine) == name for engine in overdue)
        if number:
            said[name] = (
                f"{name}: {number} of {deployed.target} replicas have not started within {round(limit_s, 1):g} s"
                " (scaling.start_limit_s) and count as capacity no longer; see what they lack (`ray status`,"
                " `serve status`) and their logs, or ask for fewer"
            )
    return said


def awaited(seen: Observation, fleet: Fleet) -> dict[str, list[str]]:
    """Returns by group the ids of the engines that Serve is to have and the router does not know. A replica that Serve
    has not made yet has an id that no engine has.
    """
    known, going = {engine.engine for engine in seen.engines}, _going(fleet)
    found = {}
    for name, deployed in fleet.groups.items():
        wanted = [engine_id(name, r.id) for r in deployed.staying]
        wanted += [engine_id(name, f"pending{i}") for i in range(deployed.target - len(deployed.staying))]
        found[name] = [engine for engine in wanted if engine not in known and engine not in going]
    return found


def completed(
    seen: Observation, fleet: Fleet, groups: Mapping[str, Group], overdue: Set[str] = frozenset()
) -> Observation:
    """Returns the observation with what Serve knows and the router does not.

    A replica whose engine the router does not see is STARTING, also one that runs and has not connected yet (after the
    router's restart, say), so that none is started in its place. Replicas that Serve has not made yet are STARTING too.
    Those that are `overdue` are left out, because nobody knows whether they will ever serve. An engine whose replica
    stops, or is about to because Serve has more than its target, is DRAINING.
    """
    going = _going(fleet)
    coming = [
        EngineView(engine, groups[name].role, Duty.STARTING)
        for name, engines in awaited(seen, fleet).items()
        for engine in engines
        if engine not in overdue
    ]
    engines = tuple(replace(e, duty=Duty.DRAINING) if e.engine in going else e for e in seen.engines)
    return replace(seen, engines=(*engines, *coming))


def _going(fleet: Fleet) -> set[str]:
    """Returns the engines whose replicas stop, or are about to."""
    going: set[str] = set()
    for name, deployed in fleet.groups.items():
        going |= {engine_id(name, r.id) for r in deployed.replicas if r.stopping}
        over = max(0, len(deployed.staying) - deployed.target)
        going |= {engine_id(name, r.id) for r in stop_order(fleet, name)[:over]}
    return going
