"""The response parser: the same answers however the bytes are cut, and errors that say what was wrong."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.live.http1 import MAX_HEAD_BYTES, BadResponse, ResponseParser, parse_head


class Recorder:
    """Keeps what the parser says, body pieces joined."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[bytes, bytes], bytes]] = []
        self._open: tuple[int, dict[bytes, bytes], bytes] | None = None

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        assert self._open is None
        self._open = (status, headers, b"")

    def on_body(self, data: bytes) -> None:
        assert self._open is not None
        status, headers, body = self._open
        self._open = (status, headers, body + data)

    def on_end(self) -> None:
        assert self._open is not None
        self.answers.append(self._open)
        self._open = None


def bodies(recorder: Recorder) -> list[tuple[int, bytes]]:
    return [(status, body) for status, _, body in recorder.answers]


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;name=value\r\n world\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)
FIXED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\noops"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
ALL = CHUNKED + FIXED + CONTINUE + EMPTY + CHUNKED
EXPECTED = [(200, b"hello world0123456789"), (404, b"oops"), (200, b""), (200, b"hello world0123456789")]


@given(cuts=st.lists(st.integers(0, len(ALL)), max_size=30))
def test_the_cuts_do_not_matter(cuts: list[int]) -> None:
    recorder = Recorder()
    parser = ResponseParser(recorder)
    places = [0, *sorted(cuts), len(ALL)]
    for start, stop in itertools.pairwise(places):
        parser.feed(ALL[start:stop])
    assert bodies(recorder) == EXPECTED
    assert parser.idle
    parser.eof()


def test_byte_by_byte() -> None:
    recorder = Recorder()
    parser = ResponseParser(recorder)
    for index in range(len(ALL)):
        parser.feed(ALL[index : index + 1])
    assert bodies(recorder) == EXPECTED


def test_body_bytes_of_one_read_come_in_one_call() -> None:
    calls: list[bytes] = []

    class Counting(Recorder):
        def on_body(self, data: bytes) -> None:
            calls.append(data)
            super().on_body(data)

    ResponseParser(Counting()).feed(CHUNKED)
    assert calls == [b"hello world0123456789"]


def test_a_body_without_length_ends_with_the_connection() -> None:
    recorder = Recorder()
    parser = ResponseParser(recorder)
    parser.feed(b"HTTP/1.1 200 OK\r\n\r\nabc")
    parser.feed(b"def")
    assert recorder.answers == []
    parser.eof()
    assert bodies(recorder) == [(200, b"abcdef")]


@pytest.mark.parametrize("cut", [10, 60, len(CHUNKED) - 1])
def test_the_end_of_the_connection_inside_an_answer_is_an_error(cut: int) -> None:
    parser = ResponseParser(Recorder())
    parser.feed(CHUNKED[:cut])
    with pytest.raises(BadResponse, match="inside a response"):
        parser.eof()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "status line"),
        (b"HTTP/1.1 abc\r\n\r\n", "the status is not a number"),
        (b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n", "header line"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", "Content-Length is not a number"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -3\r\n\r\n", "negative"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "chunk size"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n", "longer than its size"),
        (b"x" * (MAX_HEAD_BYTES + 1), "response head"),
    ],
)
def test_what_is_no_response_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadResponse, match=message):
        ResponseParser(Recorder()).feed(data)


def test_head() -> None:
    head: Any = parse_head(b"HTTP/1.1 429 Too Many\r\nRetry-After:  3 \r\nX-Y: a:b")
    assert head == (429, {b"retry-after": b"3", b"x-y": b"a:b"})
