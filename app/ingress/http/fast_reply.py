"""The reply to one request on a fast connection, as bytes of HTTP/1.1; each call writes at most once."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from app.ingress.http.reply import GONE_SLOW, Headers

_STATUS_LINE = {s.value: b"HTTP/1.1 %d %s\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


CLOSE = (b"connection", b"close")
"""The header by which the code that answers a request ends the connection after the answer."""


class Connection(Protocol):
    """The methods of a client connection that a reply calls."""

    def write(self, data: bytes) -> None: ...
    def behind(self) -> bool: ...
    def cut(self, reason: str) -> None: ...
    def finished(self, keep_alive: bool) -> None: ...
    def date_line(self) -> bytes: ...


def build_head(status: int, date_line: bytes, headers: Headers, keep_alive: bool) -> bytes:
    """Returns the head of an answer: the status line, the headers and the empty line."""
    # a status without a known phrase has none (RFC 9112, 4)
    parts = [_STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status, date_line]
    parts += [b"%s: %s\r\n" % pair for pair in headers if pair != CLOSE]
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)


class HttpReply:
    """The reply to one request on a fast connection; it implements `app.ingress.http.reply.Reply`."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "_head_only",
        "_keep_alive",
        "done",
        "gone",
        "on_gone",
        "started",
    )

    def __init__(self, connection: Connection, keep_alive: bool, chunked: bool, head_only: bool) -> None:
        self.on_gone: Callable[[str], None] | None = None
        self.gone = False
        self.started = False
        self.done = False
        self._connection = connection
        self._keep_alive = keep_alive
        self._chunked = chunked
        self._head_only = head_only
        self._head = b""

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if self.gone or self.done:
            return
        self.started = True
        self._keep_alive = self._keep_alive and CLOSE not in headers
        head = self._build_head(status, [*headers, (b"content-length", b"%d" % len(body))])
        self._connection.write(head if self._head_only else head + body)
        self._finish()

    def start(self, headers: Headers) -> None:
        """Prepares the head of a 200, which leaves with the first piece as one write."""
        if self.gone or self.done:
            return
        self.started = True
        extra = [(b"transfer-encoding", b"chunked")] if self._chunked else []
        self._keep_alive = self._keep_alive and self._chunked
        self._head = self._build_head(200, headers + extra)

    def write(self, data: bytes) -> None:
        if self.gone or self.done or not data:
            return
        self._connection.write(self._framed(data))
        if self._connection.behind():
            self._connection.cut(GONE_SLOW)

    def end(self, data: bytes = b"") -> None:
        if self.gone or self.done:
            return
        body = self._framed(data) if data or self._head else b""
        self._connection.write(body + b"0\r\n\r\n" if self._chunked and not self._head_only else body)
        self._finish()

    def lost(self, reason: str) -> None:
        """Tells the owner of the request, at most once, that the client is gone, unless the answer is complete."""
        if self.gone or self.done:
            return
        self.gone = True
        if self.on_gone is not None:
            self.on_gone(reason)

    def _framed(self, data: bytes) -> bytes:
        head, self._head = self._head, b""
        if self._head_only or not data:
            return head
        if self._chunked:
            return b"%s%x\r\n%s\r\n" % (head, len(data), data)
        return head + data

    def _build_head(self, status: int, headers: Headers) -> bytes:
        return build_head(status, self._connection.date_line(), headers, self._keep_alive)

    def _finish(self) -> None:
        self.done = True
        self.on_gone = None
        self._connection.finished(self._keep_alive)
