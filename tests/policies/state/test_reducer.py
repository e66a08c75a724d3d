"""Tests that charges follow the table in the ledger's docstring, that refused events change nothing, and that no charge
is left at the end.
"""

import contextlib
import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.request.stage import Stage
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.views import Health, Request, Role

P, D, C = "p0", "d0", "c0"


def request(attempt_id: str = "r", prompt_tokens: int = 100, slots: int = 1) -> Request:
    return Request(attempt_id, arrived_s=0.0, prompt_tokens=prompt_tokens, max_tokens=16, slots=slots)


def cluster() -> ClusterState:
    state = ClusterState()
    for name, role in ((P, Role.PREFILL), (D, Role.DECODE), (C, Role.COLOCATED)):
        state.apply(ev.EngineUp(0.0, name, role, "g", "n", slots=4, kv_capacity_tokens=1000))
    return state


def charges(state: ClusterState) -> dict[str, tuple[int, int, int, int]]:
    workers = state.snapshot(0.0).workers
    return {w.id: (w.prefilling, w.prefilling_tokens, w.slots_used, w.kv_tokens) for w in workers.values()}


def test_charges_of_every_stage_follow_the_table() -> None:
    state = cluster()
    state.apply(ev.Arrived(1.0, request(slots=2)))
    assert charges(state) == {P: (0, 0, 0, 0), D: (0, 0, 0, 0), C: (0, 0, 0, 0)}
    state.apply(ev.PrefillRouted(1.0, "r", P, colocated=False))
    assert charges(state)[P] == (1, 100, 0, 100)
    state.apply(ev.PrefillDone(2.0, "r", lease_until_s=32.0, kv_bytes=7, cached_tokens=0))
    assert charges(state)[P] == (0, 0, 0, 100)
    assert [e.request.attempt_id for e in state.snapshot(2.0).pool] == ["r"]
    state.apply(ev.DecodeRouted(3.0, "r", D))
    assert (charges(state)[P], charges(state)[D]) == ((0, 0, 0, 100), (0, 0, 2, 100))
    assert state.snapshot(3.0).pool == ()
    assert state.leases == 1
    state.apply(ev.Admitted(4.0, "r"))
    assert (charges(state)[P], charges(state)[D]) == ((0, 0, 0, 0), (0, 0, 2, 100))
    state.apply(ev.Progressed(5.0, "r", 12))
    assert charges(state)[D] == (0, 0, 2, 112)
    state.apply(ev.Closed(6.0, "r", "finished", 12))
    assert charges(state)[D] == (0, 0, 0, 0)
    assert state.in_flight == 0


def test_a_colocated_request_holds_its_slot_from_the_start_and_its_prompt_once() -> None:
    state = cluster()
    state.apply(ev.Arrived(1.0, request()))
    state.apply(ev.PrefillRouted(1.0, "r", C, colocated=True))
    assert charges(state)[C] == (1, 100, 1, 100)
    state.apply(ev.Admitted(2.0, "r"))
    assert charges(state)[C] == (0, 0, 1, 100)
    state.apply(ev.Progressed(3.0, "r", 5))
    assert charges(state)[C] == (0, 0, 1, 105)


@pytest.mark.parametrize(
    "event",
    [
        ev.PrefillRouted(9.0, "unknown", P, colocated=False),
        ev.PrefillRouted(9.0, "r", "no such worker", colocated=False),
        ev.PrefillDone(9.0, "r", 30.0, 0, 0),  # not computing yet
        ev.DecodeRouted(9.0, "r", D),  # not in the pool
        ev.Aged(9.0, "unknown", 0),
        ev.Admitted(9.0, "r"),
        ev.Progressed(9.0, "r", 3),
        ev.Closed(9.0, "unknown", "finished"),
        ev.EngineStatus(9.0, "no such worker", 0, 0, 0),
        ev.EngineDown(9.0, "no such worker"),
    ],
)
def test_an_event_that_does_not_fit_is_refused_and_changes_nothing(event: ev.Event) -> None:
    state = cluster()
    state.apply(ev.Arrived(1.0, request()))
    before = copy.deepcopy(state)
    with pytest.raises(ev.StaleEvent):
        state.apply(event)
    assert state.snapshot(9.0) == before.snapshot(9.0)
    assert state.stage("r") is Stage.QUEUED


def test_a_worker_that_is_away_takes_its_pool_entries_along_and_brings_back_what_is_not_closed() -> None:
    state = cluster()
    state.apply(ev.Arrived(1.0, request()))
    state.apply(ev.PrefillRouted(1.0, "r", P, colocated=False))
    state.apply(ev.PrefillDone(2.0, "r", 30.0, 0, 0))
    state.apply(ev.EngineDown(3.0, P))
    assert state.pool_size == 0
    assert P not in state.snapshot(3.0).workers
    state.apply(ev.EngineUp(4.0, P, Role.PREFILL, "g", "n", 4, 1000))
    assert charges(state)[P] == (0, 0, 0, 100)
    assert [(e.entered_s, e.lease_until_s) for e in state.snapshot(4.0).pool] == [(2.0, 30.0)]
    state.apply(ev.Closed(5.0, "r", "failed"))
    assert state.pool_size == 0
    assert charges(state)[P] == (0, 0, 0, 0)


def test_a_retry_gives_back_the_old_charges() -> None:
    state = cluster()
    state.apply(ev.Arrived(1.0, request()))
    state.apply(ev.PrefillRouted(1.0, "r", P, colocated=False))
    state.apply(ev.Arrived(2.0, request(prompt_tokens=300)))
    assert charges(state)[P] == (0, 0, 0, 0)
    assert state.prefills("r") == 1


def test_a_request_that_has_aged_waits_with_its_new_priority_and_charges_as_before() -> None:
    state = cluster()
    state.apply(ev.Arrived(1.0, request()))
    state.apply(ev.Aged(2.0, "r", -3))
    found = state.request("r")
    assert found is not None and (found.terms.priority, state.asked_priority("r")) == (-3, 0)
    assert state._ledger.queued.until(-3).prompts == 1
    state.apply(ev.PrefillRouted(3.0, "r", P, colocated=False))
    before = charges(state)
    with pytest.raises(ev.StaleEvent):
        state.apply(ev.Aged(3.5, "r", -4))
    state.apply(ev.PrefillDone(4.0, "r", 30.0, 5, 0))
    state.take_entered()
    assert state.pooled_priorities == [-3]
    state.apply(ev.Aged(5.0, "r", -5))
    [entry] = state.waiting()
    assert (entry.request.terms.priority, entry.entered_s, state.pooled_priorities) == (-5, 4.0, [-5])
    # it has come anew, with the priority at first still known
    assert state.take_entered() == [entry] and state.asked_priority("r") == 0
    assert state._ledger.without_slot.until(-5).prompts == 1
    state.apply(ev.DecodeRouted(6.0, "r", D))
    state.apply(ev.Closed(7.0, "r", "finished"))
    assert before and set(charges(state).values()) == {(0, 0, 0, 0)}
    assert state._ledger.without_slot._of == state._ledger.queued._of == {}


@pytest.mark.parametrize(
    ("stage", "prefill", "decode", "expected"),
    [
        ("prefilling", P, None, {P: (1, 100, 0, 100)}),
        ("pooled", P, None, {P: (0, 0, 0, 100)}),
        ("decoding", None, D, {D: (0, 0, 1, 107)}),
    ],
)
def test_an_adopted_request_charges_like_a_known_one(stage, prefill, decode, expected) -> None:  # type: ignore[no-untyped-def]
    state = cluster()
    tokens = 7 if stage == "decoding" else 0
    state.apply(ev.Adopted(1.0, request(), stage, prefill, decode, tokens, 30.0, 0))
    for worker, charge in expected.items():
        assert charges(state)[worker] == charge
    state.apply(ev.Closed(2.0, "r", "finished"))
    assert set(charges(state).values()) == {(0, 0, 0, 0)}


def test_snapshots_share_unchanged_workers_and_stay_frozen() -> None:
    state = cluster()
    first = state.snapshot(1.0)
    state.apply(ev.Arrived(1.0, request()))
    state.apply(ev.PrefillRouted(1.0, "r", P, colocated=False))
    second = state.snapshot(2.0)
    assert second.workers[D] is first.workers[D]
    assert first.workers[P].prefilling == 0
    assert second.workers[P].prefilling == 1


def test_a_ready_decode_worker_may_decode_more_as_long_as_its_slots_and_those_beyond_them_last() -> None:
    state = ClusterState()
    state.apply(ev.EngineUp(0.0, "p", Role.PREFILL, "g", "n", 2, 1000))
    state.apply(ev.EngineUp(0.0, "d", Role.DECODE, "g", "n", 2, 1000))
    assert [state.may_decode_more(worker, 0) for worker in ("d", "p", "unknown")] == [True, False, False]
    # two sequences in two slots
    state.apply(ev.Arrived(1.0, request(slots=2)))
    state.apply(ev.PrefillRouted(1.0, "r", "p", False))
    state.apply(ev.PrefillDone(2.0, "r", 32.0, 1, 0))
    state.apply(ev.DecodeRouted(2.0, "r", "d"))
    assert [state.may_decode_more("d", beyond) for beyond in (0, 1)] == [False, True]
    state.apply(ev.EngineUp(3.0, "d", Role.DECODE, "g", "n", 2, 1000, Health.DRAINING))
    assert not state.may_decode_more("d", 1)


def decoding(*attempt_ids: str) -> ClusterState:
    state = cluster()
    for attempt_id in attempt_ids:
        state.apply(ev.Arrived(0.0, request(attempt_id)))
        state.apply(ev.PrefillRouted(0.0, attempt_id, P, colocated=False))
        state.apply(ev.PrefillDone(0.0, attempt_id, 30.0, 0, 0))
        state.apply(ev.DecodeRouted(0.0, attempt_id, D))
    return state


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "closed"]), st.integers(0, 30)), max_size=30),
    st.sets(st.sampled_from(["a", "b"])),
)
def test_many_progressed_are_each_progressed_and_what_does_not_fit_is_counted(items, forecast) -> None:  # type: ignore[no-untyped-def]
    many, singly = decoding("a", "b"), decoding("a", "b")
    for state in (many, singly):
        for attempt_id in forecast:
            state.apply(ev.ForecastMade(0.0, attempt_id, 0, 20.0))
    many.apply(ev.ProgressedMany(1.0, tuple(items)))
    refused = 0
    for attempt_id, tokens in items:
        try:
            singly.apply(ev.Progressed(1.0, attempt_id, tokens))
        except ev.StaleEvent:
            refused += 1
    assert many.snapshot(1.0) == singly.snapshot(1.0)
    assert [many.stage(attempt_id) for attempt_id in "ab"] == [
        singly.stage(attempt_id) for attempt_id in "ab"
    ]
    assert many.refused_items == refused


def test_progress_told_of_a_request_whose_worker_is_away_is_charged_when_it_comes_back() -> None:
    state = decoding("a")
    state.apply(ev.Admitted(1.0, "a"))
    state.apply(ev.EngineDown(1.0, D))
    state.apply(ev.ProgressedMany(2.0, (("a", 7),)))
    state.apply(ev.Progressed(2.0, "a", 8))
    state.apply(ev.EngineUp(3.0, D, Role.DECODE, "g", "n", slots=4, kv_capacity_tokens=1000))
    assert charges(state)[D] == (0, 0, 1, 108)
    assert state.refused_items == 0
    state.apply(ev.Closed(4.0, "a", "finished", 8))
    assert charges(state)[D] == (0, 0, 0, 0)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "prefill", "colocate", "done", "decode", "admit", "tokens", "close", "down", "up"]
        ),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from([P, D, C]),
        st.integers(0, 50),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_whatever_happens_no_charge_is_negative_and_none_is_left_when_all_is_closed(steps) -> None:  # type: ignore[no-untyped-def]
    state = cluster()
    for now, (what, attempt_id, worker, n) in enumerate(steps):
        now_s = float(now)
        event: ev.Event = {
            "arrive": ev.Arrived(now_s, request(attempt_id, prompt_tokens=n + 1, slots=1 + n % 3)),
            "prefill": ev.PrefillRouted(now_s, attempt_id, worker, colocated=False),
            "colocate": ev.PrefillRouted(now_s, attempt_id, worker, colocated=True),
            "done": ev.PrefillDone(now_s, attempt_id, now_s + 30, n, 0),
            "decode": ev.DecodeRouted(now_s, attempt_id, worker),
            "admit": ev.Admitted(now_s, attempt_id),
            "tokens": ev.Progressed(now_s, attempt_id, n),
            "close": ev.Closed(now_s, attempt_id, "cancelled"),
            "down": ev.EngineDown(now_s, worker),
            "up": ev.EngineUp(now_s, worker, Role.DECODE, "g", "n", 4, 1000),
        }[what]
        with contextlib.suppress(ev.StaleEvent):
            state.apply(event)
        assert all(value >= 0 for charge in charges(state).values() for value in charge)
    for attempt_id in ("a", "b", "c"):
        if state.stage(attempt_id) is not None:
            state.apply(ev.Closed(1e3, attempt_id, "cancelled"))
    assert set(charges(state).values()) <= {(0, 0, 0, 0)}
    assert (state.in_flight, state.pool_size, state.leases) == (0, 0, 0)


@pytest.mark.parametrize("shown_between", [False, True])
def test_workers_are_in_the_order_of_their_ids_whoever_looked_when(shown_between: bool) -> None:
    state = ClusterState()
    for name in ("d9", "d1", "d5", "d3"):
        state.apply(ev.EngineUp(0.0, name, Role.DECODE, "g", "n", 4, 1000))
        if shown_between:
            state.snapshot(0.0)
    state.apply(ev.EngineDown(1.0, "d5"))
    state.apply(ev.EngineUp(1.0, "d2", Role.DECODE, "g", "n", 4, 1000))
    assert list(state.snapshot(1.0).workers) == ["d1", "d2", "d3", "d9"]
