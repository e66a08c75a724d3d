"""Traces reach a collector in the protocol's own words, and cost nothing where they are not wanted."""

import subprocess
import sys
from collections import Counter

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import SpanKind

from actors.telemetry import export
from actors.telemetry.environment import is_wanted, traces_endpoint, traces_of_environment
from actors.telemetry.facts import Answered, Attempt, Kept, Place
from actors.telemetry.forced import ForcedTraces
from actors.telemetry.traces import Traces
from benchmarks.live.collector import Collector, attributes, collector
from policies.request.ended import Result
from policies.request.life import Times

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


PLACE = Place(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


def unsampled(*results: Result | None) -> Kept:
    return Kept(PLACE, False, results=list(results))


def answered(status: int = 200, kept: Kept | None = None) -> Answered:
    """A request with one attempt: until submitted 0.5 s, queue 1 s, prefill 2 s, pool 1 s, transfer 1 s, decode 5 s."""
    times = Times(100.0, 101.0, 103.0, None, 104.0, None, 105.0, 110.0, 105.0)
    attempt = Attempt(
        "r-1", 0, times, 110.0, "finished", "p", "d", None, None, False, 10, 0, 3, 4096, 0.5, 0.1
    )
    kept = kept or Kept(PLACE, True)
    kept.attempts.append(attempt)
    return Answered(
        kept, "/v1/chat/completions", "chatcmpl-r", "m", "chat", 99.5, 105.0, 110.0, status, 7, 10, 16, True
    )


def made(to: Collector, counts: Counter[str], **more: object) -> Traces:
    exporter = OTLPSpanExporter(endpoint=to.endpoint, timeout=60)

    def count(result: str, number: int) -> None:
        counts[result] += number

    return Traces(exporter, count, {"service.name": "sluice-ingress"}, **{"sampler": ALWAYS_ON} | more)  # type: ignore[arg-type]


def test_a_request_is_one_span_with_one_for_each_task() -> None:
    counts: Counter[str] = Counter()
    with collector() as to:
        traces = made(to, counts)
        assert traces.take(answered()) == "taken"
        traces.stop()
        assert counts == {"exported": 1}
    spans = {span.name: span for span in to.spans}
    assert set(spans) == {"POST /v1/chat/completions", "prefill", "transfer", "decode"}
    whole = spans["POST /v1/chat/completions"]
    assert all(span.trace_id == whole.trace_id for span in to.spans)
    assert all(span.parent_span_id == whole.span_id for name, span in spans.items() if span is not whole)
    seconds = {name: (s.end_time_unix_nano - s.start_time_unix_nano) / 1e9 for name, s in spans.items()}
    assert seconds == pytest.approx(
        {"POST /v1/chat/completions": 10.5, "prefill": 2, "transfer": 1, "decode": 5}, abs=1e-6
    )
    waits = {event.name: event.attributes[0].value.double_value for event in whole.events}
    assert waits == pytest.approx({"prepare": 0.5, "queue": 1, "pool": 1})
    assert attributes(whole)["gen_ai.usage.output_tokens"] == 10
    assert attributes(whole)["gen_ai.response.time_to_first_chunk"] == pytest.approx(5.5)
    assert attributes(spans["transfer"])["sluice.engine"] == "d"
    assert to.resources[0]["service.name"] == "sluice-ingress"


def test_a_request_goes_on_in_the_trace_of_its_client() -> None:
    counts: Counter[str] = Counter()
    with collector() as to:
        traces = made(to, counts)
        kept = traces.begin("/v1/completions", PARENT)
        traces.take(answered(kept=kept))
        traces.stop()
    whole = next(span for span in to.spans if span.name.startswith("POST"))
    assert whole.trace_id.hex() == PARENT.split("-")[1]
    assert whole.parent_span_id.hex() == PARENT.split("-")[2]
    # other processes were told the place of the whole span before it was made
    assert kept.wire == f"00-{whole.trace_id.hex()}-{whole.span_id.hex()}-01"


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-01", "ff-" + PARENT[3:], "\u20ac" * 55])
def test_a_faulty_traceparent_begins_a_trace_of_its_own(header: str) -> None:
    counts: Counter[str] = Counter()
    with collector() as to:
        traces = made(to, counts)
        kept = traces.begin("/v1/completions", header)
        traces.take(answered(kept=kept))
        traces.stop()
    whole = next(span for span in to.spans if span.name.startswith("POST"))
    assert whole.parent_span_id == b""
    assert (whole.trace_id.hex(), whole.span_id.hex()) == (
        f"{kept.place.trace_id:032x}",
        f"{kept.place.span_id:016x}",
    )


FORCED = f"00-{0xABC << 64:032x}-b7ad6b7169203331-01"
"""A traceparent whose trace id every sampler by ratio takes: its lower 64 bits are 0."""


@pytest.mark.parametrize(
    ("sampler", "header", "wants_times", "sampled"),
    [
        (ParentBased(ALWAYS_OFF), PARENT, False, [True, True, False, False, True]),
        (ParentBased(ALWAYS_OFF), None, True, [True, True, False, False, True]),
        (ParentBased(ALWAYS_OFF), PARENT, True, [True, True, False, False, True]),
        (ParentBased(ALWAYS_OFF), UNSAMPLED, False, [False] * 5),
        # the client chooses an id that the ratio takes
        (TraceIdRatioBased(1e-9), FORCED, False, [True, True, False, False, True]),
        # what is sampled anyway is not forced
        (ALWAYS_ON, PARENT, False, [True] * 5),
        (ParentBased(ALWAYS_ON), PARENT, True, [True] * 5),
        (ALWAYS_OFF, PARENT, False, [False] * 5),
    ],
)
def test_what_clients_force_is_bounded(
    sampler: Sampler, header: str | None, wants_times: bool, sampled: list[bool]
) -> None:
    now_s = 100.0
    traces = Traces(
        InMemorySpanExporter(), lambda result, number: None, {}, sampler, lambda: now_s, forced_per_s=2.0
    )
    found = []
    for now_s in (100.0, 100.0, 100.0, 100.25, 100.5):  # noqa: B007  (the clock reads it)
        kept = traces.begin("/", header, wants_times)
        found.append(kept.sampled)
        # a request that is not sampled has its place in the client's trace all the same
        assert kept.place is not None and (kept.place.parent_id is not None) == (header is not None)
    assert found == sampled
    traces.stop()


def test_traces_that_clients_force_by_objectives_are_bounded_and_those_of_failures_are_not() -> None:
    now_s = 100.0
    traces = Traces(
        InMemorySpanExporter(),
        lambda result, number: None,
        {},
        ParentBased(ALWAYS_OFF),
        lambda: now_s,
        forced_per_s=2.0,
    )
    missed = answered(kept=unsampled("ttft"))
    assert [traces.take(missed) for _ in range(4)] == ["taken", "taken", None, None]
    # they take nothing of what other headers may force, nor of failures
    assert traces.begin("/", PARENT).sampled
    assert traces.take(answered(502, unsampled("ttft"))) == "taken"
    assert traces.take(answered(kept=traces.begin("/", PARENT))) == "taken"
    now_s = 100.5
    assert [traces.take(missed) for _ in range(2)] == ["taken", None]
    assert traces.take(answered(kept=unsampled("met"))) is None
    traces.stop()


@pytest.mark.parametrize(("rate_per_s", "most"), [(None, 5), (0.0, 0), (0.1, 1), (3.0, 3)])
def test_a_burst_of_forced_traces_is_that_of_a_second(rate_per_s: float | None, most: int) -> None:
    forced = ForcedTraces(rate_per_s)
    assert [forced.take(100.0) for _ in range(5)] == [n < most for n in range(5)]


def test_what_is_not_sampled_is_kept_only_if_it_was_bad() -> None:
    counts: Counter[str] = Counter()
    with collector() as to:
        traces = made(to, counts, sampler=ParentBased(ALWAYS_OFF))
        begun = traces.begin("/", None), traces.begin("/", UNSAMPLED), traces.begin("/", PARENT)
        assert [kept.wire is not None for kept in begun] == [False, False, True]
        for one in (
            answered(kept=begun[0]),
            answered(499, unsampled()),
            answered(429, unsampled()),
            answered(kept=unsampled(None, "met")),
            answered(kept=begun[1]),
        ):
            traces.take(one)
        for one in (answered(502, unsampled()), answered(kept=unsampled("ttft")), answered(kept=begun[2])):
            traces.take(one)
        traces.stop()
    assert counts == {"exported": 3}
    whole = [span for span in to.spans if span.name.startswith("POST")]
    assert sorted(attributes(span)["http.response.status_code"] for span in whole) == [200, 200, 502]
    assert {attributes(span).get("sluice.objective_missed") for span in whole} == {None, "ttft"}


def test_too_many_are_dropped_and_a_collector_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MOST_WAITING", 4)
    monkeypatch.setattr(export, "BATCH", 1)
    counts: Counter[str] = Counter()
    with collector() as to:
        to.gate.clear()
        traces = made(to, counts)
        results = [traces.take(answered()) for _ in range(20)]
        dropped = results.count("dropped")
        assert 14 <= dropped <= 16  # one or two are on their way
        to.status = 400
        to.gate.set()
        traces._thread.join(0)
        for _ in range(1200):
            if sum(counts.values()) == 20 - dropped:
                break
            traces._thread.join(0.05)
        traces.stop()
    assert counts == {"failed": 20 - dropped}


def test_a_request_of_which_no_spans_can_be_made_takes_no_other_one_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts: Counter[str] = Counter()
    half = Place(PLACE.trace_id, 7)

    def fails(scribe: export.Scribe) -> None:
        scribe.tracer.start_span("half").end()
        # it fails after the place was drawn and before the span has it
        scribe.at(half, "never", SpanKind.SERVER, {}, None)  # type: ignore[arg-type]

    with collector() as to:
        traces = made(to, counts)
        traces.take(answered())
        traces.put(fails)
        traces.put(lambda scribe: scribe.tracer.start_span("its own").end())
        traces.take(answered())
        traces.stop()
    assert counts == {"exported": 3, "failed": 1}
    names = Counter(span.name for span in to.spans)
    assert names == {
        "POST /v1/chat/completions": 2, "prefill": 2, "transfer": 2, "decode": 2, "its own": 1
    }  # fmt: skip
    (own,) = (span for span in to.spans if span.name == "its own")
    assert int.from_bytes(own.span_id, "big") != half.span_id
    (told,) = (record for record in caplog.records if record.name == export.__name__)
    assert told.getMessage() == "no traces can be made of 1 requests" and told.exc_info is not None


def test_without_an_endpoint_there_are_none_and_nothing_is_imported() -> None:
    assert not is_wanted({})
    assert not is_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": ""})
    assert is_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"})
    assert is_wanted({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"})
    assert not is_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"})
    assert not is_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"})
    code = (
        "import sys, actors.telemetry.environment as e, actors.telemetry.logs, actors.telemetry.parts;"
        "assert e.traces_of_environment(print, 's', 'i') is None;"
        "assert e.decision_traces('r', float) is None and e.start_trace('e', 'decode', 'sim') is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, "http://x:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318/"}, "http://x:4318/v1/traces"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://y/t"},
            "http://y/t",
        ),
        ({}, None),
    ],
)
def test_the_endpoint_is_the_one_that_the_exporter_takes(
    environment: dict[str, str], endpoint: str | None
) -> None:
    assert traces_endpoint(environment) == endpoint


def test_the_environment_names_collector_service_and_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    with collector() as to:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{to.port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        traces = traces_of_environment(
            lambda result, n: counts.update({result: n}), "sluice-ingress", "i-1", 1.0
        )
        assert traces is not None
        assert [traces._forced.take(0.0) for _ in range(2)] == [True, False]
        traces.take(answered(kept=traces.begin("/", None)))
        traces.take(answered(500, traces.begin("/", None)))
        traces.stop()
    assert counts == {"exported": 1}
    assert (to.resources[0]["service.name"], to.resources[0]["service.instance.id"]) == ("ours", "i-1")
