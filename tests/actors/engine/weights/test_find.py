"""The question to the router, which answers, answers late, or is not there."""

import asyncio
from pathlib import Path

import pytest

from actors.engine.weights import find
from actors.engine.weights.find import find_sources
from actors.wire.channel import Channel, Identity
from actors.wire.messages import FindWeights, Message, WeightsAt
from actors.wire.sockets import listen

ME = Identity("engine", "new")


async def router(path: Path, answer: WeightsAt | None) -> tuple[asyncio.Server, list[Message]]:
    asked: list[Message] = []

    def took(channel: Channel, message: Message) -> None:
        asked.append(message)
        if answer is not None:
            channel.send(answer)

    server, _ = await listen(f"unix:{path}", lambda: Channel(Identity("router", "r"), took))
    return server, asked


async def test_the_router_is_asked_for_the_model(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    server, asked = await router(path, WeightsAt((("unix:/a",), ("unix:/b", "tcp:h:1"))))

    async def at() -> tuple[str, ...]:
        return (f"unix:{path}",)

    assert await find_sources(ME, at, "n", "m") == (("unix:/a",), ("unix:/b", "tcp:h:1"))
    assert asked == [FindWeights("n", "m")]
    server.close()


async def test_a_router_that_is_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine needs a part of it for the question
    monkeypatch.setattr(find, "FIND_S", 3.0)
    path = tmp_path / "r.sock"
    server, asked = await router(path, None)

    async def at() -> tuple[str, ...]:
        return (f"unix:{path}",)

    assert await find_sources(ME, at, "n", "m") == ()
    assert asked
    server.close()


@pytest.mark.parametrize("fault", ["nowhere", "unknown", "never"])
async def test_a_router_that_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(find, "FIND_S", 0.3)

    async def at() -> tuple[str, ...]:
        if fault == "unknown":
            raise RuntimeError("Ray does not know it")
        if fault == "never":
            await asyncio.sleep(60)
        return (f"unix:{tmp_path}/none.sock",)

    assert await find_sources(ME, at, "n", "m") == ()
