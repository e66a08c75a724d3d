"""Bounds on what the ingress holds for clients before it answers: bytes of requests, connections, half requests."""

import asyncio
import json
import math
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from actors.wire import messages as wire
from app.ingress.config import IngressConfig
from app.ingress.http import crowd, protocol
from app.ingress.http import listener as listener_module
from app.ingress.http.listener import ListenerConfig
from tests.app.ingress.rig import MODEL, Rig, pair, raw, rig, until

MIB = 2**20
READ_BYTES = 256_000
"""Bytes that uvloop reads at once (UV_STREAM_RECV_BUF_SIZE)."""

SHORT = raw("POST", "/v1/completions", orjson.dumps({"prompt": "a", "max_tokens": 2}))
CHUNKED = raw(
    "POST", "/v1/completions", b"", "transfer-encoding: chunked", "content-type: application/json"
).replace(b"content-length: 0\r\n", b"")
STREAM = raw("POST", "/v1/completions", orjson.dumps({"prompt": "a", "max_tokens": 2, "stream": True}))


class Client:
    """A raw connection to the ingress."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def pause(self) -> None:
        """Lets the server read what was sent so far."""
        await self._writer.drain()
        await asyncio.sleep(0)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """Returns status, headers and body of the next answer."""
        async with asyncio.timeout(60):
            status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).strip().split(b"\r\n")
            headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
            body = await self.reader.readexactly(int(headers[b"content-length"]))
        return int(status.split()[1]), headers, body

    async def refusal(self) -> tuple[int, str, str]:
        """Returns status, code and Retry-After of an answer that ends the connection."""
        status, headers, body = await self.answer()
        assert headers[b"connection"] == b"close"
        return status, json.loads(body)["error"]["code"], headers[b"retry-after"].decode()

    async def rest(self) -> bytes:
        """Returns what comes until the connection ends."""
        async with asyncio.timeout(60):
            return await self.reader.read()

    def leave(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def clients(made: Rig) -> AsyncIterator[Callable[[], Any]]:
    """Opens connections and cuts them at the end."""
    opened: list[Client] = []

    async def client() -> Client:
        opened.append(Client(*await asyncio.open_connection("127.0.0.1", made.listener.port)))
        return opened[-1]

    try:
        yield client
    finally:
        for one in opened:
            one.leave()


def config(**options: Any) -> IngressConfig:
    return IngressConfig(**({"served_names": (MODEL,), "sweep_interval_s": 0.02} | options))


def held(made: Rig) -> int:
    return made.app.request_memory.held_bytes


def refusals(made: Rig, reason: str) -> float:
    return made.metric("sluice_listener_refusals_total", reason=reason)


async def running(made: Rig) -> str:
    """Waits for the one request under way to run, and returns its attempt."""
    p, d = made.engines["p"], made.engines["d"]
    await until(lambda: p.of(wire.Prefill))
    attempt_id = str(p.of(wire.Prefill)[-1].attempt_id)
    p.finish_prefill(attempt_id)
    await until(lambda: d.of(wire.Decode))
    d.admit(attempt_id)
    d.token(attempt_id, "first ")
    return attempt_id


# ------------------------------------------------------------------------------------------------- one connection


async def test_a_connection_holds_one_request_behind_the_one_that_runs(tmp_path: Path) -> None:
    """A client sends eight requests of 4 MiB; it cannot send what the ingress does not read."""
    large = raw("POST", "/v1/completions", orjson.dumps({"prompt": "a" * 4 * MIB, "max_tokens": 1}))
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made, clients(made) as connect:
        client = await connect()
        client.send(STREAM)
        attempt_id = await running(made)
        client.send(large * 8)
        (server,) = made.listener._server.server_state.connections  # type: ignore[union-attr]
        await until(lambda: server._unread, "an end of reading")
        assert 4 * MIB < held(made) < 4 * MIB + READ_BYTES + 10_000
        # 28 MiB have not been read; of these the kernel's buffers hold some
        assert client.unsent_bytes > 8 * MIB
        client.leave()
        # the client's end waits behind what is not read, but its kernel refuses the next piece of the answer
        made.engines["d"].token(attempt_id, "more ")
        await until(lambda: not held(made), "nothing held")
        await made.idle()


async def test_a_client_that_leaves_while_a_request_waits_is_noticed(tmp_path: Path) -> None:
    """The connection is not read then, and nothing is written to it."""
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made, clients(made) as connect:
        client = await connect()
        client.send(SHORT * 2)
        await running(made)
        await until(lambda: held(made), "a request that waits")
        client.leave()
        await made.idle()
        assert held(made) == 0
        assert len(made.engines["p"].of(wire.Prefill)) == 1


async def test_what_waits_is_answered_and_reading_goes_on(tmp_path: Path) -> None:
    large = raw("POST", "/v1/completions", orjson.dumps({"prompt": "a" * 400_000, "max_tokens": 2}))
    async with rig(tmp_path, pair(tmp_path)) as made, clients(made) as connect:
        client = await connect()
        client.send((STREAM + large + SHORT) * 5 + raw("GET", "/version", b"", "connection: close"))
        got = await client.rest()
        assert got.count(b"HTTP/1.1 200 OK") == 16
        assert held(made) == 0
        await made.idle()


async def test_many_small_parts_count_what_they_take(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, clients(made) as connect:
        client = await connect()
        client.send(CHUNKED + b"2\r\nxx\r\n" * 1000)
        # 1,000 parts of 2 bytes, each of which takes 64 more
        await until(lambda: held(made) > 66_000, "66 kB held")
        client.leave()
        await until(lambda: not held(made), "nothing held")


async def test_half_a_request_behind_a_running_stream_is_dropped_in_time(tmp_path: Path) -> None:
    listener = ListenerConfig(port=0, request_read_s=0.2)
    async with (
        rig(tmp_path, pair(tmp_path, auto=False), listener=listener) as made,
        clients(made) as connect,
    ):
        client = await connect()
        client.send(STREAM)
        attempt_id = await running(made)
        client.send(raw("POST", "/v1/completions", b"x" * 100_000)[:50_000])
        await until(lambda: held(made) > 49_000, "half a request")
        await until(lambda: not held(made), "nothing held")
        assert refusals(made, "late") == 1
        # the stream goes on, and the connection ends with it
        made.engines["d"].token(attempt_id, "last ", finish="stop")
        got = await client.rest()
        assert b"first " in got
        assert b"last " in got
        assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await made.idle()


async def test_a_request_that_follows_a_running_stream_in_time_is_answered(tmp_path: Path) -> None:
    listener = ListenerConfig(port=0, request_read_s=3.0)
    async with (
        rig(tmp_path, pair(tmp_path, auto=False), listener=listener) as made,
        clients(made) as connect,
    ):
        client = await connect()
        client.send(STREAM)
        attempt_id = await running(made)
        request = raw("GET", "/version", b"", "connection: close")
        client.send(request[:20])
        await until(lambda: held(made), "half a request")
        made.engines["d"].token(attempt_id, finish="stop")
        client.send(request[20:])
        assert b'"transport"' in await client.rest()
        assert refusals(made, "late") == 0
        await made.idle()


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("path", ["/health", "/nowhere", "/sluice/admin/policy", "/v1/models"])
async def test_only_requests_for_output_may_be_large(tmp_path: Path, path: str, fast: bool) -> None:
    """No key is asked for before the bodies of others are read, and they would take the memory of all."""
    listener = ListenerConfig(port=0, fast=fast)
    async with rig(tmp_path, pair(tmp_path), listener=listener) as made, clients(made) as connect:
        announced = await connect()
        announced.send(raw("PUT", path, b"x" * 100_000)[:-100_000])
        status, _, body = await announced.answer()
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
        growing = await connect()
        growing.send(CHUNKED.replace(b"/v1/completions", path.encode()))
        for _ in range(2):
            growing.send(b"a000\r\n" + b"x" * 0xA000 + b"\r\n")
        assert (await growing.answer())[0] == 413
        await until(lambda: not held(made), "nothing held")


# ------------------------------------------------------------------------------------------------ all connections


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
async def test_all_connections_together_hold_so_many_bytes(tmp_path: Path, fast: bool) -> None:
    bounds = config(max_body_bytes=1_000_000, max_waiting_bytes=1_500_000)
    body = orjson.dumps({"prompt": "a" * 999_000, "max_tokens": 2})
    large = raw("POST", "/v1/completions", body)
    listener = ListenerConfig(port=0, fast=fast)
    async with rig(tmp_path, pair(tmp_path), bounds, listener) as made, clients(made) as connect:
        first = await connect()
        first.send(large[:900_000])
        await until(lambda: held(made) > 890_000, "a large half")
        # by its length, before anything of its body has come
        announced = await connect()
        announced.send(large[: -len(body)])
        assert await announced.refusal() == (503, "request_memory", "1")
        # as it grows
        growing = await connect()
        growing.send(CHUNKED)
        growing.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        await until(lambda: held(made) > 890_000 + 0x10000, "another part")
        for _ in range(9):
            growing.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        assert await growing.refusal() == (503, "request_memory", "1")
        await until(lambda: held(made) < 1_000_000, "nothing held of what was refused")
        assert refusals(made, "memory") == 2
        # small requests are never kept out: 11 halves of 59,000 bytes pass the bound
        smalls = [await connect() for _ in range(11)]
        body = orjson.dumps({"prompt": "a" * 59_970, "max_tokens": 2})
        small = raw("POST", "/v1/completions", body)
        for one in smalls:
            one.send(small[: -len(body) + 59_000])
        await until(lambda: held(made) > 1_500_000, "many small halves")
        for one in smalls:
            one.send(small[-len(body) + 59_000 :])
            assert (await one.answer())[0] == 200
        # and what was there first is served
        first.send(large[900_000:])
        assert (await first.answer())[0] == 200
        await until(lambda: not held(made), "nothing held")
        await made.idle()


async def test_a_refused_request_behind_a_running_answer_holds_nothing(tmp_path: Path) -> None:
    bounds = config(max_body_bytes=100_000, max_waiting_bytes=100_000)
    async with rig(tmp_path, pair(tmp_path, auto=False), bounds) as made, clients(made) as connect:
        client = await connect()
        client.send(STREAM)
        attempt_id = await running(made)
        client.send(CHUNKED)
        client.send(b"18000\r\n" + b"x" * 0x18000 + b"\r\n")
        await until(lambda: held(made) > 0x18000, "a body")
        client.send(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
        await until(lambda: not held(made), "nothing held")
        made.engines["d"].token(attempt_id, "last ", finish="stop")
        assert (await client.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await made.idle()


async def test_a_connection_too_many_gets_503_and_probes_get_their_answers(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path), config(max_connections=2)) as made, clients(made) as connect:
        kept = [await connect(), await connect()]
        for client in kept:
            client.send(SHORT)
            assert (await client.answer())[0] == 200
        third = await connect()
        third.send(SHORT)
        assert await third.refusal() == (503, "too_many_connections", "1")
        for path in ("/health", "/health/live", "/health/ready", "/metrics"):
            probe = await connect()
            probe.send(raw("GET", path))
            status, headers, _ = await probe.answer()
            assert (status, headers[b"connection"]) == (200, b"close")
            assert await probe.rest() == b""
        assert refusals(made, "connections") == 1
        # those that were there go on, and one that leaves makes room
        kept[0].send(SHORT)
        assert (await kept[0].answer())[0] == 200
        kept[1].leave()
        third.leave()
        connections = made.listener._server.server_state.connections  # type: ignore[union-attr]
        await until(lambda: len(connections) == 1, "one connection")
        again = await connect()
        again.send(SHORT)
        assert (await again.answer())[0] == 200
        await made.idle()


async def test_half_sent_requests_make_way_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two addresses could otherwise keep everybody out by halves of requests."""
    monkeypatch.setattr(crowd, "GIVES_WAY_S", 0.0)
    async with rig(tmp_path, pair(tmp_path), config(max_connections=3)) as made:

        async def connect(host: int) -> Client:
            address = (f"127.0.0.{host}", 0)
            return Client(*await asyncio.open_connection("127.0.0.1", made.listener.port, local_addr=address))

        connections = made.listener._server.server_state.connections  # type: ignore[union-attr]
        halves: list[Client] = []
        for count, part in enumerate((raw("GET", "/version")[:20], SHORT[:-1], SHORT[:-1]), 1):
            halves.append(await connect(2))
            halves[-1].send(part)
            await until(
                lambda count=count: sum(one._gives_way for one in connections) == count,  # type: ignore[misc]
                "half a request that has been looked at",
            )
        # half a head, then half a body: the oldest goes
        for half in halves[:2]:
            new = await connect(3)
            assert await half.rest() == b""
            new.send(SHORT)
            assert (await new.answer())[0] == 200
            new.leave()
            await until(lambda: len(connections) < 3, "a connection less")
            halves.append(await connect(2))
            halves[-1].send(SHORT[:-1])
            await until(lambda: sum(one._gives_way for one in connections) == 3, "another half")
        assert refusals(made, "connections") == 2
        # one that becomes complete is answered and has its place
        halves[2].send(SHORT[-1:])
        assert (await halves[2].answer())[0] == 200
        await until(lambda: sum(one._gives_way for one in connections) == 2, "a whole request")
        for half in halves:
            half.leave()
        await made.idle()


async def test_connections_that_idle_make_way_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two addresses could otherwise keep everybody out by connections that do nothing."""
    # half a request keeps its place here, however slow the machine is
    monkeypatch.setattr(crowd, "GIVES_WAY_S", math.inf)
    hosts = iter(range(2, 20))
    bounds = config(max_connections=3, max_connections_per_address=1)
    async with rig(tmp_path, pair(tmp_path, auto=False), bounds) as made:
        opened: list[Client] = []

        async def connect() -> Client:
            address = (f"127.0.0.{next(hosts)}", 0)
            pair = await asyncio.open_connection("127.0.0.1", made.listener.port, local_addr=address)
            opened.append(Client(*pair))
            return opened[-1]

        connections = made.listener._server.server_state.connections  # type: ignore[union-attr]
        busy, silent, used = [await connect() for _ in range(3)]
        await until(lambda: len(connections) == 3, "three connections")
        busy.send(STREAM)
        attempt_id = await running(made)
        used.send(raw("GET", "/version"))
        assert (await used.answer())[0] == 200
        # the one that has asked nothing has idled longer than the one that was just answered
        new = await connect()
        assert await silent.rest() == b""
        new.send(raw("GET", "/v1/models"))
        assert (await new.answer())[0] == 200
        used.send(raw("GET", "/version"))
        assert (await used.answer())[0] == 200
        # now `new` has idled longest, and half a request is not idle
        used.send(SHORT[:20])
        await until(lambda: sum(one._in_request for one in connections) == 1, "half a request")
        newer = await connect()
        assert await new.rest() == b""
        newer.send(SHORT[:20])
        await until(lambda: sum(one._in_request for one in connections) == 2, "two halves")
        refused = await connect()
        refused.send(SHORT)
        assert await refused.refusal() == (503, "too_many_connections", "1")
        made.engines["d"].token(attempt_id, finish="stop")
        await until(lambda: made.app.in_flight == 0, "the end of the stream")
        for one in opened:
            one.leave()
        await made.idle()


async def test_beyond_the_spare_connections_none_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "SPARE_CONNECTIONS", 1)
    monkeypatch.setattr(protocol, "LINGER_S", 0.0)
    async with rig(tmp_path, pair(tmp_path), config(max_connections=1)) as made, clients(made) as connect:
        first = await connect()
        first.send(SHORT)
        assert (await first.answer())[0] == 200
        spare = await connect()
        connections = made.listener._server.server_state.connections  # type: ignore[union-attr]
        await until(lambda: len(connections) == 2, "two connections")
        third = await connect()
        assert await third.rest() == b""
        assert refusals(made, "connections") == 1
        # a spare connection is for one quick question
        assert await spare.rest() == b""
        await made.idle()


async def test_the_metrics_port_has_connections_of_its_own(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path), config(max_connections=1)) as made, clients(made) as connect:
        first = await connect()
        first.send(SHORT)
        assert (await first.answer())[0] == 200
        other = listener_module.Listener(made.app, ListenerConfig(port=0), made.app.dispatch_observation)
        await other.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", other.port)
            probe = Client(reader, writer)
            for _ in range(2):
                probe.send(raw("GET", "/health/ready"))
                status, headers, _ = await probe.answer()
                assert status == 200
                assert b"connection" not in headers
            probe.leave()
        finally:
            await other.stop()


def test_a_quarter_of_the_files_is_left_to_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        assert listener_module._affordable(8192) == 750
        assert listener_module._affordable(700) == 700
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
