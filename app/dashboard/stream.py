"""The event stream of the page: a snapshot, then a delta a second, for any number of readers and at one encoding each.

All readers share the deltas of the last minute, bounded in bytes, and have only a place in them. One that is too slow
misses deltas and gets a snapshot instead; one that reads nothing for `UNREAD_S` is cut. A stream ends with the login
that has opened it.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

KEEP_S = 60
"""Deltas that are kept, one a second, for readers that come back."""
KEEP_BYTES = 2 << 20
"""Most bytes of the deltas that are kept; the latest one always is. ASSUMPTION: where deltas are this long, what a
reader has missed of them is no shorter than the snapshot that it gets instead.
"""
COMMENT_S = 10.0
"""Longest time without anything on the stream; then a comment is sent."""
UNREAD_S = 30.0
"""Time after which a reader that reads nothing is cut."""
CHECK_S = 5.0
"""Seconds between two looks whether a reader may still read: the login may have expired, or its key be gone."""
MOST_READERS = 128
RETRY_MS = 2000

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-store"),
    (b"x-accel-buffering", b"no"),
]


class Stream:
    """The deltas that are kept, and the readers. `snapshot` returns the whole state with its `seq`."""

    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._snapshot = snapshot
        # the number of each, and the whole event as it is sent
        self._deltas: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._encoded: tuple[int, bytes] | None = None
        self._news = asyncio.Event()
        self._stopped = False
        self.readers = 0

    def add(self, delta: dict[str, Any]) -> None:
        """Adds the delta of one second and wakes all readers."""
        data = _event("delta", delta["seq"], orjson.dumps(delta))
        self._deltas.append((delta["seq"], data))
        self._kept_bytes += len(data)
        while len(self._deltas) > KEEP_S or (self._kept_bytes > KEEP_BYTES and len(self._deltas) > 1):
            self._kept_bytes -= len(self._deltas.popleft()[1])
        self._encoded = None
        self._wake()

    def stop(self) -> None:
        """Ends all streams."""
        self._stopped = True
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def next(self, seq: int | None) -> tuple[int, bytes]:
        """Returns the place and the bytes of what follows `seq`: the deltas since then, none, or a snapshot where one
        of them is not kept (or `seq` is None).
        """
        last = self._deltas[-1][0] if self._deltas else None
        if seq is not None and last is not None and self._deltas[0][0] - 1 <= seq <= last:
            # of one delta all readers get the same bytes
            return last, b"".join(data for number, data in self._deltas if number > seq)
        if self._encoded is None:
            found = self._snapshot()
            self._encoded = found["seq"], _event("snapshot", found["seq"], orjson.dumps(found))
        return self._encoded

    async def wait(self) -> None:
        """Waits for the next delta, for `COMMENT_S` at most."""
        # `wait_for` of Python 3.11 forgets that it was cancelled if the news come in the same turn of the loop
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMENT_S):
                await self._news.wait()

    async def serve(
        self, last_id: int | None, receive: Receive, send: Send, holds: Callable[[], bool] = lambda: True
    ) -> None:
        """Sends one reader the stream, until it leaves, reads nothing for too long, its permission does not hold any
        more, or the server stops.
        """
        self.readers += 1
        gone = asyncio.create_task(_gone(receive))
        sending = asyncio.create_task(self._send_all(last_id, send, holds))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.readers -= 1
            for task in (gone, sending):
                task.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)

    async def _send_all(self, last_id: int | None, send: Send, holds: Callable[[], bool]) -> None:
        async def put(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(UNREAD_S):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await put(f"retry: {RETRY_MS}\n\n".encode())
        seq, check_s = last_id, time.monotonic() + CHECK_S
        while not self._stopped:
            if time.monotonic() >= check_s:
                if not holds():
                    break
                check_s = time.monotonic() + CHECK_S
            seq, data = self.next(seq)
            await put(data or b": nothing new\n\n")
            if not self._deltas or self._deltas[-1][0] == seq:
                await self.wait()
        await put(b"", more=False)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(kind: str, seq: int, data: bytes) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind.encode(), seq, data)
