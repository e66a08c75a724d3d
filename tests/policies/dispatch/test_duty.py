"""A warm worker gets nothing and changes no decision; what a draining worker holds for others goes first."""

import random
from collections.abc import Sequence

import pytest

from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher, Reject, RouteDecode, RoutePrefill
from policies.request.terms import Mode, Terms
from policies.routing.base import PolicyError
from policies.routing.registry import DECODE, PREFILL, decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Health, Request, Role
from tests.policies.random_events import Life

WARM = {"w0": Role.PREFILL, "w1": Role.DECODE, "w2": Role.COLOCATED}
STEPS = 250


def up(
    name: str, role: Role, health: Health = Health.READY, now_s: float = 0.0, slots: int = 4
) -> ev.EngineUp:
    return ev.EngineUp(now_s, name, role, "a", "n1", slots, 4000, health)


def handled(d: Dispatcher, event: ev.Event) -> tuple[Sequence[Action], str]:
    """Returns the actions that an event led to and the error that it raised."""
    try:
        return d.handle(event), ""
    except PolicyError as error:
        return error.decided, str(error)
    except (ev.StaleEvent, ValueError) as error:
        return (), str(error)


def made(prefill: str, decode: str) -> Dispatcher:
    return Dispatcher(DispatchConfig(seed=7), prefill_policy(prefill), decode_policy(decode))


@pytest.mark.parametrize("decode", sorted(DECODE))
def test_idle_warm_workers_change_no_decision_of_any_policy(decode: str) -> None:
    """Two dispatchers go through the same history, of which one knows a warm worker of each role as well."""
    for number, prefill in enumerate(sorted(PREFILL)):
        life = Life(random.Random(number))
        alone, beside = made(prefill, decode), made(prefill, decode)
        for name, role in WARM.items():
            beside.handle(up(name, role, Health.WARM, life.now_s))
            beside.handle(ev.EngineStatus(life.now_s, name, 0, 0, 0, Health.WARM))
        events = list(life.start())
        routed = 0
        for step in range(STEPS):
            event = events[step] if step < len(events) else life.next_event()
            if isinstance(event, ev.PoliciesChanged | ev.EngineDown):
                continue
            for name in WARM:
                # any event has an unfinished scan resumed
                report = ev.EngineStatus(life.now_s, name, 0, 0, 0, Health.WARM)
                assert handled(beside, report) == handled(alone, ev.ProgressedMany(life.now_s, ()))
            one, other = handled(alone, event), handled(beside, event)
            # not a number is not equal to itself
            assert repr(one) == repr(other), (prefill, decode, step, event)
            routed += sum(not isinstance(action, Reject) for action in one[0])
            life.saw(tuple(one[0]))
        assert routed > 10


def test_a_warm_worker_that_is_activated_gets_what_waits_and_a_deactivated_one_ends_its_work() -> None:
    d = made("round_robin", "round_robin")
    for name, role, health in (
        ("p", Role.PREFILL, Health.READY), ("d", Role.DECODE, Health.READY), ("w", Role.DECODE, Health.WARM),
    ):  # fmt: skip
        d.handle(up(name, role, health, slots=1))
        d.handle(ev.EngineStatus(0.0, name, 0, 0, 0, health))

    def decoded(attempt_id: str) -> list[Action]:
        (route,) = d.handle(ev.Arrived(0.0, Request(attempt_id, 0.0, 16, 8)))
        assert isinstance(route, RoutePrefill)
        return d.handle(ev.PrefillDone(0.0, attempt_id, 30.0, 1, 0))

    (first,) = decoded("a")
    assert isinstance(first, RouteDecode) and first.decision.worker == "d"
    assert decoded("b") == []
    (second,) = d.handle(up("w", Role.DECODE, now_s=0.5, slots=1))
    assert isinstance(second, RouteDecode) and second.decision.worker == "w"
    d.handle(up("w", Role.DECODE, Health.WARM, now_s=0.6, slots=1))
    assert d.handle(ev.Admitted(0.7, "b")) == [] == d.handle(ev.Progressed(0.8, "b", 3))
    w = d.state.worker("w")
    assert w is not None and w.slots_used == 1
    assert decoded("c") == []
    # its slot is free, and it is warm
    assert d.handle(ev.Closed(0.9, "b", "finished", 3)) == []
    (third,) = d.handle(ev.Closed(1.0, "a", "finished", 3))
    assert isinstance(third, RouteDecode) and third.decision.worker == "d"


@pytest.mark.parametrize("mode", [None, Mode.COLOCATED, Mode.DISAGGREGATED])
def test_where_only_warm_workers_are_left_requests_wait_for_one_to_be_activated(mode: Mode | None) -> None:
    d = made("round_robin", "round_robin")
    request = Request("a", 0.0, 16, 8, terms=Terms(mode=mode))
    d.handle(up("w", Role.DECODE, Health.WARM))
    d.handle(ev.EngineStatus(0.0, "w", 0, 0, 0, Health.WARM))
    assert d.handle(ev.Arrived(0.0, request)) == []
    assert d.queue_size == 1
    (route,) = d.handle(up("w", Role.COLOCATED, now_s=1.0)) or d.handle(up("p", Role.PREFILL, now_s=1.0)) or [
        *d.handle(ev.EngineStatus(1.0, "p", 0, 0, 0)),
        *d.handle(up("w", Role.DECODE, now_s=1.0)),
    ]  # fmt: skip
    assert isinstance(route, RoutePrefill)


def test_the_wait_for_a_warm_worker_is_bounded_and_without_one_there_is_none() -> None:
    d = made("round_robin", "round_robin")
    d.handle(up("w", Role.DECODE, Health.WARM))
    assert d.handle(ev.Arrived(0.0, Request("a", 0.0, 16, 8))) == []
    (late,) = d.handle(ev.Tick(d.config.queue_timeout_s + 1.0))
    assert isinstance(late, Reject) and late.reason == "queue_timeout"
    now_s = 1000.0
    assert d.handle(ev.Arrived(now_s, Request("b", now_s, 16, 8))) == []
    (gone,) = d.handle(ev.EngineDown(now_s, "w"))
    assert isinstance(gone, Reject) and gone.reason == "no_engine"


@pytest.mark.parametrize(
    "terms",
    [
        Terms(mode=Mode.COLOCATED),
        Terms(mode=Mode.COLOCATED, priority=-5),
        Terms(local=True, mode=Mode.COLOCATED),
    ],
)
def test_a_request_that_no_ready_worker_serves_lets_the_others_pass_while_a_worker_is_warm(
    terms: Terms,
) -> None:
    d = made("round_robin", "round_robin")
    for name, role, health in (
        ("p", Role.PREFILL, Health.READY), ("d", Role.DECODE, Health.READY), ("w", Role.DECODE, Health.WARM),
    ):  # fmt: skip
        d.handle(up(name, role, health, slots=1))
        d.handle(ev.EngineStatus(0.0, name, 0, 0, 0, health))
    assert d.handle(ev.Arrived(0.0, Request("rare", 0.0, 16, 8, terms=terms))) == []
    # "a" is served at once, and "b" once the prefill worker is free
    (first,) = d.handle(ev.Arrived(0.1, Request("a", 0.1, 16, 8)))
    assert isinstance(first, RoutePrefill) and first.attempt_id == "a"
    assert d.handle(ev.Arrived(0.2, Request("b", 0.2, 16, 8))) == []
    assert d.handle(ev.Tick(0.3)) == []
    second = d.handle(ev.PrefillDone(0.4, "a", 30.0, 1, 0))
    assert [action.attempt_id for action in second if isinstance(action, RoutePrefill)] == ["b"]
    # the rare one waits on, and a colocated worker takes it
    assert d.queue_size == 1 and d.oldest_queued_s == 0.0
    (late,) = d.handle(up("w", Role.COLOCATED, now_s=1.0)) or d.handle(ev.EngineStatus(1.0, "w", 0, 0, 0))
    assert isinstance(late, RoutePrefill) and (late.attempt_id, late.decision.worker) == ("rare", "w")
    assert d.queue_size == 0


def test_a_request_that_waits_aside_is_rejected_when_the_last_warm_worker_goes_or_its_time_is_up() -> None:
    d = made("round_robin", "round_robin")
    for name, role, health in (
        ("p", Role.PREFILL, Health.READY), ("d", Role.DECODE, Health.READY), ("w", Role.DECODE, Health.WARM),
    ):  # fmt: skip
        d.handle(up(name, role, health))
        d.handle(ev.EngineStatus(0.0, name, 0, 0, 0, health))
    terms = Terms(mode=Mode.COLOCATED)
    assert d.handle(ev.Arrived(0.0, Request("old", 0.0, 16, 8, terms=terms))) == []
    assert d.handle(ev.Arrived(9.0, Request("young", 9.0, 16, 8, terms=terms))) == []
    (late,) = d.handle(ev.Tick(d.config.queue_timeout_s + 1.0))
    assert isinstance(late, Reject) and (late.attempt_id, late.reason) == ("old", "queue_timeout")
    (gone,) = d.handle(ev.EngineDown(d.config.queue_timeout_s + 1.0, "w"))
    assert isinstance(gone, Reject) and (gone.attempt_id, gone.reason) == ("young", "no_colocated_engine")


def pooled(d: Dispatcher, *names: tuple[str, str]) -> None:
    """Brings requests into the pool, in this order, each prefilled by the worker beside its name."""
    for attempt_id, worker in names:
        d.state.apply(ev.Arrived(1.0, Request(attempt_id, 1.0, 16, 8)))
        d.state.apply(ev.PrefillRouted(1.0, attempt_id, worker, colocated=False))
        d.handle(ev.PrefillDone(1.0, attempt_id, 100.0, 1, 0))


@pytest.mark.parametrize("decode", sorted(DECODE))
def test_what_a_draining_worker_holds_goes_first_under_every_policy(decode: str) -> None:
    d = made("round_robin", decode)
    for name, role in (("p", Role.PREFILL), ("q", Role.PREFILL), ("d", Role.DECODE)):
        d.handle(up(name, role, slots=1))
        d.handle(ev.EngineStatus(1.0, name, 0, 0, 0))
    pooled(d, ("busy", "p"), ("a", "p"), ("b", "q"), ("c", "p"), ("e", "q"))
    assert [entry.request.attempt_id for entry in d.state.waiting()] == ["a", "b", "c", "e"]
    d.handle(up("q", Role.PREFILL, Health.DRAINING, 1.0))
    assert [entry.request.attempt_id for entry in d.state.waiting()] == ["b", "e", "a", "c"]
    order, before = [], "busy"
    for _ in range(3):
        (route,) = d.handle(ev.Closed(1.0, before, "finished", 4))
        assert isinstance(route, RouteDecode)
        order.append(route.attempt_id)
        before = route.attempt_id
    assert sorted(order[:2]) == ["b", "e"] and order[2] in ("a", "c")


def test_a_worker_that_stays_after_all_gives_its_entries_their_old_places_back() -> None:
    d = made("round_robin", "round_robin")
    for name in ("p", "q"):
        d.handle(up(name, Role.PREFILL))
    pooled(d, ("a", "p"), ("b", "q"))
    d.handle(ev.EngineStatus(1.0, "q", 0, 0, 0, Health.DRAINING))
    assert [(e.request.attempt_id, e.leaving) for e in d.state.waiting()] == [("b", True), ("a", False)]
    # an entry that comes while its worker drains is first, too
    pooled(d, ("c", "q"))
    assert [e.request.attempt_id for e in d.state.waiting()] == ["b", "c", "a"]
    d.handle(ev.EngineStatus(1.5, "q", 0, 0, 0))
    assert [(e.request.attempt_id, e.leaving) for e in d.state.waiting()] == [
        ("a", False), ("b", False), ("c", False),
    ]  # fmt: skip
    d.handle(ev.Closed(2.0, "b", "cancelled"))
    assert [e.request.attempt_id for e in d.state.waiting()] == ["a", "c"]
