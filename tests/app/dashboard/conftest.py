"""The dashboard runs on uvloop where Ray runs it, so its tests do too."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop

from app.dashboard import registry


def pytest_asyncio_loop_factories(config: Any, item: Any) -> Mapping[str, Callable[[], uvloop.Loop]]:
    """Tells pytest-asyncio how to make the event loops of this directory."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def sums_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows sums as soon as they are whole, in tests of something else."""
    monkeypatch.setattr(registry, "STEADY_S", 0.0)
