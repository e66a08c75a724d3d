"""Channels over real sockets: handshake, authentication, framing, and one close reason each."""

import asyncio
import hmac
import math
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from actors.wire import channel as wire
from actors.wire import sockets
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import PROTOCOL_VERSION, Cancel, Hello, Message, Out, Prefill, Prove, Tokens
from actors.wire.sockets import connect, listen

HELLO = Hello(PROTOCOL_VERSION, "ingress", "raw", b"n" * 16)


class Side:
    """One side of some connections; it records messages, opens and closes."""

    def __init__(self, me: Identity) -> None:
        self.me = me
        self.channels: list[Channel] = []
        self.messages: list[Message] = []
        self.opened: list[Channel] = []
        self.reasons: list[str] = []
        self.on_message = lambda channel, message: None

    def new(self) -> Channel:
        channel = Channel(self.me, self._message, self.opened.append, lambda _, why: self.reasons.append(why))
        self.channels.append(channel)
        return channel

    def _message(self, channel: Channel, message: Message) -> None:
        self.messages.append(message)
        self.on_message(channel, message)


class Pair:
    """A listening side, and ways to connect to it."""

    def __init__(self, server: Side, address: str) -> None:
        self.server, self.address = server, address
        self.client = Side(Identity("ingress", "i1", server.me.secret))

    async def connect(self) -> Channel:
        return await connect((self.address,), self.client.new)

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.address.removeprefix("unix:"))


def frame(*messages: Message) -> bytes:
    body = msgspec.msgpack.encode(list(messages))
    return struct.pack(">I", len(body)) + body


async def until(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.002)


@pytest.fixture(params=[None, b"secret"], ids=["open", "secret"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    server = Side(Identity("engine", "e1", request.param))
    listener, address = await listen(f"unix:{tmp_path}/s.sock", server.new)
    pair = Pair(server, address)
    yield pair
    listener.close()
    for channel in [*server.channels, *pair.client.channels]:
        channel.abort("test over")
        if channel._transport is not None:
            await channel.closed


@pytest.fixture
async def unsecured(tmp_path: Path) -> AsyncIterator[Pair]:
    server = Side(Identity("engine", "e1"))
    listener, address = await listen(f"unix:{tmp_path}/u.sock", server.new)
    yield Pair(server, address)
    listener.close()
    for channel in server.channels:
        channel.abort("test over")


async def test_handshake_and_order_both_ways(pair: Pair) -> None:
    channel = await pair.connect()
    await until(lambda: pair.server.opened)
    assert channel.peer_name == "engine e1"
    assert pair.server.channels[0].peer_name == "ingress i1"
    for i in range(100):
        channel.send(Cancel(f"c{i}"))
        pair.server.channels[0].send(Cancel(f"s{i}"))
    await until(lambda: len(pair.server.messages) == len(pair.client.messages) == 100)
    assert pair.server.messages == [Cancel(f"c{i}") for i in range(100)]
    assert pair.client.messages == [Cancel(f"s{i}") for i in range(100)]


async def test_what_is_sent_before_the_handshake_waits_for_it(pair: Pair) -> None:
    pair.server.on_message = lambda channel, message: channel.send(message)
    side = pair.client

    def eager() -> Channel:
        channel = side.new()
        channel.send(Cancel("early"))
        return channel

    await connect((pair.address,), eager)
    await until(lambda: side.messages == [Cancel("early")])


def counted(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of messages of each write."""
    writes: list[int] = []
    write = channel._write

    def counting_write(batch: list[Message]) -> None:
        writes.append(len(batch))
        write(batch)

    monkeypatch.setattr(channel, "_write", counting_write)
    return writes


@pytest.mark.pure
async def test_many_messages_share_one_write(unsecured: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HOLD_S", math.inf)
    channel = await unsecured.connect()
    writes = counted(channel, monkeypatch)
    for i in range(500):
        channel.send(Tokens([Out(f"r{i}", " x", 1)]))
    await until(lambda: len(unsecured.server.messages) == 500)
    assert writes == [500]
    channel.close()


@pytest.mark.pure
async def test_what_has_waited_leaves_with_the_next_message_and_not_at_the_end_of_a_burst(
    unsecured: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(wire, "HOLD_S", 0.0015)
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    # the peer runs on this loop, so it reads only afterwards
    monkeypatch.setattr(wire, "queued_bytes", lambda transport: 0)
    channel = await unsecured.connect()
    writes = counted(channel, monkeypatch)
    # a message a millisecond: the third of each three finds that the first has waited for 2 ms
    for i in range(8):
        channel.send(Cancel(f"r{i}"))
        now_s[0] += 0.001
    assert writes == [3, 3]
    await until(lambda: len(unsecured.server.messages) == 8)
    assert unsecured.server.messages == [Cancel(f"r{i}") for i in range(8)]
    assert writes == [3, 3, 2]
    channel.close()


@pytest.mark.pure
async def test_a_peer_that_has_not_read_what_was_written_gets_the_rest_of_a_burst_in_one_write(
    unsecured: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HOLD_S", -1.0)
    channel = await unsecured.connect()
    writes = counted(channel, monkeypatch)
    # the peer runs on this loop: it reads nothing before the last message is queued
    for i in range(8):
        channel.send(Cancel(f"r{i}"))
    await until(lambda: len(unsecured.server.messages) == 8)
    assert writes == [2, 6]
    channel.close()


async def test_frames_may_arrive_in_any_pieces(unsecured: Pair) -> None:
    _, writer = await unsecured.raw()
    data = frame(HELLO) + frame(Cancel("a"), Cancel("b")) + frame() + frame(Cancel("c"))
    for i in range(0, len(data), 3):
        writer.write(data[i : i + 3])
        await writer.drain()
        await asyncio.sleep(0)
    await until(lambda: len(unsecured.server.messages) == 3)
    writer.write(data[len(frame(HELLO)) :])  # and several frames in one piece
    await until(lambda: len(unsecured.server.messages) == 6)
    writer.close()
    await until(lambda: unsecured.server.reasons)
    assert unsecured.server.reasons == ["closed by peer"]


def packed(body: bytes) -> bytes:
    """A frame with any content."""
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "over the limit"),
        (frame(HELLO) + struct.pack(">I", 2**31), "over the limit"),
        (struct.pack(">I", 64 * 2**10 + 1), "over the limit"),  # small until the peer is known
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "protocol error"),
        (frame(HELLO) + struct.pack(">I", 4) + b"\x91\x92\xa1x", "protocol error"),
        (struct.pack(">I", 9) + msgspec.msgpack.encode([["Nope"]]) + b"\x00" * 9, "protocol error"),
        (frame(HELLO) + packed(b"\x91\x92\xa6Cancel\xa1\xff"), "protocol error"),  # a text that is no UTF-8
        (
            frame(HELLO) + packed(b"\x91\x94\xa7Prefill\xa1x\x90\x81\xa1x" + b"\x91" * 20_000),
            "protocol error",
        ),
        (frame(Cancel("x")), "before the handshake"),
        (frame(Hello(99, "ingress", "raw")), "protocol 99"),
        (frame(HELLO, HELLO), "after the handshake"),
        (frame(HELLO, Prove(b"x")), "shared secret"),
    ],
)
async def test_garbage_closes_once_and_says_why(unsecured: Pair, data: bytes, reason: str) -> None:
    reader, writer = await unsecured.raw()
    writer.write(data)
    await until(lambda: unsecured.server.reasons)
    assert len(unsecured.server.reasons) == 1
    assert reason in unsecured.server.reasons[0]
    assert unsecured.server.messages == []
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(10**6)  # we are really disconnected
    writer.close()
    again = await unsecured.connect()  # the listener goes on
    again.close()


async def test_a_message_that_cannot_be_encoded_takes_no_other_with_it(unsecured: Pair) -> None:
    """Messages of many requests share a write."""
    channel = await unsecured.connect()
    channel.send(Cancel("a"))
    channel.send(Prefill("b", [1], {"seed": 2**70}, 1.0))
    channel.send(Cancel("c"))
    await until(lambda: len(unsecured.server.messages) == 2)
    assert unsecured.server.messages == [Cancel("a"), Cancel("c")]
    channel.close()


async def test_a_message_that_the_handler_does_not_take_ends_the_connection_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str] = []

    def refuse(channel: Channel, message: object) -> None:
        raise wire.WireError("this is for somebody else")

    listener, address = await listen(
        f"unix:{tmp_path}/s.sock",
        lambda: Channel(
            Identity("engine", "e"), refuse, None, lambda channel, reason: reasons.append(reason)
        ),
    )
    client = await connect((address,), Side(Identity("ingress", "i")).new)
    client.send(Cancel("a"))
    await until(lambda: reasons)
    assert reasons == ["protocol error from ingress i: this is for somebody else"]
    assert not [record for record in caplog.records if record.exc_info]
    listener.close()


async def test_a_peer_that_says_nothing_is_dropped(unsecured: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.05)
    _, writer = await unsecured.raw()
    await until(lambda: unsecured.server.reasons)
    assert "no handshake" in unsecured.server.reasons[0]
    writer.close()


async def test_a_time_in_which_we_stood_still_is_no_reason_to_drop_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.5)
    server, client = Side(Identity("engine", "e1", b"secret")), Side(Identity("ingress", "i1", b"secret"))
    made = Channel.connection_made

    def slowly(channel: Channel, transport: asyncio.BaseTransport) -> None:
        made(channel, transport)
        if channel in server.channels:
            # twice the limit, while two messages each way are still to come
            time.sleep(1.0)

    monkeypatch.setattr(Channel, "connection_made", slowly)
    listener, address = await listen(f"unix:{tmp_path}/s.sock", server.new)
    channel = await connect((address,), client.new)
    await until(lambda: server.opened)
    assert server.reasons == client.reasons == []
    channel.close()
    listener.close()


async def test_an_address_that_does_not_answer_gives_way_to_the_next(
    unsecured: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "CONNECT_TIMEOUT_S", 3.0)
    # the server's queue is full, so that further SYNs are dropped
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        address = deaf.getsockname()
        queue = [socket.socket() for _ in range(4)]
        for one in queue:
            one.setblocking(False)
            one.connect_ex(address)
        dead = f"tcp:127.0.0.1:{address[1]}"
        channel = await connect((dead, unsecured.address), unsecured.client.new)
        assert channel.peer_name == "engine e1"
        with pytest.raises(ConnectionError, match=f"{dead}: not connected within 3 s"):
            await connect((dead,), unsecured.client.new)
        for one in queue:
            one.close()
    channel.close()


async def test_a_peer_that_does_not_read_is_dropped(unsecured: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_OUTBOX_BYTES", 10**6)
    _, writer = await unsecured.raw()
    writer.write(frame(HELLO))
    await until(lambda: unsecured.server.opened)
    server = unsecured.server.channels[0]
    for _ in range(60):
        server.send(Cancel("x" * 10**5))
        await asyncio.sleep(0)
    await until(lambda: unsecured.server.reasons)
    assert unsecured.server.reasons == ["peer does not read: outbox over its limit"]
    server.send(Cancel("late"))  # no error
    writer.close()


async def test_a_handler_that_raises_closes_the_connection(unsecured: Pair) -> None:
    def broken(channel: Channel, message: Message) -> None:
        raise KeyError("bug")

    unsecured.server.on_message = broken
    channel = await unsecured.connect()
    channel.send(Cancel("a"))
    channel.send(Cancel("b"))
    await until(lambda: unsecured.server.reasons)
    assert "handler failed on Cancel" in unsecured.server.reasons[0]
    assert unsecured.server.messages == [Cancel("a")]
    assert await channel.closed


async def test_nothing_is_delivered_after_an_abort_in_a_handler(unsecured: Pair) -> None:
    unsecured.server.on_message = lambda channel, message: channel.abort("enough")
    channel = await unsecured.connect()
    for i in range(10):
        channel.send(Cancel(str(i)))
    await until(lambda: unsecured.server.reasons)
    assert unsecured.server.messages == [Cancel("0")]
    assert unsecured.server.reasons == ["enough"]


async def test_close_flushes_and_each_side_hears_it_once(pair: Pair) -> None:
    channel = await pair.connect()
    await until(lambda: pair.server.opened)
    channel.send(Cancel("last words"))
    channel.close("bye")
    channel.close("again")
    channel.abort("and again")
    channel.send(Cancel("too late"))
    await until(lambda: pair.server.reasons and pair.client.reasons)
    await asyncio.sleep(0.02)
    assert pair.server.messages == [Cancel("last words")]
    assert pair.client.reasons == ["bye"]
    assert pair.server.reasons == ["closed by peer"]
    assert await channel.closed == "bye"


# ---------------------------------------------------------------------------------------------------- authentication


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Pair]:
    server = Side(Identity("engine", "e1", b"right"))
    listener, address = await listen(f"unix:{tmp_path}/s.sock", server.new)
    yield Pair(server, address)
    listener.close()
    for channel in server.channels:
        channel.abort("test over")


async def test_wrong_secret(secured: Pair) -> None:
    side = Side(Identity("ingress", "i1", b"wrong"))
    with pytest.raises(WireError):
        await connect((secured.address,), side.new)
    await until(lambda: secured.server.reasons)
    assert secured.server.opened == side.opened == []
    assert len(side.reasons) == len(secured.server.reasons) == 1
    assert any("wrong shared secret" in reason for reason in [*side.reasons, *secured.server.reasons])


async def test_no_secret(secured: Pair) -> None:
    side = Side(Identity("ingress", "i1"))
    await connect((secured.address,), side.new)  # it asks for no proof itself ...
    await until(lambda: side.reasons)  # ... but is asked for one
    assert "shared secret" in side.reasons[0]
    assert secured.server.opened == []


async def test_a_proof_cannot_be_reflected(secured: Pair) -> None:
    """An attacker without the secret asks the server for the proof that the server wants of it."""
    reader, writer = await secured.raw()
    (size,) = struct.unpack(">I", await reader.readexactly(4))
    [hello] = msgspec.msgpack.decode(await reader.readexactly(size), type=list[Message])
    assert isinstance(hello, Hello)
    writer.write(frame(Hello(PROTOCOL_VERSION, hello.kind, hello.id, hello.nonce)))
    rest = await reader.read(10**6)
    if rest:
        [proof] = msgspec.msgpack.decode(rest[4:], type=list[Message])
        writer.write(frame(proof))
    await until(lambda: secured.server.reasons)
    assert secured.server.opened == []
    writer.close()


async def test_a_proof_for_one_peer_does_not_serve_another(secured: Pair) -> None:
    """A proof contains the nonce and the name of its connection, so that it is worth nothing in another."""
    reader, writer = await secured.raw()
    (size,) = struct.unpack(">I", await reader.readexactly(4))
    [hello] = msgspec.msgpack.decode(await reader.readexactly(size), type=list[Message])
    assert isinstance(hello, Hello)
    simple = hmac.new(b"right", hello.nonce + b"ingress:raw", "sha256").digest()
    writer.write(frame(HELLO, Prove(simple)))
    await until(lambda: secured.server.reasons)
    assert "wrong shared secret" in secured.server.reasons[0]
    writer.close()


# ---------------------------------------------------------------------------------------------------- addresses


async def test_the_first_address_that_answers_is_taken(unsecured: Pair, tmp_path: Path) -> None:
    absent = (f"unix:{tmp_path}/absent.sock", "tcp:127.0.0.1:1")
    channel = await connect((*absent, unsecured.address), unsecured.client.new)
    assert channel.open
    channel.close()
    with pytest.raises(ConnectionError, match=r"absent\.sock.*127\.0\.0\.1:1"):
        await connect(absent, unsecured.client.new)


async def test_tcp_port_is_chosen_and_named() -> None:
    side = Side(Identity("engine", "e1"))
    listener, address = await listen("tcp:127.0.0.1:0", side.new)
    assert address.startswith("tcp:127.0.0.1:")
    channel = await connect((address,), Side(Identity("ingress", "i")).new)
    channel.close()
    await channel.closed
    listener.close()
    with pytest.raises(ValueError, match="unix:/path"):
        await listen("http://x", side.new)


async def test_the_first_free_port_of_a_range_is_taken() -> None:
    # on an address of its own: other tests use ports of 127.0.0.1
    host = "127.0.0.77"
    side = Side(Identity("engine", "e1"))
    first, _ = await listen(f"tcp:{host}:7601-7602", side.new)
    second, address = await listen(f"tcp:{host}:7601-7602", side.new)
    assert address == f"tcp:{host}:7602"
    with pytest.raises(OSError, match=r"all ports 7601-7602 of 127\.0\.0\.77 are in use"):
        await listen(f"tcp:{host}:7601-7602", side.new)
    with pytest.raises(OSError, match="7601"):
        await listen(f"tcp:{host}:7601", side.new)
    first.close()
    second.close()


async def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    side = Side(Identity("engine", "e1"))
    path = f"unix:{tmp_path}/dir/s.sock"
    first, _ = await listen(path, side.new)
    first.close()
    second, address = await listen(path, side.new)
    channel = await connect((address,), Side(Identity("ingress", "i")).new)
    channel.close()
    await channel.closed
    second.close()


async def test_an_attempt_that_is_given_up_closes_its_connection(tmp_path: Path) -> None:
    silent = await asyncio.start_unix_server(lambda reader, writer: None, f"{tmp_path}/silent.sock")
    side = Side(Identity("ingress", "i"))
    attempt = asyncio.create_task(connect((f"unix:{tmp_path}/silent.sock",), side.new))
    await until(lambda: side.channels and side.channels[0]._transport is not None)
    await asyncio.sleep(0.02)
    attempt.cancel()
    await until(lambda: side.reasons)
    assert side.reasons == ["the attempt to connect was given up"]
    silent.close()
