"""The dashboard runs on uvloop where Ray runs it, so its tests do too."""

from collections.abc import Callable, Mapping
from typing import Any

import uvloop


def pytest_asyncio_loop_factories(config: Any, item: Any) -> Mapping[str, Callable[[], uvloop.Loop]]:
    """Tells pytest-asyncio how to make the event loops of this directory."""
    return {"uvloop": uvloop.new_event_loop}
