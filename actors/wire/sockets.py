"""Addresses of the wire (`unix:/path`, `tcp:host:port`): to listen at them, and to connect to one of them."""

import asyncio
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from actors.private_folder import make_own
from actors.wire.channel import HANDSHAKE_TIMEOUT_S, Channel
from actors.wire.tls import WireTls

CONNECT_TIMEOUT_S = 20.0
"""Seconds for one attempt to connect to an address; TCP alone would try a node that is gone for two minutes."""


async def listen(
    address: str, factory: Callable[[], Channel], tls: WireTls | None = None
) -> tuple[asyncio.Server, str]:
    """Starts to listen on `unix:/path`, `tcp:host:port` (port 0 picks a free one) or `tcp:host:first-last`, which takes
    the first free port of a range. With `tls`, connections over TCP are encrypted, and only members get a channel.
    Returns the server and the address at which it listens. Raises OSError if no such port is free, or if others may
    write into the folder of the path.
    """
    loop = asyncio.get_running_loop()
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        _clear_for_socket(rest)
        server = await loop.create_unix_server(factory, rest)
        os.chmod(rest, 0o600)
        return server, address
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        server = await _listen_in_range(factory, host, port, tls)
        bound = server.sockets[0].getsockname()
        return server, f"tcp:{host}:{bound[1]}"
    raise ValueError(f"address {address!r}: expected unix:/path or tcp:host:port")


async def _listen_in_range(
    factory: Callable[[], Channel], host: str, ports: str, tls: WireTls | None
) -> asyncio.Server:
    first, last = port_range(ports)
    secure: dict[str, Any] = (
        {} if tls is None else {"ssl": tls.server, "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S}
    )
    for port in range(first, last + 1):
        try:
            return await asyncio.get_running_loop().create_server(factory, host, port, **secure)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or first == last:
                raise
    raise OSError(errno.EADDRINUSE, f"all ports {ports} of {host} are in use: make the range longer")


def port_range(ports: str) -> tuple[int, int]:
    """Returns the first and the last port of `first-last`, or twice the only one."""
    first, _, last = ports.partition("-")
    return int(first), int(last or first)


def remove_sockets(addresses: Iterable[str]) -> None:
    """Removes the files of the unix sockets among `addresses`, after their listeners have closed."""
    for address in addresses:
        if address.startswith("unix:"):
            Path(address.removeprefix("unix:")).unlink(missing_ok=True)


def _clear_for_socket(path: str) -> None:
    make_own(Path(path).parent)
    if os.path.exists(path):
        # a killed process left this file; socket paths carry a fresh id, so no other process listens here
        os.unlink(path)


async def connect(
    addresses: tuple[str, ...], factory: Callable[[], Channel], tls: WireTls | None = None
) -> Channel:
    """Connects to the first of `addresses` that answers, completes the handshake, and returns the channel. (The unix
    path of another node does not exist here, so it fails at once.) With `tls`, a peer over TCP must be a member.

    Raises ConnectionError that names every address tried, or WireError if the handshake fails.
    """
    loop = asyncio.get_running_loop()
    errors: list[str] = []
    for address in addresses:
        scheme, _, rest = address.partition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if scheme == "unix":
                    _, channel = await loop.create_unix_connection(factory, rest)
                else:
                    host, _, port = rest.rpartition(":")
                    _, channel = await loop.create_connection(
                        factory, host, int(port), ssl=None if tls is None else tls.client
                    )
        except TimeoutError:
            errors.append(f"{address}: not connected within {CONNECT_TIMEOUT_S:g} s")
            continue
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        try:
            await channel.opened
        except asyncio.CancelledError:
            channel.abort("the attempt to connect was given up")
            raise
        return channel
    raise ConnectionError("no address answers: " + "; ".join(errors))
