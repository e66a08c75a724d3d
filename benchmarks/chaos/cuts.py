"""Partitions between processes of an application without Ray: nothing passes between two of them for a while.

Each process reads the pairs of pids that are cut off from one another from a file. A connection over a cut stays, and
neither end hears of the other: what is written waits, what arrives is not read, and the end of the other process is not
seen before the cut is over, as on a network that carries nothing. A new connection over a cut stands and says nothing.
Afterwards everything arrives in order, where both ends still want it.
"""

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

POLL_S = 0.1
"""Seconds between two looks at the file. ASSUMPTION: short against the seconds for which a cut lasts."""

NAME = "cuts"
"""Name of the file in the folder of orders."""

# struct ucred of linux/socket.h: pid, uid, gid
_CREDENTIALS = struct.Struct("3i")


def give_cuts(folder: Path, pairs: Iterable[tuple[int, int]]) -> None:
    """Orders the processes of each pair to exchange nothing, and all others to do so again."""
    half = folder / f".{NAME}"
    half.write_text(json.dumps(list(pairs)))
    half.replace(folder / NAME)


class Cuts:
    """The processes from which this one is cut off. `guard` has to see its unix sockets, before there are any."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._last = b""
        self._pids: frozenset[int] = frozenset()
        self.guards: set[Guard] = set()

    def guard(self) -> None:
        """Makes the running loop put all its connections over unix sockets under these cuts, and begins to look."""
        loop: Any = asyncio.get_running_loop()
        connects, listens = loop.create_unix_connection, loop.create_unix_server

        async def connect(
            factory: Callable[[], asyncio.Protocol], *args: Any, **more: Any
        ) -> tuple[Any, Any]:
            transport, made = await connects(lambda: Guard(factory(), self), *args, **more)
            return transport, made.inner

        async def listen(factory: Callable[[], asyncio.Protocol], *args: Any, **more: Any) -> Any:
            return await listens(lambda: Guard(factory(), self), *args, **more)

        loop.create_unix_connection, loop.create_unix_server = connect, listen
        self._look()

    def off(self, pid: int) -> bool:
        """Returns whether this process is cut off from another one now."""
        return pid in self._pids

    def _look(self) -> None:
        asyncio.get_running_loop().call_later(POLL_S, self._look)
        try:
            found = self._path.read_bytes()
        except FileNotFoundError:
            return
        if found == self._last:
            return
        self._last, me = found, os.getpid()
        pairs = [set(pair) for pair in json.loads(found)]
        self._pids = frozenset(pid for pair in pairs if me in pair for pid in pair if pid != me)
        for guard in list(self.guards):
            guard.look()


class Guard(asyncio.Protocol):
    """Stands between a connection and its protocol `inner`, and lets nothing through while the peer is cut off."""

    def __init__(self, inner: asyncio.Protocol, cuts: Cuts) -> None:
        self.inner = inner
        self._cuts, self._peer = cuts, 0
        self._held: list[bytes] | None = None
        self._ends: str | None = None
        self._told = False

    # ------------------------------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._peer = _peer_of(transport.get_extra_info("socket"))
        self._cuts.guards.add(self)
        self.look()
        seen: Any = _Transport(transport, self)
        self.inner.connection_made(seen)

    def data_received(self, data: bytes) -> None:
        if not self._told:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cuts.guards.discard(self)
        self._tell(exc)

    # ------------------------------------------------------------------------------------------------- the cut

    def look(self) -> None:
        """Begins or ends the cut as the order says."""
        off = self._cuts.off(self._peer)
        if off and self._held is None:
            self._held = []
            self.transport.pause_reading()
        elif not off and self._held is not None:
            held, self._held = self._held, None
            if self._ends == "abort":
                self.transport.abort()
                return
            for data in held:
                self.transport.write(data)
            self.transport.resume_reading()
            if self._ends == "close":
                self.transport.close()

    def write(self, data: bytes) -> None:
        if self._held is None:
            self.transport.write(data)
        else:
            self._held.append(bytes(data))

    def held_bytes(self) -> int:
        return sum(map(len, self._held or ()))

    def end(self, how: str) -> None:
        """Closes or aborts the connection, of which the peer hears only when the cut is over. This process has ended an
        aborted one at once; a closed one waits for what it has written.
        """
        if self._held is None:
            getattr(self.transport, how)()
            return
        self._ends = how
        if how == "abort":
            asyncio.get_running_loop().call_soon(self._tell, None)

    def _tell(self, exc: Exception | None) -> None:
        if not self._told:
            self._told = True
            self.inner.connection_lost(exc)


class _Transport:
    """The transport as the protocol behind a guard sees it."""

    def __init__(self, transport: Any, guard: Guard) -> None:
        self._transport, self._guard = transport, guard
        self.write = guard.write

    def get_write_buffer_size(self) -> int:
        return int(self._transport.get_write_buffer_size()) + self._guard.held_bytes()

    def close(self) -> None:
        self._guard.end("close")

    def abort(self) -> None:
        self._guard.end("abort")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _peer_of(connection: Any) -> int:
    """Returns the pid of the process at the other end: the one that connected, or the one that listens."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        found = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(found)[0]
    return pid
