"""The router and the metrics learn how each request went, as its client saw it, exactly once."""

import pytest

from actors.wire import messages as wire
from policies.request import events as ev
from policies.request.ended import RequestEnd
from tests.app.ingress.play import IDS
from tests.app.ingress.test_migration import decoding, finish

SLO = {
    "headers": {
        b"x-sluice-slo-ttft-ms": b"500",
        b"x-sluice-slo-tpot-ms": b"100",
        b"x-sluice-priority": b"batch",
    }
}
BATCH = {"class": "batch"}


async def test_times_and_tokens_are_those_of_the_client_over_a_migration() -> None:
    play, attempt_id = decoding(0, **SLO)
    play.now_s += 0.4
    play.generate(attempt_id, [0], 7)
    play.now_s += 2.0
    play.lose("d")
    (second,) = play.live
    for _ in range(4):
        play.advance(second, "q", "e")
    play.now_s += 3.0
    finish(play)
    tokens = len(IDS[0])
    assert play.ended == [
        RequestEnd("finished", "batch", pytest.approx(0.4), pytest.approx(5 / (tokens - 1)), tokens)
    ]
    # the engine that was lost had the request for an attempt, which is no end
    assert [m.ended is None for m in play.told if isinstance(m, wire.Closed)] == [True, False]
    assert play.metric("sluice_tpot_seconds_count", **BATCH) == 1
    assert play.metric("sluice_ttft_seconds_count", **BATCH) == 1
    assert play.metric("sluice_e2e_seconds_count", **BATCH) == 1
    assert play.metric("sluice_slo_requests_total", result="met", **BATCH) == 1


async def test_a_late_first_token_misses_the_objective() -> None:
    play, attempt_id = decoding(0, **SLO)
    play.now_s += 0.6
    play.generate(attempt_id, [0], 7)
    finish(play)
    assert play.metric("sluice_slo_requests_total", result="ttft", **BATCH) == 1


async def test_without_an_objective_none_is_counted() -> None:
    play, _ = decoding(3)
    finish(play)
    assert [end.outcome for end in play.ended] == ["finished"]
    assert not list(play.metrics.slo_requests.collect()[0].samples)


async def test_a_rejected_request_is_told_though_the_router_has_ended_its_attempt() -> None:
    play, _ = decoding(0, **SLO)
    play.lose("d")
    (second,) = play.live
    play.connections._happens(second, ev.Reject(503, "queue_timeout", 1.0))
    assert play.ended == [RequestEnd("rejected", "batch", None, None, 0)]
    assert play.metric("sluice_slo_requests_total", result="rejected", **BATCH) == 1


async def test_a_request_that_never_gets_into_the_retry_budget_has_failed() -> None:
    play, attempt_id = decoding(0, **SLO)
    play.connections.budgeted = 3
    play.lose("d")
    (attempt_id,) = play.live
    play.advance(attempt_id, "p", "d")
    play.fail(attempt_id, "internal")
    while play.live:
        (life,) = play.live.values()
        play.now_s = life.wake_at_s
        life.wake(play.now_s)
    assert [end.outcome for end in play.ended] == ["failed"]


async def test_a_request_at_fault_and_a_client_that_leaves_missed_nothing() -> None:
    refused, attempt_id = decoding(0, **SLO)
    refused.fail(attempt_id, "bad_request")
    left, _ = decoding(3, stream=True, **SLO)
    await left.written()
    left.reply.on_gone("left")
    for play in (refused, left):
        assert [end.outcome for end in play.ended] == ["cancelled"]
        assert not list(play.metrics.slo_requests.collect()[0].samples)


async def test_the_failure_of_one_choice_is_the_failure_of_the_request() -> None:
    play, _ = decoding(5, n=3, stream=True, **SLO)
    await play.written()
    play.lose("d")
    for attempt_id in list(play.live):
        play.advance(attempt_id, "q", "e")
    # nothing of the answer can be generated again, and no choice may go on any more
    for life in play.live.values():
        life.migrations = life.retries = 100
    play.fail(next(iter(play.live)), "internal")
    assert not play.live
    assert [end.outcome for end in play.ended] == ["failed"]
