"""Requests before engines that sleep: they wait for the wake and not for the queue's timeout, and are refused with its
reason.
"""

import pytest

from policies.dispatch.dispatcher import WAKE_MARGIN_S, DispatchConfig, Dispatcher, Reject, RoutePrefill
from policies.request.terms import Mode, Terms
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.standby import Phase, Standby
from policies.state.views import Health, Request, Role

PAIR = (Role.PREFILL, Role.DECODE)


def told(
    phase: Phase, at_s: float = 0.0, roles: tuple[Role, ...] = PAIR, reason: str = ""
) -> ev.StandbyChanged:
    return ev.StandbyChanged(at_s, Standby(phase, roles, 100.0, reason))


def dispatcher(**limits: float) -> Dispatcher:
    config = DispatchConfig(queue_timeout_s=10.0, **limits)  # type: ignore[arg-type]
    return Dispatcher(config, prefill_policy("round_robin"), decode_policy("round_robin"))


def arrived(name: str, at_s: float, mode: Mode | None = None, **more: float) -> ev.Arrived:
    return ev.Arrived(at_s, Request(name, at_s, 16, 8, terms=Terms(mode=mode), **more))


def up(d: Dispatcher, name: str, role: Role, at_s: float, slots: int = 1) -> list[object]:
    ready = ev.EngineUp(at_s, name, role, "a", "n1", slots, 4000, Health.READY)
    return [*d.handle(ready), *d.handle(ev.EngineStatus(at_s, name, 0, 0, 0))]


def test_requests_wait_for_the_wake_and_the_queues_timeout_begins_after_it() -> None:
    """The wake takes 50 s, five times the queue's timeout. The one slot takes the first; the second waits 10 s more."""
    d = dispatcher()
    d.handle(told(Phase.ASLEEP))
    assert d.handle(arrived("a", 1.0)) == [] == d.handle(arrived("b", 2.0))
    d.handle(told(Phase.WAKING, 2.0))
    assert d.handle(ev.Tick(50.0)) == []
    # a prefill engine alone answers nobody
    assert up(d, "p", Role.PREFILL, 51.0) == []
    assert d.handle(ev.Tick(51.5)) == []
    (route,) = up(d, "d", Role.DECODE, 52.0)
    assert isinstance(route, RoutePrefill) and route.attempt_id == "a"
    d.handle(told(Phase.AWAKE, 53.0))
    assert d.handle(ev.Tick(62.9)) == []
    (late,) = d.handle(ev.Tick(63.1))
    assert isinstance(late, Reject)
    assert (late.attempt_id, late.status, late.reason) == ("b", 503, "queue_timeout")


def test_a_failed_wake_rejects_all_that_wait_and_come_with_its_reason_until_an_engine_is_there() -> None:
    d = dispatcher()
    d.handle(told(Phase.WAKING))
    d.handle(arrived("a", 1.0))
    d.handle(arrived("b", 1.0))
    rejected = d.handle(told(Phase.FAILED, 9.0, reason="d: 0 of 1 replicas run"))
    rejected += d.handle(arrived("c", 10.0))
    assert [(r.attempt_id, r.status, r.reason, r.detail) for r in rejected if isinstance(r, Reject)] == [
        (name, 503, "wake_failed", "d: 0 of 1 replicas run") for name in "abc"
    ]
    up(d, "p", Role.PREFILL, 11.0)
    up(d, "d", Role.DECODE, 11.0)
    (route,) = d.handle(arrived("e", 11.0))
    assert isinstance(route, RoutePrefill)
    # its engines are busy, which is no failed wake
    assert d.handle(arrived("f", 11.0)) == []


def test_without_a_word_of_the_autoscaler_the_wait_ends_after_the_limit_of_a_wake() -> None:
    d = dispatcher()
    d.handle(told(Phase.ASLEEP))
    d.handle(arrived("a", 5.0))
    assert d.handle(ev.Tick(5.0 + 100.0 + WAKE_MARGIN_S)) == []
    (late,) = d.handle(ev.Tick(5.1 + 100.0 + WAKE_MARGIN_S))
    assert isinstance(late, Reject) and late.reason == "wake_timeout"


def test_a_requests_own_deadline_does_not_wait_for_the_wake() -> None:
    d = dispatcher()
    d.handle(told(Phase.WAKING))
    d.handle(arrived("a", 5.0, deadline_s=25.0))
    assert d.handle(ev.Tick(24.9)) == []
    (late,) = d.handle(ev.Tick(25.1))
    assert isinstance(late, Reject) and late.attempt_id == "a"


def test_the_queue_is_bounded_while_the_fleet_sleeps() -> None:
    d = dispatcher(max_queue=2)
    d.handle(told(Phase.ASLEEP))
    actions = [action for i in range(4) for action in d.handle(arrived(f"r{i}", 1.0 + i))]
    assert [(a.attempt_id, a.status) for a in actions if isinstance(a, Reject)] == [("r2", 429), ("r3", 429)]


@pytest.mark.parametrize(
    ("roles", "mode", "reason"),
    [
        (PAIR, Mode.COLOCATED, "no_colocated_engine"),
        ((Role.COLOCATED,), Mode.DISAGGREGATED, "no_disaggregated_engine"),
        (PAIR, Mode.DISAGGREGATED, None),
        ((Role.COLOCATED,), Mode.COLOCATED, None),
        (PAIR, None, None),
    ],
)
def test_a_mode_that_no_woken_engine_serves_is_refused_at_once(
    roles: tuple[Role, ...], mode: Mode | None, reason: str | None
) -> None:
    d = dispatcher()
    d.handle(told(Phase.ASLEEP, roles=roles))
    actions = d.handle(arrived("a", 1.0, mode))
    assert [a.reason for a in actions if isinstance(a, Reject)] == ([] if reason is None else [reason])
    assert d.queue_size == (reason is None)


def test_engines_that_are_lost_while_awake_are_waited_for_as_before() -> None:
    d = dispatcher(absence_s=0.0)
    d.handle(told(Phase.AWAKE))
    (gone,) = d.handle(arrived("a", 1.0))
    assert isinstance(gone, Reject) and gone.reason == "no_engine"
