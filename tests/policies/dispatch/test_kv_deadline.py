"""The time in which a request's KV is due at its decode worker. Times are in seconds."""

import math
from dataclasses import replace

import pytest

from policies.dispatch.actions import RouteDecode
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.dispatch.kv_deadline import kv_due_s
from policies.request.terms import Terms
from policies.routing.base import Decision, Ranked, Reason
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import PoolEntry, Request, Role

TERMS = {"transfer_s": 9.0, "queue_s": 0.5, "first_step_s": 0.1}


def entry(slo_s: float | None, arrived_s: float = 10.0, lease_until_s: float = 42.0) -> PoolEntry:
    request = Request("r", arrived_s, 100, 10, terms=Terms(ttft_slo_s=slo_s))
    return PoolEntry(request, "p", "g", 12.0, lease_until_s, 1000, 0)


def decision(terms: dict[str, float]) -> Decision:
    ranking = (Ranked("other", 1.0, {"queue_s": 7.0, "first_step_s": 7.0}), Ranked("d", 2.0, terms))
    return Decision("d", ranking, Reason.TIE_DRAWN)


@pytest.mark.parametrize(
    ("slo_s", "terms", "now_s", "due_s"),
    [
        # 10 + 5 - 12 - 0.5 - 0.1: the time of the transfer itself is what is asked for
        (5.0, TERMS, 12.0, 2.4),
        # a policy that names no queue has none
        (5.0, {}, 12.0, 3.0),
        # 10 + 5 - 14.5 - 0.6 < 0: the objective cannot be met any more
        (5.0, TERMS, 14.5, 0.0),
        # until a fifth of the rest before the lease ends, 42 - 12 - 6, or 8 s before it
        (None, TERMS, 12.0, 24.0),
        (None, TERMS, -8.0, 42.0),
        # what the rescue sends is urgent, but it can be in time
        (None, TERMS, 34.0, 6.4),
        (None, TERMS, 43.0, 0.0),
    ],
)
def test_what_is_left_for_the_transfer(
    slo_s: float | None, terms: dict[str, float], now_s: float, due_s: float
) -> None:
    assert kv_due_s(entry(slo_s), decision(terms), now_s, 8.0) == pytest.approx(due_s)


def test_a_retry_keeps_the_objective_of_its_first_attempt() -> None:
    """The client's clock began at 7.0, and this attempt arrived at 10.0: 7 + 5 - 11 - 0.6."""
    first = entry(5.0)
    retry = replace(first, request=replace(first.request, waits_since_s=7.0))
    assert kv_due_s(retry, decision(TERMS), 11.0, 8.0) == pytest.approx(0.4)
    # two thirds of the objective have passed at 7 + 10 / 3, and all of it at 12
    assert [retry.is_pressing(now_s) for now_s in (10.3, 10.4, 12.0, 12.1)] == [
        False, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("decode", ["netkv", "round_robin"])
@pytest.mark.parametrize(("slo_s", "at_most_s"), [(2.0, 1.5), (None, 24.0)])
def test_every_decision_for_a_decode_worker_says_when_its_kv_is_due(
    decode: str, slo_s: float | None, at_most_s: float
) -> None:
    d = Dispatcher(DispatchConfig(lease_margin_s=8.0), prefill_policy("round_robin"), decode_policy(decode))
    for worker, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        d.handle(ev.EngineUp(0.0, worker, role, "g", "n", 4, 10_000))
        d.handle(ev.EngineStatus(0.0, worker, 0, 0, 0))
    d.handle(ev.Arrived(0.0, Request("r", 0.0, 100, 10, terms=Terms(ttft_slo_s=slo_s))))
    (routed,) = d.handle(ev.PrefillDone(0.5, "r", 30.5, 1000, 0))
    assert isinstance(routed, RouteDecode)
    assert routed.kv_due_s is not None and math.isfinite(routed.kv_due_s)
    step_s = sum(routed.decision.ranking[0].terms.get(name, 0.0) for name in ("queue_s", "first_step_s"))
    # the objective leaves 1.5 s of its 2 s, less what follows the transfer; the lease's margin leaves 30 - 6 s
    assert routed.kv_due_s == pytest.approx(at_most_s - (step_s if slo_s else 0.0))
    assert (decode == "netkv") == (step_s > 0)
