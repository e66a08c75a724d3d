"""Tests that the log of decisions is bounded by what it holds, whatever ranks how many candidates how often, that it
packs them small, and that it shows them as they were.
"""

import gc
import json
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest

from actors.router.decisions import MOST_CANDIDATES, MOST_DECISIONS, PROBE, DecisionLog, described
from actors.wire.messages import Transfer
from policies.dispatch.actions import Action, PrefixFetch, Reject, RoutePrefill
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.flow.fetch_or_recompute import FetchReason
from policies.routing.base import Decision, Ranked, Reason
from policies.routing.registry import decode_policy
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.views import Request, Role

POLICY = JoinShortestQueue()


def decided(attempt_id: str, candidates: int) -> RoutePrefill:
    ranking = tuple(Ranked(f"w{i}", float(i), {}) for i in range(candidates))
    return RoutePrefill(attempt_id, Decision("w0", ranking, Reason.LEAST_COST), False, False, 0.0)


def held(log: DecisionLog) -> int:
    shown = [one for request_id in log.newest(log.capacity) for one in log.explain(request_id)]
    return sum(max(1, len(one["decision"]["ranking"])) if "decision" in one else 1 for one in shown)


def test_large_rankings_drop_the_oldest_requests_early() -> None:
    log, most = DecisionLog(), MOST_CANDIDATES // 1000
    for i in range(2 * most):
        log.record(0.0, [decided(f"r{i}", 1000)], 0.0, POLICY, POLICY)
        assert log.candidates <= MOST_CANDIDATES
    assert log.candidates == held(log)
    assert log.requests == most
    assert log.explain(f"r{most - 1}") == []
    assert len(log.explain(f"r{most}")[0]["decision"]["ranking"]) == 1000


def test_a_request_that_is_decided_without_end_keeps_its_latest_decisions() -> None:
    log = DecisionLog()
    for i in range(MOST_DECISIONS + 5):
        log.record(float(i), [decided("r", 3)], 0.0, POLICY, POLICY)
    shown = log.explain("r")
    assert [made["at_s"] for made in shown] == [float(i) for i in range(5, MOST_DECISIONS + 5)]
    assert log.candidates == held(log) == 3 * MOST_DECISIONS


def test_small_decisions_are_bounded_by_the_number_of_requests() -> None:
    log = DecisionLog(capacity=10)
    for i in range(30):
        actions = [decided(f"r{i}", 2), Reject(f"r{i}", 503, "pool_timeout", 1.0)]
        log.record(0.0, actions, 0.0, POLICY, POLICY)
    assert (log.requests, log.candidates) == (10, 30)
    assert log.newest(2) == ["r29", "r28"]


def test_numbers_that_no_message_holds_are_kept_as_floats_beside_the_decisions_of_others() -> None:
    """Two counts of 2^64 - 1 that a peer told make such a sum, and whoever came next had its connection ended."""
    log, huge = DecisionLog(), 2**65
    ranking = (Ranked("w0", huge, {"load": -huge}), Ranked("w1", 1.0, {"load": 2.0}))
    lie = RoutePrefill("lie", Decision("w0", ranking, Reason.LEAST_COST), False, False, 0.0)
    log.record(0.0, [decided("before", 2), lie, decided("after", 2)], 0.0, POLICY, POLICY)
    assert len(log.explain("before")) == len(log.explain("after")) == 1
    (shown,) = log.explain("lie")
    first, second = shown["decision"]["ranking"]
    assert (first["cost"], first["terms"], second["terms"]) == (2.0**65, {"load": -(2.0**65)}, {"load": 2.0})


def test_transfers_are_kept_with_their_request_and_show_how_long_they_were_held() -> None:
    log = DecisionLog(capacity=1)
    log.record(0.0, [decided("r-0", 1)], 0.0, POLICY, POLICY)
    log.transferred([Transfer("r-0", 100, 0.5, 2, 1.0, 0.25), Transfer("other-0", 1, 0.1, 1, 0.0)], 10.0)
    (moved,) = log.transfers("chatcmpl-r")
    assert moved == {
        "at_s": 9.0, "attempt_id": "r-0", "n_bytes": 100, "seconds": 0.5, "held_s": 0.25, "descriptors": 2,
    }  # fmt: skip
    assert log.transfers("other") == []
    log.record(11.0, [decided("s-0", 1)], 0.0, POLICY, POLICY)
    assert log.transfers("r") == [] and log._moved == {}


COMPOSITION = decode_policy("composition", {})
RING_BYTES = 2**20 * 6
"""Most bytes of a full ring of the default policies' decisions with three prefill and four decode engines, 1.2 kB for
each of 4,096 requests and a fifth more. Kept as objects they took 16 MB."""
WIDE_RING_BYTES = 2**20 * 14
"""Most bytes of a full ring whose every candidate has the 15 terms of `composition`."""


def serve(requests: int, heard: Callable[[float, Sequence[Action]], None]) -> None:
    """Has a dispatcher of the default policies decide `requests` requests, 30 of which run at a time."""
    dispatcher = Dispatcher(DispatchConfig(), POLICY, COMPOSITION)
    engines = {f"prefill-{i:08x}": Role.PREFILL for i in range(3)}
    engines |= {f"decode-{i:08x}": Role.DECODE for i in range(4)}
    for name, role in engines.items():
        dispatcher.handle(ev.EngineUp(0.0, name, role, "group", "node", 64, 1_000_000))
        dispatcher.handle(ev.EngineStatus(0.0, name, 0, 0, 0))
    for i in range(requests):
        now_s, attempt_id = i / 8, f"{i:020x}-{i}"
        for name in engines if i % 16 == 0 else ():
            dispatcher.handle(ev.EngineStatus(now_s, name, 10, 0, 10_000))
        heard(now_s, dispatcher.handle(ev.Arrived(now_s, Request(attempt_id, now_s, 816, 64))))
        heard(now_s, dispatcher.handle(ev.PrefillDone(now_s, attempt_id, now_s + 30.0, 1000, 0)))
        dispatcher.handle(ev.Admitted(now_s, attempt_id))
        if i >= 30:
            dispatcher.handle(ev.Closed(now_s, f"{i - 30:020x}-{i - 30}", "finished", 60))


def bytes_of(fill: Callable[[DecisionLog], None]) -> int:
    """Returns the bytes that a log takes once it has been filled."""
    log = DecisionLog()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        fill(log)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.nightly
def test_a_full_ring_of_ordinary_decisions_is_small() -> None:
    made: list[tuple[float, Sequence[Action]]] = []
    serve(DecisionLog().capacity, lambda now_s, actions: made.append((now_s, actions)))
    assert sum(len(actions) for _, actions in made) == 2 * DecisionLog().capacity

    def fill(log: DecisionLog) -> None:
        for now_s, actions in made:
            log.record(now_s, actions, 0.0, POLICY, COMPOSITION)
        assert log.requests == log.capacity

    assert bytes_of(fill) < RING_BYTES


def test_a_full_ring_of_the_widest_rankings_is_bounded() -> None:
    names = [f"a_term_of_the_cost_{i}" for i in range(15)]

    def fill(log: DecisionLog) -> None:
        for i in range(MOST_CANDIDATES // 8):
            terms = dict.fromkeys(names, i + 0.5)
            ranking = tuple(Ranked(f"decode-{j:08x}", i + 0.25, dict(terms)) for j in range(8))
            action = RoutePrefill(f"r{i // 2}", Decision("w0", ranking, Reason.LEAST_COST), False, False, 0.0)
            log.record(0.0, [action], 0.0, POLICY, POLICY)
        assert (log.candidates, log.requests) == (MOST_CANDIDATES, log.capacity)

    assert bytes_of(fill) < WIDE_RING_BYTES


def test_explain_shows_every_decision_as_it_was_made() -> None:
    """The reference keeps the actions themselves, as the log did before it packed them."""
    log, wanted = DecisionLog(), dict[str, list[object]]()

    def keep(now_s: float, actions: Sequence[Action]) -> None:
        log.record(now_s, actions, 0.0, POLICY, COMPOSITION, (("decode-9", "failures"),))
        for action in actions:
            shown = {"at_s": now_s, "action": type(action).__name__, **asdict(action)}
            if not isinstance(action, Reject):
                policy = described(POLICY if isinstance(action, RoutePrefill) else COMPOSITION)
                shown["policy"] = PROBE if action.decision.reason == Reason.PROBE else policy
            shown["quarantined"] = {"decode-9": "failures"}
            wanted.setdefault(action.attempt_id.partition("-")[0], []).append(shown)

    serve(40, keep)
    fetch = PrefixFetch("w2", 64, True, FetchReason.FASTER, 0.5, 1.5, {"wire_s": 0.25, "n": 3}, 2.0)
    none = Decision("w", (Ranked("w", float("inf"), {}),), Reason.PROBE)
    keep(
        99.0,
        [RoutePrefill("last-0", none, True, True, 1.5, fetch), Reject("last-1", 503, "full", 1.0, "why")],
    )
    assert len(wanted) == 41
    for request_id, decisions in wanted.items():
        assert json.dumps(log.explain(request_id)) == json.dumps(decisions)
