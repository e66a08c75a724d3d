"""The firewall rules that are shipped and shown, loaded on a host: nodes meet, and others reach what is public."""

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts.network import Host, Lan, lan
from tests.hosts.checks import needs_hosts

pytestmark = [pytest.mark.hosts, needs_hosts]

ROOT = Path(__file__).parents[2]
NODE, PEER, STRANGER = "10.77.0.1", "10.77.0.2", "10.77.0.9"
PORTS = {
    "the public port": 8000,
    "SSH": 22,
    "Serve's own port": 8001,
    "a metrics port": 9000,
    "the dashboard": 8002,
    "Ray's GCS": 6379,
    "Ray's dashboard": 8265,
    "a worker of Ray": 10002,
    "the wire": 7600,
    "NIXL's side channel": 20000,
    "UCX": 40000,
}
OPEN = {"the public port", "SSH"}
PATIENCE_S = 1.0
"""Seconds for a connection on one machine; a dropped one would be tried again and again."""


@pytest.fixture(scope="module")
def network() -> Iterator[Lan]:
    with lan({"node": NODE, "peer": PEER, "stranger": STRANGER}) as made:
        with made.hosts["node"].network():
            listeners = [socket.create_server(("", port)) for port in PORTS.values()]
        yield made
        for one in listeners:
            one.close()


def reached(host: Host, address: str = NODE) -> set[str]:
    """Returns the names of the ports that a host reaches at the node."""
    found = set()
    with host.network():
        for name, port in PORTS.items():
            try:
                socket.create_connection((address, port), PATIENCE_S).close()
            except TimeoutError:
                continue
            found.add(name)
    return found


def shipped() -> str:
    """The rules of deploy/firewall.nft with this network's addresses."""
    rules = (ROOT / "deploy" / "firewall.nft").read_text()
    rules, cards = re.subn(r'define private = "\w+"', 'define private = "eth0"', rules)
    rules, nodes = re.subn(r"define nodes = \{.*\}", f"define nodes = {{ {NODE}, {PEER} }}", rules)
    assert (cards, nodes) == (1, 1)
    return rules


def shown() -> str:
    """The commands of docs/operations.md with this network's addresses."""
    (block,) = re.findall(
        r"```sh\n(iptables .*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL
    )
    assert block.count("-i eth1 -s 10.1.0.0/16") == 1
    return str(block.replace("-i eth1 -s 10.1.0.0/16", f"-i eth0 -s {NODE},{PEER}"))


@pytest.mark.parametrize("tool", ["nft", "iptables"])
def test_nodes_reach_one_another_and_others_only_what_is_public(
    network: Lan, tool: str, tmp_path: Path
) -> None:
    if shutil.which(tool) is None and shutil.which(tool, path="/usr/sbin:/sbin") is None:
        pytest.skip(f"{tool} is not installed")
    node, peer, stranger = (network.hosts[name] for name in ("node", "peer", "stranger"))
    assert reached(stranger) == set(PORTS), "without rules everything is open, or this test shows nothing"
    try:
        if tool == "nft":
            # twice: the second time it takes the place of the first
            for _ in range(2):
                node.run(["nft", "-f", "-"], input=shipped())
        else:
            node.run(["sh", "-e", "-c", shown()])
        assert reached(stranger) == OPEN
        assert reached(peer) == set(PORTS)
        assert reached(node, "127.0.0.1") == reached(node) == set(PORTS)
        # what the node asks for itself is answered
        with stranger.network(), socket.create_server((STRANGER, 0)) as there:
            port = there.getsockname()[1]
            with node.network():
                socket.create_connection((STRANGER, port), PATIENCE_S).close()
    finally:
        undo = (
            ["nft", "flush", "ruleset"]
            if tool == "nft"
            else ["sh", "-c", "iptables -P INPUT ACCEPT; iptables -F"]
        )
        node.run(undo)
