"""The router's decisions about a sampled request stand in its trace, with their ranking."""

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from actors.telemetry import export
from actors.telemetry.decisions import MOST_RANKED, DecisionTraces
from actors.telemetry.facts import Place
from benchmarks.live.collector import Collector, attributes, collector
from policies.dispatch.dispatcher import Reject, RoutePrefill
from policies.routing.base import Decision, Ranked, Reason

PLACE = Place(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


def made(to: Collector) -> DecisionTraces:
    exporter = OTLPSpanExporter(endpoint=to.endpoint, timeout=60)
    return DecisionTraces(exporter, {"service.name": "sluice-router"}, lambda: 100.0)


def prefill(attempt_id: str, workers: int = 2, reason: Reason = Reason.LEAST_COST) -> RoutePrefill:
    ranking = tuple(Ranked(f"p{rank}", float(rank), {"queue_s": rank / 2}) for rank in range(workers))
    return RoutePrefill(attempt_id, Decision("p0", ranking, reason), False, False, 0.25)


def test_a_decision_is_a_span_with_its_ranking_below_the_request() -> None:
    with collector() as to:
        traces = made(to)
        traces.follow("a-1", PLACE.traceparent)
        traces.follow("b-1", None)
        traces.decided(99.0, 0.002, [prefill("a-1"), prefill("b-1")], "locality", "netkv")
        traces.decided(99.5, 0.001, [Reject("a-1", 503, "pool_timeout", 1.0)], "locality", "netkv")
        traces.forget("a-1")
        traces.decided(99.6, 0.001, [prefill("a-1")], "locality", "netkv")
        traces.stop()
        assert traces.totals == {"exported": 2, "failed": 0, "dropped": 0}
    decided, rejected = to.spans
    assert (decided.name, rejected.name) == ("decide prefill", "reject")
    for span in to.spans:
        assert span.trace_id.hex() == f"{PLACE.trace_id:032x}"
        assert span.parent_span_id.hex() == f"{PLACE.span_id:016x}"
    assert decided.end_time_unix_nano - decided.start_time_unix_nano == pytest.approx(2e6, abs=1e3)
    told = attributes(decided)
    assert (told["sluice.policy"], told["sluice.worker"], told["sluice.reason"]) == (
        "locality",
        "p0",
        "least_cost",
    )
    ranking = [attributes(event) for event in decided.events]
    assert [(one["worker"], one["cost"], one["term.queue_s"]) for one in ranking] == [
        ("p0", 0.0, 0.0),
        ("p1", 1.0, 0.5),
    ]
    assert attributes(rejected)["sluice.reason"] == "pool_timeout"


def test_a_long_ranking_is_cut_and_the_dispatcher_s_own_decisions_say_so() -> None:
    with collector() as to:
        traces = made(to)
        traces.follow("a-1", PLACE.traceparent)
        traces.decided(99.0, 0.0, [prefill("a-1", 40, Reason.PROBE)], "locality", "netkv")
        traces.stop()
    (span,) = to.spans
    assert len(span.events) == MOST_RANKED
    assert attributes(span)["sluice.candidates"] == 40
    assert attributes(span)["sluice.policy"] == "dispatcher"


def test_too_many_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MOST_WAITING", 4)
    monkeypatch.setattr(export, "BATCH", 1)
    with collector() as to:
        to.gate.clear()
        traces = made(to)
        traces.follow("a-1", PLACE.traceparent)
        for _ in range(20):
            traces.decided(99.0, 0.0, [prefill("a-1")], "locality", "netkv")
        # one or two are on their way
        assert 14 <= traces.totals["dropped"] <= 16
        to.gate.set()
        traces.stop()
