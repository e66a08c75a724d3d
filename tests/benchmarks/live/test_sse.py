"""The stream reader: first text, finish, errors, whatever the cuts; and which answers count as whole."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.live.sse import StreamReader, events_of, text_of


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def delta(text: str | None, finish: str | None = None, role: str | None = None) -> bytes:
    content = {key: value for key, value in (("role", role), ("content", text)) if value is not None}
    return event(choices=[{"index": 0, "delta": content, "finish_reason": finish}])


DONE = b"data: [DONE]\n\n"
ROLE = delta("", role="assistant")
WHOLE = ROLE + delta("a") + delta("b") + delta("c", "length") + DONE


def read(data: bytes) -> StreamReader:
    reader = StreamReader()
    reader.feed(data, 1.0)
    return reader


def test_times_of_first_text_and_finish() -> None:
    reader = StreamReader()
    for now_s, data in enumerate([ROLE, delta("a"), delta("b"), delta("c", "length"), DONE]):
        reader.feed(data, float(now_s))
    assert (reader.first_s, reader.finish_s, reader.finish) == (1.0, 3.0, "length")
    assert reader.events == 5
    assert reader.done
    assert reader.problem() is None


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_the_cuts_do_not_matter(cuts: list[int]) -> None:
    reader = StreamReader()
    places = [0, *sorted(cuts), len(WHOLE)]
    for start, stop in itertools.pairwise(places):
        reader.feed(WHOLE[start:stop], float(stop))
    assert reader.problem() is None
    assert reader.events == 5
    # the text is known once its whole event is: at the first cut behind it
    first_text = len(ROLE) + len(delta("a"))
    assert reader.first_s == min(place for place in places[1:] if place >= first_text)


def test_usage_of_the_last_chunk() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    reader = read(WHOLE.replace(DONE, event(choices=[], usage=usage) + DONE))
    assert reader.usage == usage


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (ROLE + delta("a") + delta("b", "stop") + DONE, "finish_reason is stop"),
        (ROLE + delta("a") + delta("b", "length"), "no \\[DONE\\]"),
        (ROLE + delta("a") + DONE, "finish_reason is None"),
        (ROLE + DONE, "no text"),
        (ROLE + delta("a") + event(error={"message": "engine died"}), "engine died"),
    ],
)
def test_answers_that_are_not_whole(data: bytes, problem: str) -> None:
    import re

    assert re.search(problem, read(data).problem() or "")


def test_finish_reason_with_a_space() -> None:
    data = b'data: {"choices": [{"text": "x", "finish_reason": "length"}]}\n\n' + DONE
    assert read(data).problem() is None


def test_text_of_both_kinds_of_chunks() -> None:
    assert text_of({"choices": [{"text": "plain"}]}) == "plain"
    assert text_of({"choices": [{"delta": {"content": "chat"}}]}) == "chat"
    assert text_of({"choices": [{"delta": {"role": "assistant"}}]}) == ""
    assert text_of({"choices": [], "usage": {}}) == ""


def test_comments_are_no_events() -> None:
    assert events_of(b': ping\n\ndata: {"a":1}\n\n' + DONE) == [{"a": 1}]
