"""Scale to zero in closed loops with a Serve in small: sleep, wake, a wake that fails, restarts, numbers by hand."""

from dataclasses import replace
from typing import Any

import pytest

from actors.scaling.asked import described
from actors.scaling.control import BadScale
from actors.scaling.fleet import Deployed, Group, not_started
from policies.state.standby import Abilities, Phase
from policies.state.views import Role
from tests.actors.scaling.world import World, two_groups

ZERO = {"prefill": (0, 0), "decode": (0, 0)}
IDLE_S, WAKE_S = 20.0, 15.0
IDLE_ROUNDS = 25
"""More rounds, of a second each, than an idle fleet stays awake."""


def world(policy: str = "fixed", **more: Any) -> World:
    """One prefill and one decode engine, which sleep after 20 s; a start takes 3 s, and a wake 15 s at most."""
    groups = {
        name: Group(name, role, 0, 3, 1, 0, 30.0)
        for name, role in (("prefill", Role.PREFILL), ("decode", Role.DECODE))
    }
    sleep = {"idle_s": IDLE_S, "wake_limit_s": WAKE_S}
    return World(more.pop("groups", groups), policy, params={"sleep": sleep}, **more)


def phase(made: World) -> Phase:
    return made.controller.standby.phase


def sleeping(policy: str = "fixed", **more: Any) -> World:
    made = world(policy, **more)
    for _ in range(30):
        made.round()
    assert (made.targets, made.counts(), phase(made)) == ({"prefill": 0, "decode": 0}, ZERO, Phase.ASLEEP)
    return made


def wakes(made: World) -> None:
    """Lets a request wait until an engine serves, and fails if none does within twice the time of a start."""
    made.queued = 1
    for _ in range(2 * made.start_rounds + 2):
        made.round()
        if phase(made) is Phase.AWAKE and made.counts() == {"prefill": (1, 0), "decode": (1, 0)}:
            made.queued = 0
            return
    raise AssertionError(f"{phase(made)}, {made.counts()}, {made.controller.last}")


@pytest.mark.parametrize("policy", ["fixed", "joint", "ongoing", "demand_rate"])
def test_an_idle_fleet_sleeps_wakes_by_one_request_and_sleeps_again(policy: str) -> None:
    made = sleeping(policy)
    assert made.stopped_active == 0
    made.queued = 1
    made.round()
    # the same round has asked Serve
    assert made.targets == {"prefill": 1, "decode": 1}
    assert phase(made) is Phase.WAKING
    wakes(made)
    for _ in range(30):
        made.round()
    assert (made.counts(), phase(made), made.stopped_active) == (ZERO, Phase.ASLEEP, 0)


def test_warm_engines_go_too_and_a_group_that_must_stay_stays() -> None:
    groups = {
        "prefill": Group("prefill", Role.PREFILL, 0, 3, 1, 0, 30.0),
        "decode": Group("decode", Role.DECODE, 0, 3, 1, 1, 30.0),
    }
    sleeping(groups=groups)
    groups["kept"] = Group("kept", Role.DECODE, 1, 2, 1, 0, 30.0)
    made = world(groups=groups)
    made.params["sleep"] = {"idle_s": IDLE_S, "wake_limit_s": WAKE_S, "decode": 1}
    made.controller = made.new_controller()
    for _ in range(30):
        made.round()
    assert sum(active for active, _ in made.counts().values()) == 1
    # a decode engine computes prompts itself, so nothing sleeps that a request would wait for
    assert phase(made) is Phase.AWAKE


@pytest.mark.parametrize("after", range(8))
def test_a_request_that_comes_while_the_engines_go_is_served(after: int) -> None:
    made = world()
    while made.controller._state is None or not made.controller._state.asleep:
        made.round()
    for _ in range(after):
        made.round()
    wakes(made)


def test_a_wake_that_fails_says_why_sleeps_again_and_the_next_one_succeeds() -> None:
    made = sleeping()
    made.room, made.queued = 0, 1
    made.serve_says = "Deployment 'DecodeEngine' has 1\nreplicas that have taken long to be scheduled."
    began = made.now
    while phase(made) is not Phase.FAILED:
        made.round()
        assert made.now - began < 60
    assert made.now - began == WAKE_S + 1
    told = made.controller.standby
    said = "decode: 0 of 1 replicas run: Deployment 'DecodeEngine' has 1 replicas that have taken long"
    assert said in told.reason and "prefill: 0 of 1" in told.reason
    # all were rejected; what is wanted stays wanted until nothing has come for the idle time
    made.queued = 0
    for _ in range(15):
        made.round()
    assert (phase(made), made.targets) == (Phase.FAILED, {"prefill": 1, "decode": 1})
    for _ in range(10):
        made.round()
    assert (phase(made), made.targets) == (Phase.ASLEEP, {"prefill": 0, "decode": 0})
    assert made.controller.standby.reason == ""
    made.room = 100
    wakes(made)


def test_a_failed_wake_ends_when_an_engine_comes_after_all() -> None:
    made = sleeping()
    made.room, made.queued = 0, 1
    for _ in range(20):
        made.round()
    assert phase(made) is Phase.FAILED
    made.room = 100
    for own in made.replicas.values():
        for replica in own:
            replica.placed, replica.born = True, made.now
    wakes(made)


@pytest.mark.parametrize("waking", [False, True])
def test_a_later_autoscaler_knows_that_the_fleet_sleeps_or_wakes_and_what_it_can(waking: bool) -> None:
    made = world()
    made.abilities = Abilities(4096, ("tools",))
    for _ in range(30):
        made.round()
    made.abilities = None
    made.room = 0
    if waking:
        made.queued = 1
        made.round()
    before, since = made.controller.standby, made.controller.phase
    made.controller = made.new_controller(made.controller.memory())
    # told at its connection, before the first round
    assert made.controller.standby == before
    assert made.controller.phase == since
    made.round()
    assert (phase(made), made.controller.phase.since_s) == (before.phase, since.since_s)
    assert made.controller.abilities == Abilities(4096, ("tools",))
    made.room = 100
    for own in made.replicas.values():
        for replica in own:
            replica.placed = True
    wakes(made)


@pytest.mark.parametrize("restarted", [True, False])
def test_time_that_nobody_saw_is_no_idle_time(restarted: bool) -> None:
    """Requests may have come while there was no autoscaler, or while Serve answered nothing: 15 s of silence before and
    one window after are no 20 s of silence.
    """
    made = world()
    for _ in range(15):
        made.round()
    if restarted:
        made.controller = made.new_controller(made.controller.memory())
    made.now += 300
    for _ in range(15):
        made.round()
        assert made.counts() == {"prefill": (1, 0), "decode": (1, 0)}
    for _ in range(10):
        made.round()
    assert (made.counts(), phase(made)) == (ZERO, Phase.ASLEEP)


def test_a_later_autoscaler_that_comes_soon_goes_on_with_the_idle_time() -> None:
    made = world()
    for _ in range(15):
        made.round()
    made.controller = made.new_controller(made.controller.memory())
    made.now += 10
    for _ in range(4):
        made.round()
    assert phase(made) is Phase.ASLEEP


def test_by_hand_nothing_is_set_to_zero_and_numbers_wake_a_fleet() -> None:
    made = sleeping()
    with pytest.raises(
        BadScale, match=r"decode is 0: it must be a whole number 1\.\.3, .*only the policy has"
    ):
        made.controller.scale({"decode": 0})
    made.controller.scale({"decode": 2})
    made.round()
    assert phase(made) is Phase.WAKING
    made.settle()
    assert (made.counts(), phase(made)) == ({"prefill": (1, 0), "decode": (2, 0)}, Phase.AWAKE)
    made.controller.release()
    made.settle()
    assert (made.counts(), phase(made)) == (ZERO, Phase.ASLEEP)


def test_numbers_that_are_given_back_under_load_stop_no_engine() -> None:
    """Requests that engines take at once never wait at the router, so nothing else tells the policy of them."""
    made = sleeping()
    made.controller.scale({"prefill": 1, "decode": 2})
    made.settle()
    made.rate = 1.0
    for _ in range(IDLE_ROUNDS):
        made.round()
    made.controller.release()
    for _ in range(IDLE_ROUNDS):
        made.round()
        assert made.counts()["decode"][0] >= 1 and phase(made) is Phase.AWAKE
    assert made.controller.manual is None


def test_a_deploy_wakes_for_a_moment_and_the_fleet_sleeps_again() -> None:
    made = sleeping()
    made.targets, made.deployed_s = {"prefill": 1, "decode": 1}, 2.0
    made.tick()
    assert "a deploy has set prefill=1 decode=1 replicas" in made.round().orders.notes[0]
    for _ in range(10):
        made.round()
    assert (made.targets, made.controller.manual) == ({"prefill": 0, "decode": 0}, None)


@pytest.mark.parametrize("deleted", [False, True])
def test_a_deploy_while_the_fleet_sleeps_forgets_what_ruled_only_if_the_application_was_deleted(
    deleted: bool,
) -> None:
    """Asleep there is no engine's replica by which the two could be told apart; the router's is there."""
    made = sleeping()
    made.companions = ("ingress1", "router1")
    made.controller.bound({"decode": {"max": 2}})
    made.round()
    memory = made.controller.memory()
    made.targets, made.deployed_s = {"prefill": 1, "decode": 1}, 2.0
    made.companions = ("ingress2", "router2") if deleted else ("ingress2", "router1")
    made.tick()
    made.controller = made.new_controller(memory)
    notes = made.round().orders.notes
    assert any("deployed anew" in note for note in notes) is deleted
    assert made.controller.groups["decode"].most == (3 if deleted else 2)


def test_without_sleep_nothing_is_told_of_one() -> None:
    made = World(two_groups())
    for _ in range(60):
        made.round()
    assert made.counts() == {"prefill": (1, 0), "decode": (2, 0)}
    assert (made.controller.standby.phase, made.controller.standby.wake_limit_s) == (Phase.AWAKE, 0.0)


def test_an_administrator_sees_the_phase_and_the_reason() -> None:
    made = sleeping()
    told = described(made.controller, made.controller.last, 0.5)
    assert told["phase"] == "asleep"
    assert told["plan"]["serving"] == {"prefill": 0, "decode": 0, "colocated": 0}
    assert told["reasons"][0] == "asleep: the next request wakes"
    preview = made.controller.preview(None)
    assert preview is not None and preview.reasons[0] == "asleep: the next request wakes"


def test_what_serve_says_is_cut_to_a_length_that_fits_an_answer() -> None:
    fleet = world().fleet()
    fleet = replace(fleet, groups={"d": Deployed(2, (), "x" * 1_000)})
    assert len(not_started(fleet)) == 300
