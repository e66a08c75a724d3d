"""Traces against a journal: tasks by attempt, orphans, and the time of a request that its trace accounts for."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.watching.spans import differences, tasks_in, traces_of
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.journal.lines import header_line, record_text
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev

MS = 1_000_000


def span(name: str, start_ms: float, end_ms: float, number: int, parent: int = 0, **told: Any) -> Span:
    made = Span(
        name=name,
        trace_id=b"t" * 16,
        span_id=number.to_bytes(8, "big"),
        parent_span_id=parent.to_bytes(8, "big") if parent else b"",
        start_time_unix_nano=round(start_ms * MS),
        end_time_unix_nano=round(end_ms * MS),
    )
    made.attributes.extend(
        KeyValue(key=key.replace("_", "."), value=AnyValue(string_value=value)) for key, value in told.items()
    )
    return made


def waited(whole: Span, name: str, until_ms: float, seconds: float) -> None:
    value = KeyValue(key="seconds", value=AnyValue(double_value=seconds))
    whole.events.add(name=name, time_unix_nano=round(until_ms * MS), attributes=[value])


def migrated() -> list[Span]:
    """A request of 100 ms: an attempt from 1 to 40 ms, then one from 43 ms on. 3 + 2 ms are nobody's, and of those the
    3 ms between the attempts are a gap that the migration shows.
    """
    whole = span("POST /v1/completions", 0, 100, 1, gen_ai_response_id="cmpl-a")
    whole.attributes[0].key = "gen_ai.response.id"
    waited(whole, "prepare", 1, 0.001)
    waited(whole, "queue", 5, 0.004)  # submitted at 1 ms
    waited(whole, "pool", 22, 0.002)
    waited(whole, "queue", 45, 0.002)  # submitted at 43 ms
    waited(whole, "pool", 60, 0.001)
    first = [
        span("prefill", 5, 20, 2, 1, sluice_attempt="a-1"),
        span("transfer", 22, 30, 3, 1, sluice_attempt="a-1"),
        span("decode", 30, 40, 4, 1, sluice_attempt="a-1"),
    ]
    second = [
        span("migration", 40, 70, 5, 1, sluice_attempt="a-2"),
        span("prefill", 45, 59, 6, 1, sluice_attempt="a-2"),
        span("transfer", 60, 70, 7, 1, sluice_attempt="a-2"),
        span("decode", 70, 98, 8, 1, sluice_attempt="a-2"),
    ]
    return [*first, *second, whole]


def test_waits_tasks_and_gaps_add_up_to_the_request() -> None:
    found = traces_of(migrated())
    # 2 ms after the last token
    assert found.missing_s("cmpl-a") == pytest.approx(0.002)
    assert found.tasks == {attempt: Counter(prefill=1, transfer=1, decode=1) for attempt in ("a-1", "a-2")}
    assert (found.going_on, found.orphans) == (1, Counter())


def test_time_that_counts_twice_or_is_nobodys_is_seen() -> None:
    spans = migrated()
    spans[3] = span("migration", 40, 70, 5, 1, sluice_attempt="a-2")
    spans[6] = span("decode", 60, 98, 8, 1, sluice_attempt="a-2")  # 10 ms of them are the transfer's
    assert traces_of(spans).missing_s("cmpl-a") == pytest.approx(0.002 - 0.010)
    del spans[6]
    assert traces_of(spans).missing_s("cmpl-a") == pytest.approx(0.002 + 0.028)


def test_a_span_whose_parent_never_came_is_an_orphan() -> None:
    spans = migrated()
    stray = span("decide prefill", 4, 5, 9, 77)
    start = span("engine start", 0, 9, 10)
    found = traces_of([*spans, stray, start])
    assert found.orphans == Counter({"decide prefill": 1})
    assert list(found.whole) == ["cmpl-a"]
    assert traces_of(spans[:-1]).orphans.total() == 7


def test_tasks_are_those_of_the_journal(tmp_path: Path) -> None:
    dispatcher = Dispatcher(
        DispatchConfig(), prefill_policy("round_robin", {}), decode_policy("round_robin", {})
    )
    ended = [
        (
            ev.Closed(1.0, "a-1", "finished", output_tokens=4),
            ('{"action":"RoutePrefill","attempt_id":"a-1"}',),
        ),
        (ev.Closed(2.0, "b-1", "finished"), ('{"action":"RouteDecode","attempt_id":"b-1"}',)),
        (ev.Tick(3.0), ('{"action":"RoutePrefill","attempt_id":"d-1"}',)),
        # the engine had been killed, so nothing was sent to it
        (ev.AttemptFailed(4.0, "d-1", ("p",), "prefill", "not_connected"), ()),
    ]
    texts = [record_text(n, event, outcome) for n, (event, outcome) in enumerate(ended)]
    (tmp_path / "journal-0.jsonl").write_text(header_line(dispatcher, "1") + "\n" + "".join(texts))
    expected = tasks_in(tmp_path)
    assert expected == {"a-1": Counter(prefill=1, decode=1), "b-1": Counter(transfer=1), "d-1": Counter()}
    assert differences(expected, expected) == []
    assert differences(expected, {"a-1": Counter(prefill=1, decode=1), "c-1": Counter(decode=1)}) == [
        "b-1: tasks transfer 1, spans none",
        "c-1: tasks none, spans decode 1",
    ]
