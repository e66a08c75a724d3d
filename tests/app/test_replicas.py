"""The replicas: workers find the wire's secret, and generations of routers rise whoever starts meanwhile."""

import os

import pytest

from actors.wire.environment import hand_down
from app import replicas
from app.config import WireConfig


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
