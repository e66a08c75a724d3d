"""The way of a connection with TLS from its acceptance to its first request.

Both loops accept, shake hands and only then tell a protocol, so a server of theirs cannot count connections that are
silent. `TlsDoor` accepts by itself: it counts a connection at once, closes it where it is beyond the limits, and leaves
the handshake to the loop (`connect_accepted_socket`), within a bound. After the handshake the HTTP protocol takes the
connection over, and its place in the crowd with it.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import cast

from app.ingress.http import crowd
from app.ingress.http.crowd import Crowd, Reason, address_of
from app.ingress.http.protocol import FastHttpProtocol

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Seconds that a handshake may take. A client that loses three packets in a row waits 1 + 2 + 4 s for its
retransmissions (RFC 6298); the rest is for two round trips and the work of both sides. The loops' default is 60 s. A
handshake of the wire between processes has 10 s, too.
"""

RETRY_S = 1.0
"""Seconds until connections are accepted again after the process could open no more files, as in asyncio."""


class TlsDoor:
    """Accepts the connections of a listening socket and gives them to HTTP protocols that `make` returns.

    `accepted_at_once` connections are accepted before the loop serves others. `refused` is called with "handshake" for
    each handshake that has not ended after `handshake_s`.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        crowd: Crowd,
        make: Callable[[], asyncio.Protocol],
        refused: Callable[[str], None],
        handshake_s: float,
        accepted_at_once: int,
    ) -> None:
        self._listening, self._context, self._crowd, self._make = listening, context, crowd, make
        self._refused, self._handshake_s, self._accepted_at_once = refused, handshake_s, accepted_at_once
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._under_way: dict[asyncio.Task[None], _Arrival] = {}

    def open(self) -> None:
        """Begins to accept connections; the socket listens."""
        self._retry = None
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Closes the listening socket. Handshakes under way go on."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    async def end_handshakes(self, within_s: float) -> None:
        """Ends the handshakes under way, and waits for at most `within_s` seconds until they are uncounted."""
        for arrival in self._under_way.values():
            arrival.hang_up()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=within_s)

    def _accept(self) -> None:
        for _ in range(self._accepted_at_once):
            try:
                sock, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept connections (%s); trying again in %g s", error, RETRY_S)
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(RETRY_S, self.open)
                return
            self._admit(sock, address_of(peer))

    def _admit(self, sock: socket.socket, address: str | None) -> None:
        """Counts a connection, and begins its handshake unless it is beyond the limits and the spare connections."""
        crowded = self._crowd.enter(address)
        if crowded is not None and not self._crowd.has_spare(crowded, address):
            self._crowd.leave(address)
            sock.close()
            return
        sock.setblocking(False)
        arrival = _Arrival(sock, address, crowded, self._crowd, self._make)
        task = self._loop.create_task(self._shake_hands(arrival))
        self._under_way[task] = arrival
        task.add_done_callback(self._under_way.pop)

    async def _shake_hands(self, arrival: "_Arrival") -> None:
        """Takes a connection through its handshake. One that does not get through it is uncounted here."""
        crowd_knows = self._loop.call_later(
            crowd.GIVES_WAY_S, self._crowd.still_arrives, arrival, arrival.address, arrival.hang_up
        )
        try:
            # The transport owns the socket and closes it, also after a failure.
            await self._loop.connect_accepted_socket(
                lambda: arrival, arrival.sock, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except ConnectionAbortedError:
            # Both loops end a handshake at its time limit by this error.
            self._refused("handshake")
        except OSError as error:
            # ssl.SSLError, too: no TLS, no cipher in common, or a client that has left
            log.debug("a TLS handshake failed: %r", error)
        except Exception:
            log.exception("a TLS handshake failed by an error of this process")
        finally:
            crowd_knows.cancel()
            self._crowd.works(arrival)
            if not arrival.handed_over:
                self._crowd.leave(arrival.address)


class _Arrival(asyncio.Protocol):
    """A counted connection until its handshake is done."""

    def __init__(
        self,
        sock: socket.socket,
        address: str | None,
        crowded: Reason | None,
        crowd: Crowd,
        make: Callable[[], asyncio.Protocol],
    ) -> None:
        self.sock, self.address, self._crowded = sock, address, crowded
        self._crowd, self._make = crowd, make
        self.handed_over = False
        """Whether the HTTP protocol has the connection, and counts its end."""

    def hang_up(self) -> None:
        """Ends the connection: the handshake fails as if the client had left. A socket's own `close` would free its
        number while the loop still watches it.
        """
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the connection has ended by itself: %r", error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Gives the connection to HTTP: the loop calls this after the handshake and before it reads."""
        http = self._make()
        cast(asyncio.Transport, transport).set_protocol(http)
        self.handed_over = True
        if isinstance(http, FastHttpProtocol):
            http.begin(transport, self.address, self._crowded)
        else:
            # uvicorn's own protocol has a count of its own
            self._crowd.leave(self.address)
            http.connection_made(transport)
