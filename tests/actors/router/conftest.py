"""A router for each test: it listens on a socket of its own and joins the shortest queue."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.router.server import RouterServer
from actors.wire.channel import Identity
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.simple.join_shortest_queue import JoinShortestQueue


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[RouterServer]:
    policy = JoinShortestQueue()
    server = RouterServer(
        Identity("router", "r"), Dispatcher(DispatchConfig(), policy, policy), engine_grace_s=0.1
    )
    await server.start([f"unix:{tmp_path}/r.sock"])
    yield server
    await server.stop()
