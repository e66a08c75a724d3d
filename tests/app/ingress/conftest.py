"""The ingress runs on uvloop where Ray runs it, so its tests do too; some run on both loops."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import uvloop

ON_BOTH = {"test_handshakes.py"}
"""Files whose tests run on both loops, because they are about what the loops do differently."""


def pytest_asyncio_loop_factories(
    config: Any, item: Any
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tells pytest-asyncio how to make the event loops of this directory."""
    uv: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    return uv | {"asyncio": asyncio.new_event_loop} if item.path.name in ON_BOTH else uv
