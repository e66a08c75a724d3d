"""Bounds of groups that an administrator changes: what is refused, what follows, and how long they rule."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from actors.scaling.asked import answer
from actors.scaling.bounds import BadScale, bounded, bounds_of
from actors.scaling.fleet import Group
from policies.scaling.sleep import MaySleep
from policies.state.standby import Phase
from policies.state.views import Role
from tests.actors.scaling.world import World, two_groups

GROUPS = {"d": Group("d", Role.DECODE, 1, 4, 2, 1, 30.0, warm_max=2)}


def ask(world: World, **asked: Any) -> tuple[int, Any, bool]:
    status, body, changed = answer(world.controller, json.dumps(asked).encode(), 0.5)
    return status, json.loads(body), changed


def settled(policy: str = "fixed", warm: int = 0, **more: Any) -> World:
    made = World(two_groups(warm=warm), policy, **more)
    made.settle()
    return made


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"x": {"min": 1}}, "there is no group 'x'; there are d"),
        ({"d": {}}, "bounds of d must be an object with one of min, max, warm, warm_max"),
        ({"d": 3}, "bounds of d must be an object"),
        ({"d": {"most": 3}}, "d.most is not known; there are min, max, warm, warm_max"),
        ({"d": {"max": "3"}}, "d.max is '3': it must be a whole number 0..4096"),
        ({"d": {"min": -1}}, "d.min is -1: it must be a whole number 0..4096"),
        ({"d": {"min": True}}, "d.min is True: it must be a whole number"),
        ({"d": {"max": 4097}}, "d.max is 4097: it must be a whole number"),
        ({"d": {"min": 0, "max": 0}}, "d.max is 0: it must be 1..4096, at least min"),
        ({"d": {"min": 5}}, "d.max is 4: it must be 5..4096, at least min"),
        ({"d": {"warm": 4}}, "d.warm is 4: it must be 0..3, at most max less min"),
        ({"d": {"warm_max": 0}}, "d.warm_max is 0: it must be 1..3, from warm to max less min"),
        ({"d": {"max": 2}}, "d.warm_max is 2: it must be 1..1, from warm to max less min"),
    ],
)
def test_bounds_that_cannot_be_are_refused_with_key_and_allowed_values(
    asked: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadScale, match=says.replace(".", r"\.")):
        bounded(GROUPS, asked)


def test_what_is_not_named_stays_and_a_deploy_is_still_known() -> None:
    made = bounded(GROUPS, {"d": {"max": 6, "warm": 3}})["d"]
    # as many may wait as do
    assert bounds_of(made) == {"min": 1, "max": 6, "warm": 3, "warm_max": 3}
    assert (made.deployed, bounds_of(GROUPS["d"])["max"]) == (3, 4)


def test_the_policy_follows_bounds_up_and_down_and_the_pool_follows_warm() -> None:
    world = settled()
    assert ask(world, bounds={"decode": {"min": 3}})[::2] == (200, True)
    world.settle()
    assert world.counts()["decode"] == (3, 0)
    ask(world, bounds={"decode": {"min": 1, "max": 2}})
    world.settle()
    assert world.counts()["decode"] == (2, 0)
    _, told, _ = ask(world, bounds={"decode": {"max": 3, "warm": 1}})
    decode = told["groups"][1]
    assert (decode["min"], decode["max"], decode["keeps_warm"], decode["warm_max"]) == (1, 3, 1, 1)
    assert decode["configured"] == {"min": 1, "max": 4, "warm": 0, "warm_max": 0}
    world.settle()
    assert world.counts()["decode"] == (2, 1)
    assert world.stopped_active == 0


def test_a_learned_state_goes_on_within_new_bounds() -> None:
    world = World(two_groups(), "joint", params={"calm_s": 60.0})
    for _ in range(40):
        world.rate = 40.0
        world.round()
    state = world.controller._state
    assert state.lengths.weight > 0
    ask(world, bounds={"decode": {"max": 2}})
    assert world.controller._state.lengths == state.lengths
    for _ in range(20):
        world.round()
    assert world.counts()["decode"][0] <= 2


def test_a_plan_within_bounds_changes_nothing() -> None:
    world = settled()
    status, told, changed = ask(world, bounds={"decode": {"min": 3}}, plan=True)
    assert (status, changed, told["plan"]["serving"]["decode"]) == (200, False, 3)
    assert told["plan"]["replicas"] == {"decode": 3}
    assert told["groups"][1]["min"] == 1
    assert world.round().orders.targets == ()
    ask(world, counts={"decode": 2})
    _, told, _ = ask(world, bounds={"decode": {"warm": 1}}, plan=True)
    assert (told["plan"]["warm"], told["plan"]["replicas"]) == (1, {"decode": 3})


def test_counts_that_rule_are_kept_within_bounds_by_refusing_others() -> None:
    world = settled()
    ask(world, counts={"decode": 3})
    status, told, changed = ask(world, bounds={"decode": {"max": 2}})
    assert (status, changed) == (400, False)
    assert "decode is set to 3 by an administrator, outside 1..2: set another number" in told["message"]
    assert ask(world, bounds={"decode": {"max": 3}})[0] == 200
    status, told, _ = ask(world, counts={"decode": 4})
    assert (status, told["message"]) == (
        400,
        "decode is 4: it must be a whole number 1..3, the bounds that an administrator has set; nothing was changed",
    )


def test_orders_come_one_at_a_time_and_the_budget_holds() -> None:
    world = settled(budget=5)
    status, told, _ = ask(world, bounds={"decode": {"max": 3}}, counts={"decode": 3})
    assert (status, told["message"].partition(":")[0]) == (400, "counts and bounds exclude each other")
    status, told, _ = ask(world, bounds={})
    assert (status, "at least one group" in told["message"]) == (400, True)
    status, told, _ = ask(world, bounds={"decode": {"min": 4, "max": 5}, "prefill": {"min": 2}})
    assert (status, "above the budget of 5" in told["message"]) == (400, True)
    assert world.controller.groups == world.controller.configured


def test_bounds_that_hold_only_together_outlive_the_autoscaler_together() -> None:
    """At least 4 decode engines and 1 prefill engine fit a budget of 5, and beside the configured 3 they do not."""
    groups = {
        "decode": Group("decode", Role.DECODE, 1, 4, 1, 0, 30.0),
        "prefill": Group("prefill", Role.PREFILL, 3, 4, 3, 0, 30.0),
    }
    world = World(groups, budget=5)
    world.settle()
    assert ask(world, bounds={"decode": {"min": 4}, "prefill": {"min": 1}})[0] == 200
    ruled = world.controller.groups
    world.controller = world.new_controller(world.controller.memory())
    assert world.controller.groups == ruled
    assert not any("do not hold" in note for note in world.round().orders.notes)
    # where one group's do not hold any more, the other's do
    memory = world.controller.memory()
    world.budget = 4
    world.controller = world.new_controller(memory)
    notes = [note for note in world.round().orders.notes if "do not hold" in note]
    assert len(notes) == 1 and notes[0].startswith(
        "the bounds that were set of decode do not hold any more: "
    )
    assert [group.least for group in world.controller.groups.values()] == [1, 1]


@pytest.mark.parametrize("after", range(0, 12, 3))
def test_bounds_outlive_the_autoscaler_until_the_configuration_changes(after: int) -> None:
    world = settled()
    ask(world, bounds={"decode": {"min": 3}})
    for _ in range(after):
        world.round()
    world.controller = world.new_controller(world.controller.memory())
    world.settle()
    assert world.counts()["decode"] == (3, 0)

    # the configuration of another group changes nothing
    world.groups = {**world.groups, "prefill": replace(world.groups["prefill"], most=3)}
    world.controller = world.new_controller(world.controller.memory())
    assert bounds_of(world.controller.groups["decode"])["min"] == 3

    world.groups = {**world.groups, "decode": replace(world.groups["decode"], most=5)}
    world.controller = world.new_controller(world.controller.memory())
    assert bounds_of(world.controller.groups["decode"]) == {"min": 1, "max": 5, "warm": 0, "warm_max": 0}
    notes = world.round().orders.notes
    assert notes[0] == "the configuration has other bounds of decode than before: they rule"


def test_an_application_that_is_deployed_anew_forgets_them() -> None:
    world = settled()
    ask(world, bounds={"decode": {"min": 3, "max": 3}})
    world.settle()
    memory = world.controller.memory()
    anew = World(two_groups(), deployed_s=99.0, made=1_000)
    anew.controller = anew.new_controller(memory)
    anew.settle()
    assert anew.controller.groups == anew.controller.configured
    assert anew.controller.policy.limits.decode_min == 1
    assert anew.counts()["decode"] == (2, 0)


def test_a_group_gives_up_what_it_may_not_have_though_its_role_has_room() -> None:
    """Two groups of decode engines with three and one: the plan counts by role, and each group has bounds."""
    groups = {
        "p": Group("p", Role.PREFILL, 1, 2, 1),
        "a": Group("a", Role.DECODE, 1, 4, 3),
        "b": Group("b", Role.DECODE, 1, 4, 1),
    }
    world = World(groups)
    world.settle()
    ask(world, bounds={"a": {"max": 1}})
    world.settle()
    assert (world.counts()["a"], world.counts()["b"]) == ((1, 0), (3, 0))
    assert world.stopped_active == 0
    ask(world, bounds={"a": {"max": 4, "min": 3}})
    world.settle()
    assert (world.counts()["a"], world.counts()["b"]) == ((3, 0), (1, 0))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_bounds_follow_one_another_all_groups_come_to_rest_within_them(seed: int) -> None:
    """Engines are lent to the other role in between, orders are lost, and bounds change before others have been
    reached: an engine that serves another role still counts as a replica of its own group.
    """
    rng = random.Random(seed)
    groups = {
        "p": Group("p", Role.PREFILL, 1, 4, 1),
        "a": Group("a", Role.DECODE, 1, 4, 2),
        "b": Group("b", Role.DECODE, 1, 3, 1),
    }
    wanted = {"prefill": rng.randint(1, 4), "decode": rng.randint(1, 6)}
    world = World(groups, params=wanted, nodes=("n0", "n1"))
    world.settle(120)
    for _ in range(6):
        asked = {name: drawn(rng) for name in groups}
        status, body, _ = ask(world, bounds=asked)
        assert status == 200, body
        for _ in range(rng.choice((0, 0, 5, 20))):
            world.round(lost=rng.random() < 0.2)
        if rng.random() < 0.5:
            lent = rng.choice([r for own in world.replicas.values() for r in own if world.runs(r)])
            lent.role = rng.choice((Role.PREFILL, Role.DECODE))
        world.settle(200)
        for name, bounds in asked.items():
            assert bounds["min"] <= len(world.replicas[name]) <= bounds["max"]
    assert world.stopped_active == 0


def drawn(rng: random.Random) -> dict[str, int]:
    least = rng.randint(1, 3)
    most = rng.randint(least, 4)
    warm = rng.randint(0, min(1, most - least))
    return {"min": least, "max": most, "warm": warm, "warm_max": warm}


def test_whether_engines_may_sleep_changes_while_they_are_awake() -> None:
    groups = {name: replace(group, least=0) for name, group in two_groups().items()}
    sleep = {"idle_s": 5.0, "wake_limit_s": 15.0}
    world = World(groups, params={"sleep": sleep})
    made = world.controller._make

    def make(groups: Any) -> Any:
        """As the configuration makes it: only groups without a least number may sleep."""
        policy = made(groups)
        assert isinstance(policy, MaySleep)
        return policy if any(not group.least for group in groups.values()) else policy.policy

    world.controller._make = make
    for _ in range(20):
        world.round()
    assert world.controller.phase.phase is Phase.ASLEEP
    asked = {"prefill": {"min": 1}, "decode": {"min": 1}}
    status, told, _ = ask(world, bounds=asked)
    assert status == 400
    assert told["message"].startswith("the engines are asleep: whether they may sleep (min 0)")
    world.queued = 1
    for _ in range(10):
        world.round()
    assert world.controller.phase.phase is Phase.AWAKE
    world.queued = 0
    assert ask(world, bounds=asked)[0] == 200
    for _ in range(30):
        world.round()
    assert world.counts() == {"prefill": (1, 0), "decode": (2, 0)}
