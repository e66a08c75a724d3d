"""The controller in closed loops with a Serve in small: counts are reached, nothing that serves is stopped, and what
others set, losses and restarts change neither.
"""

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from actors.scaling.asked import answer
from actors.scaling.control import BadScale
from actors.scaling.fleet import Group
from policies.scaling.base import Move, Step, Way
from policies.scaling.journal import header_line, replay, step_line
from policies.scaling.observation import Duty, Observation
from policies.scaling.starts import StartSteps
from policies.state.views import Role
from tests.actors.scaling.world import Running, World, two_groups


def test_counts_are_reached_up_and_down_and_only_warm_idle_replicas_stop() -> None:
    world = World(two_groups())
    world.settle()
    assert world.counts() == {"prefill": (1, 0), "decode": (2, 0)}
    world.controller.scale({"prefill": 2, "decode": 3})
    world.settle()
    assert world.counts() == {"prefill": (2, 0), "decode": (3, 0)}
    world.controller.scale({"prefill": 1, "decode": 1})
    world.settle()
    assert world.counts() == {"prefill": (1, 0), "decode": (1, 0)}
    assert world.stopped_active == 0


def test_a_replica_with_work_is_given_up_when_idle_or_after_its_drain_time() -> None:
    world = World(two_groups())
    world.settle()
    for replica in world.replicas["decode"]:
        replica.requests = 1
    world.controller.scale({"decode": 1})
    for _ in range(20):
        world.round()
    assert world.targets["decode"] == 2
    assert world.counts()["decode"] == (1, 1)
    (warm,) = [r for r in world.replicas["decode"] if r.duty is Duty.WARM]
    warm.requests = 0
    world.round()
    assert world.targets["decode"] == 1

    world.controller.scale({"decode": 2})
    world.settle()
    for replica in world.replicas["decode"]:
        replica.requests = 1
    began = world.now
    world.controller.scale({"decode": 1})
    while world.targets["decode"] == 2:
        world.round()
    # its drain time is 30 s
    assert 30 <= world.now - began <= 33


@pytest.mark.parametrize("nodes", [("n0",), ("n0", "n1"), ("n0", "n1", "n2", "n3")])
def test_serves_next_replica_goes_and_another_takes_its_place(nodes: tuple[str, ...]) -> None:
    """An old engine in a switched role is the least loaded, so the plan names it; Serve would stop the newest."""
    world = World(two_groups(), nodes=nodes)
    world.round()
    world.controller.scale({"prefill": 3, "decode": 4})
    world.settle()
    for own in world.replicas.values():
        for age, replica in enumerate(own):
            replica.requests = age
    world.controller.scale({"prefill": 2, "decode": 2})
    for _ in range(60):
        world.round()
        for own in world.replicas.values():
            for replica in own:
                if replica.duty is Duty.WARM:
                    replica.requests = 0
    assert world.counts() == {"prefill": (2, 0), "decode": (2, 0)}
    assert world.roles() == {Role.PREFILL: 2, Role.DECODE: 2}
    assert world.stopped_active == 0


def test_orders_that_are_lost_are_given_again() -> None:
    world = World(two_groups(warm=1))
    world.settle()
    world.controller.scale({"decode": 3})
    for _ in range(5):
        assert world.round(lost=True).orders.engines
    assert world.counts()["decode"][0] == 2
    world.settle()
    assert world.counts()["decode"] == (3, 1)


def test_a_warm_engine_is_active_after_one_round_and_the_pool_is_refilled() -> None:
    world = World(two_groups(warm=1))
    world.settle()
    assert world.counts()["decode"] == (2, 1)
    world.controller.scale({"decode": 3})
    world.round()
    assert world.counts()["decode"] == (3, 0)
    world.settle()
    assert world.counts()["decode"] == (3, 1)


def test_a_pending_replica_is_taken_back_once_it_is_not_needed() -> None:
    world = World(two_groups(), room=3)
    world.settle()
    world.controller.scale({"decode": 4})
    for _ in range(10):
        world.round()
    assert world.targets["decode"] == 4
    assert world.counts()["decode"] == (2, 0)
    world.controller.scale({"decode": 2})
    world.settle()
    assert world.targets == {"prefill": 1, "decode": 2}
    assert world.counts()["decode"] == (2, 0)
    assert world.stopped_active == 0


def test_the_policys_own_pending_replica_is_taken_back_too() -> None:
    world = World(two_groups(), room=3, params={"decode": 4})
    for _ in range(130):
        world.round()
    assert world.targets["decode"] == 4
    world.controller = world.new_controller()
    world.controller.policy = World(two_groups(), params={"decode": 2}).controller.policy
    for _ in range(130):
        world.round()
    assert world.targets["decode"] == 2
    assert world.counts()["decode"] == (2, 0)
    assert world.stopped_active == 0


def test_a_restarted_router_that_knows_no_engine_makes_nothing_start_or_stop() -> None:
    world = World(two_groups())
    world.settle()
    everyone = [r for own in world.replicas.values() for r in own]
    for replica in everyone:
        replica.connected = False
    for _ in range(5):
        assert world.round().orders.targets == ()
    for replica in everyone:
        replica.connected = True
    world.settle()
    assert world.counts() == {"prefill": (1, 0), "decode": (2, 0)}


def test_an_order_while_a_new_router_does_not_know_all_engines_leaves_other_groups_as_they_are() -> None:
    world = World(two_groups(), params={"prefill": 3})
    world.settle()
    for replica in world.replicas["prefill"][1:]:
        replica.connected = False
    for _ in range(3):
        world.round()
    world.controller.scale({"decode": 3})
    for own in world.replicas.values():
        for replica in own:
            replica.connected = True
    world.settle()
    assert world.counts() == {"prefill": (3, 0), "decode": (3, 0)}
    # one that does not come back serves no longer
    world.controller.release()
    world.replicas["prefill"][2].connected = False
    for _ in range(62):
        world.round()
    world.controller.scale({"decode": 2})
    assert world.controller.manual is not None
    assert world.controller.manual.counts == {"prefill": 2, "decode": 2}


def test_the_first_replicas_are_waited_for() -> None:
    world = World(two_groups())
    for own in world.replicas.values():
        for replica in own:
            replica.born = 0
    made = world.round()
    assert made.plan is None
    assert made.held == "3 of the first replicas have not started yet"
    world.settle()
    assert world.counts() == {"prefill": (1, 0), "decode": (2, 0)}


# ------------------------------------------------------------------------------------------------ who else sets counts


def test_a_count_that_somebody_else_sets_is_adopted_and_said() -> None:
    world = World(two_groups())
    world.settle()
    world.targets["decode"] = 4
    made = world.round()
    assert made.orders.notes[0] == (
        "somebody else has set decode=4 replicas: adopted, prefill=1 decode=4 serve"
    )
    world.settle()
    assert world.counts() == {"prefill": (1, 0), "decode": (4, 0)}
    assert world.controller.manual is not None
    assert world.controller.manual.by == "somebody else"
    world.controller.release()
    world.settle()
    assert world.counts() == {"prefill": (1, 0), "decode": (2, 0)}


def test_a_count_that_somebody_else_sets_is_adopted_as_far_as_the_budget_allows() -> None:
    world = World(two_groups(), budget=5)
    world.settle()
    world.controller.scale({"prefill": 2})
    world.settle()
    world.targets["decode"] = 4
    made = world.round()
    assert made.orders.notes[0] == (
        "somebody else has set decode=4 replicas: adopted, prefill=2 decode=3 serve"
    )
    world.settle()
    assert world.counts() == {"prefill": (2, 0), "decode": (3, 0)}
    # so a later autoscaler goes on with it
    world.controller = world.new_controller(world.controller.memory())
    world.settle()
    assert world.counts() == {"prefill": (2, 0), "decode": (3, 0)}
    assert world.controller.manual is not None
    assert world.controller.manual.by == "somebody else"


def test_an_administrators_order_is_the_last_word_over_a_number_that_was_set_a_moment_before() -> None:
    world = World(two_groups())
    world.settle()
    # set after the autoscaler has looked, and before the order
    world.targets["decode"] = 4
    world.controller.scale({"decode": 3})
    world.settle()
    assert world.counts()["decode"] == (3, 0)
    assert world.controller.manual is not None
    assert world.controller.manual.by == "an administrator"
    # a number that is set later is adopted as ever
    world.targets["decode"] = 2
    world.settle()
    assert world.controller.manual.by == "somebody else"
    assert world.counts()["decode"] == (2, 0)


def test_a_deploy_sets_the_files_counts_and_what_is_wanted_is_set_again() -> None:
    world = World(two_groups())
    world.settle()
    world.controller.scale({"decode": 4})
    world.settle()
    world.targets["decode"], world.deployed_s = 2, 2.0
    assert "a deploy has set decode=2" in world.round().orders.notes[0]
    world.settle()
    assert world.targets["decode"] == 4


def test_a_count_that_could_not_be_set_is_not_taken_for_somebody_elses() -> None:
    world = World(two_groups())
    world.settle()
    world.controller.scale({"decode": 4})
    made = world.controller.decide(world.seen(), world.fleet())
    assert dict(made.orders.targets) == {"decode": 4}
    # the call is lost, or comes late: both are ours
    world.controller.trying({"decode": 4})
    world.tick()
    assert world.round().orders.notes == ()
    assert world.controller.manual is not None
    assert world.controller.manual.by == "an administrator"


def test_a_deploy_is_pending_until_serve_says_that_it_is_over() -> None:
    """Serve shows the time of a deploy before its numbers."""
    world = World(two_groups())
    world.settle()
    world.controller.scale({"decode": 4})
    world.settle()
    world.deployed_s, world.deploying = 2.0, True
    for _ in range(5):
        assert world.round().orders.notes == ()
    world.targets["decode"] = 2
    assert world.round().orders.notes[0] == (
        "a deploy has set decode=2 replicas; what is wanted is set again"
    )
    assert world.targets["decode"] == 4
    world.deploying = False
    world.settle()
    assert world.counts()["decode"] == (4, 0)
    assert world.controller.manual is not None
    assert world.controller.manual.by == "an administrator"


def test_a_number_of_a_program_that_deploys_is_no_foreign_one() -> None:
    """`serve.run` changes no time that Serve tells, and deploys all the same."""
    world = World(two_groups())
    world.settle()
    world.controller.scale({"decode": 3})
    world.settle()
    world.targets["decode"], world.deploying = 2, True
    assert "a deploy has set decode=2" in world.round().orders.notes[0]
    world.deploying = False
    world.settle()
    assert world.counts()["decode"] == (3, 0)


def test_a_foreign_number_during_a_deploy_is_kept_and_adopted_when_the_deploy_is_over() -> None:
    world = World(two_groups())
    world.settle()
    world.deployed_s, world.deploying = 2.0, True
    world.round()
    world.targets["decode"] = 4
    for _ in range(5):
        made = world.round()
        assert made.orders.notes[0] == (
            "decode=4 replicas were set while a deploy runs: they stay until it is over"
        )
        assert made.orders.targets == ()
    assert world.controller.manual is None
    world.deploying = False
    assert "somebody else has set decode=4" in world.round().orders.notes[0]
    world.settle()
    assert world.counts()["decode"] == (4, 0)


def test_an_administrators_order_during_a_deploy_rules_over_a_number_that_waits() -> None:
    world = World(two_groups())
    world.settle()
    world.deployed_s, world.deploying = 2.0, True
    world.targets["decode"] = 4
    world.round()
    world.controller.scale({"decode": 3})
    for _ in range(20):
        world.round()
    world.deploying = False
    world.settle()
    assert world.counts()["decode"] == (3, 0)
    assert world.controller.manual is not None
    assert world.controller.manual.by == "an administrator"


# ---------------------------------------------------------------------------------------------------- before a plan


def test_replicas_that_serve_replaced_before_the_first_plan_serve_again() -> None:
    """A rolling update under load: new replicas have ranks above those of the old ones, and all begin warm."""
    world = World(two_groups(warm=1), policy="joint")
    for _ in range(3):
        assert world.round(fitted=False).orders.engines == ()
    assert world.counts()["decode"] == (2, 1)
    world.replace_all("decode")
    for _ in range(6):
        # nothing has been measured, so there is no plan
        made = world.round(fitted=False)
        assert made.plan is None
        assert made.orders.targets == ()
    assert world.counts() == {"prefill": (1, 0), "decode": (2, 1)}
    # a replica that is ready is not kept back for the others, which start
    world.replace_all("decode", ready=1)
    world.controller = world.new_controller()
    made = world.round(fitted=False)
    assert made.held == "2 of the first replicas have not started yet"
    assert world.counts()["decode"] == (1, 0)


def test_before_a_plan_an_engine_that_serves_another_role_counts_and_none_is_taken_away() -> None:
    world = World(two_groups(warm=1), policy="joint")
    world.round(fitted=False)
    first, _, warm = world.replicas["decode"]
    first.role = Role.PREFILL
    warm.duty = Duty.ACTIVE
    for _ in range(5):
        assert world.round(fitted=False).orders.engines == ()


# ------------------------------------------------------------------------------------------------- errors of a policy


def raising(seen: Observation, step: Step) -> Step:
    raise KeyError("demand")


def refusing(seen: Observation, step: Step) -> Step:
    raise ValueError("arrived is nan")


def naming_nobody(seen: Observation, step: Step) -> Step:
    moves = (Move(Way.DEACTIVATE, "nobody-7", Role.DECODE),)
    return step._replace(plan=dataclasses.replace(step.plan, moves=moves))


def no_step(seen: Observation, step: Step) -> Step:
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        (raising, "the policy failed: KeyError('demand')"),
        (refusing, "the policy refuses this observation: arrived is nan"),
        (naming_nobody, "the policy's plan cannot be carried out: KeyError('nobody-7')"),
        (no_step, "the policy failed: AttributeError"),
    ],
)
def test_any_error_of_a_policy_is_said_and_the_last_plan_and_an_administrators_order_hold(
    failing: Callable[[Observation, Step], Step], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(two_groups(), params={"decode": 3})
    world.settle()
    kind: Any = type(world.controller.policy)
    decides = kind.step
    monkeypatch.setattr(kind, "step", lambda policy, seen, state: failing(seen, decides(policy, seen, state)))
    # a serving engine dies: the last plan is still carried out
    world.replicas["decode"][0].duty = Duty.WARM
    made = world.round()
    assert made.held is not None and made.held.startswith(said)
    assert made.fault is not None and made.step is None
    assert made.plan is not None and made.plan.serving.decode == 3
    world.settle()
    assert world.counts()["decode"] == (3, 0)
    status, body, _ = answer(world.controller, b"", 0.0)
    assert (status, json.loads(body)["held"]) == (200, made.held)
    status, _, changed = answer(world.controller, b'{"counts":{"decode":2}}', 0.0)
    assert (status, changed) == (200, True)
    world.settle()
    assert world.counts()["decode"] == (2, 0)
    # it recovers, and goes on from its state
    monkeypatch.undo()
    world.controller.release()
    world.settle()
    assert world.counts()["decode"] == (3, 0)
    assert world.last_refusal() is None


def test_a_question_that_cannot_be_answered_is_an_answer() -> None:
    world = World(two_groups())
    world.settle()
    assert world.controller.last is not None
    world.controller.last = world.controller.last._replace(
        seen=dataclasses.replace(world.controller.last.seen, engines=None)  # type: ignore[arg-type]
    )
    status, body, changed = answer(world.controller, b'{"plan":true}', 0.0)
    assert (status, changed) == (500, False)
    assert "the autoscaler cannot answer this" in json.loads(body)["message"]


# ------------------------------------------------------------------------------------------------------------ restarts


@pytest.mark.parametrize("seed", range(4))
def test_a_controller_killed_at_any_round_goes_on_where_the_other_was(seed: int) -> None:
    """Counts change while controllers die; the counts ordered last are reached, and nothing that serves is stopped."""
    draw = random.Random(seed)
    world = World(two_groups(warm=1), nodes=("n0", "n1"))
    world.settle()
    wanted: dict[str, int] = {}
    for _ in range(6):
        wanted = {"prefill": draw.randint(1, 4), "decode": draw.randint(1, 3)}
        world.round()
        world.controller.scale(wanted)
        for _ in range(draw.randint(1, 8)):
            world.round()
            world.controller = world.new_controller(world.controller.memory())
    world.settle()
    assert {name: active for name, (active, _) in world.counts().items()} == wanted
    assert world.stopped_active == 0


def test_a_controller_that_died_before_its_order_was_confirmed_is_not_somebody_else() -> None:
    world = World(two_groups())
    world.settle()
    world.controller.scale({"decode": 4})
    targets = dict(world.controller.decide(world.seen(), world.fleet()).orders.targets)
    world.controller.trying(targets)
    memory = world.controller.memory()
    world.targets |= targets
    world.controller = world.new_controller(memory)
    assert world.round().orders.notes == ()
    world.settle()
    assert world.counts()["decode"] == (4, 0)


def test_an_application_that_was_deployed_anew_forgets_an_administrators_counts() -> None:
    world = World(two_groups())
    world.settle()
    world.controller.scale({"decode": 4})
    world.settle()
    memory = world.controller.memory()
    anew = World(two_groups(), deployed_s=9.0, made=100)
    anew.controller = anew.new_controller(memory)
    assert "deployed anew" in anew.round().orders.notes[0]
    anew.settle()
    assert anew.counts()["decode"] == (2, 0)


def test_a_deploy_of_a_changed_configuration_keeps_an_administrators_counts() -> None:
    world = World(two_groups())
    world.settle()
    world.controller.scale({"prefill": 2, "decode": 4})
    world.settle()
    memory = world.controller.memory()
    # Serve sets the file's counts again, one group gets a lower bound and one is new
    world.groups = {
        "prefill": Group("prefill", Role.PREFILL, 1, 4, 1, 0, 30.0),
        "decode": Group("decode", Role.DECODE, 1, 3, 1, 0, 30.0),
        "more": Group("more", Role.DECODE, 1, 2, 1, 0, 30.0),
    }
    world.targets, world.deployed_s = {"prefill": 1, "decode": 1, "more": 1}, 9.0
    world.replicas["more"] = []
    world.controller = world.new_controller(memory)
    world.settle()
    assert world.counts() == {"prefill": (2, 0), "decode": (3, 0), "more": (1, 0)}
    assert world.controller.manual is not None
    assert world.controller.manual.by == "an administrator"


def test_remembered_counts_that_no_longer_fit_the_budget_are_given_up_and_said() -> None:
    world = World(two_groups())
    world.settle()
    world.controller.scale({"prefill": 3, "decode": 4})
    world.settle()
    world.budget = 5
    world.controller = world.new_controller(world.controller.memory())
    assert "prefill=3 decode=4 are more than scaling.budget, 5" in world.round().orders.notes[0]
    assert world.controller.manual is None
    assert not any("budget" in note for note in world.round().orders.notes)


def test_what_lasted_before_another_policy_decided_begins_anew() -> None:
    world = World(two_groups(), policy="joint", rate=1.0)
    for _ in range(30):
        world.round()
    world.controller._state = dataclasses.replace(world.controller._state, calm_since_s=1.0)
    world.policy = "fixed"
    world.controller = world.new_controller(world.controller.memory())
    for _ in range(61):
        world.round()
    world.policy = "joint"
    world.controller = world.new_controller(world.controller.memory())
    made = world.round()
    assert made.orders.notes[0].startswith("the policy has not decided for 62 s")
    assert made.before.forecast.seen >= 2 and made.before.calm_since_s is None


def test_after_a_break_the_journal_begins_a_file_that_can_be_replayed_and_it_is_said() -> None:
    world = World(two_groups(), policy="joint", rate=1.0)
    for _ in range(30):
        world.round()
    before = world.controller.policy
    world.now += 5000
    made = world.round()
    assert made.orders.notes[0].startswith("the policy has not decided for 5001 s")
    assert world.controller.policy is not before and made.step is not None
    header = header_line(world.controller.policy, made.before, "test")
    assert [one.same for one in replay([header, step_line(made.seen, made.step)])] == [True]
    # back by an hour: windows are learned again from the next one on
    learned = world.controller._state.forecast.seen
    world.now -= 3600
    assert world.round().orders.notes[0].startswith("the clock went back by 3599 s")
    for _ in range(20):
        world.round()
    assert world.controller._state.forecast.seen > learned


def test_a_memory_of_another_form_is_not_read() -> None:
    world = World(two_groups())
    world.controller = world.new_controller('{"manual": null, "state": null}')
    assert "another version" in world.round().orders.notes[0]
    world.settle()
    assert world.counts()["decode"] == (2, 0)


def test_what_one_policy_has_learned_waits_while_another_decides() -> None:
    world = World(two_groups(), policy="joint", rate=1.0)
    for _ in range(30):
        world.round()
    learned = world.controller._state
    assert learned.forecast.seen >= 2
    world.policy, world.params = "fixed", {}
    world.controller = world.new_controller(world.controller.memory())
    world.round()
    assert world.controller._state.wanted is not None
    world.policy = "joint"
    world.controller = world.new_controller(world.controller.memory())
    assert world.controller._state == learned


# ------------------------------------------------------------------------------------------------------------- policies


def test_a_policy_that_needs_an_engines_capacity_waits_until_it_is_known() -> None:
    world = World(two_groups(), policy="joint")
    made = world.controller.decide(world.seen(fitted=False), world.fleet())
    assert made.held == "no engine has reported enough work yet to know what one carries"
    assert made.plan is None
    made = world.controller.decide(world.seen(), world.fleet())
    assert made.held is None
    assert made.plan is not None
    # later without it: the plan before stays in force
    made = world.controller.decide(world.seen(fitted=False), world.fleet())
    assert made.held is not None
    assert made.plan is not None


def test_the_joint_policy_grows_and_shrinks_a_fleet_and_every_replica_that_goes_is_warm() -> None:
    world = World(two_groups(warm=1), policy="joint", nodes=("n0", "n1"), params={"calm_s": 60.0})
    world.rate = 1.0
    for _ in range(60):
        world.round()
    assert world.counts()["prefill"][0] == 1
    # a prefill engine computes 5 prompts/s (0.2 s each), a decode engine 8 answers/s (16 slots of 2 s each)
    world.rate = 12.0
    for _ in range(120):
        world.round()
    assert world.counts()["prefill"][0] >= 3
    assert world.counts()["decode"][0] >= 2
    assert world.last_refusal() is None
    world.rate = 1.0
    for _ in range(900):
        world.round()
    assert world.counts()["prefill"][0] == 1
    assert world.stopped_active == 0
    assert world.last_refusal() is None


def test_a_switch_is_an_order_to_one_engine_and_changes_no_count() -> None:
    world = World(two_groups(), params={"prefill": 2, "decode": 1})
    made = world.round()
    assert made.plan is not None
    assert [move.way for move in made.plan.moves] == [Way.SWITCH]
    assert made.orders.targets == ()
    world.settle()
    assert world.roles() == {Role.PREFILL: 2, Role.DECODE: 1}
    assert world.targets == {"prefill": 1, "decode": 2}


def test_a_group_at_its_most_grows_in_another_group() -> None:
    groups = {
        "p": Group("p", Role.PREFILL, 1, 3, 1),
        "d": Group("d", Role.DECODE, 1, 2, 2),
    }
    world = World(groups, params={"prefill": 1, "decode": 2})
    world.settle()
    # a decode engine serves prefill; the group of decode engines is full, so a decode engine comes from the other
    world.replicas["d"][0].role = Role.PREFILL
    world.controller.policy = World(groups, params={"prefill": 2, "decode": 2}).controller.policy
    world.settle()
    assert world.roles() == {Role.PREFILL: 2, Role.DECODE: 2}
    assert world.targets == {"p": 2, "d": 2}


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"decod": 1}, r"there is no group 'decod'; there are prefill, decode"),
        (
            {"decode": 0},
            r"decode is 0: it must be a whole number 1\.\.4, the bounds in engines\.decode\.scaling",
        ),
        ({"decode": 5}, r"decode is 5: it must be a whole number 1\.\.4"),
        ({"decode": True}, "decode is True"),
        ({"decode": 1.5}, r"decode is 1\.5"),
    ],
)
def test_counts_that_cannot_be_are_refused_in_words(counts: dict[str, object], says: str) -> None:
    world = World(two_groups())
    world.round()
    with pytest.raises(BadScale, match=says):
        world.controller.scale(counts)
    assert world.controller.manual is None


def test_warm_replicas_count_in_the_budget_of_an_administrators_counts() -> None:
    # prefill has no warm ones, decode one; 2 + 3 serving and 1 warm are 6
    world = World(two_groups(warm=1), budget=5)
    world.round()
    with pytest.raises(
        BadScale, match=r"prefill=2 decode=3, with 1 warm 6 replicas, are more than scaling\.budget, 5"
    ):
        world.controller.scale({"prefill": 2, "decode": 3})
    world.controller.scale({"prefill": 2, "decode": 2})
    world.settle()
    assert sum(world.targets.values()) == 5
    # a group at its most has no place for a warm one: 1 + 4 of them
    world.controller.scale({"prefill": 1, "decode": 4})
    world.settle()
    assert sum(world.targets.values()) == 5


# ------------------------------------------------------------------------------------------------------------- faults


def test_a_replica_that_is_never_ready_is_waited_for_and_taken_back_when_it_is_not_needed() -> None:
    """The replica runs and its engine never connects: Serve calls it running, the router does not know it."""
    world = World(two_groups())
    world.settle()
    world.controller.scale({"decode": 3})
    world.round()
    (stuck,) = [r for r in world.replicas["decode"] if r.born >= world.now - 1]
    stuck.connected = False
    for _ in range(60):
        world.round()
    # no further one is started in its place, which Serve's health probe would do
    assert world.targets["decode"] == 3
    assert sum(r.connected for r in world.replicas["decode"]) == 2
    world.controller.scale({"decode": 2})
    world.settle()
    assert [r.connected for r in world.replicas["decode"]] == [True, True]
    assert world.stopped_active == 0


def test_the_policys_own_replica_that_is_never_ready_is_taken_back_too() -> None:
    world = World(two_groups(), params={"decode": 3})
    while world.targets["decode"] == 2:
        world.round()
    for replica in world.replicas["decode"][2:]:
        replica.connected = False
    for _ in range(30):
        world.round()
    world.controller.policy = World(two_groups(), params={"decode": 2}).controller.policy
    world.controller._state = None
    for _ in range(200):
        world.round()
    assert world.targets["decode"] == 2
    assert [r.connected for r in world.replicas["decode"]] == [True, True]
    assert world.stopped_active == 0


@pytest.mark.parametrize("seed", range(6))
def test_replicas_that_die_while_warm_switching_or_draining_change_no_count_that_is_reached(
    seed: int,
) -> None:
    """Each round may kill a replica in whatever it does; Serve makes another one, which begins warm."""
    draw = random.Random(seed)
    world = World(two_groups(warm=1), nodes=("n0", "n1"))
    world.settle()
    killed: set[str] = set()
    for _ in range(40):
        world.controller.scale({"prefill": draw.randint(1, 4), "decode": draw.randint(1, 3)})
        for _ in range(draw.randint(1, 6)):
            world.round(lost=draw.random() < 0.2)
            by_state: dict[str, list[Running]] = {}
            for own in world.replicas.values():
                for replica in own:
                    state = "draining" if replica.stops_in is not None else replica.duty.value
                    by_state.setdefault(state, []).append(replica)
            if draw.random() < 0.5:
                state = "draining" if "draining" in by_state else draw.choice(sorted(by_state))
                killed.add(state)
                world.kill(draw.choice(by_state[state]))
    assert killed == {"draining", "warm", "active"}
    wanted = {"prefill": 2, "decode": 2}
    world.controller.scale(wanted)
    world.settle(200)
    assert {name: active for name, (active, _) in world.counts().items()} == wanted
    # no replica is left over
    assert {name: len(own) for name, own in world.replicas.items()} == {"prefill": 2, "decode": 3}
    assert world.targets == {"prefill": 2, "decode": 3}


def test_an_engine_that_dies_while_it_switches_its_role_is_replaced_by_another() -> None:
    world = World(two_groups(), params={"prefill": 2, "decode": 1})
    made = world.round()
    assert made.plan is not None
    (move,) = made.plan.moves
    world.kill(world.engine(move.engine))
    world.settle(120)
    assert world.roles() == {Role.PREFILL: 2, Role.DECODE: 1}
    assert world.stopped_active == 0


@pytest.mark.parametrize("wrong", ["kv_usage", "score", "distance", "since_s"])
def test_a_number_of_an_engine_that_is_no_number_stops_nothing(wrong: str) -> None:
    """Whether a policy refuses such an observation or not: nothing that serves is stopped, and plans go on after it."""
    world = World(two_groups(warm=1), policy="joint", params={"calm_s": 60.0})
    world.rate = 2.0
    for _ in range(30):
        world.round()
    before = world.counts()
    seen = world.seen()
    broken = tuple(dataclasses.replace(e, **{wrong: float("nan")}) for e in seen.engines)  # type: ignore[arg-type]
    made = world.controller.decide(dataclasses.replace(seen, engines=broken), world.fleet())
    assert not [order for order in made.orders.engines if order.duty is Duty.WARM]
    for _ in range(10):
        world.round()
    assert world.counts() == before
    assert world.last_refusal() is None
    assert world.stopped_active == 0


def test_a_plan_is_made_for_the_measured_lead_of_a_start() -> None:
    world = World(two_groups())
    made = world.controller.decide(world.seen(), world.fleet())
    guess = made.seen.leads.start_s
    starts = {f"decode-{i}": StartSteps(1.0, float(i), 2.0, 3.0, 1.0) for i in range(1, 11)}
    made = world.controller.decide(world.seen(), world.fleet(), starts=starts)
    # totals 8..17, of which the ninth is 16
    assert made.seen.leads.start_s == 16.0 != guess
    # engines that have gone still count
    made = world.controller.decide(world.seen(), world.fleet(), starts={})
    assert made.seen.leads.start_s == 16.0
    assert world.controller.start_steps == StartSteps(1.0, 9.0, 2.0, 3.0, 1.0)
