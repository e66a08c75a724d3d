"""Clients that read slowly or not at all, many from one address, and streams on which nothing happens."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import orjson
import pytest

from app.ingress.config import IngressConfig
from app.ingress.http import crowd, protocol
from app.ingress.http.crowd import Crowd, address_of
from app.ingress.http.listener import ListenerConfig
from app.ingress.http.memory import SharedBytes
from app.listening import IDLE_S, PROBE_S, PROBES
from tests.app.ingress.rig import MODEL, Rig, pair, raw, rig, until
from tests.app.ingress.test_bounds import SHORT, STREAM, Client, clients, config, refusals, running


def small_reader(made: Rig) -> socket.socket:
    """A client with small buffers of its own, which reads when the test says so."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", made.listener.port))
    sock.setblocking(False)
    return sock


def connection(made: Rig) -> protocol.FastHttpProtocol:
    (one,) = made.listener._server.server_state.connections  # type: ignore[union-attr]
    return one  # type: ignore[return-value]


def unread(made: Rig) -> SharedBytes[protocol.FastHttpProtocol]:
    server = made.listener._server
    assert server is not None
    return server.config.http.keywords["bounds"].unread  # type: ignore[union-attr,no-any-return]


async def test_a_client_that_is_gone_without_a_word_is_found_out(tmp_path: Path) -> None:
    """A request waits, so nothing is sent on the connection, and only the kernel's probes can tell."""
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made:
        sock = small_reader(made)
        await asyncio.get_running_loop().sock_sendall(sock, SHORT)
        await until(lambda: made.app.in_flight == 1, "a request under way")
        transport = connection(made).transport
        assert transport is not None
        ours = transport.get_extra_info("socket")
        theirs = socket.socket(fileno=os.dup(ours.fileno()))
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)]
        options += [(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT)]
        assert [theirs.getsockopt(*option) for option in options] == [1, IDLE_S, PROBE_S, PROBES]
        # a bound on what is not acknowledged would cut those who read slowly
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        theirs.close()
        sock.close()
        await made.idle()


# -------------------------------------------------------------------------------------------- slow, and not at all


async def test_who_reads_slowly_gets_the_whole_answer(tmp_path: Path) -> None:
    """The whole answer takes many times as long as a reader may stand still."""
    listener = ListenerConfig(port=0, request_read_s=0.2, keep_alive_s=0.2)
    async with rig(tmp_path, pair(tmp_path, auto=False), listener=listener) as made:
        sock = small_reader(made)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, SHORT)
        attempt_id = await running(made)
        text = "x" * 20_000_000
        made.engines["d"].token(attempt_id, text, finish="stop")
        await until(lambda: made.app.in_flight == 0, "an answer written")
        one, got, sweeps = connection(made), 0, 0
        # a sweep in which the client has read something, many times over
        while got < len(text):
            for _ in range(20):
                piece = await loop.sock_recv(sock, 400_000)
                assert piece or got >= len(text), "the answer was cut"
                got += len(piece)
            if one.transport is not None and one._paused:
                one.sweep(1.0, 0.2, 0.2)
                sweeps += 1
        assert sweeps > 10
        sock.close()
        await made.idle()


async def test_who_reads_nothing_of_an_answer_is_cut(tmp_path: Path) -> None:
    listener = ListenerConfig(port=0, request_read_s=0.2)
    async with rig(tmp_path, pair(tmp_path, auto=False), listener=listener) as made:
        sock = small_reader(made)
        await asyncio.get_running_loop().sock_sendall(sock, SHORT)
        attempt_id = await running(made)
        made.engines["d"].token(attempt_id, "x" * 20_000_000, finish="stop")
        await until(lambda: unread(made).held_bytes > 10_000_000, "an unread answer")
        await until(lambda: not made.listener._server.server_state.connections, "no connection")  # type: ignore[union-attr]
        assert unread(made).held_bytes == 0
        sock.close()


@pytest.mark.parametrize("leaves", ["keeps the connection", "ends the connection"])
async def test_who_never_reads_the_last_bytes_of_an_answer_is_cut(tmp_path: Path, leaves: str) -> None:
    """A transport that is closed waits for its last bytes to be read, which here are too few to pause its writer."""
    listener = ListenerConfig(port=0, request_read_s=0.2, keep_alive_s=0.2)
    async with rig(tmp_path, pair(tmp_path, auto=False), listener=listener) as made:
        sock = small_reader(made)
        ends = leaves == "ends the connection"
        asked = SHORT.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1) if ends else SHORT
        await asyncio.get_running_loop().sock_sendall(sock, asked)
        attempt_id = await running(made)
        one = connection(made)
        assert one.transport is not None
        # the answer finds the kernel's queue full, so all of it stays with the transport
        fill = one.transport.get_extra_info("socket").dup()
        fill.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                fill.send(b"x" * 65_536)
        fill.close()
        made.engines["d"].token(attempt_id, "x" * 1000, finish="stop")
        await until(lambda: made.app.in_flight == 0, "an answer written")
        assert 0 < one.transport.get_write_buffer_size() < protocol.HIGH_WATER_BYTES
        assert not one._paused
        await until(lambda: not made.listener._server.server_state.connections, "no connection")  # type: ignore[union-attr]
        sock.close()


async def test_unread_bytes_of_all_are_bounded_and_the_largest_goes(tmp_path: Path) -> None:
    """Three readers of whole answers read nothing; the second has most."""
    bounds = config(max_unread_bytes=30_000_000)
    async with rig(tmp_path, pair(tmp_path, auto=False), bounds) as made:
        loop, socks = asyncio.get_running_loop(), []
        for size in (12_000_000, 20_000_000, 12_000_000):
            socks.append(small_reader(made))
            await loop.sock_sendall(socks[-1], SHORT)
            n = len(socks)
            await until(lambda n=n: len(made.engines["p"].received) >= n, "a prefill")
            attempt_id = made.engines["p"].received[-1].attempt_id  # type: ignore[union-attr]
            made.engines["p"].finish_prefill(attempt_id)
            await until(lambda n=n: len(made.engines["d"].received) >= n, "a decode")
            made.engines["d"].admit(attempt_id)
            made.engines["d"].token(attempt_id, "x" * size, finish="stop")
            await until(lambda: made.app.in_flight == 0, "an answer written")
        await until(lambda: refusals(made, "unread") == 1, "a cut")
        assert unread(made).held_bytes <= 30_000_000
        # it has what the kernel holds, and no more
        got = 0
        while piece := await loop.sock_recv(socks[1], 1_000_000):
            got += len(piece)
        assert got < 20_000_000
        for sock in socks[::2]:
            got = 0
            while got < 12_000_000:
                got += len(await loop.sock_recv(sock, 1_000_000))
        await until(lambda: unread(made).held_bytes == 0, "nothing unread")
        for sock in socks:
            sock.close()
        await made.idle()


async def test_a_connection_idles_once_the_rest_of_its_answer_has_been_read(tmp_path: Path) -> None:
    """A client that reads an answer late, and then does nothing, keeps its place from nobody."""
    async with rig(tmp_path, pair(tmp_path, auto=False), config(max_connections=1)) as made:
        sock, loop = small_reader(made), asyncio.get_running_loop()
        await loop.sock_sendall(sock, SHORT)
        attempt_id = await running(made)
        size = 12_000_000
        made.engines["d"].token(attempt_id, "x" * size, finish="stop")
        await until(lambda: made.app.in_flight == 0, "an answer written")
        one, got = connection(made), 0
        assert one._paused
        while got < size:
            got += len(await loop.sock_recv(sock, 1_000_000))
        await until(lambda: not one._paused, "all of it in the kernel")
        # from another address, within the limit of that
        port, own = made.listener.port, ("127.0.0.2", 0)
        other = Client(*await asyncio.open_connection("127.0.0.1", port, local_addr=own))
        other.send(raw("GET", "/v1/models"))
        assert (await other.answer())[0] == 200
        # the first one has made way
        while await loop.sock_recv(sock, 1_000_000):
            pass
        sock.close()
        other.leave()
        await made.idle()


def test_the_largest_holders_go_until_the_rest_fits() -> None:
    gone: list[str] = []
    shared: SharedBytes[str] = SharedBytes(100, gone.append)
    shared.hold("a", 50)
    shared.hold("b", 50)
    assert gone == []
    shared.hold("c", 60)  # 160: c goes, which leaves 100
    assert gone == ["c"]
    shared.hold("a", 10)
    shared.hold("d", 91)  # 151: d goes, which leaves 60
    assert (gone, shared.held_bytes) == (["c", "d"], 60)
    shared.hold("b", 0)
    assert shared.held_bytes == 10


# ------------------------------------------------------------------------------------------------------ by address


def test_connections_are_counted_by_address() -> None:
    refused: list[str] = []
    here = Crowd(5, 2, refused.append)
    assert [here.enter(address) for address in ("a", "a", "a", "b", None, "c")] == [
        None, None, "address", None, None, "connections",
    ]  # fmt: skip
    here.leave("a")
    here.leave("a")
    here.leave("a")
    assert here.enter("a") is None
    assert here.has_spare("address", "a")
    assert refused == []
    assert here.refusal("address").message.startswith("This replica has 2 connections from your address")
    assert here.refusal("connections").message.startswith("This replica has 5 connections already")
    assert refused == ["address", "connections"]


def test_what_idles_makes_way_in_its_order_but_for_nobody_beyond_a_limit_of_its_own() -> None:
    ended: list[str] = []
    here = Crowd(2, 2, lambda _: None)
    for name in ("a", "b"):
        assert here.enter(name) is None
        here.idles(name, lambda name=name: ended.append(name))
    assert here.enter("c") is None
    assert ended == ["a"]
    here.leave("a")
    # `b` works, and `c` as well
    here.works("b")
    assert here.enter("d") == "connections"
    here.leave("d")
    here.idles("b", lambda: ended.append("b"))
    assert here.enter("c") is None
    here.leave("b")
    here.idles("c", lambda: ended.append("c"))
    assert here.enter("c") == "connections"
    assert ended == ["a", "b"]


def test_what_arrives_for_long_makes_way_where_nothing_idles_but_not_for_an_address_with_more() -> None:
    ended: list[str] = []
    refused: list[str] = []
    here = Crowd(4, 4, refused.append)

    def arrives(name: str, address: str) -> None:
        here.still_arrives(name, address, lambda: ended.append(name))

    for address in ("a", "b", "b", "b"):
        assert here.enter(address) is None
    arrives("a1", "a")
    for name in ("b1", "b2", "b3"):
        arrives(name, "b")
        arrives("a1", "a")
    # another of b's pushes out its own, and none of a's
    assert here.enter("b") is None
    assert ended == ["b1"]
    here.leave("b")
    assert here.enter("c") is None
    assert ended == ["b1", "a1"]
    here.leave("a")
    # what idles goes first, and what is complete does not go
    here.idles("c1", lambda: ended.append("c1"))
    here.works("b2")
    assert here.enter("d") is None
    here.leave("c")
    assert here.enter("d") is None
    here.leave("b")
    assert ended == ["b1", "a1", "c1", "b3"]
    assert here.enter("d") == "connections"
    assert refused == ["connections"] * 3


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.1.2.3", 4), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 4, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 4, 0, 3), "fe80::/64"),
        (("::ffff:10.1.2.3", 4, 0, 0), "10.1.2.3"),
        ("", None),
        (None, None),
    ],
)
def test_addresses(peer: object, address: str | None) -> None:
    assert address_of(peer) == address


async def test_one_address_does_not_take_all_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "SPARE_CONNECTIONS", 1)
    async with (
        rig(tmp_path, pair(tmp_path), config(max_connections_per_address=1)) as made,
        clients(made) as connect,
    ):
        first = await connect()
        first.send(SHORT)
        assert (await first.answer())[0] == 200
        second = await connect()
        second.send(SHORT)
        assert await second.refusal() == (503, "too_many_connections", "1")
        third = await connect()
        assert await third.rest() == b""
        assert refusals(made, "address") == 2
        # another address of this host
        sock = socket.create_connection(("127.0.0.1", made.listener.port), source_address=("127.0.0.2", 0))
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, SHORT)
        assert (await loop.sock_recv(sock, 100)).startswith(b"HTTP/1.1 200")
        sock.close()
        await made.idle()


# -------------------------------------------------------------------------------------------------------- keep-alive


async def test_a_silent_stream_gets_comments_where_they_are_on(tmp_path: Path) -> None:
    async with (
        rig(tmp_path, pair(tmp_path, auto=False), config(sse_keep_alive_s=0.05)) as made,
        clients(made) as connect,
    ):
        client = await connect()
        client.send(STREAM)
        got = await client.reader.readuntil(b": keep-alive\n\n")
        assert got.startswith(b"HTTP/1.1 200 OK")
        assert b"text/event-stream" in got
        # still in the queue; more follow, and then the answer
        await client.reader.readuntil(b": keep-alive\n\n")
        attempt_id = await running(made)
        await client.reader.readuntil(b"first ")
        await client.reader.readuntil(b": keep-alive\n\n")
        made.engines["d"].token(attempt_id, "last ", finish="stop")
        assert b"last " in await client.reader.readuntil(b"data: [DONE]\n\n")
        await made.idle()


async def test_a_whole_answer_gets_no_comments(tmp_path: Path) -> None:
    async with (
        rig(tmp_path, pair(tmp_path, auto=False), config(sse_keep_alive_s=0.05)) as made,
        clients(made) as connect,
    ):
        client = await connect()
        client.send(SHORT)
        await until(lambda: made.app.in_flight == 1)
        await asyncio.sleep(0.2)
        attempt_id = await running(made)
        made.engines["d"].token(attempt_id, "x", finish="stop")
        assert (await client.answer())[0] == 200
        await made.idle()


async def test_a_refusal_after_a_comment_is_an_event(tmp_path: Path) -> None:
    bounds = config(sse_keep_alive_s=0.05, request_timeout_s=1.0)
    async with rig(tmp_path, pair(tmp_path, auto=False), bounds) as made, clients(made) as connect:
        client = await connect()
        client.send(STREAM)
        await client.reader.readuntil(b": keep-alive\n\n")
        got = await client.reader.readuntil(b"0\r\n\r\n")
        assert b'data: {"error":{' in got
        assert b'"code":"deadline"' in got
        await made.idle()


async def test_without_the_option_a_stream_is_silent_until_its_first_token(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made, clients(made) as connect:
        client = await connect()
        client.send(STREAM)
        await until(lambda: made.app.in_flight == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.3)
        client.leave()
        await made.idle()


async def test_a_stream_with_comments_only_may_start_again_elsewhere(tmp_path: Path) -> None:
    """Comments are no output: an engine that fails before the first token costs the client nothing."""
    bounds = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, sse_keep_alive_s=0.05)
    engines = [*pair(tmp_path, auto=False)]
    body = orjson.dumps({"prompt": "a", "max_tokens": 2, "stream": True})
    async with rig(tmp_path, engines, bounds) as made, clients(made) as connect:
        client = await connect()
        client.send(raw("POST", "/v1/completions", body, "x-sluice-migrate: off"))
        await client.reader.readuntil(b": keep-alive\n\n")
        (exchange,) = made.app.requests._open
        assert exchange.unsent()  # type: ignore[attr-defined]
        attempt_id = await running(made)
        await client.reader.readuntil(b"first ")
        assert not exchange.unsent()  # type: ignore[attr-defined]
        made.engines["d"].token(attempt_id, "x", finish="stop")
        await client.reader.readuntil(b"data: [DONE]\n\n")
        await made.idle()
