"""An administrator's questions and orders to the autoscaler, and their answers."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from actors.scaling.asked import answer
from app.api.answers import Scaling
from sluice.types import Scaling as Typed
from tests.actors.scaling.world import World, two_groups


@pytest.fixture
def world() -> World:
    made = World(two_groups(warm=1))
    made.settle()
    return made


def ask(world: World, **asked: Any) -> tuple[int, Any, bool]:
    status, body, changed = answer(world.controller, json.dumps(asked).encode(), 0.5)
    return status, json.loads(body), changed


def test_the_answer_has_the_documented_shape_before_and_after_the_first_observation(world: World) -> None:
    for controller in (world.new_controller(), world.controller):
        status, body, changed = answer(controller, b"", None)
        assert (status, changed) == (200, False)
        told = json.loads(body)
        assert TypeAdapter(Scaling).validate_python(told, strict=True) == told
        assert Typed.model_validate(told).mode == "auto"


def test_numbers_for_a_fleet_that_was_not_seen_yet_are_no_fault_of_who_asks(world: World) -> None:
    fresh = world.new_controller()
    status, body, changed = answer(fresh, b'{"counts": {"decode": 3}}', None)
    assert (status, changed, fresh.manual) == (503, False, None)
    assert "nothing was changed: try again" in json.loads(body)["message"]
    # what an earlier autoscaler was ordered last is read in the first round, so no order may come before it
    for order in (b'{"bounds": {"decode": {"max": 3}}}', b'{"mode": "auto"}'):
        status, body, changed = answer(fresh, order, None)
        assert (status, changed, fresh.groups) == (503, False, fresh.configured)
        assert "try again" in json.loads(body)["message"]
    # numbers that no fleet could have are refused at once
    assert answer(fresh, b'{"counts": {"decode": 9}}', None)[0] == 400
    assert answer(fresh, b'{"bounds": {"decode": {"max": -1}}}', None)[0] == 400
    assert ask(world, counts={"decode": 3})[0] == 200


def test_counts_rule_until_auto(world: World) -> None:
    status, told, changed = ask(world, counts={"decode": 3})
    assert (status, told["mode"], told["by"], changed) == (200, "manual", "an administrator", True)
    assert [(g["name"], g["wanted"]) for g in told["groups"]] == [("prefill", 1), ("decode", 3)]
    world.settle()
    assert world.counts()["decode"] == (3, 1)
    status, told, changed = ask(world, mode="auto")
    assert (status, told["mode"], changed) == (200, "auto", True)
    world.settle()
    assert world.counts()["decode"] == (2, 1)


def test_a_plan_changes_nothing(world: World) -> None:
    status, told, changed = ask(world, counts={"decode": 3}, plan=True)
    assert (status, told["mode"], changed) == (200, "auto", False)
    plan = told["plan"]
    assert plan["serving"] == {"prefill": 1, "decode": 3, "colocated": 0}
    assert [move["way"] for move in plan["moves"]] == ["activate"]
    assert [order["duty"] for order in plan["engines"]] == ["active"]
    # the pool is refilled: 3 serve and 1 waits
    assert plan["replicas"] == {"decode": 4}
    assert told["reasons"] == ["prefill=1 decode=3 would serve; nothing is set"]
    assert world.round().orders.engines == ()

    # while counts rule, the policy's own plan can be asked for
    ask(world, counts={"decode": 3})
    world.settle()
    _, told, _ = ask(world, plan=True)
    assert told["plan"]["serving"]["decode"] == 2
    assert told["mode"] == "manual"
    assert world.counts()["decode"] == (3, 1)


def test_a_policy_that_has_no_plan_yet_shows_none_also_while_numbers_rule() -> None:
    world = World(two_groups(), policy="joint")
    world.round(fitted=False)
    ask(world, counts={"decode": 3})
    world.round(fitted=False)
    _, told, _ = ask(world)
    assert told["plan"]["serving"]["decode"] == 3
    _, told, _ = ask(world, plan=True)
    assert (told["plan"], told["reasons"]) == (None, [])
    assert told["held"] == "no engine has reported enough work yet to know what one carries"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (b"{", "the order is no JSON"),
        (b"\xff", "the order is"),
        (b"[]", "must be a JSON object"),
        (b'{"count": {}}', "'count' is not known; there are counts, mode, bounds, plan"),
        (b'{"counts": {}}', "at least one group"),
        (b'{"counts": {"decode": 9}}', r"1..4, the bounds in engines.decode.scaling; nothing was changed"),
        (b'{"counts": {"x": 1}}', "there is no group 'x'; there are prefill, decode"),
        (b'{"mode": "off"}', "it must be 'auto'"),
        (b'{"mode": "auto", "counts": {"decode": 2}}', "exclude each other"),
        (b'{"plan": 1}', "plan must be true or false"),
    ],
)
def test_a_wrong_order_is_refused_in_words_and_changes_nothing(world: World, asked: bytes, says: str) -> None:
    status, body, changed = answer(world.controller, asked, 0.5)
    assert (status, changed) == (400, False)
    assert says in json.loads(body)["message"]
    assert world.controller.manual is None
