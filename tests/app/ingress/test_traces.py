"""The trace of a request tells all that happened to it, whatever failed."""

import asyncio
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from actors.router.clock import clock_s
from actors.telemetry.decisions import DecisionTraces
from actors.telemetry.export import Exports, drawn_place
from actors.telemetry.facts import Answered, Kept
from actors.telemetry.spans import write
from actors.telemetry.traces import Traces
from actors.wire import messages as wire
from benchmarks.live.collector import attributes, collector
from tests.app.ingress.play import Play, finish, story
from tests.app.ingress.rig import pair, rig, until


class Taken:
    """Takes what an exchange hands over, and makes the spans of it."""

    def __init__(self) -> None:
        self.answered: list[Answered] = []

    def begin(self, path: str, traceparent: str | None, wants_times: bool) -> Kept:
        return Kept(drawn_place(), True)

    def take(self, answered: Answered) -> None:
        self.answered.append(answered)

    def spans(self) -> list[ReadableSpan]:
        exporter = InMemorySpanExporter()
        exports = Exports(exporter, lambda result, number: None, {}, lambda: 0.0)
        for one in self.answered:
            exports.put(partial(write, one))
        exports.stop()
        return list(exporter.get_finished_spans())


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_fails_the_spans_are_those_of_the_tasks(data: st.DataObject) -> None:
    asyncio.run(spans_of_tasks(data))


async def spans_of_tasks(data: st.DataObject) -> None:
    taken = Taken()
    play, _ = await story(data, taken)
    if data.draw(st.booleans(), "the client leaves") and play.live:
        assert play.reply.on_gone is not None
        play.reply.on_gone("disconnected")
    finish(play)
    await play.written()
    (answered,) = taken.answered
    check(answered, taken.spans(), play)


def check(answered: Answered, spans: list[ReadableSpan], play: Play) -> None:
    attempts = answered.kept.attempts
    whole = spans[-1]
    assert whole.parent is None and whole.context is not None
    for span in spans[:-1]:
        assert span.parent is not None and span.parent.span_id == whole.context.span_id
        assert span.start_time is not None and span.end_time is not None
        assert whole.start_time <= span.start_time <= span.end_time  # type: ignore[operator]
        # the attempts of a client that left end after the whole, by the time that it takes to end them
        assert span.end_time <= whole.end_time + 100_000  # type: ignore[operator]
    named: dict[str, list[ReadableSpan]] = {}
    for span in spans[:-1]:
        named.setdefault(span.name, []).append(span)
    times = [one.times for one in attempts]
    assert len(named.get("prefill", ())) == sum(t.routed_s is not None for t in times)
    assert len(named.get("transfer", ())) == sum(t.decode_routed_s is not None for t in times)
    assert len(named.get("decode", ())) == sum(t.attempt_first_s is not None for t in times)
    going_on = len(named.get("migration", ())) + len(named.get("retry", ()))
    migrated = sum(attempt.carried_tokens > 0 for attempt in attempts)
    assert len(named.get("migration", ())) == migrated
    assert going_on == len(attempts) - 1
    ids = {span.context.span_id for span in spans if span.context is not None}
    for span in [*named.get("migration", ()), *named.get("retry", ())]:
        (link,) = span.links
        assert link.context.span_id in ids
    # the tasks of an attempt follow one another, so that no second counts twice
    for attempt in attempts:
        own = [s for s in spans[:-1] if (s.attributes or {}).get("sluice.attempt") == attempt.attempt_id]
        tasks = [span for span in own if span.name not in ("migration", "retry")]
        for before, after in itertools.pairwise(tasks):
            assert before.end_time <= after.start_time  # type: ignore[operator]


async def test_live_requests_are_traced_to_a_collector(tmp_path: Path) -> None:
    counts: list[tuple[str, int]] = []
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with collector() as to:
        traces = Traces(
            OTLPSpanExporter(endpoint=to.endpoint),
            lambda result, number: counts.append((result, number)),
            {"service.name": "rig"},
            ALWAYS_ON,
        )
        decisions = DecisionTraces(
            OTLPSpanExporter(endpoint=to.endpoint), {"service.name": "router"}, clock_s
        )
        async with rig(tmp_path, pair(tmp_path), traces=traces, decisions=decisions) as made:
            for stream in (True, False):
                answer = await made.client.post(
                    "/v1/chat/completions",
                    json=made.chat(stream=stream),
                    headers={"traceparent": traceparent},
                )
                assert answer.status_code == 200
            left = made.client.stream("POST", "/v1/chat/completions", json=made.chat(stream=True))
            made.engines["d"].step_s = 0.2
            async with left as reply:
                await anext(reply.aiter_bytes())
            await made.idle()
            await until(lambda: made.app.in_flight == 0)
            prefills, decodes = made.engines["p"].of(wire.Prefill), made.engines["d"].of(wire.Decode)
        await asyncio.to_thread(traces.stop)
    assert sum(number for result, number in counts if result == "exported") == 3
    whole = [span for span in to.spans if span.name == "POST /v1/chat/completions"]
    assert [attributes(s)["http.response.status_code"] for s in whole] == [200, 200, 499]
    assert [s.trace_id.hex() == traceparent.split("-")[1] for s in whole] == [True, True, False]
    for one in whole:
        below = [s for s in to.spans if s.parent_span_id == one.span_id]
        assert all(s.trace_id == one.trace_id for s in below)
        decided = [s for s in below if s.name.startswith("decide")]
        assert [(s.name, attributes(s)["sluice.worker"]) for s in decided] == [
            ("decide prefill", "p"), ("decide decode", "d"),
        ]  # fmt: skip
        assert all(s.events[0].name == "candidate" for s in decided)
        tasks = [s for s in below if s not in decided]
        assert [s.name for s in tasks] == ["prefill", "transfer", "decode"]
        # the engines were told the place of the whole span
        context = f"00-{one.trace_id.hex()}-{one.span_id.hex()}-01"
        assert [sum(m.trace == context for m in work) for work in (prefills, decodes)] == [1, 1]
        told_s = sum(s.end_time_unix_nano - s.start_time_unix_nano for s in tasks) / 1e9
        told_s += sum(_seconds(event) for event in one.events)
        whole_s = (one.end_time_unix_nano - one.start_time_unix_nano) / 1e9
        finishes = ["finish"] if attributes(one)["http.response.status_code"] == 200 else []
        assert [event.name for event in one.events] == ["prepare", "queue", "pool", *finishes]
        # a client that leaves does so between two tokens; nanoseconds since the epoch are rounded to 256 of them
        assert told_s == pytest.approx(whole_s, abs=1e-5) if finishes else told_s <= whole_s


def _seconds(event: Any) -> float:
    return float(next(a.value.double_value for a in event.attributes if a.key == "seconds"))


async def test_a_request_that_is_not_sampled_costs_router_and_engines_nothing(tmp_path: Path) -> None:
    counts: list[tuple[str, int]] = []
    with collector() as to:
        exporter = partial(OTLPSpanExporter, endpoint=to.endpoint)
        traces = Traces(exporter(), lambda *told: counts.append(told), {"service.name": "rig"}, ALWAYS_OFF)
        decisions = DecisionTraces(exporter(), {"service.name": "router"}, clock_s)
        async with rig(tmp_path, pair(tmp_path), traces=traces, decisions=decisions) as made:
            assert (await made.client.post("/v1/chat/completions", json=made.chat())).status_code == 200
            # one whose objective cannot be met is kept all the same, as its ingress saw it
            slo = {"slo": {"ttft_ms": 0.001}}
            assert (await made.client.post("/v1/chat/completions", json=made.chat(**slo))).status_code == 200
            await made.idle()
            assert {
                m.trace for engine in made.engines.values() for m in engine.of(wire.Prefill | wire.Decode)
            } == {None}  # type: ignore[arg-type]
        await asyncio.to_thread(traces.stop)
    assert sorted(span.name for span in to.spans) == [
        "POST /v1/chat/completions",
        "decode",
        "prefill",
        "transfer",
    ]
    assert decisions.totals == {"exported": 0, "failed": 0, "dropped": 0}
