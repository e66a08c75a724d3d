"""The HTTP side: status codes, limits, keep-alive and pipelining, both transports, the small endpoints."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from actors.wire import messages as wire
from app.ingress.config import IngressConfig
from app.ingress.http.listener import ListenerConfig
from tests.app.ingress.rig import MODEL, Rig, pair, raw, rig, until


@pytest.fixture(params=["fast", "plain"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    config = IngressConfig(
        served_names=(MODEL, "alias"), max_body_bytes=100_000, max_in_flight=4, sweep_interval_s=0.02
    )
    listener = ListenerConfig(port=0, fast=request.param == "fast")
    async with rig(tmp_path, pair(tmp_path), config, listener) as made:
        yield made
        await made.idle()


@pytest.fixture
async def fast(tmp_path: Path) -> AsyncIterator[Rig]:
    config = IngressConfig(served_names=(MODEL,), max_body_bytes=100_000, sweep_interval_s=0.02)
    async with rig(tmp_path, pair(tmp_path), config) as made:
        yield made
        await made.idle()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    return error  # type: ignore[no-any-return]


def events(text: str) -> list[Any]:
    """The events of a stream that ended well."""
    lines = [line for line in text.split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# -------------------------------------------------------------------------------------------------------- answers


async def test_the_small_endpoints(served: Rig) -> None:
    get = served.client.get
    models = (await get("/v1/models")).json()
    assert [m["id"] for m in models["data"]] == [MODEL, "alias"]
    assert models["data"][0]["max_model_len"] == 1024
    assert (await get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert error_of(await get("/v1/models/other"))["param"] == "model"
    for path in ("/health", "/health/live", "/health/ready"):
        assert (await get(path)).status_code == 200
    assert (await get("/version")).json() == {"version": "0.0", "transport": served.app.transport}
    status = (await get("/sluice/status")).json()
    assert status["ready"] is True
    assert status["model"] == MODEL
    assert status["router"]["policy"] == {"prefill": "join_shortest_queue", "decode": "join_shortest_queue"}
    assert [(e["id"], e["role"], e["slots"]) for e in status["engines"]] == [
        ("d", "decode", 64),
        ("p", "prefill", 64),
    ]
    assert "sluice_requests_total" in (await get("/metrics")).text


async def test_unknown_paths_and_methods(served: Rig) -> None:
    answer = await served.client.get("/v2/nothing")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
    answer = await served.client.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = await served.client.post("/v1/models")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


async def test_an_unknown_model_is_404_a_missing_one_is_the_served_one(served: Rig) -> None:
    answer = await served.client.post("/v1/chat/completions", json=served.chat(model="gpt-5"))
    assert (answer.status_code, error_of(answer)["param"]) == (404, "model")
    answer = await served.client.post("/v1/chat/completions", json=served.chat())
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    answer = await served.client.post("/v1/chat/completions", json=served.chat(model="alias"))
    assert answer.json()["model"] == "alias"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe\xfd",
        b'{"messages": "\xff"}',
        b"[" * 50_000,
        b'{"messages":[{"role":"user","content":"a"}]',
    ],
)
async def test_a_broken_body_is_400(served: Rig, body: bytes, stream: bool) -> None:
    answer = await served.client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    error_of(answer)


async def test_a_bad_streamed_request_is_refused_before_any_stream(served: Rig) -> None:
    too_long = {"prompt": "word " * 1100, "stream": True}
    answer = await served.client.post("/v1/completions", json=too_long)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")
    answer = await served.client.post("/v1/chat/completions", json=served.chat(stream=True, temperature=9))
    assert (answer.status_code, error_of(answer)["param"]) == (400, "temperature")


async def test_a_huge_body_is_413(served: Rig) -> None:
    body = orjson.dumps({"prompt": "x" * 200_000})
    answer = await served.client.post("/v1/completions", content=body)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")

    async def pieces() -> AsyncIterator[bytes]:  # no content-length: counted as it comes
        for _ in range(20):
            yield b"x" * 10_000

    answer = await served.client.post("/v1/completions", content=pieces())
    assert answer.status_code == 413
    assert (await served.client.get("/health")).status_code == 200


async def test_more_than_it_may_hold_is_429_with_a_reason(served: Rig) -> None:
    for engine in served.engines.values():
        engine.auto = False
    waiting = [
        asyncio.create_task(served.client.post("/v1/chat/completions", json=served.chat())) for _ in range(4)
    ]
    await until(lambda: served.app.in_flight == 4)
    answer = await served.client.post("/v1/chat/completions", json=served.chat())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert error_of(answer)["type"] == "rate_limit_error"
    assert served.metric("sluice_requests_total", code="429", **{"class": "none", "model": MODEL}) == 1
    for task in waiting:
        task.cancel()
    await served.idle()


async def test_a_request_id_is_kept_or_made(served: Rig) -> None:
    answer = await served.client.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    answer = await served.client.post(
        "/v1/chat/completions", json=served.chat(stream=True), headers={"x-request-id": "a b"}
    )
    assert answer.headers["x-request-id"].startswith("req-")


async def test_a_client_cannot_choose_a_name_of_ours(served: Rig) -> None:
    """The names of requests inside the system begin the ids of attempts, of which no two may be equal."""
    first = await served.client.post("/v1/chat/completions", json=served.chat())
    shown = first.headers["x-request-id"]
    again = await served.client.post(
        "/v1/chat/completions", json=served.chat(), headers={"x-request-id": shown}
    )
    assert again.headers["x-request-id"] == shown
    assert again.json()["id"] != first.json()["id"]
    own = shown.removeprefix("req-")
    prefills = served.engines["p"].of(wire.Prefill)
    assert sum(message.attempt_id.startswith(own) for message in prefills) == 1


async def test_migration_may_be_forbidden_and_nothing_else_is_said_of_it(served: Rig) -> None:
    for value, status in (("off", 200), ("on", 200), ("no", 400)):
        headers = {"x-sluice-migrate": value}
        answer = await served.client.post("/v1/chat/completions", json=served.chat(), headers=headers)
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "x-sluice-migrate"


async def test_not_ready_without_engines(tmp_path: Path) -> None:
    async with rig(tmp_path, []) as made:
        for path in ("/health", "/health/ready"):
            answer = await made.client.get(path)
            assert (answer.status_code, error_of(answer)["code"]) == (503, "not_ready")
        assert (await made.client.get("/health/live")).status_code == 200
        answer = await made.client.post("/v1/chat/completions", json=made.chat())
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


async def test_a_long_prompt_is_tokenised_aside_and_served(tmp_path: Path) -> None:
    config = IngressConfig(served_names=(MODEL,), offload_prompt_chars=50)
    async with rig(tmp_path, pair(tmp_path), config) as made:
        answer = await made.client.post("/v1/completions", json={"prompt": "word " * 100, "max_tokens": 2})
        assert answer.json()["usage"]["prompt_tokens"] == 101
        answer = await made.client.post("/v1/completions", json={"prompt": "word " * 1100, "stream": True})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")
        await made.idle()


# ------------------------------------------------------------------------------------------- the fast connection


async def talk(made: Rig, data: bytes, until_eof: bool = True) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", made.listener.port)
    writer.write(data)
    try:
        async with asyncio.timeout(60):
            return await reader.read() if until_eof else await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


async def test_pipelined_requests_are_answered_in_order(fast: Rig) -> None:
    slow = raw("POST", "/v1/completions", orjson.dumps({"prompt": "a", "max_tokens": 3, "stream": True}))
    whole = raw("POST", "/v1/completions", orjson.dumps({"prompt": "b", "max_tokens": 1}))
    last = raw("GET", "/version", b"", "connection: close")
    got = await talk(fast, slow + whole + raw("GET", "/health/live") + last)
    order = [got.index(mark) for mark in (b"[DONE]", b'"total_tokens":2', b'{"live":true}', b'"transport"')]
    assert order == sorted(order)
    assert got.count(b"HTTP/1.1 200 OK") == 4


async def test_many_pipelined_requests_pass_the_bound_of_what_is_held(fast: Rig) -> None:
    requests = raw("POST", "/v1/completions", orjson.dumps({"prompt": "a", "max_tokens": 1})) * 100
    got = await talk(fast, requests + raw("GET", "/version", b"", "connection: close"))
    assert got.count(b"HTTP/1.1 200 OK") == 101


async def test_a_client_that_asks_and_never_reads_is_not_answered_for_ever(tmp_path: Path) -> None:
    listener = ListenerConfig(port=0, request_read_s=0.2)
    async with rig(tmp_path, pair(tmp_path), listener=listener) as made:
        _, writer = await asyncio.open_connection("127.0.0.1", made.listener.port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        request = raw("GET", "/metrics") * 50
        # uvloop raises RuntimeError where the handle is closed already.
        with pytest.raises((ConnectionError, RuntimeError)):
            async with asyncio.timeout(60):
                while True:
                    writer.write(request)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        writer.transport.abort()
        assert (await made.client.get("/health")).status_code == 200


async def test_a_models_name_may_be_quoted(served: Rig) -> None:
    answer = await served.client.get("/v1/models/al%69as")
    assert answer.json()["id"] == "alias"


async def test_a_path_cannot_forge_a_log_line(
    fast: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(fast.app, "_model", breaks)
    got = await talk(fast, raw("GET", "/v1/models/x%0d%0aforged", b"", "connection: close"))
    assert got.startswith(b"HTTP/1.1 500 ")
    (line,) = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert line == r"GET '/v1/models/x\r\nforged' failed"


async def test_a_connection_is_used_again(fast: Rig) -> None:
    async with httpx.AsyncClient(base_url=fast.url, limits=httpx.Limits(max_connections=1)) as client:
        for stream in (True, False, True):
            answer = await client.post("/v1/chat/completions", json=fast.chat(stream=stream))
            assert answer.status_code == 200
            assert "connection" not in answer.headers


async def test_http_1_0_gets_a_plain_body_that_ends_with_the_connection(fast: Rig) -> None:
    body = orjson.dumps({"prompt": "a", "max_tokens": 2, "stream": True})
    got = await talk(fast, raw("POST", "/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, payload = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert payload.startswith(b"data: {")
    assert payload.endswith(b"data: [DONE]\n\n")


async def test_100_continue(fast: Rig) -> None:
    body = orjson.dumps({"prompt": "a", "max_tokens": 1})
    head = raw("POST", "/v1/completions", body, "expect: 100-continue").removesuffix(body)
    assert await talk(fast, head, until_eof=False) == b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_head_has_no_body(fast: Rig) -> None:
    got = await talk(fast, raw("HEAD", "/v1/models", b"", "connection: close"))
    assert got.startswith(b"HTTP/1.1 200 OK")
    assert got.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"complete nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
        # 2,000 headers of 1 and 0 bytes count (1 + 32) x 2,000 = 66,000 bytes
        (b"GET / HTTP/1.1\r\n" + b"x:\r\n" * 2000 + b"\r\n", b"431"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999\r\n\r\n", b"413"),
    ],
)
async def test_what_is_no_http_is_refused_in_openais_shape(fast: Rig, data: bytes, status: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", fast.listener.port)
    writer.write(data)
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split(b" ")[1] == status
        assert b"connection: close" in head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert set(json.loads(await reader.readexactly(length))) == {"error"}
    writer.close()


async def test_a_time_in_which_we_stood_still_does_not_close_a_connection(tmp_path: Path) -> None:
    listener = ListenerConfig(port=0, keep_alive_s=3.0)
    async with rig(tmp_path, pair(tmp_path), listener=listener) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.listener.port)
        await asyncio.sleep(0.1)
        time.sleep(4.5)  # noqa: ASYNC251
        await asyncio.sleep(0.1)  # the listener's sweep has had its turn
        writer.write(raw("GET", "/version"))
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    listener = ListenerConfig(port=0, keep_alive_s=0.1, request_read_s=0.1)
    async with rig(tmp_path, pair(tmp_path), listener=listener) as made:
        assert b"HTTP/1.1 200 OK" in await talk(made, raw("GET", "/version"))
        assert await talk(made, b"POST /v1/completions HTTP/1.1\r\ncontent-le") == b""  # a slow sender
