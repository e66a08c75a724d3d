"""Engines that wait warm, and those that would read from them, hear of one another before a request needs it."""

import pytest

from actors.router.acquaintance import acquaintances
from actors.router.server import RouterServer
from actors.wire import messages as wire
from tests.actors.router.test_server import Peer, peer, until


def info(name: str, role: str, duty: str = "active", **more: object) -> wire.EngineInfo:
    group = more.pop("group", "g")
    facts = (name, role, "vllm", "m", group, ("unix:/x",), 2, 100, 16, 1024, "n", 1, 30.0)
    given = {"duty": duty, "kv_peer": name.encode(), **more}
    return wire.EngineInfo(*facts, **given)  # type: ignore[arg-type]


WARM_DECODE = info("d2", "decode", "warm")
WARM_PREFILL = info("p2", "prefill", "warm")
SERVING = [info("p1", "prefill"), info("d1", "decode")]


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        # engines that serve meet with their first request
        (SERVING, {}),
        # a warm engine may be activated in either role: it meets those that lend, and those that read meet it
        ([*SERVING, WARM_DECODE], {"d1": (b"d2",), "d2": (b"p1",)}),
        ([*SERVING, WARM_PREFILL], {"d1": (b"p2",), "p2": (b"p1",)}),
        # two of them may be activated at once, each in the other's role
        (
            [*SERVING, WARM_DECODE, WARM_PREFILL],
            {"d1": (b"d2", b"p2"), "d2": (b"p1", b"p2"), "p2": (b"p1", b"d2")},
        ),
        # a colocated engine lends and reads, but not from itself
        ([info("c1", "colocated", "warm"), info("c2", "colocated")], {"c1": (b"c2",), "c2": (b"c1",)}),
        # KV never crosses groups
        ([SERVING[0], info("d2", "decode", "warm", group="other")], {}),
        # an engine that is not ready would not answer
        ([info("p1", "prefill", state="draining"), WARM_DECODE], {}),
        ([SERVING[0], info("d2", "decode", "warm", state="stalled")], {}),
        # engines of other kinds need no acquaintance
        ([SERVING[0], info("d2", "decode", "warm", kv_peer=b"")], {}),
        ([info("p1", "prefill", kv_peer=b""), WARM_DECODE], {}),
    ],
)
def test_acquaintances(infos: list[wire.EngineInfo], expected: dict[str, tuple[bytes, ...]]) -> None:
    assert acquaintances(infos) == expected


def test_engines_that_serve_are_looked_at_once_each_not_pair_by_pair() -> None:
    looks = 0

    class Looked:
        def __init__(self, told: wire.EngineInfo) -> None:
            self.told = told

        def __getattr__(self, name: str) -> object:
            nonlocal looks
            looks += 1
            return getattr(self.told, name)

    pairs = 100
    serving = [info(f"{role}{n}", role) for n in range(pairs) for role in ("prefill", "decode")]
    assert acquaintances([Looked(told) for told in serving]) == {}  # type: ignore[misc]
    # fewer than a look at each pair would take
    assert looks < pairs * pairs


async def announced(router: RouterServer, told: wire.EngineInfo) -> Peer:
    made = await peer(router, "engine", told.id)
    made.channel.send(wire.Announce(told))
    await until(lambda: told.id in {one.id for one in router.engines.infos()})
    return made


async def test_a_warm_engine_hears_of_each_lender_once(router: RouterServer) -> None:
    p1 = await announced(router, SERVING[0])
    d2 = await announced(router, WARM_DECODE)
    assert await d2.get(wire.Peers) == wire.Peers((b"p1",))
    # the same again is no news
    p1.channel.send(wire.Announce(SERVING[0]))
    await announced(router, info("p3", "prefill"))
    assert await d2.get(wire.Peers) == wire.Peers((b"p1", b"p3"))
    # a lender that was replaced, by another of the same name, is another
    p1.channel.send(wire.Announce(info("p1", "prefill", kv_peer=b"p1 again")))
    assert await d2.get(wire.Peers) == wire.Peers((b"p1 again", b"p3"))
    assert not [message for message in d2.inbox if isinstance(message, wire.Peers)]


async def test_an_engine_that_connects_again_is_told_again(router: RouterServer) -> None:
    await announced(router, SERVING[0])
    first = await announced(router, WARM_DECODE)
    assert await first.get(wire.Peers) == wire.Peers((b"p1",))
    first.channel.abort("the connection is lost")
    await until(lambda: {one.id: one.state for one in router.engines.infos()}["d2"] == "draining")
    second = await announced(router, WARM_DECODE)
    assert await second.get(wire.Peers) == wire.Peers((b"p1",))
