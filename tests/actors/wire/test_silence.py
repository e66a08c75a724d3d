"""Peers that give no sign of life without ending their connection, and TCP's own watch over connections."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.wire import channel as wire
from actors.wire.channel import Channel, Identity
from actors.wire.messages import Cancel, Out, Ping, Tokens
from actors.wire.sockets import connect, listen
from tests.actors.wire.test_channel import HELLO, Side, frame, until

PING_S = 0.05
LONG_PING_S = 60.0
"""Seconds between pings, beside which what a busy machine adds to a time is nothing."""


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PING_S", PING_S)


@pytest.fixture(params=["unix", "tcp"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Side, str]]:
    side = Side(Identity("engine", "e1"))
    where = f"unix:{tmp_path}/s.sock" if request.param == "unix" else "tcp:127.0.0.1:0"
    listener, address = await listen(where, side.new)
    yield side, address
    listener.close()
    for channel in side.channels:
        channel.abort("test over")


async def raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return await asyncio.open_unix_connection(rest)
    host, _, port = rest.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_peers_that_live_stay_connected_and_their_owners_see_no_ping(server: tuple[Side, str]) -> None:
    side, address = server
    client = Side(Identity("ingress", "i1"))
    channel = await connect((address,), client.new)
    await asyncio.sleep(10 * wire.SILENT_PINGS * PING_S)
    assert channel.open and side.channels[0].open
    channel.send(Cancel("still here"))
    await until(lambda: side.messages)
    assert side.messages == [Cancel("still here")]
    assert client.messages == []
    channel.abort("test over")


async def test_a_peer_that_falls_silent_is_lost_and_the_reason_says_so(server: tuple[Side, str]) -> None:
    side, address = server
    _, writer = await raw(address)
    writer.write(frame(HELLO))
    await until(lambda: side.reasons)
    assert side.reasons == ["ingress raw was silent for 3 s"]
    assert side.channels[0].silent and not side.channels[0].broken
    writer.close()


async def test_bytes_of_any_kind_are_a_sign_of_life(server: tuple[Side, str]) -> None:
    side, address = server
    _, writer = await raw(address)
    data = frame(HELLO) + frame(Cancel("a long one" * 100))
    head = len(frame(HELLO))
    writer.write(data[:head])
    for at in range(head, head + 10 * wire.SILENT_PINGS):
        writer.write(data[at : at + 1])
        await asyncio.sleep(PING_S)
    assert not side.reasons
    writer.write(data[head + 10 * wire.SILENT_PINGS :])
    await until(lambda: side.messages)
    writer.close()


@pytest.mark.parametrize(("waits_pings", "quiet"), [(0.0, False), (1.0, False), (4.0, True)])
async def test_an_end_after_a_long_quiet_time_says_so(
    server: tuple[Side, str], waits_pings: float, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENT_PINGS", 20)
    side, address = server
    _, writer = await raw(address)
    writer.write(frame(HELLO))
    await until(lambda: side.opened)
    for _ in range(2):
        writer.write(frame(Ping()))
        await asyncio.sleep(PING_S)
    writer.write(frame(Ping()))
    await asyncio.sleep(waits_pings * PING_S)
    writer.close()
    await until(lambda: side.reasons)
    assert (side.channels[0].quiet_s > 0.0) == quiet
    assert not side.channels[0].silent


@pytest.mark.parametrize(
    ("stands_s", "excused"), [(0.0, False), (1.2 * LONG_PING_S, False), (3.2 * LONG_PING_S, True)]
)
async def test_a_connection_that_ends_while_this_process_stands_still_for_long_says_so(
    server: tuple[Side, str], stands_s: float, excused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's clock goes on by the time for which the process stands still, in which nothing of it runs."""
    monkeypatch.setattr(wire, "PING_S", LONG_PING_S)
    side, address = server
    _, writer = await raw(address)
    writer.write(frame(HELLO))
    await until(lambda: side.opened)
    writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    loop = asyncio.get_running_loop()
    clock_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock_s() + stands_s)
    await until(lambda: side.reasons)
    assert side.channels[0].stood_still == excused
    assert not side.channels[0].silent


async def test_a_peer_that_speaks_but_does_not_read_is_lost(server: tuple[Side, str]) -> None:
    side, address = server
    reader, writer = await raw(address)
    writer.write(frame(HELLO))
    await until(lambda: side.opened)
    # more than the buffers of any socket hold; asyncio's reader stops reading at twice its limit
    for n in range(64):
        side.channels[0].send(Tokens([Out(f"r{n}", "x" * 2**20, 1)]))
    while not side.reasons:
        writer.write(frame(Ping()))
        await asyncio.sleep(PING_S / 2)
    assert side.reasons[0].startswith("ingress raw read nothing for 3 s, ")
    assert side.channels[0].silent
    writer.close()
    del reader


async def test_a_peer_that_reads_slowly_stays(server: tuple[Side, str]) -> None:
    side, address = server
    reader, writer = await raw(address)
    writer.write(frame(HELLO))
    await until(lambda: side.opened)
    side.channels[0].send(Tokens([Out("r", "x" * (8 * 2**20), 1)]))
    read = 0
    for _ in range(8 * wire.SILENT_PINGS):
        writer.write(frame(Ping()))
        # on TCP less than what must leave the kernel's queue before our own buffer gets shorter
        read += len(await reader.read(2**17))
        await asyncio.sleep(PING_S / 2)
    assert read < 8 * 2**20, "the test read everything: nothing was held back"
    assert not side.reasons
    writer.close()


async def test_a_channel_that_closes_does_not_wait_for_a_peer_that_does_not_read(
    server: tuple[Side, str],
) -> None:
    side, address = server
    reader, writer = await raw(address)
    writer.write(frame(HELLO))
    await until(lambda: side.opened)
    for n in range(64):
        side.channels[0].send(Tokens([Out(f"r{n}", "x" * 2**20, 1)]))
    side.channels[0].close("done")
    await until(lambda: side.reasons)
    assert side.reasons == ["done"]
    writer.close()
    del reader


class Proxy:
    """A relay between a client and a server, which can stop relaying without closing anything."""

    def __init__(self) -> None:
        self.relays = True
        self.tasks: list[asyncio.Task[None]] = []
        # a writer that nobody holds is closed, which the other side would hear
        self.writers: list[asyncio.StreamWriter] = []

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            if self.relays:
                writer.write(data)

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[str]:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await raw(address)
            self.writers += [writer, back]
            self.tasks += [
                asyncio.create_task(self.relay(reader, back)),
                asyncio.create_task(self.relay(there, writer)),
            ]

        listener = await asyncio.start_server(accepted, "127.0.0.1", 0)
        yield f"tcp:127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        listener.close()
        for task in self.tasks:
            task.cancel()


async def test_a_connection_that_is_cut_without_a_word_ends_on_both_sides(server: tuple[Side, str]) -> None:
    side, address = server
    client, proxy = Side(Identity("ingress", "i1")), Proxy()
    async with proxy.to(address) as through:
        await connect((through,), client.new)
        await asyncio.sleep(2 * wire.SILENT_PINGS * PING_S)
        assert not client.reasons and not side.reasons
        proxy.relays = False
        await until(lambda: client.reasons and side.reasons)
    assert client.reasons == ["engine e1 was silent for 3 s"]
    assert side.reasons == ["ingress i1 was silent for 3 s"]


async def test_a_peer_that_accepts_and_never_speaks_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.2)
    listener = await asyncio.start_unix_server(lambda r, w: asyncio.sleep(60), f"{tmp_path}/s.sock")
    with pytest.raises(wire.WireError, match="no handshake within"):
        await connect((f"unix:{tmp_path}/s.sock",), Side(Identity("ingress", "i1")).new)
    listener.close()


async def test_tcp_itself_watches_connections_of_both_sides(server: tuple[Side, str]) -> None:
    side, address = server
    client = Side(Identity("ingress", "i1"))
    await connect((address,), client.new)
    await until(lambda: side.opened)
    for channel in (client.channels[0], side.channels[0]):
        assert channel._transport is not None
        connection = channel._transport.get_extra_info("socket")
        alive = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert bool(alive) == address.startswith("tcp:")
        if alive and hasattr(socket, "TCP_USER_TIMEOUT"):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    client.channels[0].abort("test over")


# ------------------------------------------------------------------------------------------------- sizes of frames


async def test_a_large_batch_leaves_in_frames_of_bounded_size(
    server: tuple[Side, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, address = server
    monkeypatch.setattr(wire, "FRAME_BYTES", 10_000)
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 30_000)
    client = Side(Identity("ingress", "i1"))
    channel = await connect((address,), client.new)
    sizes: list[int] = []
    assert channel._transport is not None
    monkeypatch.setattr(channel, "_transport", Spy(channel._transport, sizes))
    messages = [Cancel(f"{n}" + "x" * (20_000 if n % 100 == 7 else 100)) for n in range(1000)]
    for message in messages:
        channel.send(message)
    await until(lambda: len(side.messages) == 1000)
    assert side.messages == messages
    assert max(sizes) < 30_000
    assert len(sizes) > 10
    channel.abort("test over")


class Spy:
    """A transport that notes the length of each write."""

    def __init__(self, transport: asyncio.Transport, sizes: list[int]) -> None:
        self._spied, self._sizes = transport, sizes

    def write(self, data: bytes) -> None:
        self._sizes.append(len(data))
        self._spied.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._spied, name)


async def test_a_message_that_no_peer_would_take_is_not_sent(
    server: tuple[Side, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = server
    monkeypatch.setattr(wire, "FRAME_BYTES", 10_000)
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 30_000)
    client = Side(Identity("ingress", "i1"))
    channel = await connect((address,), client.new)
    channel.send(Cancel("x" * 40_000))
    await until(lambda: client.reasons)
    assert client.reasons[0].endswith("is over the limit of 30000")


# ---------------------------------------------------------------------------------------------------- generations


async def router(tmp_path: Path, name: str, generation: int) -> tuple[asyncio.Server, str, Side]:
    side = Side(Identity("router", name, None, generation, wire.Generations(generation)))
    listener, address = await listen(f"unix:{tmp_path}/{name}.sock", side.new)
    return listener, address, side


async def test_a_process_that_hears_of_a_later_router_leaves_the_earlier_one(tmp_path: Path) -> None:
    """The ingress hears of the later router from an engine, which is connected to it."""
    _, old, _ = await router(tmp_path, "old", 3)
    _, new, _ = await router(tmp_path, "new", 4)
    me, it = Identity("ingress", "i1"), Identity("engine", "e1")
    ingress, engine = Side(me), Side(it)
    to_old = await connect((old,), ingress.new)
    await connect((new,), engine.new)
    _, address = await listen(f"unix:{tmp_path}/e1.sock", engine.new)
    to_engine = await connect((address,), ingress.new)
    await to_old.closed
    assert ingress.reasons == ["router old of generation 3 was replaced by one of 4"]
    assert not to_old.silent and not to_old.broken
    assert to_engine.open
    with pytest.raises(wire.WireError, match="router old of generation 3 was replaced by one of 4"):
        await connect((old,), ingress.new)
    to_new = await connect((new,), ingress.new)
    await asyncio.sleep(5 * PING_S)
    assert to_new.open
    for side in (ingress, engine):
        for channel in side.channels:
            channel.abort("test over")


async def test_a_router_of_unknown_generation_is_left_alone(tmp_path: Path) -> None:
    _, address, side = await router(tmp_path, "plain", 0)
    me = Identity("ingress", "i1")
    me.generations.heard(7)
    ingress = Side(me)
    channel: Channel = await connect((address,), ingress.new)
    await asyncio.sleep(5 * PING_S)
    assert channel.open
    assert side.me.generations.highest == 7
    channel.abort("test over")
