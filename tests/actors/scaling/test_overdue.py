"""Replicas that never start: another group starts what they were asked for, and without one nothing grows.

A round is a second, and an engine is overdue after 20 s.
"""

import json
import random
from typing import Any

import pytest

from actors.scaling.asked import answer
from actors.scaling.fleet import Group
from actors.scaling.orders import OVER_BUDGET
from policies.scaling.observation import Duty
from policies.state.views import Role
from tests.actors.scaling.world import World

LIMIT_S = 20.0


def groups(least: int = 1, most: int = 4) -> dict[str, Group]:
    """One prefill group, and two decode groups of which each begins with one replica."""
    return {
        "p": Group("p", Role.PREFILL, 1, 1, 1, 0, 30.0),
        "da": Group("da", Role.DECODE, least, most, 1, 0, 30.0),
        "db": Group("db", Role.DECODE, 1, most, 1, 0, 30.0),
    }


def world(decode: int, **given: Any) -> World:
    """A fleet whose policy wants this number of decode engines, more than there are at first; `da` never has room for
    another one.
    """
    given.setdefault("groups", groups())
    return World(start_limit_s=LIMIT_S, params={"prefill": 1, "decode": decode}, **given)


def want(made: World, decode: int) -> None:
    """Has the policy want another number of decode engines."""
    other = World(made.groups, params={"prefill": 1, "decode": decode}, budget=made.budget)
    made.controller.policy = other.controller.policy
    # the policy keeps the counts of its first step otherwise
    made.controller._state = None


def rounds(made: World, number: int) -> None:
    for _ in range(number):
        made.round()


def described(made: World) -> dict[str, Any]:
    status, text, _ = answer(made.controller, b"{}", 0.0)
    assert status == 200
    found: dict[str, Any] = json.loads(text)
    return found


def of_group(made: World, name: str) -> tuple[int, int, int, int]:
    """Replicas that are wanted, active, starting and overdue engines of a group, as an administrator reads them."""
    (group,) = (group for group in described(made)["groups"] if group["name"] == name)
    return group["replicas"], group["active"], group["starting"], group["overdue"]


def stuck(decode: int = 3, **given: Any) -> World:
    """The fleet in the round in which the engines of `da` that never start become overdue."""
    made = world(decode, full=frozenset({"da"}), **given)
    # the first replica runs already
    for replica in made.replicas["da"]:
        replica.placed = True
    # the others are asked for in the first round, and awaited from the second on
    rounds(made, 22)
    return made


def test_what_is_never_placed_is_given_up_for_a_start_in_another_group() -> None:
    made = world(3, full=frozenset({"da"}))
    for replica in made.replicas["da"]:
        replica.placed = True
    rounds(made, 21)
    assert of_group(made, "da") == (2, 1, 1, 0)
    assert made.targets == {"p": 1, "da": 2, "db": 1}
    made.round()
    assert made.targets == {"p": 1, "da": 1, "db": 2}
    made.settle()
    assert made.roles() == {Role.PREFILL: 1, Role.DECODE: 3}
    assert made.targets == {"p": 1, "da": 1, "db": 2}
    assert made.stopped_active == 0


@pytest.mark.parametrize(("budget", "started"), [(4, 1), (5, 2)])
def test_what_dies_at_each_start_stays_until_another_group_has_one_if_the_budget_allows_it(
    budget: int, started: int
) -> None:
    """Serve makes a replica of `da` every five rounds, and none comes: p, da and db have 1 + 2 + 1 replicas."""
    made = stuck(fails_after=5, budget=budget)
    assert made.targets == {"p": 1, "da": 2, "db": started}
    rounds(made, 60)
    assert made.targets == {"p": 1, "da": 3 - started, "db": started}
    assert made.roles()[Role.DECODE] == 1 + started


@pytest.mark.parametrize("budget", [4, 5, None])
def test_a_start_that_takes_longer_than_the_limit_is_not_given_up(budget: int | None) -> None:
    """Every start takes 70 rounds. If what loads were given up for another group, none would ever end."""
    made = world(3, budget=budget)
    made.settle()
    for own in made.replicas.values():
        for replica in own:
            replica.born -= 70
    made.start_rounds = 70
    made.kill(made.replicas["da"][0])
    for second in range(75):
        for own in made.replicas.values():
            for replica in own:
                replica.loads = True
        made.round()
        if second == 40:
            assert of_group(made, "da")[3] == 1
    assert made.roles() == {Role.PREFILL: 1, Role.DECODE: 3}
    made.settle(100)
    assert made.roles() == {Role.PREFILL: 1, Role.DECODE: 3}
    assert sum(made.targets.values()) == 4
    assert made.stopped_active == 0


def test_without_another_group_it_stays_wanted_and_nothing_more_is_asked_for() -> None:
    only = {name: group for name, group in groups().items() if name != "db"}
    made = stuck(2, groups=only)
    for _ in range(100):
        assert made.round().orders.targets == ()
    assert made.targets == {"p": 1, "da": 2}
    assert of_group(made, "da") == (2, 1, 0, 1)
    assert described(made)["notes"] == [
        "da: 1 of 2 replicas have not started within 20 s (scaling.start_limit_s) and count as capacity no longer; see"
        " what they lack (`ray status`, `serve status`) and their logs, or ask for fewer",
        "nothing is started for decode in the place of replicas that are overdue: no group without such replicas may"
        " have one more",
    ]


def test_one_that_comes_late_serves() -> None:
    only = {name: group for name, group in groups().items() if name != "db"}
    made = stuck(2, groups=only)
    (late,) = (replica for replica in made.replicas["da"] if not replica.placed)
    late.placed, late.born = True, made.now
    made.settle()
    assert of_group(made, "da") == (2, 2, 0, 0)
    assert described(made)["notes"] == []


def test_one_that_is_not_wanted_any_more_is_taken_back() -> None:
    only = {name: group for name, group in groups().items() if name != "db"}
    made = stuck(2, groups=only)
    want(made, 1)
    rounds(made, 3)
    assert made.targets == {"p": 1, "da": 1}
    assert of_group(made, "da") == (1, 1, 0, 0)
    assert made.stopped_active == 0


def test_demand_beyond_what_is_overdue_is_asked_for_as_ever() -> None:
    """Two are overdue in `da`, `db` is full, and the policy then wants one more: `da` is asked for it, since nodes may
    still come. Nothing but that one is asked for again.
    """
    bounded = groups()
    bounded["db"] = Group("db", Role.DECODE, 1, 1, 1, 0, 30.0)
    made = stuck(4, groups=bounded)
    assert of_group(made, "da") == (3, 1, 0, 2)
    want(made, 5)
    assert made.round().orders.targets == (("da", 4),)
    rounds(made, 10)
    assert of_group(made, "da") == (4, 1, 1, 2)


@pytest.mark.parametrize(("budget", "started", "then"), [(4, 1, 1), (5, 2, 2), (6, 2, 3), (8, 2, 4)])
def test_a_group_at_its_least_keeps_what_is_overdue_and_the_budget_decides_on_another(
    budget: int, started: int, then: int
) -> None:
    """`da` must have two replicas, of which one never starts: with p, da and db there are 1 + 2 + 1 replicas."""
    made = World(groups(least=2), start_limit_s=LIMIT_S, params={"prefill": 1, "decode": 3}, budget=budget)
    made.settle()
    made.full = frozenset({"da"})
    made.kill(made.replicas["da"][-1])
    rounds(made, 40)
    assert made.targets == {"p": 1, "da": 2, "db": started}
    assert of_group(made, "da") == (2, 1, 0, 1)
    refused = OVER_BUDGET in " ".join(described(made)["notes"])
    assert refused is (started == 1)
    # two more are wanted: of the group that waits for none, within the budget
    want(made, 5)
    rounds(made, 10)
    assert made.targets == {"p": 1, "da": 2, "db": then}


def test_a_running_replica_that_the_router_does_not_know_is_replaced_without_a_loss_of_one_that_serves() -> (
    None
):
    made = world(3)
    made.settle()
    silent = made.replicas["da"][0]
    silent.connected = False
    rounds(made, 25)
    assert silent.id in {replica.id for replica in made.replicas["da"]}
    made.settle()
    assert made.roles()[Role.DECODE] == 4
    # it is still there, and three others serve
    assert sum(r.connected and r.duty is Duty.ACTIVE for own in made.replicas.values() for r in own) == 4
    assert made.stopped_active == 0


def test_a_running_replica_that_never_came_is_taken_back_when_it_is_not_wanted() -> None:
    """A replica is overdue after 20 s, and given up once the router has not known it for a minute, as ever."""
    made = world(2, groups={name: group for name, group in groups().items() if name != "db"})
    made.settle()
    made.replicas["da"][-1].connected = False
    rounds(made, 65)
    assert of_group(made, "da") == (2, 1, 0, 1)
    want(made, 1)
    made.settle()
    assert made.targets == {"p": 1, "da": 1}


@pytest.mark.parametrize("seed", range(15))
def test_rooms_that_come_and_go_lead_to_what_is_wanted_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    made = world(4, budget=6)
    made.settle()
    for _ in range(300):
        if draw.random() < 0.05:
            made.full = frozenset(name for name in made.groups if draw.random() < 0.5)
        if draw.random() < 0.05:
            for own in made.replicas.values():
                for replica in own:
                    if not replica.placed:
                        replica.placed, replica.born = True, made.now
        for own in made.replicas.values():
            for replica in own:
                replica.loads = replica.loads or draw.random() < 0.02
        if draw.random() < 0.02:
            made.kill(draw.choice([replica for own in made.replicas.values() for replica in own]))
        made.round(lost=draw.random() < 0.1)
        assert sum(made.targets.values()) <= 6
        assert all(made.targets[name] <= group.most for name, group in made.groups.items())
    made.full = frozenset()
    for own in made.replicas.values():
        for replica in own:
            replica.placed = True
    made.settle(200)
    assert made.roles() == {Role.PREFILL: 1, Role.DECODE: 4}
    assert sum(made.targets.values()) == 5
    assert made.stopped_active == 0
