"""Ageing: requests that wait long are raised to the next more urgent class, in queue and pool."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.dispatch.actions import Aged
from policies.dispatch.ageing import AgeWatch
from policies.dispatch.config import DispatchConfig
from policies.dispatch.dispatcher import Action, Dispatcher, Reject, RouteDecode, RoutePrefill
from policies.fairness.base import FairnessPolicy
from policies.fairness.none import NoFairness
from policies.fairness.vtc import VirtualTokenCounter
from policies.journal.replay import replay
from policies.request.terms import Terms
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.standby import Phase, Standby
from policies.state.views import Request
from tests.policies.dispatch.test_sharing import STRICT, Fleet, sent
from tests.policies.random_events import Life, recorded

POLICIES = pytest.mark.parametrize("policy", [NoFairness(), STRICT], ids=["none", "vtc"])


def priority_of(fleet: Fleet, name: str) -> int:
    request = fleet.d.state.request(name)
    assert request is not None
    return request.terms.priority


def tick(fleet: Fleet, at_s: float) -> list[Action]:
    fleet.now_s = at_s
    return fleet.d.handle(ev.Tick(at_s))


# -------------------------------------------------------------------------------------------------------- the watch


def test_a_watch_names_those_that_are_due_with_the_next_more_urgent_class() -> None:
    waits: dict[str, tuple[Request, float]] = {}
    watch = AgeWatch(waits.get)
    for name, priority, since_s in (
        ("a", 0, 0.0),
        ("b", 1, 1.0),
        ("c", 5, 0.0),
        ("d", 5, 2.0),
        ("e", 5, 0.5),
    ):
        request = Request(name, since_s, 1, 1, terms=Terms(priority))
        waits[name] = request, since_s
        watch.add(request, since_s, since_s + 10.0)
    del waits["e"]

    def due(now_s: float, most: int = 99) -> list[tuple[str, int]]:
        return [(one.attempt_id, to) for one, _, to in watch.due(now_s, [0, 1, 5], most)]

    assert due(9.9) == []
    # "a" is in the most urgent class, "e" has left
    assert due(11.0) == [("b", 0), ("c", 1)]
    # each is named once
    assert due(11.0) == []
    assert due(12.0) == [("d", 1)]
    watch.restart(waits.values(), 10.0)
    assert due(20.0, most=2) == [("b", 0), ("c", 1)] and due(20.0) == [("d", 1)]
    watch.restart(waits.values(), None)
    assert due(1e9) == []


def test_a_watch_forgets_what_has_left() -> None:
    waits: dict[str, tuple[Request, float]] = {}
    watch = AgeWatch(waits.get)
    for i in range(3000):
        request = Request(f"r{i}", 0.0, 1, 1, terms=Terms(i % 2))
        waits[request.attempt_id] = request, 0.0
        watch.add(request, 0.0, float(i))
        if i >= 10:
            del waits[f"r{i - 10}"]
        watch.tidy(len(waits))
        assert watch._watched == sum(map(len, watch._of.values())) <= 1024 + 4 * 11
    assert len(watch.due(1e9, [0, 1], 9999)) == 5


# --------------------------------------------------------------------------------------------------- queue and pool


@POLICIES
def test_in_the_queue_a_request_is_raised_class_by_class_and_explained(policy: FairnessPolicy) -> None:
    fleet = Fleet(policy, class_ageing_s=10.0)
    running, _ = fleet.arrive("a", priority=-1)
    old, _ = fleet.arrive("a", priority=7)
    for priority in (-1, 0, -1, 0):
        fleet.arrive("b", priority=priority)
    assert not tick(fleet, 9.0) and priority_of(fleet, old) == 7
    tick(fleet, 10.1)
    # only to the next one in which something waits; those of class 0 are raised as well
    assert priority_of(fleet, old) == 0
    tick(fleet, 15.0)
    assert priority_of(fleet, old) == 0
    tick(fleet, 20.2)
    assert priority_of(fleet, old) == -1
    order = []
    aged = {}
    for _ in range(5):
        actions = fleet.prefilled(running)
        [running] = sent(actions)
        order.append(running)
        [route] = [one for one in actions if isinstance(one, RoutePrefill)]
        aged[running] = route.aged
    if isinstance(policy, NoFairness):
        # one that is raised is the last of its new class
        assert order == ["b-3", "b-5", "b-4", "b-6", old]
    assert set(order) == {old, "b-3", "b-4", "b-5", "b-6"}
    assert aged["b-3"] is aged["b-5"] is None
    assert aged["b-4"] == aged["b-6"] == Aged(0, -1)
    assert aged[old] == Aged(7, -1)


@POLICIES
def test_in_the_pool_a_request_is_raised_and_its_decision_says_so(policy: FairnessPolicy) -> None:
    fleet = Fleet(policy, prefill=9, overcommit_slots=0, class_ageing_s=10.0)
    running, _ = fleet.arrive("c")
    fleet.prefilled(running)
    old, _ = fleet.arrive("a", priority=1)
    fleet.prefilled(old)
    tick(fleet, 8.0)
    young, _ = fleet.arrive("b", priority=0)
    fleet.prefilled(young)
    tick(fleet, 9.0)
    assert priority_of(fleet, old) == 1
    tick(fleet, 10.5)
    assert priority_of(fleet, old) == 0 and fleet.d.state.pool_entry(old).request.terms.priority == 0
    # in its new class it came first
    actions = fleet.ended(running)
    assert sent(actions, RouteDecode) == [old]
    [route] = [one for one in actions if isinstance(one, RouteDecode)]
    assert route.aged == Aged(1, 0)
    actions = fleet.ended(old)
    [route] = [one for one in actions if isinstance(one, RouteDecode)]
    assert (route.attempt_id, route.aged) == (young, None)


def test_a_refused_request_says_how_its_priority_had_changed() -> None:
    fleet = Fleet(NoFairness(), class_ageing_s=10.0)
    fleet.d.handle(ev.PoliciesChanged(0.0, dispatch={"queue_timeout_s": 30.0}))
    fleet.arrive("a", priority=0)
    fleet.arrive("a", priority=0)
    old, _ = fleet.arrive("a", priority=1)
    tick(fleet, 11.0)
    rejects = [one for one in tick(fleet, 31.0) if isinstance(one, Reject)]
    assert {one.attempt_id: one.aged for one in rejects}[old] == Aged(1, 0)


def test_without_the_option_nothing_is_raised_and_it_begins_with_what_waits() -> None:
    fleet = Fleet(NoFairness(), prefill=1, overcommit_slots=0)
    names = [fleet.arrive("a", priority=i)[0] for i in range(3)]
    tick(fleet, 1e6)
    assert [priority_of(fleet, name) for name in names] == [0, 1, 2]
    fleet.d.handle(ev.PoliciesChanged(1e6, dispatch={"class_ageing_s": 5.0}))
    tick(fleet, 1e6 + 1)
    # the first is computed, and the second is the most urgent one that waits
    assert [priority_of(fleet, name) for name in names] == [0, 1, 1] and fleet.d.raised == 1
    fleet.d.handle(ev.PoliciesChanged(1e6 + 2, dispatch={"class_ageing_s": None}))
    fleet.arrive("a", priority=-1)
    tick(fleet, 1e6 + 99)
    assert [priority_of(fleet, name) for name in names] == [0, 1, 1]


def test_while_the_fleet_sleeps_nothing_ages() -> None:
    fleet = Fleet(NoFairness(), prefill=1, class_ageing_s=10.0)
    fleet.d.handle(ev.StandbyChanged(0.0, Standby(Phase.WAKING, wake_limit_s=1e6)))
    fleet.arrive("a", priority=0)
    fleet.arrive("a", priority=0)
    old, _ = fleet.arrive("a", priority=1)
    tick(fleet, 50.0)
    assert priority_of(fleet, old) == 1
    fleet.d.handle(ev.StandbyChanged(50.0, Standby(Phase.AWAKE)))
    tick(fleet, 59.0)
    assert priority_of(fleet, old) == 1
    tick(fleet, 61.0)
    assert priority_of(fleet, old) == 0


def test_a_tick_raises_no_more_than_its_bound() -> None:
    fleet = Fleet(NoFairness(), class_ageing_s=10.0, tick_entries=4)
    fleet.arrive("a", priority=0)
    fleet.arrive("a", priority=0)
    names = [fleet.arrive("a", priority=1)[0] for _ in range(10)]
    for n in (4, 8, 10):
        tick(fleet, 20.0 + n)
        assert [priority_of(fleet, name) for name in names] == [0] * n + [1] * (10 - n)


# ------------------------------------------------------------------------------------------------------ properties


def longest_wait(
    place: str, age_s: float | None, policy: FairnessPolicy, pick: Callable[[int], int]
) -> float:
    """Returns for how long one of 2 classes' least urgent requests waits at most, in steps of a second. With each step
    one request is served and more than one comes, most of them of the urgent class, which would take all.
    """
    pool = place == "pool"
    fleet = Fleet(policy, prefill=4 if pool else 1, overcommit_slots=0, class_ageing_s=age_s, max_queue=10**6)
    running, _ = fleet.arrive("a")
    if pool:
        fleet.prefilled(running)
    came, waited = {}, [0]
    for step in range(200):
        fleet.now_s = float(step)
        # 5 urgent ones in 4 steps, and a less urgent one every tenth
        for priority in [0] * (2 if step % 4 == 0 else 1) + [pick(step)] * (step % 10 == 3):
            name, _ = fleet.arrive("ab"[step % 2], priority=priority)
            came[name] = step, priority
            if pool:
                fleet.prefilled(name)
        fleet.d.handle(ev.Tick(fleet.now_s))
        actions = fleet.ended(running) if pool else fleet.prefilled(running)
        [running] = sent(actions, RouteDecode if pool else RoutePrefill)
        step_came, priority = came.pop(running, (step, 0))
        if priority:
            waited.append(step - step_came)
    return max([*waited, *(200 - at for at, priority in came.values() if priority)])


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    place=st.sampled_from(["queue", "pool"]),
    fair=st.booleans(),
)
def test_nobody_starves_with_ageing_and_somebody_does_without(seed: int, place: str, fair: bool) -> None:
    policy = STRICT if fair else NoFairness()
    picked = random.Random(seed).sample(range(1, 9), 3)

    def pick(step: int) -> int:
        return picked[step % 3]

    assert longest_wait(place, None, policy, pick) > 190
    # a class after another, 10 s each, and then in turn with what waits in the most urgent one: no more than comes in
    # the whole time beyond what is served, 1/4 + 1/10 a step
    assert longest_wait(place, 10.0, policy, pick) <= 10 * 4 + 200 * 0.35 + 2


@pytest.mark.parametrize("seed", range(4))
def test_any_history_with_ageing_and_shares_of_classes_replays_to_the_same_lines(seed: int) -> None:
    d = Dispatcher(
        DispatchConfig(max_queue=24, max_queue_tokens=20_000, class_ageing_s=0.3, queue_timeout_s=5.0),
        prefill_policy("load_aware"),
        decode_policy("composition"),
        fairness=VirtualTokenCounter(class_ratio=3.0 if seed % 2 else None, slack_tokens=100.0),
    )
    life = Life(random.Random(seed), tenants=("a", "a", "b"), changes_fairness=False)

    def agree() -> None:
        """The queue, the sums and the reducer agree on whose class is whose."""
        state = d.state
        queued = [state.request(one.attempt_id) for one in d.sharing.queue.waiting()]
        assert all(a is b for a, b in zip(queued, d.sharing.queue.waiting(), strict=True))
        assert d.queued_sequences == state._ledger.queued.until(10**9).sequences
        assert sorted({e.request.terms.priority for e in state.waiting()}) == state.pooled_priorities

    lines = recorded(d, life, 1200, agree)
    text = "\n".join(lines)
    assert '"aged":{"asked":1,"served_as":0}' in text
    assert ('"classes":{"' in text) == bool(seed % 2)
    assert all(step.equal for step in replay(lines))
