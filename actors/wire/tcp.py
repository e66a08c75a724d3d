"""TCP's own signs of life, beside the pings of a channel: they end a connection that no channel watches any more, and
show what the peer's kernel has taken.
"""

import array
import asyncio
import fcntl
import socket
import termios

KEEP_ALIVE_IDLE_S = 5
"""Seconds without traffic after which the kernel probes the peer's. Open channels ping each second, so only one whose
process is stopped or that is not open yet is probed."""
KEEP_ALIVE_INTERVAL_S = 5
KEEP_ALIVE_PROBES = 3
# ASSUMPTION: longer than the silence after which a channel gives up by itself, shorter than what anybody waits for;
# Linux alone retransmits for some 15 minutes (tcp_retries2).
USER_TIMEOUT_MS = 20_000
"""Milliseconds for which sent bytes may stay unacknowledged. It equals idle time and probes together, because it
replaces the number of probes where it is set."""


def keep_alive(connection: socket.socket) -> None:
    """Turns keep-alive and the user timeout on for a TCP connection, as far as the platform has them."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEP_ALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEP_ALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEP_ALIVE_PROBES),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def queued_bytes(transport: asyncio.Transport) -> int:
    """Returns the number of written bytes that lie in this host's kernel: the peer has not acknowledged them, or, on a
    Unix socket, has not read them. 0 if the platform does not tell.
    """
    connection = transport.get_extra_info("socket")
    queued = array.array("i", [0])
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, queued)
    except (AttributeError, OSError, ValueError):
        return 0
    return queued[0]
