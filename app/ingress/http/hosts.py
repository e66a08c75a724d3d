"""The names by which a listener answers.

A web page can make its own name mean the address of this machine (DNS rebinding). The browser then sends the page's
requests here and lets the page read the answers. Only the Host header tells: it has the page's name.
"""

import functools
import ipaddress
import socket
from collections.abc import Callable

LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Ends of names that public DNS does not resolve (RFC 6761, RFC 6762, ICANN's resolution of 2024-07-29), so that no
page can have one.
"""

ANY = "*"


def permits(listening: str, allowed: tuple[str, ...] | None) -> Callable[[bytes], bool]:
    """Returns the function that says whether a Host header may be answered on the address `listening`.

    Addresses and local names always may. Without `allowed` every other name may, too, but not on a loopback address,
    where only programs of this machine and its browsers ask. With `allowed` only the names in it may ("*": all).
    """
    if (allowed is not None and ANY in allowed) or (allowed is None and not _is_loopback(listening)):
        return lambda host: True
    names = {"", "localhost", socket.gethostname().lower(), *(name.lower() for name in allowed or ())}

    @functools.lru_cache(256)
    def permitted(host: bytes) -> bool:
        name = _name(host.decode("ascii", "replace"))
        return name in names or name.endswith(LOCAL_SUFFIXES) or _is_address(name)

    return permitted


def _name(host: str) -> str:
    """Returns the name or address in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(listening: str) -> bool:
    return listening == "localhost" or (
        _is_address(listening) and ipaddress.ip_address(listening).is_loopback
    )
