"""One kept-alive HTTP/1.1 connection to an ingress, for requests one after the other, whose answers come in pieces."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from actors.loop_timeout import within
from benchmarks.live.http1 import BadResponse, ResponseParser

Piece = Callable[[bytes], object]


class ConnectionEndedError(ConnectionError):
    """The error of a connection that ended before the answer did."""


class Connection(asyncio.Protocol):
    """A connection; `ask` sends one request and waits for the whole of its answer."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._parser = ResponseParser(self)
        self._answer: asyncio.Future[int] | None = None
        self._piece: Piece | None = None
        self._head: Callable[[int], None] | None = None
        self._status = 0
        self._closing = False
        self.ended = False

    @property
    def local_port(self) -> int:
        """The port of this end, by which the process at the other end can be found."""
        return int(self.transport.get_extra_info("sockname")[1])

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return not self.ended and not self._closing and self._answer is None

    async def ask(self, request: bytes, piece: Piece, head: Callable[[int], None] | None = None) -> int:
        """Sends a request and returns the status of its answer. `piece` gets each piece of the body when it comes, and
        `head` the status before them.

        Raises ConnectionEndedError if the connection ends first. A cancelled call leaves the connection unusable.
        """
        if not self.usable:
            raise ConnectionEndedError("the connection had ended before the request")
        self._answer = asyncio.get_running_loop().create_future()
        self._piece, self._head = piece, head
        self.transport.write(request)
        try:
            return await self._answer
        finally:
            if not self._answer.done() or self._answer.cancelled():
                self.drop()
            self._answer = None

    def drop(self) -> None:
        """Ends the connection at once."""
        self.ended = True
        self.transport.abort()

    # ------------------------------------------------------------------------------------------- asyncio, parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed(data)
        except ValueError as error:
            self._fail(f"not HTTP: {error}")
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        try:
            self._parser.eof()
        except BadResponse:
            pass  # told below
        self._fail(f"connection ended: {type(exc).__name__ if exc else 'closed by the server'}")

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        self._closing = headers.get(b"connection", b"").lower() == b"close"
        if self._head is not None:
            self._head(status)

    def on_body(self, data: bytes) -> None:
        if self._piece is not None:
            self._piece(data)

    def on_end(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._status)

    def _fail(self, reason: str) -> None:
        self.ended = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionEndedError(reason))


async def connect(port: int, timeout_s: float) -> Connection:
    """Returns a new connection to a loopback port. Raises OSError, or TimeoutError after `timeout_s` seconds for which
    this loop ran.
    """
    loop = asyncio.get_running_loop()
    connecting = asyncio.ensure_future(loop.create_connection(Connection, "127.0.0.1", port))
    if not await within(timeout_s, connecting):
        connecting.cancel()
        raise TimeoutError
    return connecting.result()[1]


async def get(connection: Connection, path: str, timeout_s: float) -> tuple[int, bytes]:
    """Returns (status, body) of a GET. Raises what `answered` does."""
    return await answered(connection, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode(), timeout_s)


async def answered(connection: Connection, request: bytes, timeout_s: float) -> tuple[int, bytes]:
    """Returns (status, body) of a request's answer. Raises OSError, or TimeoutError after `timeout_s` seconds for which
    this loop ran; the connection is then dropped.
    """
    pieces: list[bytes] = []
    asking = asyncio.ensure_future(connection.ask(request, pieces.append))
    try:
        if not await within(timeout_s, asking):
            asking.cancel()
            raise TimeoutError
        return asking.result(), b"".join(pieces)
    except OSError:  # a TimeoutError is one
        connection.drop()
        raise


def post_bytes(path: str, body: dict[str, Any], **headers: str) -> bytes:
    """Returns the bytes of a POST with a JSON body."""
    return json_bytes("POST", path, body, **headers)


def json_bytes(method: str, path: str, body: Mapping[str, Any], **headers: str) -> bytes:
    """Returns the bytes of a request with a JSON body."""
    data = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data
