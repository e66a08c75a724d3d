"""The listener by the standard (RFC 9110, RFC 9112), and what a browser could send without asking."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.ingress.config import IngressConfig
from app.ingress.http import protocol
from app.ingress.http.head import without_upgrade
from app.ingress.http.hosts import permits
from app.ingress.http.listener import ListenerConfig
from tests.app.ingress.rig import MODEL, Rig, pair, raw, rig, until
from tests.app.ingress.test_bounds import CHUNKED, clients, config, refusals

BODY = orjson.dumps({"prompt": "a", "max_tokens": 2})
LAST = raw("GET", "/version", b"", "connection: close")


@pytest.fixture
async def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    # a refused client has this time to read the refusal before the connection ends
    monkeypatch.setattr(protocol, "LINGER_S", 0.0)
    async with rig(tmp_path, pair(tmp_path), IngressConfig(served_names=(MODEL,))) as made:
        yield made
        await made.idle()


def chunked(body: bytes, *trailers: str) -> bytes:
    """A request whose body comes in two chunks, with trailers behind it."""
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:5], body[5:]))
    return CHUNKED + parts + b"0\r\n" + "".join(f"{t}\r\n" for t in trailers).encode() + b"\r\n"


def answers(got: bytes) -> int:
    return got.count(b"\r\ndate: ")


async def said(made: Rig, data: bytes) -> bytes:
    """Everything that the server answers until it ends the connection."""
    async with clients(made) as connect:
        client = await connect()
        client.send(data)
        return await client.rest()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------- upgrades


UPGRADE = (
    "connection: Upgrade, HTTP2-Settings",
    "upgrade: h2c",
    "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)
"""The headers that `java.net.http.HttpClient` adds to its first request of a connection without TLS."""


@pytest.mark.parametrize("parts", [1, 7, 10_000], ids=["one read", "some reads", "byte by byte"])
async def test_a_request_that_offers_http_2_is_answered_with_its_body(fast: Rig, parts: int) -> None:
    data = raw("POST", "/v1/completions", BODY, *UPGRADE) * 2 + LAST
    step = -(-len(data) // parts)
    async with clients(fast) as connect:
        client = await connect()
        for at in range(0, len(data), step):
            client.send(data[at : at + step])
            await client.pause()
        got = await client.rest()
    assert got.count(b"HTTP/1.1 200 OK") == 3
    assert got.count(b'"completion_tokens":2') == 2
    assert b"101" not in got.split(b"\r\n")[0]


async def test_a_chunked_body_behind_an_offer_is_read(fast: Rig) -> None:
    offer = chunked(BODY).replace(b"host:", "\r\n".join(UPGRADE).encode() + b"\r\nhost:", 1)
    got = await said(fast, offer + LAST)
    assert got.count(b"HTTP/1.1 200 OK") == 2
    assert b'"completion_tokens":2' in got


async def test_a_get_that_wants_a_websocket_is_answered_as_a_get(fast: Rig) -> None:
    wish = raw(
        "GET", "/health/live", b"", "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"
    )
    got = await said(fast, wish + LAST)
    assert got.count(b"HTTP/1.1 200 OK") == 2
    assert b'{"live":true}' in got


async def test_connect_is_no_request_of_ours(fast: Rig) -> None:
    got = await said(fast, b"CONNECT other:443 HTTP/1.1\r\nhost: localhost\r\n\r\n" + LAST)
    assert got.startswith(b"HTTP/1.1 400")
    assert answers(got) == 1


def test_only_the_wish_is_taken_out_of_a_head() -> None:
    headers = {b"host": b"x", b"connection": b"Upgrade, close", b"upgrade": b"h2c", b"content-length": b"3"}
    assert without_upgrade(b"POST", b"/a?b", "1.1", headers) == (
        b"POST /a?b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 3\r\n\r\n"
    )


# ------------------------------------------------------------------------------------------------ heads and trailers


async def test_trailers_change_nothing(fast: Rig) -> None:
    """The priority would be refused with 400, and the id repeated in the answer."""
    got = await said(
        fast, chunked(BODY, "x-sluice-priority: nonsense", "x-request-id: mine", "host: other") + LAST
    )
    assert got.count(b"HTTP/1.1 200 OK") == 2
    assert b"x-request-id: mine" not in got


async def test_trailers_count_as_headers(fast: Rig) -> None:
    got = await said(fast, chunked(BODY, *["x: " + "a" * 1000] * 70))
    assert got.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /version HTTP/1.1\r\n", b"400"),
        ("GET /version HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n", b"400"),
        ("GET /version HTTP/1.1\r\nhost: a b\r\n", b"400"),
        ("GET /version HTTP/1.1\r\nhost: a/b\r\n", b"400"),
        ("GET /version HTTP/1.1\r\nhost:\r\nconnection: close\r\n", b"200"),
        ("GET /version HTTP/1.1\r\nhost: [::1]:8000\r\nconnection: close\r\n", b"200"),
        ("GET /version HTTP/1.0\r\n", b"200"),
        ("GET /version HTTP/1.1\r\nhost: x.local\r\nauthorization: a\r\nauthorization: b\r\n", b"400"),
        ("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n", b"501"),
        (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            "transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
            b"400",
        ),
        ("POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n", b"400"),
    ],
)
async def test_heads(fast: Rig, head: str, status: bytes) -> None:
    got = await said(fast, head.encode() + b"\r\n")
    assert got.split(b" ")[1] == status
    assert answers(got) == 1


@pytest.mark.parametrize("header", ["authorization", "x-sluice-priority", "content-type"])
async def test_nor_does_serve_s_own_port_take_a_header_twice(fast: Rig, header: str) -> None:
    """A proxy that looks at the first one, and a server that takes the last, would disagree."""
    sent: list[dict[str, Any]] = []
    pairs = [(b"host", b"localhost"), (header.encode(), b"a"), (header.title().encode(), b"b")]
    scope = {"type": "http", "method": "GET", "path": "/version", "headers": pairs}
    bodies = [{"type": "http.request", "body": b""}]

    async def receive() -> dict[str, Any]:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await fast.app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert json.loads(sent[1]["body"])["error"]["code"] == "repeated_header"


@pytest.mark.parametrize("more", [raw("GET", "/version"), b"nonsense\r\n\r\n"])
async def test_behind_the_last_request_nothing_is_answered(fast: Rig, more: bytes) -> None:
    """In one read, where the first answer has been written before the rest is parsed."""
    got = await said(fast, LAST + more)
    assert answers(got) == 1
    assert got.startswith(b"HTTP/1.1 200")


async def test_nor_while_the_last_answer_waits_to_be_read(fast: Rig) -> None:
    """A transport that is closing still sends what is written to it as long as something waits before it."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = fast.listener._server
    assert server is not None
    config, state = server.config, server.server_state
    make = partial(config.http_protocol_class, config=config, server_state=state, app_state={})
    await asyncio.get_running_loop().connect_accepted_socket(make, theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(raw("GET", "/openapi.json", b"", "connection: close") + b"nonsense\r\n\r\n")
    async with asyncio.timeout(60):
        got = await reader.read()
    assert got.startswith(b"HTTP/1.1 200")
    assert got.endswith(b"}")
    assert answers(got) == 1
    writer.close()


# ------------------------------------------------------------------------------------------------ what browsers send


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize(
    ("content_type", "more", "status"),
    [
        ("application/json", {}, 200),
        ("Application/JSON; charset=utf-8", {}, 200),
        ("application/vnd.api+json", {}, 200),
        ("text/plain", {}, 415),
        ("application/x-www-form-urlencoded", {}, 415),
        ("multipart/form-data; boundary=application/json", {}, 415),
        (None, {}, 415),
        (None, {"authorization": "Basic YTpi"}, 415),
        ("text/plain", {"authorization": "Bearer EMPTY"}, 200),
    ],
)
async def test_only_json_where_a_browser_would_not_ask(
    tmp_path: Path, plain: bool, content_type: str | None, more: dict[str, str], status: int
) -> None:
    async with rig(tmp_path, pair(tmp_path), listener=ListenerConfig(port=0, fast=not plain)) as made:
        made.client.headers.pop("authorization")
        headers = more | ({} if content_type is None else {"content-type": content_type})
        answer = await made.client.post("/v1/completions", content=BODY, headers=headers)
        assert answer.status_code == status
        if status == 415:
            assert answer.json()["error"]["code"] == "unsupported_media_type"
        await made.idle()


@pytest.mark.parametrize(
    ("listening", "allowed", "host", "answered"),
    [
        ("127.0.0.1", None, "localhost:8000", True),
        ("127.0.0.1", None, "127.0.0.1:8000", True),
        ("127.0.0.1", None, "LOCALHOST", True),
        ("127.0.0.1", None, "app.localhost.", True),
        ("127.0.0.1", None, "[::1]:8000", True),
        ("127.0.0.1", None, "", True),
        ("127.0.0.1", None, "evil.example:8000", False),
        ("127.0.0.1", None, "127.0.0.1.evil.example", False),
        ("127.0.0.1", None, "localhost.evil.example", False),
        ("::1", None, "evil.example", False),
        ("localhost", None, "evil.example", False),
        ("0.0.0.0", None, "anything.example", True),
        ("127.0.0.1", ("chat.example",), "Chat.Example:443", True),
        ("127.0.0.1", ("chat.example",), "evil.example", False),
        ("0.0.0.0", ("chat.example",), "evil.example", False),
        ("0.0.0.0", ("chat.example",), "10.0.0.1:8000", True),
        ("127.0.0.1", ("*",), "evil.example", True),
    ],
)
def test_hosts(listening: str, allowed: tuple[str, ...] | None, host: str, answered: bool) -> None:
    assert permits(listening, allowed)(host.encode()) is answered


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
async def test_a_page_that_takes_our_address_for_its_own_name_gets_no_answer(
    tmp_path: Path, plain: bool
) -> None:
    listener = ListenerConfig(port=0, fast=not plain)
    async with rig(tmp_path, pair(tmp_path), config(), listener) as made:
        headers = {"host": f"evil.example:{made.listener.port}", "origin": "http://evil.example"}
        for method, path in (("POST", "/v1/completions"), ("GET", "/sluice/status"), ("GET", "/v1/models")):
            answer = await made.client.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
            assert "allowed_hosts" in answer.json()["error"]["message"]
        assert refusals(made, "host") == 3
    named = config(allowed_hosts=("evil.example",))
    async with rig(tmp_path, pair(tmp_path), named, listener) as made:
        assert (await made.client.get("/v1/models", headers={"host": "evil.example"})).status_code == 200


# ------------------------------------------------------------------------------------------------------ at the head


async def head_only(made: Rig, *headers: str, n_bytes: int = 1_000_000) -> dict[str, Any]:
    """The refusal of a request of which nothing but its head is sent."""
    head = raw("POST", "/v1/completions", b"x", *headers).removesuffix(b"x")
    async with clients(made) as connect:
        client = await connect()
        client.send(head.replace(b"content-length: 1", b"content-length: %d" % n_bytes))
        status, answered, body = await client.answer()
        assert answered[b"x-request-id"]
        assert answered[b"connection"] == b"close"
    return json.loads(body)["error"] | {"status": status}  # type: ignore[no-any-return]


async def test_a_large_body_is_not_read_where_no_engine_could_take_it(tmp_path: Path) -> None:
    async with rig(tmp_path, []) as made:
        assert (await head_only(made))["code"] == "not_ready"
        # and a client that asks first learns it, however little it would send
        assert (await head_only(made, "expect: 100-continue", n_bytes=10))["code"] == "not_ready"
        assert made.metric("sluice_requests_total", code="503", **{"class": "none", "model": MODEL}) == 2


async def test_a_large_body_of_another_kind_is_not_read(fast: Rig) -> None:
    head = raw("POST", "/v1/completions", b"", "content-type: text/plain")
    head = head.replace(b"content-length: 0", b"content-length: 99999")
    async with clients(fast) as connect:
        client = await connect()
        client.send(head)
        assert (await client.answer())[0] == 415


async def test_a_large_body_beyond_what_is_served_at_once_is_not_read(tmp_path: Path) -> None:
    async with (
        rig(tmp_path, pair(tmp_path, auto=False), config(max_in_flight=1)) as made,
        clients(made) as connect,
    ):
        first = await connect()
        first.send(raw("POST", "/v1/completions", BODY))
        await until(lambda: made.app.in_flight == 1)
        refused = await head_only(made)
        assert (refused["status"], refused["code"]) == (429, "too_many_requests")
        first.leave()
        await made.idle()


async def test_a_large_body_behind_a_running_answer_is_read(tmp_path: Path) -> None:
    """A refusal would have no place: the answer before it comes first."""
    async with rig(tmp_path, pair(tmp_path), config(max_in_flight=1)) as made:
        large = orjson.dumps(
            {"prompt": "a " * 200, "max_tokens": 2, "user": "u", "metadata": {"x": "y" * 100_000}}
        )
        first = raw("POST", "/v1/completions", BODY)
        got = await said(made, first + raw("POST", "/v1/completions", large) + LAST)
        assert got.count(b"HTTP/1.1 200 OK") == 3
        await made.idle()
