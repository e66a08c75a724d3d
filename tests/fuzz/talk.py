"""One hostile connection to an HTTP server in this process: bytes go in as they come, whatever is answered is kept."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator
from random import Random
from typing import Any

import uvicorn

from actors.wire.tcp import queued_bytes
from tests.fuzz.watch import Watch

HANG_S = 60.0
"""Seconds after which a connection that has not come to rest counts as hanging."""

Rest = Callable[[Any, socket.socket, bytearray], Awaitable[None]]
"""Waits until the protocol of a connection, the client's socket and what it got so far have come to rest."""


def pieces(rng: Random, data: bytes) -> Iterator[bytes]:
    """Yields the bytes as they arrive: mostly at once, else cut at any places."""
    while data:
        size = len(data) if rng.random() < 0.8 else rng.randint(1, len(data))
        yield data[:size]
        data = data[size:]


def receive(ours: socket.socket, got: bytearray) -> None:
    """Adds what has come to `got`."""
    try:
        while piece := ours.recv(1 << 18):
            got += piece
    except OSError:
        pass


class _Socket:
    """A socket as `queued_bytes` reads one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def get_extra_info(self, _: str) -> socket.socket:
        return self._sock


def unread(ours: socket.socket) -> int:
    """Returns the bytes that were sent and that the other side has not read."""
    return queued_bytes(_Socket(ours))  # type: ignore[arg-type]


async def talk(watch: Watch, server: uvicorn.Server | None, rng: Random, data: bytes, rest: Rest) -> bytes:
    """Sends the bytes over a connection of its own, waits for `rest`, leaves, and returns what was answered."""
    assert server is not None
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    config = server.config
    _, protocol = await asyncio.get_running_loop().connect_accepted_socket(
        lambda: config.http_protocol_class(config=config, server_state=server.server_state, app_state={}),  # type: ignore[call-arg]
        theirs,
    )
    got = bytearray()
    try:
        async with asyncio.timeout(HANG_S):
            for piece in pieces(rng, data):
                while piece:
                    try:
                        piece = piece[ours.send(piece) :]
                    except BlockingIOError:
                        receive(ours, got)
                    except OSError:
                        # it is refused, and the connection has ended
                        piece = b""
                    await asyncio.sleep(0)
            await rest(protocol, ours, got)
    except TimeoutError:
        watch.note(f"no end within {HANG_S} s: {data!r}")
    receive(ours, got)
    ours.close()
    return bytes(got)


def count_answers(
    watch: Watch,
    got: bytes,
    status_line: re.Pattern[bytes],
    expected: Collection[int],
    sent: int,
    data: bytes,
) -> None:
    """Counts the answers to `sent` requests by their status, and notes each 5xx that is not `expected`."""
    statuses = [int(status) for status in status_line.findall(got)]
    for status in statuses:
        watch.count(str(status))
        if status >= 500 and status not in expected:
            watch.note(f"{status} to {data!r}: {got[-2000:]!r}")
    watch.count("no answer", max(0, sent - len(statuses)))
