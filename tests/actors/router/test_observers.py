"""Observers get what ingresses get, own nothing, and are told of the network."""

from pathlib import Path

import pytest

from actors.router import server as server_module
from actors.router.observers import MOST_OBSERVERS
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from actors.wire.sockets import connect
from tests.app.ingress.rig import make_router, pair, rig, until


async def test_an_observer_owns_no_attempts_and_may_not_send_work(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        closed: list[str] = []
        channel = await connect(
            made.router.addresses,
            lambda: Channel(
                Identity("observer", "o"), lambda c, m: None, on_close=lambda c, reason: closed.append(reason)
            ),
        )
        channel.send(wire.Submit("a-1", 5, 5))
        await until(lambda: closed, "the end of the connection")
        assert made.router.status().in_flight == 0
        answer = await made.client.post("/v1/chat/completions", json=made.chat())
        assert answer.status_code == 200


async def test_observers_hear_of_fleet_figures_and_network_and_the_fleet_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PATHS_S", 0.02)
    monkeypatch.setattr(server_module, "STATUS_S", 0.02)
    heard: dict[type, wire.Message] = {}
    async with rig(tmp_path, pair(tmp_path)) as made:
        channel = await connect(
            made.router.addresses,
            lambda: Channel(
                Identity("observer", "o"), lambda _, message: heard.update({type(message): message})
            ),
        )
        channel.send(wire.Observing(("unix:/nowhere",)))
        await until(lambda: made.router.fleet().observers, "an observer in the fleet")
        assert made.router.fleet().observers == (wire.ObserverInfo("o", ("unix:/nowhere",)),)
        await until(lambda: {wire.Fleet, wire.FleetStatus, wire.PathsSeen} <= set(heard), "all reports")
        assert heard[wire.PathsSeen] == wire.PathsSeen([wire.PathSeen("n", "n", None, None, None)])
        channel.abort("done")
        await until(lambda: not made.router.fleet().observers, "no observer in the fleet")


async def test_there_are_not_too_many_observers(tmp_path: Path) -> None:
    router = make_router(tmp_path)
    await router.start([f"unix:{tmp_path}/r.sock"])
    closed: list[str] = []

    def new() -> Channel:
        return Channel(
            Identity("observer", "o"), lambda c, m: None, on_close=lambda c, reason: closed.append(reason)
        )

    try:
        channels = [await connect(router.addresses, new) for _ in range(MOST_OBSERVERS + 1)]
        await until(lambda: len(closed) == 1, "one refused")
        for channel in channels:
            channel.abort("done")
        await until(lambda: not router._observers, "none left")
    finally:
        await router.stop()
