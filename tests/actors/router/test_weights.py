"""An engine that starts hears which others lend their weights."""

import msgspec
import pytest

from actors.router.network.feed import NetworkConfig, RouterNetwork
from actors.router.server import RouterServer
from actors.router.weights import WeightSources
from actors.wire import messages as wire
from policies.network.oracle import NodePlace, Oracle
from tests.actors.router.test_acquaintance import announced, info
from tests.actors.router.test_server import peer


def lender(name: str, node: str = "n", **more: object) -> wire.EngineInfo:
    told = info(name, "decode", weights=(f"unix:/{name}",), **more)
    return msgspec.structs.replace(told, node=node)


def test_only_ready_lenders_of_the_model_are_named() -> None:
    infos = [
        lender("a"),
        lender("b", state="draining"),
        lender("c", state="down"),
        lender("d", state="stalled"),
        info("e", "decode"),
    ]
    ask = WeightSources()
    found = [ask.answer(wire.FindWeights("n", "m"), infos, lambda one, node: 0).sources for _ in range(2)]
    # equally near ones take turns
    assert found == [(("unix:/a",), ("unix:/d",)), (("unix:/d",), ("unix:/a",))]
    assert ask.answer(wire.FindWeights("n", "other"), infos, lambda one, node: 0).sources == ()


def test_the_nearest_come_first() -> None:
    network = RouterNetwork(NetworkConfig())
    infos = [lender("far", "f"), lender("near", "g"), lender("here", "h")]
    message = wire.FindWeights("h", "m")
    # without an oracle the own node is known to be near, and no other
    assert WeightSources().answer(message, infos, network.tier).sources[0] == ("unix:/here",)
    network._told = Oracle(
        bandwidth_bytes_per_s={0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0},
        places={"h": NodePlace("r1", "p"), "g": NodePlace("r1", "p"), "f": NodePlace("r2", "q")},
    )
    found = WeightSources().answer(message, infos, network.tier).sources
    assert found == (("unix:/here",), ("unix:/near",), ("unix:/far",))


async def test_the_router_answers_an_engine_that_starts(router: RouterServer) -> None:
    await announced(router, lender("a"))
    new = await peer(router, "engine", "new")
    new.channel.send(wire.FindWeights("x", "m"))
    assert await new.get(wire.WeightsAt) == wire.WeightsAt((("unix:/a",),))
    # it is no engine of the fleet yet
    assert [one.id for one in router.engines.infos()] == ["a"]


@pytest.mark.parametrize("kind", ["ingress", "observer"])
async def test_nobody_else_asks(router: RouterServer, kind: str) -> None:
    other = await peer(router, kind, "other")
    other.channel.send(wire.FindWeights("x", "m"))
    await other.channel.closed
