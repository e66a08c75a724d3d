"""The engine replica: its workers find the wire's secret."""

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
