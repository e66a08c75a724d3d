"""Where a replica's sockets are: on which address of its node, on which ports, and never over TCP without a secret."""

import pytest

from app import addresses
from app.endpoints import WireConfig

ADDRESSES = ["127.0.0.1", "10.1.0.5", "10.2.0.5", "::1"]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with an address in each of two networks."""
    found = [addresses.ipaddress.ip_address(address) for address in ADDRESSES]
    monkeypatch.setattr(addresses, "_own_addresses", lambda: found)
    monkeypatch.setattr(addresses.ray.util, "get_node_ip_address", lambda: "10.2.0.5")


@pytest.mark.parametrize(
    ("interface", "host"),
    [(None, None), ("auto", "10.2.0.5"), ("10.1.0.0/16", "10.1.0.5"), ("10.1.0.5", "10.1.0.5")],
)
@pytest.mark.usefixtures("node")
def test_one_setting_names_the_internal_address_of_every_node(
    interface: str | None, host: str | None
) -> None:
    assert addresses.node_host(WireConfig(interface=interface)) == host


@pytest.mark.parametrize(
    ("interface", "host"), [(None, "127.0.0.1"), ("auto", "10.2.0.5"), ("10.1.0.0/16", "10.1.0.5")]
)
@pytest.mark.usefixtures("node")
def test_nixls_side_channel_is_open_to_the_private_network_at_most(interface: str | None, host: str) -> None:
    assert addresses.side_channel_host(WireConfig(interface=interface)) == host


@pytest.mark.parametrize(
    ("interface", "says"),
    [
        ("10.3.0.0/16", r"10\.3\.0\.0/16, where this node has no address \(it has 127\.0\.0\.1, 10\.1\.0\.5"),
        ("10.0.0.0/8", r"where this node has 10\.1\.0\.5 and 10\.2\.0\.5 .*exactly one address"),
    ],
)
@pytest.mark.usefixtures("node")
def test_a_network_without_one_address_of_the_node_is_refused(interface: str, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        addresses.node_host(WireConfig(interface=interface))


def test_every_address_of_this_machine_can_be_read() -> None:
    assert "127.0.0.1" in map(str, addresses._own_addresses())


@pytest.mark.usefixtures("node")
def test_tcp_needs_a_secret_and_a_ray_that_says_who_may_and_keeps_to_its_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = WireConfig(interface="10.1.0.0/16", ports="7600-7699")
    monkeypatch.delenv("SLUICE_WIRE_SECRET", raising=False)
    with pytest.raises(RuntimeError, match="SLUICE_WIRE_SECRET of every node"):
        addresses.listen_addresses(wire, "router")
    monkeypatch.setenv("SLUICE_WIRE_SECRET", "hush")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(RuntimeError, match="RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN"):
        addresses.listen_addresses(wire, "router")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    unix, tcp = addresses.listen_addresses(wire, "router")
    assert unix.startswith("unix:")
    assert tcp == "tcp:10.1.0.5:7600-7699"
