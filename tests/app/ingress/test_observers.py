"""An ingress pushes what it knows to observers, and never waits for one."""

import asyncio
from pathlib import Path

import pytest

from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from actors.wire.link import CLOSE_S
from actors.wire.sockets import connect, listen
from app.ingress import observers
from tests.app.ingress.rig import pair, rig, until


async def test_an_ingress_drops_what_an_observer_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observer is connected and reads nothing more; requests go on, and what is kept for it stays bounded."""
    monkeypatch.setattr(observers, "PERIOD_S", 0.01)
    monkeypatch.setattr(observers, "MOST_REQUESTS", 4)
    paused: list[Channel] = []

    def hang(channel: Channel) -> None:
        assert channel._transport is not None
        channel._transport.pause_reading()
        paused.append(channel)

    async with rig(tmp_path, pair(tmp_path)) as made:
        server, address = await listen(
            f"unix:{tmp_path}/o.sock", lambda: Channel(Identity("observer", "o"), lambda c, m: None, hang)
        )
        link = await connect(
            made.router.addresses, lambda: Channel(Identity("observer", "o"), lambda c, m: None)
        )
        link.send(wire.Observing((address,)))
        await until(lambda: paused, "a connection to the observer")
        own = made.connections.observers
        watcher = own._watchers["o"]
        for _ in range(3):
            for _ in range(20):
                answer = await made.client.post("/v1/chat/completions", json=made.chat())
                assert answer.status_code == 200
                assert len(own._requests) <= 4
            own.note("retry", "x", None)
        # the observer is lost in the end, as every silent peer is, and found again
        await until(lambda: len(paused) > 1, "another connection to the observer")
        await made.idle()
        assert (
            watcher.link.channel is None
            or watcher.link.channel.unread_bytes() <= 2 * observers.MOST_UNREAD_BYTES
        )
        link.abort("done")
        server.close()
        for channel in paused:
            channel.abort("done")
        await until(lambda: not made.connections.fleet.observers, "a fleet without observers")  # type: ignore[union-attr]
        await until(lambda: not own._watchers, "no observer")


@pytest.mark.parametrize("reads", [True, False])
async def test_an_ingress_that_stops_tells_what_it_counted_last_and_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(observers, "PERIOD_S", 3600.0)
    monkeypatch.setattr(observers, "LAST_READ_S", 0.05)
    told: list[wire.Message] = []
    channels: list[Channel] = []

    def connected(channel: Channel) -> None:
        channels.append(channel)
        if not reads:
            assert channel._transport is not None
            channel._transport.pause_reading()

    async with rig(tmp_path, pair(tmp_path)) as made:
        server, address = await listen(
            f"unix:{tmp_path}/o.sock",
            lambda: Channel(Identity("observer", "o"), lambda c, message: told.append(message), connected),
        )
        link = await connect(
            made.router.addresses, lambda: Channel(Identity("observer", "o"), lambda c, m: None)
        )
        link.send(wire.Observing((address,)))
        own = made.connections.observers
        await until(lambda: channels and own._connected, "a connection to the observer")
        assert (await made.client.post("/v1/chat/completions", json=made.chat())).status_code == 200
        await made.idle()
        channel = own._watchers["o"].link.channel
        if not reads:
            # more than the socket takes
            assert channel is not None and channel._transport is not None
            channel._transport.write(bytes(2**21))
        # less than the seconds that other peers get to read
        async with asyncio.timeout(CLOSE_S - 1):
            await own.stop()
        await own.stop()
        link.abort("done")
        server.close()
    if reads:
        await until(lambda: told, "the last push")
        (last,) = told
        assert isinstance(last, wire.IngressObserved)
        (counted,) = [one for one in last.figures if one.name == "sluice_requests_total"]
        assert [numbers for _, numbers in counted.series] == [(1.0,)]
        assert [one.status for one in last.requests] == [200]
    for channel in channels:
        channel.abort("done")


async def test_without_observers_nothing_is_kept(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        name = made.app.requests.new_id(None)
        assert made.app.requests.keep("/v1/completions", name) is None
        asked = made.app.requests.keep("/v1/completions", name._replace(wants_times=True))
        # router and engines follow it, and it is in no trace
        assert asked is not None and asked.wire is not None and asked.trace_id == ""
        await made.client.post("/v1/chat/completions", json=made.chat())
        assert made.connections.observers._requests == []
