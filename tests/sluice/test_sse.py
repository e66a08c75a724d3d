"""The event decoder: every way to cut and end lines gives the same events."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice import InvalidResponseError
from sluice._events import SSEDecoder, StreamState
from sluice.types import ChatChunk


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"data: a\n\n", ["a"]),
        (b"data:a\n\n", ["a"]),
        (b"data:  a\n\n", [" a"]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b": comment\n\ndata: a\n\n", ["a"]),
        (b"event: e\nid: 1\nretry: 5\ndata: a\n\n", ["a"]),
        (b"event: e\n\n", []),
        (b"data\n\n", [""]),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"data: a\n\ndata: b\n\n\n\ndata: c\n\n", ["a", "b", "c"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\x0b\x0c\x1c\xc2\x85\n\n", ["a\x0b\x0c\x1c\x85"]),
    ],
)
def test_events_of_one_chunk(raw: bytes, events: list[str]) -> None:
    assert SSEDecoder().feed(raw) == events


def test_events_have_their_names() -> None:
    raw = b"event: snapshot\nid: 7\ndata: a\n\ndata: b\n\nevent: lost\n\ndata: c\n\nevent:delta\ndata: d\n\n"
    named = [("snapshot", "a"), ("message", "b"), ("message", "c"), ("delta", "d")]
    assert SSEDecoder().events(raw) == named


LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))


@given(
    events=st.lists(st.lists(LINE, min_size=1, max_size=3), min_size=1, max_size=5),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    data=st.data(),
)
def test_cuts_do_not_matter(events: list[list[str]], end: str, data: st.DataObject) -> None:
    raw = "".join("".join(f"data: {line}{end}" for line in lines) + end for lines in events).encode()
    # A lone CR at the very end could still become CRLF; one more byte settles it.
    raw += b":\n" if end == "\r" else b""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw)))) | {len(raw)})
    decoder, got = SSEDecoder(), []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        got += decoder.feed(raw[start:stop])
    assert got == ["\n".join(lines) for lines in events]


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_line_end_cut_in_two_is_one_line_end(cut: int) -> None:
    raw = b"data: a\r\ndata: b\r\n\r\n"
    decoder = SSEDecoder()
    assert decoder.feed(raw[:cut]) + decoder.feed(raw[cut:]) == ["a\nb"]


def test_bad_utf8_is_an_error() -> None:
    with pytest.raises(InvalidResponseError, match="UTF-8"):
        SSEDecoder().feed(b"data: \xff\n\n")


@pytest.mark.parametrize("piece", [b"x" * 40, b"data: " + b"x" * 20 + b"\n"])
def test_an_event_without_end_does_not_fill_the_memory(piece: bytes) -> None:
    decoder = SSEDecoder(max_event_bytes=100)
    with pytest.raises(InvalidResponseError, match="larger than 100"):
        deque(map(decoder.feed, [piece] * 10), maxlen=0)


def test_an_error_event_that_is_nested_without_end_is_no_chunk() -> None:
    state = StreamState(ChatChunk)
    state.feed(b'data: {"error": ' + b"[" * 100_000 + b"\n\n")
    with pytest.raises(InvalidResponseError, match="not a chunk"):
        state.take()


def test_small_events_may_be_many() -> None:
    decoder = SSEDecoder(max_event_bytes=100)
    assert sum(len(decoder.feed(b"data: " + b"x" * 50 + b"\n\n")) for _ in range(10)) == 10
