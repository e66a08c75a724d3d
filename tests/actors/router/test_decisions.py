"""Tests that the log of decisions is bounded by what it holds, whatever ranks how many candidates how often."""

from actors.router.decisions import MOST_CANDIDATES, MOST_DECISIONS, DecisionLog
from actors.wire.messages import Transfer
from policies.dispatch.actions import Reject, RoutePrefill
from policies.routing.base import Decision, Ranked, Reason
from policies.routing.simple.join_shortest_queue import JoinShortestQueue

POLICY = JoinShortestQueue()


def decided(attempt_id: str, candidates: int) -> RoutePrefill:
    ranking = tuple(Ranked(f"w{i}", float(i), {}) for i in range(candidates))
    return RoutePrefill(attempt_id, Decision("w0", ranking, Reason.LEAST_COST), False, False, 0.0)


def held(log: DecisionLog) -> int:
    made = [one for decisions in log._ring.values() for one in decisions]
    return sum(1 if isinstance(m.action, Reject) else max(1, len(m.action.decision.ranking)) for m in made)


def test_large_rankings_drop_the_oldest_requests_early() -> None:
    log, most = DecisionLog(), MOST_CANDIDATES // 1000
    for i in range(2 * most):
        log.record(0.0, [decided(f"r{i}", 1000)], 0.0, POLICY, POLICY)
        assert log.candidates == held(log) <= MOST_CANDIDATES
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
