"""The trace of a sampled request has what its engines told, on the ingress's clock."""

from functools import partial

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.telemetry.export import Exports, drawn_place
from actors.telemetry.facts import Answered, Attempt, Kept
from actors.telemetry.spans import write
from actors.telemetry.times import CLOCK, Stamps
from policies.request.life import Times


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
    answered = Answered(
        kept, "/v1/completions", "cmpl-1", "m", "standard", 0.5, 20.0, 30.0, 200, 4, 5, 5, True
    )
    exporter = InMemorySpanExporter()
    exports = Exports(exporter, lambda result, number: None, {}, lambda: 0.0)
    exports.put(partial(write, answered))
    exports.stop()
    spans = exporter.get_finished_spans()
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
