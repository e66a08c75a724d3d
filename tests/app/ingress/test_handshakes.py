"""Connections with TLS count from their acceptance, and handshakes have a bound, on both loops (`conftest.py`)."""

import asyncio
import json
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.ingress.http import crowd, protocol
from app.ingress.http import listener as listener_module
from app.ingress.http.crowd import Crowd
from app.ingress.http.listener import ListenerConfig
from tests.app.ingress.rig import Rig, pair, raw, rig, until
from tests.app.ingress.test_bounds import SHORT, Client, config, refusals
from tests.app.ingress.test_tls import certificate

LONG_S = 60.0
SHORT_S = 0.3


@pytest.fixture(autouse=True)
def crowds(monkeypatch: pytest.MonkeyPatch) -> list[Crowd]:
    """One spare connection, and the crowds that were made."""
    made: list[Crowd] = []

    def make(*arguments: Any) -> Crowd:
        made.append(Crowd(*arguments))
        return made[-1]

    monkeypatch.setattr(crowd, "SPARE_CONNECTIONS", 1)
    monkeypatch.setattr(listener_module, "Crowd", make)
    return made


def count(crowds: list[Crowd]) -> tuple[int, int]:
    """Returns the connections that the listener counts: over all, and summed over the addresses."""
    (one,) = crowds
    return one._count, one._by_address.total()


@asynccontextmanager
async def https(
    folder: Path, handshake_s: float = LONG_S, fast: bool = True, **limits: int
) -> AsyncIterator[Rig]:
    cert, key = certificate(folder)
    listener = ListenerConfig(port=0, tls_cert=cert, tls_key=key, handshake_s=handshake_s, fast=fast)
    async with rig(folder, pair(folder), config(**limits), listener) as made:
        yield made


@contextmanager
def silent(made: Rig) -> Iterator[Callable[[], socket.socket]]:
    """Opens connections that say nothing, and closes them at the end."""
    opened: list[socket.socket] = []

    def one() -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", made.listener.port)))
        opened[-1].setblocking(False)
        return opened[-1]

    try:
        yield one
    finally:
        for sock in opened:
            sock.close()


def trusted(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


async def client(folder: Path, made: Rig, **more: Any) -> Client:
    """Returns a connection whose handshake is done."""
    port = made.listener.port
    return Client(*await asyncio.open_connection("127.0.0.1", port, ssl=trusted(folder), **more))


async def ended(sock: socket.socket) -> None:
    """Waits until the server has closed the connection."""
    try:
        async with asyncio.timeout(30):
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    except ConnectionResetError:
        pass


def is_open(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True


@pytest.mark.parametrize(
    ("limit", "reason"), [("max_connections", "connections"), ("max_connections_per_address", "address")]
)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
async def test_silent_connections_beyond_the_limit_and_its_spare_are_closed(
    tmp_path: Path, crowds: list[Crowd], limit: str, reason: str, fast: bool
) -> None:
    async with https(tmp_path, fast=fast, **{limit: 2}) as made:
        with silent(made) as connect:
            socks = [connect() for _ in range(8)]
            for sock in socks[3:]:
                await ended(sock)
            assert [is_open(sock) for sock in socks[:3]] == [True] * 3
            assert count(crowds) == (3, 3)
            assert refusals(made, reason) == 5
        await until(lambda: count(crowds) == (0, 0), "no connection")
        answer = await client(tmp_path, made)
        answer.send(SHORT)
        assert (await answer.answer())[0] == 200
        answer.leave()


async def test_silent_connections_leave_other_addresses_room(tmp_path: Path, crowds: list[Crowd]) -> None:
    async with https(tmp_path, max_connections_per_address=1) as made:
        with silent(made) as connect:
            first, second, third = connect(), connect(), connect()
            await ended(third)
            assert is_open(first)
            assert is_open(second)
            other = await client(tmp_path, made, local_addr=("127.0.0.2", 0))
            other.send(SHORT)
            assert (await other.answer())[0] == 200
            assert count(crowds) == (3, 3)
            other.leave()


async def test_silent_handshakes_make_way_for_other_addresses(
    tmp_path: Path, crowds: list[Crowd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "GIVES_WAY_S", 0.0)
    async with https(tmp_path, max_connections=2) as made:
        with silent(made) as connect:
            first, second = connect(), connect()
            await until(lambda: sum(len(one._arriving) for one in crowds) == 2, "two silent handshakes")
            other = await client(tmp_path, made, local_addr=("127.0.0.2", 0))
            other.send(SHORT)
            assert (await other.answer())[0] == 200
            await ended(first)
            assert is_open(second)
            assert refusals(made, "connections") == 1
            assert count(crowds) == (2, 2)
            other.leave()


async def test_a_silent_handshake_ends_in_time(tmp_path: Path, crowds: list[Crowd]) -> None:
    async with https(tmp_path, SHORT_S) as made:
        with silent(made) as connect:
            began_s = time.monotonic()
            nothing, half = connect(), connect()
            # the head of a record that does not come
            half.send(b"\x16\x03\x01\x02\x00\x01")
            await until(lambda: count(crowds) == (2, 2), "two connections")
            await ended(nothing)
            assert time.monotonic() - began_s >= SHORT_S
            await ended(half)
        await until(lambda: count(crowds) == (0, 0), "no connection")
        assert refusals(made, "handshake") == 2


async def test_a_connection_counts_once_through_its_handshake_and_requests(
    tmp_path: Path, crowds: list[Crowd]
) -> None:
    async with https(tmp_path, SHORT_S) as made:
        one = await client(tmp_path, made)
        assert count(crowds) == (1, 1)
        for _ in range(2):
            # the bound on handshakes has no meaning behind one
            await asyncio.sleep(SHORT_S)
            one.send(SHORT)
            assert (await one.answer())[0] == 200
            assert count(crowds) == (1, 1)
        one.leave()
        await until(lambda: count(crowds) == (0, 0), "no connection")
        assert refusals(made, "handshake") == 0
        await made.idle()


async def test_a_failed_handshake_is_uncounted(tmp_path: Path, crowds: list[Crowd]) -> None:
    async with https(tmp_path) as made:
        with silent(made) as connect:
            plain = connect()
            plain.send(raw("GET", "/health/ready"))
            left = connect()
            await until(lambda: count(crowds)[0] >= 1, "a connection")
            left.close()
            reset = connect()
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reset.close()
            await until(lambda: count(crowds) == (0, 0), "no connection")
            # a client that does not trust the certificate
            with pytest.raises(ssl.SSLError):
                await asyncio.open_connection(
                    "127.0.0.1", made.listener.port, ssl=ssl.create_default_context()
                )
        await until(lambda: count(crowds) == (0, 0), "no connection")
        assert refusals(made, "handshake") == 0
        one = await client(tmp_path, made)
        one.send(SHORT)
        assert (await one.answer())[0] == 200
        one.leave()
        await until(lambda: count(crowds) == (0, 0), "no connection")


async def test_a_place_is_kept_from_the_acceptance_on(
    tmp_path: Path, crowds: list[Crowd], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first connection is within the limit, although another one is done with its handshake before it."""
    monkeypatch.setattr(protocol, "LINGER_S", 0.0)
    async with https(tmp_path, max_connections=1) as made:
        with silent(made) as connect:
            early = connect()
            await until(lambda: count(crowds) == (1, 1), "the early one")
            spare = await client(tmp_path, made)
            spare.send(raw("GET", "/health/ready"))
            assert (await spare.answer())[0] == 200
            await until(lambda: count(crowds) == (1, 1), "the early one alone")
            spare = await client(tmp_path, made)
            spare.send(SHORT)
            assert await spare.refusal() == (503, "too_many_connections", "1")
            connecting = asyncio.open_connection(
                sock=early.dup(), ssl=trusted(tmp_path), server_hostname="127.0.0.1"
            )
            first = Client(*await connecting)
            first.send(SHORT)
            assert (await first.answer())[0] == 200
            first.leave()
        await until(lambda: count(crowds) == (0, 0), "no connection")


async def test_a_listener_that_stops_ends_handshakes(tmp_path: Path, crowds: list[Crowd]) -> None:
    async with https(tmp_path) as made:
        with silent(made) as connect:
            waits, begun = connect(), connect()
            begun.send(b"\x16\x03\x01\x02\x00\x01")
            await until(lambda: count(crowds) == (2, 2), "two connections")
            # accepted by the listener's own end
            last = connect()
            await made.listener.stop()
            assert count(crowds) == (0, 0)
            for sock in (waits, begun, last):
                await ended(sock)


async def test_a_stream_over_tls(tmp_path: Path, crowds: list[Crowd]) -> None:
    async with (
        https(tmp_path) as made,
        httpx.AsyncClient(base_url=made.url.replace("http:", "https:"), verify=trusted(tmp_path)) as http,
    ):
        answers = await asyncio.gather(
            *(http.post("/v1/chat/completions", json=made.chat(stream=True)) for _ in range(8))
        )
        for answer in answers:
            pieces = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
            assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces) == "w0 w1 w2 w3 "
        await made.idle()
    assert count(crowds) == (0, 0)
