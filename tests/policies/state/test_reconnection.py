"""Tests that a router that restarts, or loses engines, charges in the end what an undisturbed one charges.

A new router learns of requests and engines in any order: ingresses and engines reconnect independently, and work goes
on meanwhile.
"""

import contextlib
import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.request.stage import Stage
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.views import PoolEntry, Request, Role

ENGINES = {
    name: ev.EngineUp(1.0, name, role, "g", "n", 16, 100_000)
    for name, role in (
        ("p0", Role.PREFILL),
        ("p1", Role.PREFILL),
        ("d0", Role.DECODE),
        ("d1", Role.DECODE),
        ("c0", Role.COLOCATED),
    )
}
IN_WORK: dict[str, ev.Adopted] = {
    "prefilling": ev.Adopted(1.0, Request("prefilling", 0.0, 100, 8), "prefilling", "p0", None, 0, 1.0, 0),
    "colocated": ev.Adopted(1.0, Request("colocated", 0.0, 110, 8), "prefilling", "c0", "c0", 0, 1.0, 0),
    "pooled": ev.Adopted(1.0, Request("pooled", 0.0, 120, 8), "pooled", "p0", None, 0, 31.0, 77),
    "transferring": ev.Adopted(
        1.0, Request("transferring", 0.0, 130, 8), "transferring", "p1", "d0", 0, 1.0, 0
    ),
    "decoding": ev.Adopted(
        1.0, Request("decoding", 0.0, 140, 8, slots=3), "decoding", None, "d1", 21, 1.0, 0
    ),
}


def undisturbed() -> ClusterState:
    """Returns a router that has seen every request on its way from the beginning."""
    state = ClusterState()
    for up in ENGINES.values():
        state.apply(up)
    for adopted in IN_WORK.values():
        request, prefill, decode = adopted.request, adopted.prefill_worker, adopted.decode_worker
        attempt_id = request.attempt_id
        state.apply(ev.Arrived(1.0, request))
        colocated = attempt_id == "colocated"
        state.apply(ev.PrefillRouted(1.0, attempt_id, prefill or "p0", colocated))
        if adopted.stage != "prefilling":
            state.apply(ev.PrefillDone(1.0, attempt_id, adopted.lease_until_s, adopted.kv_bytes, 0))
        if decode is not None and not colocated:
            state.apply(ev.DecodeRouted(1.0, attempt_id, decode))
        if adopted.stage == "decoding":
            state.apply(ev.Progressed(1.0, attempt_id, adopted.tokens))
    return state


def charges(state: ClusterState) -> dict[str, tuple[object, ...]]:
    return {
        w.id: (w.slots_used, w.kv_tokens, w.prefilling, w.prefilling_tokens, w.sending, w.transfers)
        for w in state.snapshot(1.0).workers.values()
    }


def pool(state: ClusterState) -> list[PoolEntry]:
    return state.waiting()


def test_the_undisturbed_run_is_what_the_stages_charge() -> None:
    """Charges by hand; all other tests compare with them."""
    shown = charges(undisturbed())
    assert {worker: charge[:5] for worker, charge in shown.items()} == {
        "c0": (1, 110, 1, 110, 0),
        "d0": (1, 130, 0, 0, 0),
        "d1": (3, 161, 0, 0, 0),  # 140 + 21
        "p0": (0, 220, 1, 100, 1),
        "p1": (0, 130, 0, 0, 1),
    }


@pytest.mark.parametrize("stage", sorted(IN_WORK))
@pytest.mark.parametrize("first", ["ingress", "engines", "prefill engines", "decode engines"])
def test_every_order_of_reconnection_charges_each_stage_alike(stage: str, first: str) -> None:
    only = {stage: IN_WORK[stage]}
    prefill_first = sorted(ENGINES.values(), key=lambda up: up.role is not Role.PREFILL)
    decode_first = sorted(ENGINES.values(), key=lambda up: up.role is not Role.DECODE)
    orders: dict[str, list[ev.Event]] = {
        "ingress": [*only.values(), *ENGINES.values()],
        "engines": [*ENGINES.values(), *only.values()],
        "prefill engines": [*prefill_first[:2], *only.values(), *prefill_first[2:]],
        "decode engines": [*decode_first[:2], *only.values(), *decode_first[2:]],
    }
    state, expected = ClusterState(), undisturbed()
    for event in orders[first]:
        state.apply(event)
    for other in IN_WORK:
        if other != stage:
            expected.apply(ev.Closed(1.0, other, "cancelled"))
    assert charges(state) == charges(expected)
    assert pool(state) == pool(expected)
    assert state.stage(stage) is expected.stage(stage)


@settings(max_examples=200, deadline=None)
@given(st.permutations([*ENGINES.values(), *IN_WORK.values()]))
def test_any_order_of_reconnection_ends_in_the_undisturbed_charges(events: list[ev.Event]) -> None:
    state = ClusterState()
    for event in events:
        state.apply(event)
    expected = undisturbed()
    assert charges(state) == charges(expected)
    assert pool(state) == pool(expected)


@settings(max_examples=200, deadline=None)
@given(
    st.permutations([*ENGINES.values(), *IN_WORK.values()]),
    st.lists(st.tuples(st.sampled_from(sorted(ENGINES)), st.integers(0, 12)), max_size=8),
    st.lists(st.tuples(st.sampled_from(sorted(IN_WORK)), st.integers(0, 12)), max_size=6),
)
def test_links_that_break_and_adoptions_that_come_twice_change_nothing_in_the_end(
    events: list[ev.Event], breaks: list[tuple[str, int]], again: list[tuple[str, int]]
) -> None:
    """A link may be away longer than the grace at any moment; an ingress may tell of an attempt again."""
    state, told = ClusterState(), list(events)
    for worker, at in breaks:
        told[at:at] = [ev.EngineDown(1.0, worker), ENGINES[worker]]
    for stage, at in again:
        told.insert(at, IN_WORK[stage])
    for event in told:
        # a worker cannot go before it has come
        with contextlib.suppress(ev.StaleEvent):
            state.apply(event)
    expected = undisturbed()
    assert charges(state) == charges(expected)
    assert sorted(entry.request.attempt_id for entry in pool(state)) == ["pooled"]
    for adopted in IN_WORK.values():
        state.apply(ev.Closed(2.0, adopted.request.attempt_id, "cancelled"))
    assert all(not any(charge[:5]) for charge in charges(state).values())
    assert not pool(state)


def test_a_prefill_that_ends_before_its_engine_has_come_enters_the_pool_when_it_comes() -> None:
    for up_at in range(4):
        state = ClusterState()
        adopted = dataclasses.replace(IN_WORK["prefilling"], prefill_worker=None if up_at == 3 else "p0")
        steps: list[ev.Event] = [
            adopted,
            ev.PrefillDone(2.0, "prefilling", 32.0, 55, 16, worker="p0"),
        ]
        steps.insert(min(up_at, 2), ENGINES["p0"])
        for event in steps:
            state.apply(event)
        (entry,) = pool(state)
        assert (entry.prefill_worker, entry.entered_s, entry.lease_until_s) == ("p0", 2.0, 32.0)
        assert (entry.kv_bytes, entry.cached_tokens, entry.group) == (55, 16, "g")
        assert charges(state)["p0"][:5] == (0, 100, 0, 0, 1)


def test_an_adoption_replaces_what_was_known_of_the_attempt() -> None:
    for before, after in itertools.permutations(IN_WORK.values(), 2):
        state = ClusterState()
        for up in ENGINES.values():
            state.apply(up)
        state.apply(dataclasses.replace(before, request=after.request))
        state.apply(after)
        alone = ClusterState()
        for event in (*ENGINES.values(), after):
            alone.apply(event)
        assert charges(state) == charges(alone)
        assert pool(state) == pool(alone)
        assert state.stage(after.request.attempt_id) is alone.stage(after.request.attempt_id)


def test_an_adopted_transfer_is_admitted_and_progresses_though_its_workers_come_later() -> None:
    state = ClusterState()
    state.apply(IN_WORK["transferring"])
    state.apply(ev.Admitted(2.0, "transferring"))
    state.apply(ev.ProgressedMany(2.0, (("transferring", 5),)))
    assert state.stage("transferring") is Stage.DECODING
    for up in ENGINES.values():
        state.apply(up)
    assert charges(state)["d0"][:2] == (1, 135)
    assert charges(state)["p1"][:5] == (0, 0, 0, 0, 0)
