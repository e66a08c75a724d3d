"""Tests that shared lists of feasible workers obey `has_room`; tests of overcommit and of a batch policy."""

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.dispatch.dispatcher import DispatchConfig, Dispatcher, RouteDecode
from policies.dispatch.feasibility import MOST_LOOKUPS, Lookups, Room
from policies.record import record
from policies.routing.balance.balance_route_0 import BalanceRoute0
from policies.routing.base import Reason
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.views import KnownHits, Request, Role
from tests.policies.routing.views import worker

WORKERS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 300), st.integers(0, 100)), max_size=6
)


@settings(deadline=None)
@given(WORKERS, st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5)), max_size=8), st.integers(0, 2))
def test_feasible_lists_follow_the_rule(facts, requests, overcommit) -> None:  # type: ignore[no-untyped-def]
    workers = [
        worker(
            f"w{i}", slots=slots, slots_used=used, kv_tokens=kv, foreign_kv_tokens=f, kv_capacity_tokens=300
        )
        for i, (slots, used, kv, f) in enumerate(facts)
    ]
    room = Room(workers, reserve_tokens=7, overcommit_slots=overcommit)
    for i, (tokens, n) in enumerate(requests):
        expected = []
        for w in workers:
            slots = min(n, w.slots)
            enough = max(0, 300 - w.kv_tokens - w.foreign_kv_tokens) >= tokens + 7 * slots
            if w.slots + overcommit - w.slots_used >= slots and (enough or w.slots_used == 0):
                expected.append(w)
        assert room.for_request(Request(f"r{i}", 0.0, tokens, 1, n)) == expected


@settings(deadline=None)
@given(
    WORKERS,
    st.lists(
        st.tuples(
            st.integers(1, 300), st.integers(1, 5), st.dictionaries(st.integers(0, 5), st.integers(0, 300))
        ),
        max_size=8,
    ),
    st.integers(0, 2),
)
def test_hits_on_blocks_in_use_lower_the_need_on_their_worker_alone(facts, requests, overcommit) -> None:  # type: ignore[no-untyped-def]
    workers = [
        worker(
            f"w{i}", slots=slots, slots_used=used, kv_tokens=kv, shared_kv_tokens=f, kv_capacity_tokens=200
        )
        for i, (slots, used, kv, f) in enumerate(facts)
    ]
    in_use = {
        f"r{i}": {f"w{w}": min(tokens, hit) for w, hit in hits.items()}
        for i, (tokens, _, hits) in enumerate(requests)
    }
    room = Room(workers, 7, overcommit, Lookups(KnownHits({}, in_use)))
    for i, (tokens, n, _) in enumerate(requests):
        request, expected = Request(f"r{i}", 0.0, tokens, 1, n), []
        for w in workers:
            slots = min(n, w.slots)
            need = tokens - in_use[f"r{i}"].get(w.id, 0) + 7 * slots
            enough = w.slots_used == 0 or need <= 200 - (w.kv_tokens - w.shared_kv_tokens)
            if w.slots_used + slots <= w.slots + overcommit and enough:
                expected.append(w)
        assert room.for_request(request) == expected
        assert room.may_fit(request) or not expected


def test_beside_free_slots_there_is_room_in_queues_while_some_slot_is_free() -> None:
    full, free = worker("a", slots=2, slots_used=2), worker("b", slots=2, slots_used=1)
    request = Request("r", 0.0, 10, 1)
    assert Room([full, free], 0, 1, beside_free_slots=True).for_request(request) == [full, free]
    assert not Room([full], 0, 1, beside_free_slots=True)
    assert Room([full], 0, 1, beside_free_slots=True).for_request(request) == []
    assert Room([full], 0, 1).for_request(request) == [full]
    assert not Room([full], 0, 0)


@record
class WatchedHits(KnownHits):
    """Hits that note the requests for which they are looked up."""

    looked_up: list[str] = field(default_factory=list)

    def tokens_in_use(self, request: Request, at_least: int = 1) -> Mapping[str, int]:
        self.looked_up.append(request.attempt_id)
        return KnownHits.tokens_in_use(self, request, at_least)


@pytest.mark.parametrize("useful", [True, False])
def test_hits_are_looked_up_for_a_bounded_number_of_entries(useful: bool) -> None:
    full = [
        worker(name, slots_used=1, kv_tokens=950, kv_capacity_tokens=1000, group=name) for name in ("w", "v")
    ]
    asked = [Request(f"r{i}", 0.0, 100, 1) for i in range(2 * MOST_LOOKUPS)]
    cached = {request.attempt_id: {"w" if useful else "x": 90} for request in asked}
    hits = WatchedHits({}, cached)
    lookups = Lookups(hits)
    room, other = (Room([one], 0, 0, lookups) for one in full)
    found = [bool(room.for_request(request)) for request in asked]
    assert found == [useful] * MOST_LOOKUPS + [False] * MOST_LOOKUPS
    assert hits.looked_up == [request.attempt_id for request in asked[:MOST_LOOKUPS]]
    assert not room.may_fit(asked[-1])
    # all groups of a round share the bound
    assert not other.may_fit(asked[0])


def test_what_cannot_be_cached_is_not_looked_up_and_does_not_count() -> None:
    full = worker("w", slots_used=1, kv_tokens=950, kv_capacity_tokens=1000)
    lookups = Lookups(hits := WatchedHits({}, {"warm": {"w": 90}}))
    room = Room([full], 0, 0, lookups)
    assert not any(room.for_request(Request(f"r{i}", 0.0, 100, 1)) for i in range(2 * MOST_LOOKUPS))
    assert room.for_request(Request("warm", 0.0, 100, 1)) == [full]
    assert hits.looked_up == ["warm"]


def test_a_request_of_many_sequences_counts_once_however_many_workers_there_are() -> None:
    small = [worker(f"w{i}", slots=1, slots_used=1, kv_tokens=950, kv_capacity_tokens=1000) for i in range(9)]
    asked = [Request(f"r{i}", 0.0, 100, 1, slots=2) for i in range(2 * MOST_LOOKUPS)]
    room = Room(small, 0, 1, Lookups(KnownHits({}, {one.attempt_id: {"w3": 90} for one in asked})))
    assert [room.for_request(one) for one in asked] == [[small[3]]] * MOST_LOOKUPS + [[]] * MOST_LOOKUPS


def dispatcher(decode: BalanceRoute0, slots: int, **config: Any) -> Dispatcher:
    d = Dispatcher(DispatchConfig(**config), JoinShortestQueue(), decode)
    for name, role in (("p", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        d.handle(ev.EngineUp(0.0, name, role, "g", "n", 64 if role is Role.PREFILL else slots, 100_000))
        d.handle(ev.EngineStatus(0.0, name, 0, 0, 0))
    return d


def prefilled(d: Dispatcher, attempt_id: str, tokens: int, slots: int = 1) -> list[RouteDecode]:
    d.handle(ev.Arrived(1.0, Request(attempt_id, 1.0, tokens, 64, slots=slots)))
    actions = d.handle(ev.PrefillDone(1.0, attempt_id, 31.0, 1, 0))
    return [a for a in actions if isinstance(a, RouteDecode)]


def test_a_slot_that_frees_lets_the_batch_policy_choose_from_the_whole_pool() -> None:
    d = dispatcher(BalanceRoute0(), slots=2)
    placed = {
        attempt_id: prefilled(d, attempt_id, tokens)
        for attempt_id, tokens in (("a", 900), ("b", 500), ("c", 500), ("e", 100))
    }
    assert all(len(made) == 1 for made in placed.values())
    loads = {w: d.state.snapshot(1.0).workers[w].kv_tokens for w in ("d0", "d1")}
    assert [
        prefilled(d, attempt_id, tokens) for attempt_id, tokens in (("x", 700), ("y", 395), ("z", 50))
    ] == [[], [], []]
    for attempt_id in "abce":
        d.handle(ev.Admitted(2.0, attempt_id))
    # a (900) + e (100) are on one worker, b + c (500 each) on the other. b leaves, so that worker is 500 below the
    # first: x (700) would exceed it, y (395) fits.
    assert sorted(loads.values()) == [1000, 1000]
    (made,) = [a for a in d.handle(ev.Closed(3.0, "b", "finished")) if isinstance(a, RouteDecode)]
    assert (made.attempt_id, made.decision.reason) == ("y", Reason.BEST_SUBSET)


def test_bypass_fills_a_worker_above_its_slots_by_the_overcommit_only() -> None:
    d = dispatcher(BalanceRoute0(bypass=True), slots=1, overcommit_slots=1)
    assert [len(prefilled(d, f"r{i}", 100)) for i in range(5)] == [1, 1, 1, 1, 0]
    assert {w: d.state.snapshot(1.0).workers[w].slots_used for w in ("d0", "d1")} == {"d0": 2, "d1": 2}


CONTRADICTION = (
    "bypass_slots is 2, but the dispatcher allows {0}: set its overcommit_slots to 2 or more (and overcommit not to "
    '"never"), '
    "or bypass_slots to {0} or less, or to null for as many as the dispatcher allows"
)


@pytest.mark.parametrize(
    ("limits", "allowed"), [({}, 1), ({"overcommit_slots": 9, "overcommit": "never"}, 0)]
)
def test_a_cap_of_the_bypass_above_the_dispatchers_is_refused(limits: dict[str, Any], allowed: int) -> None:
    message = re.escape(CONTRADICTION.format(allowed))
    with pytest.raises(ValueError, match=message):
        dispatcher(BalanceRoute0(bypass=True, bypass_slots=2), 1, **limits)
    d = dispatcher(BalanceRoute0(), 1, **limits)
    choice = ev.PolicyChoice("balance_route_0", {"bypass": True, "bypass_slots": 2})
    with pytest.raises(ValueError, match=message):
        d.handle(ev.PoliciesChanged(1.0, decode=choice))
    assert not getattr(d.decode, "bypass", None)
    wider = {"overcommit_slots": 2, "overcommit": "by_policy"}
    d.handle(ev.PoliciesChanged(1.0, decode=choice, dispatch=wider))
    assert d.overcommit_slots == 2
    with pytest.raises(ValueError, match=re.escape(CONTRADICTION.format(1))):
        d.handle(ev.PoliciesChanged(1.0, dispatch={"overcommit_slots": 1}))
    assert d.overcommit_slots == 2


def test_the_bypass_takes_the_dispatchers_limit_by_default() -> None:
    d = dispatcher(BalanceRoute0(bypass=True), 1, overcommit_slots=3)
    assert [len(prefilled(d, f"r{i}", 100)) for i in range(9)] == [1] * 8 + [0]
    # without the bypass its cap means nothing
    dispatcher(BalanceRoute0(bypass_slots=7), 1)
