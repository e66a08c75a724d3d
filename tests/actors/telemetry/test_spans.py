"""The trace of a request has what its engines told, on the ingress's clock, and its times sum up to the request's."""

from collections.abc import Sequence
from functools import partial

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.telemetry.export import Exports, drawn_place
from actors.telemetry.facts import Answered, Attempt, Kept
from actors.telemetry.spans import write
from actors.telemetry.times import CLOCK, Stamps
from policies.request.life import Times
from policies.request.stage import Outcome


def spans_of(answered: Answered) -> Sequence[ReadableSpan]:
    """The spans of a request, the whole span last."""
    exporter = InMemorySpanExporter()
    exports = Exports(exporter, lambda result, number: None, {}, lambda: 0.0)
    exports.put(partial(write, answered))
    exports.stop()
    return exporter.get_finished_spans()


def told_by(whole: ReadableSpan) -> dict[str, float]:
    """The seconds of each event of a whole span."""
    found: dict[str, float] = {}
    for event in whole.events:
        seconds = (event.attributes or {})["seconds"]
        assert isinstance(seconds, float)
        found[event.name] = seconds
    return found


def seconds_of(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_the_parts_of_tasks_that_engines_told_are_spans_below_the_whole() -> None:
    times = Times(
        1.0,
        routed_s=2.0,
        pooled_s=10.0,
        decode_routed_s=11.0,
        first_s=20.0,
        last_s=30.0,
        attempt_first_s=20.0,
    )
    attempt = Attempt("a1", 0, times, 30.0, "finished", "p", "d", None, None, False, 5, 0, 0)
    told = [
        Stamps("p", "prefill", CLOCK, {"received": 3.0, "admitted": 4.0, "computed": 8.0, "sent": 9.0}),
        Stamps("d", "decode", CLOCK, {"received": 12.0, "reading": 13.0, "admitted": 15.0, "first": 19.0}),
    ]
    kept = Kept(drawn_place(), True, [attempt], engines={"a1": told})
    spans = spans_of(
        Answered(kept, "/v1/completions", "cmpl-1", "m", "standard", 0.5, 20.0, 30.0, 200, 4, 5, 5, True)
    )
    whole = spans[-1]
    assert whole.start_time is not None and whole.context is not None
    found = []
    for span in spans:
        if span.name.startswith("engine "):
            assert span.parent is not None and span.parent.span_id == whole.context.span_id
            assert span.start_time is not None and span.end_time is not None
            since_s, until_s = (
                (at - whole.start_time) / 1e9 + 0.5 for at in (span.start_time, span.end_time)
            )
            found.append((span.name, (span.attributes or {})["sluice.engine"], since_s, until_s))
    # the first step is not told apart from the wait for it, so both are the step
    assert found == [
        ("engine wait for a slot", "p", pytest.approx(3.0), pytest.approx(4.0)),
        ("engine prefill", "p", pytest.approx(4.0), pytest.approx(8.0)),
        ("engine report", "p", pytest.approx(8.0), pytest.approx(9.0)),
        ("engine wait for a slot", "d", pytest.approx(12.0), pytest.approx(13.0)),
        ("engine transfer", "d", pytest.approx(13.0), pytest.approx(15.0)),
        ("engine step", "d", pytest.approx(15.0), pytest.approx(19.0)),
    ]


def test_what_the_ingress_does_after_the_last_token_is_accounted_for() -> None:
    """The ingress was kept for 40 ms from completing the answer: the attempt ended 1 ms before the request."""
    times = Times(1.0, 1.25, 1.5, None, 1.75, None, 2.0, 3.0, 2.0)
    attempt = Attempt("a1", 0, times, 3.039, "finished", "p", "d", None, None, False, 5, 0, 0)
    kept = Kept(drawn_place(), True, [attempt])
    *tasks, whole = spans_of(
        Answered(kept, "/v1/completions", "cmpl-1", "m", "standard", 0.5, 2.0, 3.04, 200, 4, 5, 5, True)
    )
    waits = told_by(whole)
    assert waits == pytest.approx({"prepare": 0.5, "queue": 0.25, "pool": 0.25, "finish": 0.04})
    assert whole.events[-1].timestamp == whole.end_time
    assert [span.name for span in tasks] == ["prefill", "transfer", "decode"]
    told_s = sum(map(seconds_of, tasks)) + sum(waits.values())
    # nanoseconds since the epoch are rounded to 256 of them
    assert told_s == pytest.approx(seconds_of(whole), abs=1e-5)


@pytest.mark.parametrize(
    ("outcome", "status", "attempt_ended_s", "finish_s"),
    [("failed", 502, 2.5, 0.04), ("cancelled", 499, 2.541, None)],
)
def test_the_end_of_an_attempt_that_did_not_finish_is_not_its_last_token(
    outcome: Outcome, status: int, attempt_ended_s: float, finish_s: float | None
) -> None:
    """The attempts of a client that left are ended after its request, so that nothing lies between."""
    times = Times(1.0, 1.25, 1.5, None, 1.75, None, 2.0, 2.25, 2.0)
    failed = "d" if outcome == "failed" else None
    attempt = Attempt("a1", 0, times, attempt_ended_s, outcome, "p", "d", failed, failed, False, 5, 0, 0)
    kept = Kept(drawn_place(), True, [attempt])
    whole = spans_of(
        Answered(kept, "/v1/completions", "cmpl-1", "m", "standard", 0.5, 2.0, 2.54, status, 4, 5, 5, True)
    )[-1]
    told = told_by(whole)
    assert told.get("finish") == (None if finish_s is None else pytest.approx(finish_s))
