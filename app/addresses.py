"""The addresses at which a process of the application listens (a unix socket, and TCP where nodes talk over TCP).

The addresses of the router, which others connect to, are asked of Ray Serve.
"""

import ipaddress
import os
import socket
import uuid
from typing import TYPE_CHECKING, Any

import psutil
import ray

from app.drain import socket_directory
from app.endpoints import WireConfig

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

RAY_AUTH = "RAY_AUTH_MODE"
"""Environment variable by which Ray's ports want a token; `ray start` sets it itself where it finds one in ~/.ray."""


def listen_addresses(wire: WireConfig, name: str) -> list[str]:
    """Returns the addresses on which a component of this process listens.

    They are a unix socket and, if `wire` has an interface, TCP there. Raises RuntimeError for TCP without a secret, or
    if Ray was started without saying how its own ports are authenticated: what nodes have open is never open to all.
    """
    directory = socket_directory(wire.socket_dir)
    addresses = [f"unix:{os.path.join(directory, f'{name}-{uuid.uuid4().hex[:8]}.sock')}"]
    if wire.interface is not None:
        if wire.secret() is None:
            raise RuntimeError(
                f"wire.interface is set, so nodes talk over TCP: put the same secret into the environment variable "
                f"{wire.secret_env} of every node before Ray starts there"
            )
        if not os.environ.get(RAY_AUTH):
            raise RuntimeError(
                f"wire.interface is set, so other hosts reach Ray's ports, and whoever does runs code: start Ray"
                f" on every node with {RAY_AUTH}=token and the same RAY_AUTH_TOKEN. {RAY_AUTH}=disabled says that a"
                " firewall keeps everybody else away"
            )
        addresses.append(f"tcp:{node_host(wire)}:{wire.ports}")
    return addresses


def node_host(wire: WireConfig) -> str | None:
    """Returns this node's address for internal sockets, or None where everything stays inside one node.

    Raises RuntimeError if the node does not have exactly one address in the network `wire.interface`.
    """
    if wire.interface in (None, "auto"):
        return ray.util.get_node_ip_address() if wire.interface else None
    network = ipaddress.ip_network(wire.interface)
    has = [str(ip) for ip in _own_addresses() if ip.version == network.version]
    inside = [ip for ip in has if ipaddress.ip_address(ip) in network]
    if len(inside) != 1:
        raise RuntimeError(
            f"wire.interface is {network}, where this node has {' and '.join(inside) or 'no address'} (it has "
            f"{', '.join(has)}): name a network in which each node has exactly one address"
        )
    return inside[0]


def side_channel_host(wire: WireConfig) -> str:
    """Returns the address on which NIXL's side channel listens, which authenticates nobody: this node's in the network
    `wire.interface`, or loopback where everything stays inside one node. Raises RuntimeError as `node_host` does.
    """
    return node_host(wire) or "127.0.0.1"


def _own_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    families = (socket.AF_INET, socket.AF_INET6)
    found = [a.address for device in psutil.net_if_addrs().values() for a in device if a.family in families]
    # a link-local address of IPv6 has its device behind a percent sign
    return [ipaddress.ip_address(address.partition("%")[0]) for address in found]


def finder(router: "DeploymentHandle[Any]") -> Any:
    """Returns an async callable that asks Ray Serve for the router's addresses."""

    async def find() -> tuple[str, ...]:
        return tuple(await router.addresses.remote())

    return find
