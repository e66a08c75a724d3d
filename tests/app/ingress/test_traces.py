"""The trace of a request tells all that happened to it, whatever failed."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from actors.telemetry.export import Traces
from actors.telemetry.facts import Answered
from actors.telemetry.spans import write
from policies.request.stage import Stage
from policies.request.troubles import SUSPECT_S
from tests.actors.telemetry.collector import attributes, collector
from tests.app.ingress.play import Play
from tests.app.ingress.rig import pair, rig, until

FLEET = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}


class Taken:
    """Takes what an exchange hands over, and makes the spans of it."""

    def __init__(self) -> None:
        self.answered: list[Answered] = []

    def take(self, answered: Answered) -> None:
        self.answered.append(answered)

    def spans(self) -> list[ReadableSpan]:
        ended: list[ReadableSpan] = []

        class Collects(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                ended.append(span)

        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(Collects())
        for one in self.answered:
            write(provider.get_tracer("test"), one, lambda at_s: round(at_s * 1e9), None)
        return ended


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_fails_the_spans_are_those_of_the_tasks(data: st.DataObject) -> None:
    asyncio.run(one_story(data))


async def one_story(data: st.DataObject) -> None:
    """One request under random failures; the clock goes on by a second between two steps."""
    draw, taken = data.draw, Taken()
    n = draw(st.integers(1, 2), "n")
    play = Play(FLEET, traces=taken, n=n, stream=draw(st.booleans(), "stream"), max_tokens=500)
    for _ in range(draw(st.integers(0, 40), "steps")):
        if not play.live:
            break
        attempt_id = draw(st.sampled_from(sorted(play.live)), "attempt")
        life = play.live[attempt_id]
        match draw(st.sampled_from(["go", "go", "go", "go", "lose", "fail", "overdue", "write"]), "what"):
            case "go":
                play.advance(attempt_id, *draw(st.sampled_from([("p", "d"), ("q", "e")])), tokens=3)
            case "lose":
                play.lose(draw(st.sampled_from(sorted(FLEET)), "lost"))
            case "fail" if life.decode_engine or life.prefill_engine:
                play.fail(attempt_id, draw(st.sampled_from(["internal", "kv_load"]), "code"))
            case "overdue" if life.stage is not Stage.QUEUED:
                play.now_s += 130.0
                life.wake(play.now_s)
            case _:
                await play.written()
        play.now_s += SUSPECT_S + 1
    if draw(st.booleans(), "the client leaves") and play.live:
        assert play.reply.on_gone is not None
        play.reply.on_gone("disconnected")
    for _ in range(10):
        for attempt_id in list(play.live):
            play.advance(attempt_id, "q", "e", tokens=1000)
            play.now_s += 1.0
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
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time  # type: ignore[operator]
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
        async with rig(tmp_path, pair(tmp_path), traces=traces) as made:
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
        await asyncio.to_thread(traces.stop)
    assert sum(number for result, number in counts if result == "exported") == 3
    whole = [span for span in to.spans if span.name == "POST /v1/chat/completions"]
    assert [attributes(s)["http.response.status_code"] for s in whole] == [200, 200, 499]
    assert [s.trace_id.hex() == traceparent.split("-")[1] for s in whole] == [True, True, False]
    for one in whole:
        tasks = [s for s in to.spans if s.parent_span_id == one.span_id]
        assert [s.name for s in tasks] == ["prefill", "transfer", "decode"]
        told_s = sum(s.end_time_unix_nano - s.start_time_unix_nano for s in tasks) / 1e9
        told_s += sum(_seconds(event) for event in one.events)
        whole_s = (one.end_time_unix_nano - one.start_time_unix_nano) / 1e9
        # what is left is the ingress's own work before the queue and after the last token
        assert told_s <= whole_s


def _seconds(event: Any) -> float:
    return float(next(a.value.double_value for a in event.attributes if a.key == "seconds"))
