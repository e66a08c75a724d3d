"""Ingress, router and engines over TCP with TLS: they serve as over unix sockets, and take new certificates running."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.wire.channel import Channel
from actors.wire.tls import WireTls
from tests.actors.wire.certificates import Authority
from tests.app.ingress.rig import Rig, rig, until
from tests.app.ingress.test_with_sim import CHAT, Sim, events


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def node(authority: Authority, tmp_path: Path) -> Path:
    return authority.member(tmp_path / "node")


@pytest.fixture
async def made(tmp_path: Path, node: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, [], tls=WireTls(node)) as started:
        engines = [
            await Sim.start(started, tmp_path, name, role)
            for name, role in (("p", "prefill"), ("d", "decode"))
        ]
        await until(lambda: len(started.connections.engines()) == 2 and started.connections.ready() is None)
        yield started
        for engine in engines:
            await engine.stop()


def wires(made: Rig) -> list[Channel]:
    """The connections that the router has with ingress and engines."""
    engines = (made.router.engines.channel(name) for name in ("p", "d"))
    return [*made.router._ingresses._ingresses, *(channel for channel in engines if channel is not None)]


async def answer(made: Rig) -> str:
    got = await made.client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert got.status_code == 200, got.text
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events(got.text))


async def test_requests_are_served_and_no_connection_is_plain(made: Rig) -> None:
    assert len((await answer(made)).split()) == 12
    found = [channel._transport.get_extra_info("ssl_object") for channel in wires(made) if channel._transport]
    assert len(found) == 3 and all(one is not None and one.version() == "TLSv1.3" for one in found)


async def test_certificates_of_another_authority_take_over_without_a_restart(
    made: Rig, authority: Authority, node: Path
) -> None:
    text = await answer(made)
    following = Authority("the next one")
    following.member(node)
    # what stands goes on
    assert await answer(made) == text
    before = wires(made)
    for channel in before:
        channel.abort("the test cuts it")
    await until(lambda: len(wires(made)) == 3 and not set(wires(made)) & set(before), "new connections")
    await until(
        lambda: made.connections.ready() is None and made.connections.router_connected(), "a ready ingress"
    )
    assert await answer(made) == text
    issuers = {
        str(channel._transport.get_extra_info("peercert")["issuer"])
        for channel in wires(made)
        if channel._transport
    }
    assert len(issuers) == 1 and "the next one" in issuers.pop()


async def test_an_engine_of_another_authority_never_serves(made: Rig, tmp_path: Path) -> None:
    stranger = WireTls(Authority().member(tmp_path / "stranger"))
    me = made.router.me
    made.router.me = replace(me, tls=stranger)
    engine = await Sim.start(made, tmp_path, "x", "decode")
    made.router.me = me
    await answer(made)
    assert made.router.engines.channel("x") is None
    assert [info.id for info in made.connections.engines()] == ["d", "p"]
    await engine.stop()
