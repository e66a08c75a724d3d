"""The orders of an administrator in a run with an autoscaler lead where they say, and parts of engines are told by what
they do.
"""

import json
import random
from collections import Counter
from typing import Any

import pytest

from actors.scaling.asked import answer
from app.config import AppConfig
from benchmarks.chaos.run import doing
from benchmarks.chaos.scaling import LEAST, STATES, Ordered, row, walk
from benchmarks.chaos.schedule import ENGINES, SCALING, Schedule
from benchmarks.chaos.setups import sim_setup
from benchmarks.chaos.totals import orders_of
from policies.scaling.base import Way
from policies.scaling.observation import Duty
from tests.actors.scaling.world import World


def configured() -> AppConfig:
    return AppConfig(**sim_setup(scaling=True).args)


def world() -> World:
    """The fleet of the setup around the autoscaler's controller, with the policy that the configuration makes."""
    autoscaler = configured().autoscaler
    made = World(autoscaler.groups())
    made.made_policy = autoscaler.policy  # type: ignore[method-assign]
    made.controller = made.new_controller()
    made.settle()
    return made


def told(made: World, body: dict[str, Any]) -> dict[str, Any]:
    status, text, _ = answer(made.controller, json.dumps(body).encode(), 0.0)
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


def engines(made: World) -> dict[str, int]:
    """The engines of `made` by part, as `State.engines` has them."""
    running = [replica for own in made.replicas.values() for replica in own]
    found = Counter("warm" if r.duty is Duty.WARM else r.role.value for r in running)
    return dict.fromkeys(STATES[0].engines, 0) | found


def test_the_configuration_is_the_first_state() -> None:
    made = world()
    assert engines(made) == STATES[0].engines
    assert STATES[0].differs(told(made, {})) is None


def test_every_order_leads_to_the_engines_that_it_says_and_they_start_stop_switch_and_wake() -> None:
    made, ways, here = world(), Counter[Way](), STATES[0]
    visited = Counter(state for state in walk(random.Random("walk"))[:60])
    assert set(visited) == set(STATES)
    for state in walk(random.Random("walk"))[1:60]:
        told(made, here.order_to(state))
        for _ in range(60):
            decided = made.round()
            ways.update(move.way for move in decided.plan.moves if decided.plan)  # type: ignore[union-attr]
        here = state
        assert engines(made) == state.engines
        assert state.differs(told(made, {})) is None
        assert sum(made.targets.values()) == state.replicas
    assert {Way.SWITCH, Way.ACTIVATE, Way.STOP} <= set(ways)
    assert made.stopped_active == 0


@pytest.mark.parametrize("seed", range(12))
def test_losses_of_engines_orders_and_autoscalers_do_not_keep_the_fleet_from_what_was_ordered_last(
    seed: int,
) -> None:
    """In small what the benchmark does to a whole application: a replica dies about every 20 rounds, the autoscaler
    every 25 and goes on with the memory that was saved last, and every tenth round's orders to engines are lost.
    """
    rng, made, here = random.Random(seed), world(), STATES[0]
    for state in walk(random.Random(seed))[1:12]:
        # an autoscaler that has just started takes no order before its first round
        made.round()
        told(made, here.order_to(state))
        here, saved = state, made.controller.memory()
        for _ in range(rng.randrange(8, 40)):
            if rng.random() < 0.05:
                made.kill(rng.choice([replica for own in made.replicas.values() for replica in own]))
            if rng.random() < 0.04:
                made.controller = made.new_controller(saved)
            if made.round(lost=rng.random() < 0.1).orders.targets:
                saved = made.controller.memory()
    made.settle(200)
    assert engines(made) == here.engines
    assert here.differs(told(made, {})) is None


def test_what_rules_differs_from_what_was_ordered() -> None:
    made, wide, by_hand, narrow = world(), STATES[0], STATES[1], STATES[4]
    assert by_hand.differs(told(made, {})) == "wanted of prefill by hand are None, ordered were 2"
    said = narrow.differs(told(made, {}))
    assert said is not None
    assert said.startswith("the bounds of prefill are")
    told(made, wide.order_to(by_hand))
    assert by_hand.differs(told(made, {})) is None
    assert wide.differs(told(made, {})) == "wanted of prefill by hand are 2, ordered were None"


def test_no_state_takes_the_least_that_must_serve() -> None:
    """A fault needs two well engines of a role, and what the schedule counts as whole is in every state."""
    for state in STATES:
        assert all(state.engines[role] >= LEAST[role] >= 2 for role in ENGINES)
        assert any(state.leads_to(other) for other in STATES)
    assert not STATES[0].leads_to(STATES[0])


def test_a_seed_decides_the_orders() -> None:
    assert walk(random.Random(3)) == walk(random.Random(3)) != walk(random.Random(4))


def engine(name: str, role: str, state: str = "ready", duty: str = "active") -> dict[str, str]:
    return {"id": name, "role": role, "state": state, "duty": duty}


def test_the_part_of_an_engine_is_what_it_does() -> None:
    one = {
        "engines": [
            engine("prefill-a", "prefill"),
            # serves the other role than its group's
            engine("prefill-b", "decode"),
            engine("decode-a", "decode", duty="warm"),
            engine("decode-b", "decode", "draining"),
            engine("decode-c", "decode", "quarantined"),
            engine("decode-d", "decode", "starting", "warm"),
        ]
    }
    other = {"engines": [engine("decode-a", "decode")]}
    assert doing([one]) == {
        "prefill-a": "prefill", "prefill-b": "decode", "decode-a": "warm", "decode-b": "draining",
        "decode-c": "decode", "decode-d": "starting",
    }  # fmt: skip
    assert doing([one, other])["decode-a"] == "decode"


def test_the_autoscaler_and_idle_engines_are_harmed_where_they_are_there() -> None:
    setup = sim_setup(scaling=True)
    assert {kind.name for kind in SCALING} <= {kind.name for kind in setup.kinds}
    assert not {kind.name for kind in SCALING} & {kind.name for kind in sim_setup().kinds}
    well = {**setup.parts, "warm": 1, "starting": 1, "draining": 1}
    schedule = Schedule(setup.kinds, 1, setup.parts)
    drawn = {fault.kind for _ in range(200) if (fault := schedule.next(well))}
    assert drawn == set(setup.kinds) - {kind for kind in setup.kinds if kind.name == "poison prefill"}
    without = Schedule(SCALING, 1, setup.parts)
    parts = {f.kind.part for _ in range(100) if (f := without.next({"autoscaler": 1, "starting": 0}))}
    assert parts == {"autoscaler"}


def test_the_controller_is_harmed_while_engines_start() -> None:
    setup = sim_setup(scaling=True)
    kinds = [kind for kind in setup.kinds if kind.part == "controller"]
    assert Schedule(kinds, 1, setup.parts).next({**setup.parts, "starting": 1, "warm": 0}) is not None


def test_orders_add_up() -> None:
    """Acknowledged after 1.5 and 8 s, of which one was reached 20 s later."""
    done = Ordered({"mode": "auto"}, 10.0, 11.5, 31.5)
    overtaken = Ordered({"counts": {"prefill": 2}}, 40.0, 48.0, None, Counter({"503": 2}))
    lost = Ordered({"mode": "auto"}, 90.0)
    rows = [row(order) for order in (done, overtaken, lost)]
    assert rows[1] == ['{"counts": {"prefill": 2}}', 40.0, 48.0, None, {"503": 2}]
    assert orders_of(rows) == {
        "number": 3, "acknowledged": 2, "acknowledged_longest_s": 8.0,
        "reached": 1, "reached_median_s": 20.0, "reached_longest_s": 20.0,
    }  # fmt: skip
    assert orders_of([]) is None
