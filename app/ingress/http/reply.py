"""The interface through which a request is answered, and its implementation for ASGI (`fast_reply` has the other one).

The code that answers a request calls either `respond` once, or `start`, then `write` any number of times, then `end`.
All calls are synchronous, and harmless after the client has gone. `on_gone(reason)` runs at most once, synchronously,
when the client disconnects or stops reading; nothing is written after it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

Headers = list[tuple[bytes, bytes]]

GONE_DISCONNECTED = "client disconnected"
GONE_SLOW = "client reads too slowly"


@dataclass(slots=True)
class Request:
    """One HTTP request with its whole body.

    `headers` has lower-case names; of headers with equal names it keeps the last. `address` returns that of
    whoever has opened the connection, which may be a proxy; empty if it is unknown.
    """

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    address: Callable[[], str] = str


class Reply(Protocol):
    """The way back to the client of one request; the module's docstring says how it is used."""

    on_gone: Callable[[str], None] | None
    gone: bool
    started: bool

    def respond(self, status: int, headers: Headers, body: bytes) -> None: ...
    def start(self, headers: Headers) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes = b"") -> None: ...


class AsgiReply:
    """A reply through ASGI's `send`: the synchronous side fills a buffer, and `pump` empties it as the client reads."""

    def __init__(self, slow_client_bytes: int) -> None:
        self.on_gone: Callable[[str], None] | None = None
        self.gone = False
        self.started = False
        self._limit = slow_client_bytes
        self._messages: list[dict[str, Any]] = []
        self._body = bytearray()
        self._ended = False
        self._wake = asyncio.Event()

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if self.gone:
            return
        self.started = True
        self._messages.append(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (b"content-length", b"%d" % len(body))],
            }
        )
        self.end(body)

    def start(self, headers: Headers) -> None:
        if self.gone:
            return
        self.started = True
        self._messages.append({"type": "http.response.start", "status": 200, "headers": headers})
        self._wake.set()

    def write(self, data: bytes) -> None:
        if self.gone or self._ended:
            return
        self._body += data
        self._wake.set()
        if len(self._body) > self._limit:
            self.lost(GONE_SLOW)

    def end(self, data: bytes = b"") -> None:
        if self.gone or self._ended:
            return
        self._body += data
        self._ended = True
        self._wake.set()

    def lost(self, reason: str) -> None:
        """Drops the remaining output, because the client has gone, and tells the owner unless the answer has ended."""
        if self.gone:
            return
        self.gone = True
        self._wake.set()
        if self.on_gone is not None and not self._ended:
            self.on_gone(reason)

    async def pump(
        self,
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Runs until the answer is sent or the client has gone."""
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            while await self._send_next(send):
                pass
        except (OSError, asyncio.CancelledError):
            self.lost(GONE_DISCONNECTED)
            raise
        finally:
            watcher.cancel()

    async def _send_next(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> bool:
        """Sends the pending output. Returns False when the answer is complete or the client has gone."""
        await self._wake.wait()
        self._wake.clear()
        messages, self._messages = self._messages, []
        body, ended = bytes(self._body), self._ended
        self._body.clear()
        if body or ended:
            messages.append({"type": "http.response.body", "body": body, "more_body": not ended})
        for message in messages:
            if self.gone:
                return False
            await send(message)
        return not (ended or self.gone)

    async def _watch(self, receive: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.lost(GONE_DISCONNECTED)
