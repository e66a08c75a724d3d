"""The facts that a router tells of its fleet: engines with their totals, and the network."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.router.server import RouterServer
from actors.wire import messages as wire
from actors.wire.channel import Identity
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from tests.actors.router.test_server import serving


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[RouterServer]:
    server = RouterServer(
        Identity("router", "r"), Dispatcher(DispatchConfig(), JoinShortestQueue(), JoinShortestQueue())
    )
    await server.start([f"unix:{tmp_path}/r.sock"])
    yield server
    await server.stop()


async def test_engines_are_told_with_what_they_announced_and_counted(router: RouterServer) -> None:
    prefill, _, ingress = await serving(router)
    totals = {"step_s": 1.5, "prefill_steps": 3.0}
    prefill.channel.send(wire.Status("p", 0, 0, 0, 0, 0.0, totals=totals))
    for _ in range(100):
        ingress.channel.send(wire.Admin(1, "facts"))
        answer = await ingress.get(wire.AdminAnswer)
        assert isinstance(answer, wire.AdminAnswer) and answer.status == 200
        told = json.loads(answer.body)
        by_id = {engine["id"]: engine for engine in told["engines"]}
        if by_id["p"]["totals"]:
            break
    assert by_id["p"]["totals"] == totals
    info = next(info for info in router.engines.infos() if info.id == "d")
    for name in (
        "role",
        "kind",
        "group",
        "node",
        "slots",
        "kv_blocks",
        "block_size_tokens",
        "lease_s",
        "dp_ranks",
    ):
        assert by_id["d"][name] == getattr(info, name)
    assert told["network"] == {"tiers": {}, "places": {}, "pairs": []}
