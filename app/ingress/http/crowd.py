"""The number of connections that a port has, over all and by the address that they come from."""

import ipaddress
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Literal

from app.api.errors import ApiError, too_many_connections

SPARE_CONNECTIONS = 64
"""Connections beyond a limit that are answered: probes and scrapes as ever, others with a refusal."""

GIVES_WAY_S = 1.0
"""Seconds after which a request that is still arriving, or a TLS handshake, may have to make way. ASSUMPTION: what a
client sends without pausing has arrived by then, but for large bodies over slow lines.
"""

MOST_TRIED = 64
"""Arrivals that are tried until one is found that may make way, so that a crowd costs each new connection little."""

Reason = Literal["connections", "address"]
"""The limit that a connection is beyond: that of all connections, or that of its address."""


class Crowd:
    """Counts the connections of one port. `refused` is called with the reason of each refusal.

    Connections on which nothing happens are known, the one that has idled longest first: beyond the limit of all
    connections it makes way for a new one. Two addresses could otherwise keep everybody out by connections that idle.
    Where none idles, one makes way on which a request or a TLS handshake has been arriving for longest, `GIVES_WAY_S`
    at least, if its address has as many connections as that of the new one. So no address that has many pushes out
    others, and senders of half a request push out themselves.
    """

    def __init__(self, most: int, most_by_address: int, refused: Callable[[Reason], None]) -> None:
        self._most, self._most_by_address, self._refused = most, most_by_address, refused
        self._count = 0
        self._by_address: Counter[str] = Counter()
        # what ends each, in the order in which they began to idle
        self._idle: dict[Hashable, Callable[[], None]] = {}
        # the address and what ends each, in the order in which they had been arriving for too long
        self._arriving: dict[Hashable, tuple[str | None, Callable[[], None]]] = {}

    def enter(self, address: str | None) -> Reason | None:
        """Counts a new connection, and returns the limit that it is beyond. A Unix socket has no address."""
        self._count += 1
        if address is not None:
            self._by_address[address] += 1
        own = self._by_address[address or ""] > self._most_by_address
        if self._count > self._most and (own or not self._make_way(address)):
            return "connections"
        return "address" if own else None

    def idles(self, connection: Hashable, end: Callable[[], None]) -> None:
        """Notes that nothing happens on a connection from now on; `end` closes it."""
        self._idle[connection] = end

    def works(self, connection: Hashable) -> None:
        """Notes that something happens on a connection, or that it has ended."""
        self._idle.pop(connection, None)
        self._arriving.pop(connection, None)

    def still_arrives(self, connection: Hashable, address: str | None, end: Callable[[], None]) -> None:
        """Notes that a request, or a handshake, has been arriving for `GIVES_WAY_S` and is not complete; `end` drops
        the connection. Idempotent.
        """
        self._arriving.setdefault(connection, (address, end))

    def _make_way(self, address: str | None) -> bool:
        """Ends the connection that has idled longest, else one that has been arriving for long, for a new one of
        `address`. It is uncounted a moment later. Returns False without one.
        """
        for connection in self._idle:
            self._idle.pop(connection)()
            return True
        for connection, (other, _) in islice(self._arriving.items(), MOST_TRIED):
            if self._by_address[other or ""] >= self._by_address[address or ""]:
                self._refused("connections")
                self._arriving.pop(connection)[1]()
                return True
        return False

    def leave(self, address: str | None) -> None:
        """Counts a connection as ended."""
        self._count -= 1
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def has_spare(self, reason: Reason, address: str | None) -> bool:
        """Returns whether a connection beyond a limit may ask anything at all; a refusal is counted."""
        if reason == "connections":
            more = self._count - self._most
        else:
            more = self._by_address[address or ""] - self._most_by_address
        if more > SPARE_CONNECTIONS:
            self._refused(reason)
        return more <= SPARE_CONNECTIONS

    def refusal(self, reason: Reason) -> ApiError:
        """Returns the 503 for a request on a connection beyond a limit, and counts it."""
        self._refused(reason)
        return too_many_connections(
            self._most if reason == "connections" else self._most_by_address, reason == "address"
        )


def address_of(peer: object) -> str | None:
    """Returns the address that a connection counts under, from the transport's `peername`: an IPv4 address, or the /64
    of an IPv6 address, since that is what one customer of a provider has (RFC 6177). None for a Unix socket.
    """
    if not isinstance(peer, tuple):
        return None
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
