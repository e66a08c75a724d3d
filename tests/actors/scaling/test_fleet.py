"""Serve's replicas, joined with what the router sees; Serve's order of stopping is compared with Serve itself."""

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import DeploymentScheduler

from actors.scaling.fleet import (
    Deployed,
    Fleet,
    Group,
    Replica,
    completed,
    figures,
    group_of,
    start_steps,
    stop_order,
)
from actors.wire.messages import Started
from policies.scaling.base import Counts, Plan
from policies.scaling.observation import Duty, EngineView, Observation
from policies.scaling.starts import StartSteps
from policies.state.views import Role
from tests.policies.scaling.fleet import CAPABILITY

GROUPS = {"p": Group("p", Role.PREFILL, 1, 4, 1), "d-x": Group("d-x", Role.DECODE, 1, 4, 1)}


class NoLabels:
    """A cluster without node labels, for Serve's scheduler."""

    def get_node_labels(self, node_id: str) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("seed", range(20))
def test_replicas_stop_in_the_order_that_serve_has(seed: int) -> None:
    """Serve 2.60's own scheduler chooses, for one to all replicas of a group, on nodes with different crowds."""
    draw = random.Random(seed)
    nodes = ["head", "n1", "n2", "n3"]
    mine, other = DeploymentID("DEngine", "sluice"), DeploymentID("PEngine", "sluice")
    scheduler = DeploymentScheduler(NoLabels(), "head", lambda: None)  # type: ignore[arg-type]
    for deployment in (mine, other):
        scheduler.on_deployment_created(deployment, scheduling_policy=None)  # type: ignore[arg-type]
    found: list[Replica] = []
    crowds: Counter[str] = Counter()
    # others on each node, so that no two nodes have equally many
    for number, node in enumerate(nodes):
        for i in range(20 * number):
            scheduler.on_replica_running(ReplicaID(f"o{number}{i}", other), node)
            crowds[node] += 1
    for i in range(draw.randint(2, 9)):
        replica, node = ReplicaID(f"r{i}", mine), draw.choice(nodes)
        scheduler.on_replica_running(replica, node)
        found.append(Replica(replica.unique_id, node, float(i)))
        crowds[node] += 1
    recovering = ReplicaID("late", mine)
    scheduler.on_replica_recovering(recovering)
    found.append(Replica("late", None, 0.5, running=False))
    fleet = Fleet({"d": Deployed(len(found), tuple(found))}, crowds, "head")
    ours = [replica.id for replica in stop_order(fleet, "d")]
    for number in range(1, len(found) + 1):
        theirs = scheduler._get_replicas_to_stop(mine, number)
        assert {replica.unique_id for replica in theirs} == set(ours[:number])


def seen(*engines: EngineView) -> Observation:
    return Observation(100.0, 1, (), engines, CAPABILITY)


def duties(observation: Observation) -> dict[str, Any]:
    return {engine.engine: engine.duty for engine in observation.engines}


def test_replicas_that_the_router_does_not_see_are_starting_and_those_that_stop_are_draining() -> None:
    fleet = Fleet(
        {
            # two more were asked for than Serve has made
            "p": Deployed(4, (Replica("a", "n", 1.0), Replica("b", None, 2.0, running=False))),
            # one less was asked for: the newest goes
            "d-x": Deployed(1, (Replica("c", "n", 1.0), Replica("d", "n", 2.0), Replica("e", "n", 3.0, stopping=True))),
        },
        {"n": 4},
    )  # fmt: skip
    views = [
        EngineView("p-a", Role.PREFILL, Duty.ACTIVE),
        *(EngineView(f"d-x-{own}", Role.DECODE, Duty.ACTIVE) for own in "cde"),
    ]
    assert duties(completed(seen(*views), fleet, GROUPS)) == {
        "p-a": Duty.ACTIVE,
        "d-x-c": Duty.ACTIVE,
        "d-x-d": Duty.DRAINING,
        "d-x-e": Duty.DRAINING,
        "p-b": Duty.STARTING,
        "p-pending0": Duty.STARTING,
        "p-pending1": Duty.STARTING,
    }


def test_an_engines_group_and_replica_follow_from_its_id() -> None:
    fleet = Fleet({"d-x": Deployed(1, (Replica("c", "n", 1.0),))})
    assert group_of("d-x-c") == "d-x"
    assert fleet.replica("d-x-c") == Replica("c", "n", 1.0)
    assert fleet.replica("d-x-z") is None
    assert fleet.replica("z-c") is None


def test_the_reserve_of_a_start_lasts_from_serves_making_until_the_process_began() -> None:
    fleet = Fleet({"d": Deployed(2, (Replica("c", "n", 100.0), Replica("e", "n", 0.0)))})
    started = Started(103.5, 1.0, 2.0, 3.0, 0.5)
    assert start_steps("d-c", started, fleet) == StartSteps(3.5, 1.0, 2.0, 3.0, 0.5)
    # the clocks of two nodes may differ
    assert start_steps("d-c", msgspec.structs.replace(started, began_s=99.0), fleet) == StartSteps(
        0.0, 1.0, 2.0, 3.0, 0.5
    )
    # not announced yet, no time of Serve's, no replica
    assert start_steps("d-c", msgspec.structs.replace(started, announce_s=None), fleet) is None
    assert start_steps("d-e", started, fleet) is None
    assert start_steps("d-x", started, fleet) is None
    # one engine's nonsense is no start, and ends nobody's round
    for wrong in (float("nan"), float("inf"), -1.0):
        assert start_steps("d-c", msgspec.structs.replace(started, weights_s=wrong), fleet) is None
    assert start_steps("d-c", msgspec.structs.replace(started, began_s=float("inf")), fleet) is None


def test_figures_count_warm_engines_and_the_longest_start() -> None:
    fleet = Fleet(
        {
            "p": Deployed(2, (Replica("a", "n", 90.0), Replica("b", None, 60.0, running=False))),
            # this one stops, and is waited for by nobody
            "d-x": Deployed(2, (Replica("c", "n", 10.0), Replica("d", "n", 5.0, stopping=True))),
        }
    )
    views = EngineView("p-a", Role.PREFILL, Duty.ACTIVE), EngineView("d-x-c", Role.DECODE, Duty.WARM)
    told = figures(completed(seen(*views), fleet, GROUPS), fleet, Plan(Counts(1, 1, 0), 2), GROUPS)
    # p-b has been starting since 60, and it is 100
    assert told == {
        "warm_engines": 1.0, "warm_wanted": 2.0, "replicas_wanted": 4.0, "replica_start_seconds_max": 40.0,
    }  # fmt: skip
    # an overdue one counts as no capacity, and its start goes on
    overdue = completed(seen(*views), fleet, GROUPS, {"p-b"})
    assert duties(overdue) == {"p-a": Duty.ACTIVE, "d-x-c": Duty.WARM, "d-x-pending0": Duty.STARTING}
    assert figures(overdue, fleet, None, GROUPS, {"p-b"})["replica_start_seconds_max"] == 40.0
    without_plan = figures(seen(*views), fleet, None, {"d-x": Group("d-x", Role.DECODE, 1, 4, 1, warm=3)})
    assert (without_plan["warm_wanted"], without_plan["replica_start_seconds_max"]) == (3.0, 0.0)
