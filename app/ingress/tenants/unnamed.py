"""The tenant of a request without an API key, for the shares of `policies.fairness`: its user's name, else the address
of its client.

Nobody checks a user's name, so a client that makes up names has a share for each of them; API keys prevent that. Behind
a proxy all clients have its address, and are one tenant unless they name users. An IPv6 client has the addresses of a
whole /64 network, so only the network counts.
"""

from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from predictors.text import digest

DIGITS = 12
"""Digits of a digest that are shown. ASSUMPTION: two tenants of one service hardly ever share them (48 bits)."""


@lru_cache(maxsize=4096)
def unnamed_tenant(user: str, address: str, salt: bytes) -> str:
    """Returns the tenant that a user, or without one an address, counts as: "user-" or "address-" and a digest, keyed
    by `salt`, because names and addresses do not leave the ingress. Returns "" if neither is known.
    """
    if user:
        return "user-" + digest(user, salt)[:DIGITS]
    return "address-" + digest(_network(address), salt)[:DIGITS] if address else ""


def _network(address: str) -> str:
    """Returns what counts of an address: all of an IPv4 address, 64 bits of an IPv6 one."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    return str(parsed.ipv4_mapped or parsed.exploded[:19])
