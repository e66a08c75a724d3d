"""Tests of what the reducer's views hold for NetKV, FlowKV and BR-H: transfers, sending queue, departures, indicators,
oracle.
"""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.network.oracle import Oracle
from policies.request.terms import Terms
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.views import (
    Departure,
    NodeLoad,
    PortBand,
    PortLoad,
    Queues,
    Request,
    Role,
    Transfers,
    Worker,
)
from policies.state.worker_events import FLOWS_STALE_S, INDICATOR_WINDOW_S

P, D = "p0", "d0"


def cluster() -> ClusterState:
    state = ClusterState()
    for name, role in ((P, Role.PREFILL), (D, Role.DECODE), ("d1", Role.DECODE)):
        state.apply(ev.EngineUp(0.0, name, role, "g", "n", slots=8, kv_capacity_tokens=10_000, barrier="b"))
    return state


def view(state: ClusterState, worker: str) -> Worker:
    return state.snapshot(0.0).workers[worker]


def pooled(
    state: ClusterState, attempt_id: str, prompt_tokens: int = 100, slots: int = 1, priority: int = 0
) -> None:
    state.apply(ev.Arrived(0.0, Request(attempt_id, 0.0, prompt_tokens, 64, slots, Terms(priority))))
    state.apply(ev.PrefillRouted(0.0, attempt_id, P, colocated=False))
    state.apply(ev.PrefillDone(0.0, attempt_id, 30.0, 1, 0))


def decoding(state: ClusterState, attempt_id: str, tokens: int = 0, **kw: int) -> None:
    pooled(state, attempt_id, **kw)
    state.apply(ev.DecodeRouted(0.0, attempt_id, D))
    state.apply(ev.Progressed(0.0, attempt_id, tokens))


def test_transfers_hang_on_the_sender_from_the_decision_to_the_admission() -> None:
    state = cluster()
    pooled(state, "a")
    pooled(state, "b", priority=3)
    assert (view(state, P).sending, view(state, P).transfers) == (2, ())
    state.apply(ev.DecodeRouted(0.0, "a", D))
    state.apply(ev.DecodeRouted(0.0, "b", D))
    assert view(state, P).transfers == (Transfers(D, 0, 1), Transfers(D, 3, 1))
    state.apply(ev.Admitted(1.0, "a"))
    assert (view(state, P).sending, view(state, P).transfers) == (1, (Transfers(D, 3, 1),))
    state.apply(ev.Closed(1.0, "b", "cancelled"))
    assert (view(state, P).sending, view(state, P).transfers) == (0, ())


@pytest.mark.parametrize("dead", [P, D])
def test_a_dead_end_takes_the_transfer_along_and_brings_it_back(dead: str) -> None:
    state = cluster()
    pooled(state, "a")
    state.apply(ev.DecodeRouted(0.0, "a", D))
    state.apply(ev.EngineDown(1.0, dead))
    if dead == D:
        assert view(state, P).transfers == ()
    state.apply(ev.EngineUp(2.0, dead, Role.PREFILL if dead == P else Role.DECODE, "g", "n", 8, 10_000))
    # its link was away longer than the grace; the request has not been closed, so the transfer may go on
    assert (view(state, P).sending, view(state, P).transfers) == (1, (Transfers(D, 0, 1),))
    state.apply(ev.Closed(3.0, "a", "failed"))
    assert (view(state, P).sending, view(state, P).transfers) == (0, ())


def test_a_forecast_counts_down_by_token_and_never_below_one_step() -> None:
    state = cluster()
    decoding(state, "a", tokens=10)
    state.apply(ev.ForecastMade(0.0, "a", tokens=10, finishes_in_tokens=3.5))
    assert view(state, D).departures == (Departure(4, 1, 110),)  # gone at the first step h >= 3.5
    state.apply(ev.Progressed(0.0, "a", 12))
    assert view(state, D).departures == (Departure(2, 1, 112),)
    state.apply(ev.Progressed(0.0, "a", 40))
    assert view(state, D).departures == (Departure(1, 1, 140),)
    state.apply(ev.ForecastMade(0.0, "a", tokens=40, finishes_in_tokens=None))
    assert view(state, D).departures == ()


def test_departures_of_one_step_add_up_and_leave_with_their_requests() -> None:
    state = cluster()
    decoding(state, "a", tokens=10)
    decoding(state, "b", tokens=8, slots=2)  # 4 tokens a sequence
    state.apply(ev.ForecastMade(0.0, "a", tokens=10, finishes_in_tokens=5))
    state.apply(ev.ForecastMade(0.0, "b", tokens=8, finishes_in_tokens=5))
    assert view(state, D).departures == (Departure(5, 3, 218),)
    state.apply(ev.Progressed(0.0, "b", 12))  # 6 a sequence: 3 steps left
    assert view(state, D).departures == (Departure(3, 2, 112), Departure(5, 1, 110))
    for attempt_id in ("a", "b"):
        state.apply(ev.Closed(1.0, attempt_id, "finished"))
    assert view(state, D).departures == ()


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_forecast_that_is_no_number_is_refused_naming_the_request(bad: float) -> None:
    state = cluster()
    decoding(state, "a")
    with pytest.raises(ValueError, match="request a: forecast of"):
        state.apply(ev.ForecastMade(0.0, "a", 0, bad))


def test_indicators_are_means_over_the_window_of_what_is_reported() -> None:
    state = cluster()
    state.apply(ev.EngineStatus(0.0, D, 9, 9, 0))
    late = 1.0 + INDICATOR_WINDOW_S
    state.apply(ev.EngineStatus(late - 1.0, D, running=2, waiting=0, kv_tokens=0, compute=0.5))
    state.apply(ev.EngineStatus(late, D, running=4, waiting=1, kv_tokens=0))
    seen = view(state, D).indicators
    assert seen is not None
    assert (seen.running, seen.waiting, seen.compute, seen.swapped) == (3.0, 0.5, 0.5, None)


def switched(state: ClusterState, worker: str, role: Role, now_s: float) -> None:
    state.apply(ev.EngineUp(now_s, worker, role, "g", "n", slots=8, kv_capacity_tokens=10_000, barrier="b"))


def prefilling(state: ClusterState, attempt_id: str, worker: str) -> None:
    state.apply(ev.Arrived(0.0, Request(attempt_id, 0.0, 100, 64)))
    state.apply(ev.PrefillRouted(0.0, attempt_id, worker, colocated=False))


def test_queues_are_divided_by_phase_as_they_were_at_each_report() -> None:
    """An engine with three sequences is lent to prefill. It gets a prompt, and its sequences end one by one."""
    state = cluster()
    for name in "abc":
        decoding(state, name)
    state.apply(ev.EngineStatus(0.0, D, running=3, waiting=0, kv_tokens=0, swapped=1))
    switched(state, D, Role.PREFILL, 0.0)
    state.apply(ev.EngineStatus(0.5, D, running=3, waiting=0, kv_tokens=0, swapped=1))
    seen = view(state, D).indicators
    assert seen is not None and (seen.running, seen.prefill) == (3.0, Queues(0.0, 0.0, 0.0))
    prefilling(state, "p", D)
    assert (view(state, D).unreported, view(state, D).unreported_prefills) == (1, 1)
    state.apply(ev.EngineStatus(1.0, D, running=3, waiting=1, kv_tokens=0))
    # a quarter of 3 running and 1 waiting, over three reports: 0.75 / 3 and 0.25 / 3
    seen = view(state, D).indicators
    assert seen is not None and seen.prefill == Queues(0.25, pytest.approx(0.25 / 3), 0.0)
    for name in "abc":
        state.apply(ev.Closed(1.5, name, "stop"))
    late = 1.1 + INDICATOR_WINDOW_S
    state.apply(ev.EngineStatus(late, D, running=1, waiting=0, kv_tokens=0))
    seen = view(state, D).indicators
    assert seen is not None and (seen.running, seen.prefill) == (1.0, Queues(1.0, 0.0, None))
    # it goes home with the prompt, and what a report shows beyond what is known belongs to its role
    switched(state, D, Role.DECODE, late)
    late += 1.0 + INDICATOR_WINDOW_S
    state.apply(ev.EngineStatus(late, D, running=1, waiting=0, kv_tokens=0))
    seen = view(state, D).indicators
    assert seen is not None and seen.prefill == Queues(1.0, 0.0, None)
    state.apply(ev.Closed(late, "p", "cancelled"))
    late += 1.0 + INDICATOR_WINDOW_S
    state.apply(ev.EngineStatus(late, D, running=1, waiting=0, kv_tokens=0))
    seen = view(state, D).indicators
    assert seen is not None and seen.prefill == Queues(0.0, 0.0, None)


def test_a_colocated_prompt_is_in_prefill_until_its_first_token() -> None:
    state = cluster()
    switched(state, "c", Role.COLOCATED, 0.0)
    state.apply(ev.Arrived(0.0, Request("a", 0.0, 100, 64, slots=2)))
    state.apply(ev.PrefillRouted(0.0, "a", "c", colocated=True))
    state.apply(ev.EngineStatus(0.0, "c", running=1, waiting=0, kv_tokens=0))
    seen = view(state, "c").indicators
    assert seen is not None and seen.prefill == Queues(1.0, 0.0, None)
    state.apply(ev.Progressed(1.0, "a", 2))
    state.apply(ev.EngineStatus(2.5, "c", running=2, waiting=0, kv_tokens=0))
    seen = view(state, "c").indicators
    assert seen is not None and (seen.running, seen.prefill) == (2.0, Queues(0.0, 0.0, None))


def test_what_was_routed_since_the_last_report_is_counted() -> None:
    state = cluster()
    pooled(state, "a")
    assert view(state, P).unreported == 1
    state.apply(ev.EngineStatus(1.0, P, 0, 0, 0))
    assert view(state, P).unreported == 0
    state.apply(ev.DecodeRouted(1.0, "a", D))
    assert view(state, D).unreported == 1


def test_oracle_and_barrier_are_in_the_snapshot() -> None:
    state, oracle = cluster(), Oracle({1: 5.0})
    state.apply(ev.OracleRefreshed(0.0, oracle))
    assert state.snapshot(0.0).oracle is oracle
    assert view(state, D).barrier == "b"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["pool", "route", "admit", "tokens", "forecast", "stays", "close", "downP", "downD", "up"]
        ),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 30),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_whatever_happens_departures_stay_within_the_charges_and_nothing_is_left(steps) -> None:  # type: ignore[no-untyped-def]
    state = cluster()
    for what, attempt_id, n in steps:
        with contextlib.suppress(ev.StaleEvent):
            if what == "pool":
                pooled(state, attempt_id, prompt_tokens=n + 1, slots=1 + n % 2, priority=n % 3)
            elif what == "route":
                state.apply(ev.DecodeRouted(0.0, attempt_id, D if n % 2 else "d1"))
            elif what == "admit":
                state.apply(ev.Admitted(0.0, attempt_id))
            elif what == "tokens":
                state.apply(ev.Progressed(0.0, attempt_id, n))
            elif what in ("forecast", "stays"):
                state.apply(ev.ForecastMade(0.0, attempt_id, n, float(n) if what == "forecast" else None))
            elif what == "close":
                state.apply(ev.Closed(0.0, attempt_id, "finished"))
            elif what in ("downP", "downD"):
                state.apply(ev.EngineDown(0.0, P if what == "downP" else D))
            else:
                state.apply(ev.EngineUp(0.0, D, Role.DECODE, "g", "n", 8, 10_000))
        for w in state.snapshot(0.0).workers.values():
            assert sum(d.sequences for d in w.departures) <= w.slots_used
            assert sum(d.kv_tokens for d in w.departures) <= w.kv_tokens
            assert all(d.step >= 1 and d.sequences >= 1 for d in w.departures)
            assert sum(t.flows for t in w.transfers) <= w.sending
    for attempt_id in ("a", "b", "c"):
        if state.stage(attempt_id) is not None:
            state.apply(ev.Closed(0.0, attempt_id, "cancelled"))
    for w in state.snapshot(0.0).workers.values():
        assert (w.departures, w.transfers, w.sending) == ((), (), 0)


def flows_at(node: str, now_s: float, size: int = 1) -> ev.FlowsReported:
    load = PortLoad(1e9, (PortBand(1, (0.0,), 1, size),))
    return ev.FlowsReported(now_s, ev.PolicyChoice("mfs"), NodeLoad(node, load, load))


def test_the_latest_report_of_a_flow_agent_is_known_as_long_as_it_is_fresh() -> None:
    state = cluster()
    assert state.flow_report("n", 0.0) is None
    state.apply(flows_at("n", 1.0))
    state.apply(flows_at("m", 1.5))
    latest = flows_at("n", 2.0, 7)
    state.apply(latest)
    assert state.flow_report("n", 2.0 + FLOWS_STALE_S) == latest
    assert state.flow_report("n", 2.1 + FLOWS_STALE_S) is None
    # m is silent; it is forgotten when another agent reports
    state.apply(flows_at("n", 2.0 + FLOWS_STALE_S))
    assert state.flow_report("m", 1.5) is None
