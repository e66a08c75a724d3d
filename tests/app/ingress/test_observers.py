"""An ingress pushes what it knows to observers, and never waits for one."""

from pathlib import Path

import pytest

from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
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


async def test_without_observers_nothing_is_kept(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        name = made.app.requests.new_id(None)
        assert made.app.requests.keep("/v1/completions", name) is None
        asked = made.app.requests.keep("/v1/completions", name._replace(wants_times=True))
        # router and engines follow it, and it is in no trace
        assert asked is not None and asked.wire is not None and asked.trace_id == ""
        await made.client.post("/v1/chat/completions", json=made.chat())
        assert made.connections.observers._requests == []
