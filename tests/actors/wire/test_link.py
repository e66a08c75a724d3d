"""A link that is kept: it finds a slow peer, leaves time to one that refuses it, and ends even where the peer does not
read.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.wire import link as module
from actors.wire.channel import Channel, Identity
from actors.wire.link import Link, at
from actors.wire.messages import PROTOCOL_VERSION, Cancel, Hello
from actors.wire.sockets import listen
from tests.actors.wire.test_channel import Side, frame, until

ME = Identity("ingress", "i")


async def test_who_takes_long_to_be_found_is_given_more_time_at_each_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIND_TIMEOUT_S", 0.05)
    server = Side(Identity("router", "r"))
    listener, address = await listen(f"unix:{tmp_path}/s.sock", server.new)
    cut: list[bool] = []

    async def find() -> tuple[str, ...]:
        cut.append(True)
        await asyncio.sleep(0.3)
        cut[-1] = False
        return (address,)

    up: list[Channel] = []
    link = Link(ME, find, lambda c, m: None, up.append, lambda reason: None, "router")
    link.start()
    await until(lambda: up)
    assert cut[0] and not cut[-1]
    await link.stop()
    listener.close()


async def test_a_peer_that_does_not_read_does_not_keep_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.2)

    async def greets_and_never_reads(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(Hello(PROTOCOL_VERSION, "router", "r", b"n" * 16)))
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    server = await asyncio.start_unix_server(greets_and_never_reads, tmp_path / "s.sock")
    up: list[Channel] = []
    down: list[str] = []

    async def find() -> tuple[str, ...]:
        return (f"unix:{tmp_path}/s.sock",)

    link = Link(ME, find, lambda c, m: None, up.append, down.append, "router")
    link.start()
    await until(lambda: up)
    for _ in range(8):
        link.send(Cancel("x" * 10**6))
    await link.stop()
    await until(lambda: down)
    assert up[0].closed.done()
    server.close()


@pytest.mark.parametrize(("stood_s", "first_s"), [(60.0, 0.4), (0.0, 0.05)])
async def test_a_peer_that_ends_each_connection_at_once_is_asked_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stood_s: float, first_s: float
) -> None:
    """A connection that ends after no time at all counts as one that stood only where `STOOD_S` is 0. Of the pauses the
    fourth is 8 * 0.05 s with the back-off, and 0.05 s without it, each times 0.8 to 1.2.
    """
    monkeypatch.setattr(module, "STOOD_S", stood_s)
    pauses: list[float] = []

    class Sleepless:
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            await asyncio.sleep(0)

    def refuses(channel: Channel) -> None:
        channel.abort("nobody is welcome here")

    listener, address = await listen(
        f"unix:{tmp_path}/s.sock", lambda: Channel(Identity("router", "r"), lambda c, m: None, refuses)
    )
    link = Link(ME, at(address), lambda c, m: None, lambda c: None, lambda reason: None, "router")
    monkeypatch.setattr(module, "asyncio", Sleepless())
    link.start()
    await until(lambda: len(pauses) >= 4)
    await link.stop()
    listener.close()
    assert 0.8 * first_s <= pauses[3] <= 1.2 * first_s


@pytest.mark.parametrize("turns", range(1, 8))
async def test_a_link_ends_at_whatever_moment_it_is_stopped(turns: int) -> None:
    """One of the moments is that in which its peer has been found."""

    async def find() -> tuple[str, ...]:
        return ("unix:/nobody",)

    link = Link(ME, find, lambda c, m: None, lambda c: None, lambda reason: None, "nobody")
    link.start()
    task = link._task
    assert task is not None
    for _ in range(turns):
        await asyncio.sleep(0)
    await link.stop()
    for _ in range(10):
        await asyncio.sleep(0)
    assert task.done()
