"""The start of an engine is a trace of its steps."""

import os

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from actors.telemetry.start import VARIABLE, StartTrace
from benchmarks.live.collector import attributes, collector


def test_steps_follow_one_another_and_phases_lie_in_them() -> None:
    phases = {"imports": 12.0, "config": 1.0, "weights": 5.0, "kv_cache": 2.0, "warm_up": 1.0}
    with collector() as to:
        trace = StartTrace(
            lambda: OTLPSpanExporter(endpoint=to.endpoint, timeout=60),
            {"service.name": "e"},
            "d-1",
            "decode",
            "vllm",
        )
        with trace.inherited():
            assert os.environ[VARIABLE] == trace.place.traceparent
        assert VARIABLE not in os.environ
        steps = {"process": 14.0, "weights": 5.0, "post_load": 4.0, "announce": 0.5}
        trace.send(1000.0, steps, phases)
    spans = {span.name: span for span in to.spans}
    whole = spans.pop("engine start")
    assert whole.span_id.hex() == f"{trace.place.span_id:016x}"
    assert attributes(whole) == {
        "sluice.engine": "d-1",
        "sluice.role": "decode",
        "sluice.engine_kind": "vllm",
    }

    def at(name: str) -> tuple[float, float]:
        span = spans[name]
        return span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9

    assert (whole.start_time_unix_nano / 1e9, whole.end_time_unix_nano / 1e9) == pytest.approx(
        (1000.0, 1023.5)
    )
    # each step begins where the one before ended: 14 + 5 + 4 + 0.5
    assert [at(name) for name in steps] == [
        pytest.approx(times) for times in ((1000, 1014), (1014, 1019), (1019, 1023), (1023, 1023.5))
    ]
    assert [at(name) for name in ("imports", "config", "kv_cache", "warm_up")] == [
        pytest.approx(times) for times in ((1000, 1012), (1012, 1013), (1019, 1021), (1021, 1022))
    ]
    parents = {name: span.parent_span_id for name, span in spans.items()}
    assert {parents[name] for name in steps} == {whole.span_id}
    assert (parents["imports"], parents["warm_up"]) == (spans["process"].span_id, spans["post_load"].span_id)
    assert set(spans) == {*steps, "imports", "config", "kv_cache", "warm_up"}
