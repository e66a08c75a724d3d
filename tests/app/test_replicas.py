"""The replicas: workers find the wire's secret, NIXL listens on a private address, the log warns of keys that are
shown, and generations of routers rise whoever starts meanwhile.
"""

import logging
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.telemetry import logs
from actors.wire.environment import hand_down
from app import addresses, replicas
from app.config import ModelConfig
from app.dashboard import replica as dashboard_replica
from app.endpoints import DashboardConfig, IngressGroupConfig, WireConfig
from app.groups import EngineConfig
from app.ingress import replica as ingress_replica
from app.replicas import EngineReplica, Stay


def test_workers_find_the_secret_of_another_variable_and_the_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTHER_SECRET", "hush")
    monkeypatch.setenv("SLUICE_WIRE_SECRET", "of another application")
    monkeypatch.delenv("SLUICE_WIRE_TLS", raising=False)
    wire = WireConfig(secret_env="OTHER_SECRET", tls="/etc/certificates")
    hand_down(wire.secret(), wire.tls_folder())
    assert os.environ["SLUICE_WIRE_SECRET"] == "hush" and os.environ["SLUICE_WIRE_TLS"] == "/etc/certificates"
    assert (wire.tls_folder(), WireConfig().tls_folder()) == ("/etc/certificates", "/etc/certificates")
    monkeypatch.delenv("OTHER_SECRET")
    hand_down(WireConfig(secret_env="OTHER_SECRET").secret(), None)
    assert "SLUICE_WIRE_SECRET" not in os.environ and "SLUICE_WIRE_TLS" not in os.environ


class Started(Exception):
    """Ends the start of a replica at the point that a test is about."""


@pytest.mark.parametrize(
    ("interface", "host"), [(None, "127.0.0.1"), ("10.1.0.0/16", "10.1.0.5"), ("10.1.0.5", "10.1.0.5")]
)
async def test_an_engine_opens_nixls_side_channel_to_the_private_network_at_most(
    monkeypatch: pytest.MonkeyPatch, interface: str | None, host: str
) -> None:
    own = [addresses.ipaddress.ip_address(one) for one in ("127.0.0.1", "10.1.0.5", "192.0.2.7")]
    monkeypatch.setattr(addresses, "_own_addresses", lambda: own)
    context = SimpleNamespace(app_name="a", replica_id=SimpleNamespace(unique_id="u"))
    monkeypatch.setattr(replicas.serve, "get_replica_context", lambda: context)
    node = SimpleNamespace(get_node_id=lambda: "n")
    monkeypatch.setattr(replicas.ray, "get_runtime_context", lambda: node)
    monkeypatch.setattr(logs, "start", lambda *names: None)
    given: dict[str, Any] = {}

    def make(*arguments: Any, **defaults: Any) -> None:
        given.update(defaults)
        raise Started

    monkeypatch.setattr(replicas, "make_engine", make)
    wire, config, start = WireConfig(interface=interface), EngineConfig(name="e", role="prefill"), Stay(1.0)
    begin: Any = EngineReplica.__init__
    with pytest.raises(Started):
        await begin(SimpleNamespace(), ModelConfig(), config, None, wire, None, None, start, None)
    assert given == {"side_channel_host": host}


async def test_a_dashboard_marks_its_log_lines_as_every_replica_does(monkeypatch: pytest.MonkeyPatch) -> None:
    components: list[str] = []

    def made(*_: Any) -> None:
        raise Started

    monkeypatch.setattr(logs, "start", components.append)
    monkeypatch.setattr(dashboard_replica, "finder", made)
    begin: Any = dashboard_replica.DashboardReplica.__init__
    with pytest.raises(Started):
        await begin(SimpleNamespace(), DashboardConfig(), None, "m", {}, None, (), WireConfig(), None)
    assert components == ["dashboard"]


@pytest.mark.parametrize(("options", "warned"), [({"admin_keys": ["a secret key"]}, True), ({}, False)])
async def test_an_ingress_warns_of_keys_in_its_configuration_when_it_starts(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    options: dict[str, Any],
    warned: bool,
) -> None:
    def salt(*_: Any) -> bytes:
        raise Started

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(logs, "start", lambda *names: None)
    monkeypatch.setattr(ingress_replica, "salt_of_application", salt)
    # Serve has put a class of its own in front
    begin: Any = ingress_replica.IngressReplica.__mro__[1].__init__
    group = IngressGroupConfig(options=options)
    with caplog.at_level(logging.WARNING, "ray.serve"), pytest.raises(Started):
        await begin(SimpleNamespace(), ModelConfig(), group, False, WireConfig(), "open", None)
    assert ("SLUICE_ADMIN_KEYS" in caplog.text, "a secret key" in caplog.text) == (warned, False)


@pytest.mark.parametrize(
    ("options", "rate_per_s"),
    [({}, 10.0), ({"forced_traces_per_s": 0.5}, 0.5), ({"forced_traces_per_s": None}, None)],
)
async def test_an_ingress_bounds_the_traces_that_clients_force(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], rate_per_s: float | None
) -> None:
    bounds: list[float | None] = []

    def traces(*told: Any) -> None:
        bounds.append(told[-1])
        raise Started

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(logs, "start", lambda *names: None)
    monkeypatch.setattr(ingress_replica, "traces_of_environment", traces)
    begin: Any = ingress_replica.IngressReplica.__mro__[1].__init__
    group = IngressGroupConfig(options=options)
    with pytest.raises(Started):
        await begin(SimpleNamespace(), ModelConfig(), group, False, WireConfig(), "open", None)
    assert bounds == [rate_per_s]


class Store:
    """Ray's store as `next_generation` uses it. `before_put` runs once, before the first put."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.before_put = lambda: None

    def put(self, key: str, value: bytes, overwrite: bool, namespace: str) -> bool:
        assert not overwrite
        run, self.before_put = self.before_put, lambda: None
        run()
        existed = key in self.keys
        self.keys.add(key)
        return existed


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(replicas, "_internal_kv_put", store.put)
    monkeypatch.setattr(
        replicas,
        "_internal_kv_list",
        lambda prefix, namespace: [key.encode() for key in store.keys if key.startswith(prefix)],
    )
    monkeypatch.setattr(replicas, "_internal_kv_del", lambda key, namespace: store.keys.discard(key))
    return store


@pytest.mark.parametrize("others", [1, 2, 5])
def test_a_generation_that_was_taken_and_deleted_meanwhile_is_not_given_again(
    store: Store, others: int
) -> None:
    assert replicas.next_generation("a") == 1
    given = []
    # this router has read the list, and stands still until others have come, each deleting the numbers below its own
    store.before_put = lambda: given.extend(replicas.next_generation("a") for _ in range(others))
    mine = replicas.next_generation("a")
    assert given == list(range(2, 2 + others))
    assert mine > max(given)
    assert replicas.next_generation("a") > mine
    assert len(store.keys) == 1
