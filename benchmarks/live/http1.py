"""An incremental parser of HTTP/1.1 responses on one kept-alive connection. It takes bytes and makes callbacks.

It handles what an API server sends: Content-Length, chunked bodies (extensions and trailers are skipped), and bodies
that end with the connection. All body bytes of one `feed` are passed on in one call, so that a read with many chunks is
cheap to count.
"""

from collections.abc import Callable
from typing import Protocol

MAX_HEAD_BYTES = 64 * 1024
# The value that a reader returns when the buffer ends before the element does.
_MORE = -1


class BadResponse(ValueError):
    """The error of a response that this parser cannot read; the message says what is wrong."""


class Sink(Protocol):
    """The interface of the receiver of responses, which come one after the other."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...


class ResponseParser:
    """A parser that is fed with the socket's bytes and calls `sink`.

    It raises BadResponse, after which it must not be used again.
    """

    __slots__ = ("_buffer", "_left", "_pieces", "_read", "_sink")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._buffer = b""
        # Bytes of the current chunk or body that are still to come.
        self._left = 0
        self._pieces: list[bytes] = []
        self._read: Callable[[bytes, int], int] = self._read_head

    @property
    def idle(self) -> bool:
        """Whether the parser is between two responses."""
        return self._read == self._read_head and not self._buffer

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the connection. Raises BadResponse."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        position, end = 0, len(data)
        while position < end:
            after = self._read(data, position)
            if after == _MORE:
                break
            position = after
        self._buffer = data[position:]
        self._flush()

    def eof(self) -> None:
        """Notes that the connection has ended. Raises BadResponse when that cuts a response."""
        if self._read == self._read_until_eof:
            self._end()
        elif not self.idle:
            raise BadResponse("the connection ended inside a response")

    def _flush(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._sink.on_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _end(self) -> None:
        self._flush()
        self._read = self._read_head
        self._sink.on_end()

    def _read_head(self, data: bytes, at: int) -> int:
        stop = data.find(b"\r\n\r\n", at)
        if stop < 0:
            if len(data) - at > MAX_HEAD_BYTES:
                raise BadResponse(f"a response head of more than {MAX_HEAD_BYTES} bytes")
            return _MORE
        status, headers = parse_head(data[at:stop])
        # This is an interim response; the final one follows.
        if status < 200:
            return stop + 4
        self._sink.on_head(status, headers)
        self._begin_body(status, headers)
        return stop + 4

    def _begin_body(self, status: int, headers: dict[bytes, bytes]) -> None:
        if headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._read = self._read_size
        elif b"content-length" in headers or status in (204, 304):
            self._left = _integer(headers.get(b"content-length", b"0"), 10, "Content-Length")
            self._read = self._read_fixed
            if self._left == 0:
                self._end()
        else:
            self._read = self._read_until_eof

    def _read_size(self, data: bytes, at: int) -> int:
        stop = data.find(b"\r\n", at)
        if stop < 0:
            return _MORE
        self._left = _integer(data[at:stop].partition(b";")[0], 16, "a chunk size")
        self._read = self._read_chunk if self._left else self._read_trailer
        return stop + 2

    def _read_chunk(self, data: bytes, at: int) -> int:
        if self._left == 0:
            if len(data) - at < 2:
                return _MORE
            if data[at : at + 2] != b"\r\n":
                raise BadResponse("a chunk is longer than its size")
            self._read = self._read_size
            return at + 2
        return self._take(data, at)

    def _read_trailer(self, data: bytes, at: int) -> int:
        stop = data.find(b"\r\n", at)
        if stop < 0:
            return _MORE
        if stop == at:
            self._end()
        return stop + 2

    def _read_fixed(self, data: bytes, at: int) -> int:
        after = self._take(data, at)
        if self._left == 0:
            self._end()
        return after

    def _read_until_eof(self, data: bytes, at: int) -> int:
        self._pieces.append(data[at:])
        return len(data)

    def _take(self, data: bytes, at: int) -> int:
        piece = data[at : at + self._left]
        self._left -= len(piece)
        self._pieces.append(piece)
        return at + len(piece)


def parse_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Returns (status, headers with lower-case names and stripped values) of a head without its last blank line."""
    lines = head.split(b"\r\n")
    version, _, rest = lines[0].partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise BadResponse(f"not an HTTP/1 status line: {lines[0][:80]!r}")
    status = _integer(rest[:3], 10, "the status")
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon:
            raise BadResponse(f"not a header line: {line[:80]!r}")
        headers[name.strip().lower()] = value.strip()
    return status, headers


def _integer(text: bytes, base: int, what: str) -> int:
    try:
        value = int(text, base)
    except ValueError:
        raise BadResponse(f"{what} is not a number: {text[:40]!r}") from None
    if value < 0:
        raise BadResponse(f"{what} is negative: {value}")
    return value
