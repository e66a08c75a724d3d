"""The replicas: workers find the wire's secret, and generations of routers rise whoever starts meanwhile."""

import pytest

from app import replicas
from app.config import WireConfig


def test_workers_find_the_secret_of_another_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_SECRET", "hush")
    monkeypatch.setenv("SLUICE_WIRE_SECRET", "of another application")
    replicas.hand_down_secret(WireConfig(secret_env="OTHER_SECRET"))
    assert replicas.os.environ["SLUICE_WIRE_SECRET"] == "hush"
    monkeypatch.delenv("OTHER_SECRET")
    replicas.hand_down_secret(WireConfig(secret_env="OTHER_SECRET"))
    assert "SLUICE_WIRE_SECRET" not in replicas.os.environ


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
