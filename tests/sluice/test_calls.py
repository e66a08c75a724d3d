"""Calls that are answered in one piece: what is sent, what comes back, which error, which retries."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

import sluice
from sluice import SLO, ChatMessage, RetryPolicy, Sluice, Timeouts
from tests.sluice.conftest import FAST_RETRY
from tests.sluice.drivers import Driver
from tests.sluice.server import (
    WAIT_S,
    ContractServer,
    Request,
    Wire,
    answers,
    api_error,
    chat_answer,
    streams,
)

CHAT = "POST /v1/chat/completions"
NO_RETRY = {"retry": RetryPolicy(max_retries=0)}
RETRY = {"retry": FAST_RETRY}


def test_chat_sends_every_option_and_returns_the_typed_answer(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, answers(200, chat_answer("Hi", system_fingerprint="f"), x_request_id="req-7"))
    answer = driver.call(
        server.url,
        "chat",
        "Say hi",
        model="m",
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        seed=1,
        stop=["x"],
        n=1,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": -1.0},
        response_format={"type": "json_object"},
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="auto",
        priority="batch",
        slo=SLO(ttft_ms=200, tpot_ms=50),
        session="s1",
        migrate=False,
        server_timeout_s=30,
        extra_body={"new_field": 1},
        extra_headers={"X-Trace": "t"},
    )
    (request,) = server.requests
    assert request.json == {
        "messages": [{"role": "user", "content": "Say hi"}],
        "model": "m",
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 1,
        "stop": ["x"],
        "n": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"5": -1.0},
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "priority": "batch",
        "slo": {"ttft_ms": 200, "tpot_ms": 50},
        "session": "s1",
        "new_field": 1,
    }
    assert request.headers["x-trace"] == "t"
    assert request.headers["x-sluice-migrate"] == "off"
    assert request.headers["x-sluice-timeout-s"] == "30.0"
    assert request.headers["content-type"] == "application/json"
    assert (answer.text, answer.choices[0].finish_reason, answer.request_id) == ("Hi", "stop", "req-7")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 2)
    assert answer.model_extra == {"system_fingerprint": "f"}


def test_what_is_not_said_is_not_sent(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, answers(200, chat_answer()))
    driver.call(server.url, "chat", "Hi", temperature=None, model=None)
    assert server.requests[0].json == {"messages": [{"role": "user", "content": "Hi"}]}
    assert "x-sluice-migrate" not in server.requests[0].headers
    assert "x-sluice-timeout-s" not in server.requests[0].headers


def test_an_answer_says_where_another_engine_went_on(server: ContractServer, driver: Driver) -> None:
    note = {"migrations": 1, "resumed": [{"index": 0, "after_tokens": 37}]}
    server.on(CHAT, answers(200, {**chat_answer(), "sluice": note}))
    answer = driver.call(server.url, "chat", "Hi", migrate=True)
    assert answer.sluice.model_dump() == note
    assert server.requests[0].headers["x-sluice-migrate"] == "on"


def test_an_answer_can_be_sent_back_as_part_of_the_conversation(
    server: ContractServer, client: Sluice
) -> None:
    server.on(CHAT, answers(200, chat_answer("Berlin")))
    message = client.chat("Capital of Germany?").message
    assert isinstance(message, ChatMessage)
    client.chat(
        [{"role": "user", "content": "Capital of Germany?"}, message, {"role": "user", "content": "Sure?"}]
    )
    assert server.requests[1].json["messages"][1] == {"role": "assistant", "content": "Berlin"}


def test_completions(server: ContractServer, driver: Driver) -> None:
    logprobs = {"tokens": [" a"], "token_logprobs": [-0.5], "top_logprobs": None, "text_offset": [0]}
    choice = {"index": 0, "text": " a", "finish_reason": "length", "logprobs": logprobs}
    server.on("POST /v1/completions", answers(200, {"id": "c", "model": "m", "choices": [choice]}))
    answer = driver.call(server.url, "completions", [1, 2, 3], logprobs=1, echo=False)
    assert server.requests[0].json == {"prompt": [1, 2, 3], "logprobs": 1, "echo": False}
    assert answer.text == " a"
    assert answer.choices[0].logprobs.token_logprobs == [-0.5]


def test_the_client_s_model_is_a_default(server: ContractServer) -> None:
    server.on(CHAT, answers(200, chat_answer()))
    with Sluice(server.url, model="default") as client:
        client.chat("a")
        client.chat("a", model="other")
    assert [request.json["model"] for request in server.requests] == ["default", "other"]


def test_non_ascii_text_survives_both_ways(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, answers(200, chat_answer("größer 🙂")))
    assert driver.call(server.url, "chat", "日本語 🙂").text == "größer 🙂"
    assert server.requests[0].json["messages"][0]["content"] == "日本語 🙂"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_base_url_may_end_with_v1(server: ContractServer, suffix: str) -> None:
    server.on("GET /v1/models", answers(200, {"object": "list", "data": [{"id": "m", "max_model_len": 8}]}))
    with Sluice(server.url + suffix) as client:
        (model,) = client.models()
    assert (model.id, model.max_model_len) == ("m", 8)


def test_environment_names_server_and_key(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_BASE_URL", server.url)
    monkeypatch.setenv("SLUICE_API_KEY", "secret")
    server.on("GET /version", answers(200, {"version": "1.2", "transport": "sockets", "vllm": "0.32"}))
    with Sluice() as client:
        version = client.version()
        assert "secret" not in repr(client._settings)
    assert (version.version, version.transport, version.model_extra) == ("1.2", "sockets", {"vllm": "0.32"})
    assert server.requests[0].headers["authorization"] == "Bearer secret"


def test_loopback_does_not_go_through_a_proxy(
    server: ContractServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    server.on("GET /version", answers(200, {"version": "1"}))
    with Sluice(server.url, retry=RetryPolicy(max_retries=0)) as client:
        assert client.version().version == "1"


def test_without_a_key_no_authorization_is_sent(server: ContractServer, client: Sluice) -> None:
    server.on("GET /version", answers(200, {"version": "1"}))
    client.version()
    assert "authorization" not in server.requests[0].headers


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://[::1"])
def test_an_impossible_base_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(sluice.ConfigurationError, match="base URL"):
        Sluice(url)


def test_a_key_that_no_header_can_carry_is_refused_at_once() -> None:
    with pytest.raises(sluice.ConfigurationError, match="API key"):
        Sluice(api_key="a\nb")


STATUS = {
    "ready": True,
    "model": "m",
    "router": {"connected": True, "policy": {"prefill": "rr", "decode": "jsq"}},
    "engines": [{"id": "p0", "role": "prefill", "state": "ready", "kv_usage": 0.25, "rank": 3}],
    "requests": {"in_flight": 2, "queued": 1, "pool": 0},
    "leases": 1,
    "uptime_s": 5.0,
}


def test_status_is_typed_and_keeps_unknown_fields(server: ContractServer, driver: Driver) -> None:
    server.on("GET /sluice/status", answers(200, STATUS))
    status = driver.call(server.url, "status")
    assert status.ready
    assert status.router.policy.decode == "jsq"
    assert (status.engines[0].kv_usage, status.engines[0].model_extra) == (0.25, {"rank": 3})
    assert status.requests.queued == 1
    assert status.model_extra == {"uptime_s": 5.0}


def test_status_needs_ready_only(server: ContractServer, driver: Driver) -> None:
    server.on("GET /sluice/status", answers(200, {"ready": False}))
    status = driver.call(server.url, "status")
    assert (status.ready, status.engines, status.router) == (False, [], None)


def test_metrics(server: ContractServer, driver: Driver) -> None:
    text = b'# TYPE sluice_requests_total counter\nsluice_requests_total{code="200"} 3\n'
    server.on("GET /metrics", answers(200, text, content_type="text/plain"))
    assert driver.call(server.url, "metrics").total("sluice_requests_total", code="200") == 3


def test_health_of_a_server_that_is_ready(server: ContractServer, driver: Driver) -> None:
    server.on("GET /health/live", answers(200, b"ok"))
    server.on("GET /health/ready", answers(200, b"ok"))
    assert driver.call(server.url, "health").model_dump() == {"live": True, "ready": True, "detail": None}


def test_health_of_a_server_that_is_not_ready_is_an_answer(server: ContractServer, driver: Driver) -> None:
    server.on("GET /health/live", answers(200, b"ok"))
    server.on("GET /health/ready", answers(503, api_error("no decode engine"), retry_after="1"))
    health = driver.call(server.url, "health", settings=RETRY)
    assert health.model_dump() == {"live": True, "ready": False, "detail": "no decode engine"}
    assert len(server.requests) == 2, "a probe is not retried"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, sluice.BadRequestError),
        (401, sluice.AuthenticationError),
        (403, sluice.AuthenticationError),
        (404, sluice.NotFoundError),
        (413, sluice.BadRequestError),
        (422, sluice.BadRequestError),
        (429, sluice.RateLimitedError),
        (500, sluice.ServerError),
        (502, sluice.ServerError),
        (503, sluice.UnavailableError),
    ],
)
def test_error_statuses_are_typed(
    server: ContractServer, driver: Driver, status: int, kind: type[sluice.ApiError]
) -> None:
    body = api_error("why", type="t", param="max_tokens", code="c")
    server.on(CHAT, answers(status, body, x_request_id="req-9"))
    with pytest.raises(kind) as caught:
        driver.call(server.url, "chat", "x", settings=NO_RETRY)
    error = caught.value
    assert type(error) is kind
    assert (error.status_code, error.message, error.param, error.reason) == (status, "why", "max_tokens", "c")
    assert error.request_id == "req-9"
    for part in (str(status), "why", "max_tokens", "req-9"):
        assert part in str(error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>Bad gateway</html>", "<html>Bad gateway</html>"),
        (b"", "the server answered 502 without a message"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "plain"}', "plain"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"[1]", "[1]"),
        (b'{"error": {"message": 7}}', '{"message": 7}'),
        # nested more deeply than Python's calls
        (b"[" * 100_000, "[" * 500),
    ],
)
def test_error_bodies_in_other_shapes(
    server: ContractServer, client: Sluice, body: bytes, message: str
) -> None:
    server.on(CHAT, answers(502, body))
    with pytest.raises(sluice.ServerError) as caught:
        client.chat("x")
    assert caught.value.message == message


@pytest.mark.parametrize("body", [b"not json", b"{}", b'{"choices": 5}', b'{"choices": [', b"\xff"])
def test_an_answer_that_is_not_one_is_said_to_be(server: ContractServer, driver: Driver, body: bytes) -> None:
    server.on(CHAT, answers(200, body))
    with pytest.raises(sluice.InvalidResponseError, match="/v1/chat/completions"):
        driver.call(server.url, "chat", "x")
    assert len(server.requests) == 1


def test_a_redirect_is_not_followed_but_named(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, answers(308, b"", location="https://elsewhere.example/"))
    with pytest.raises(sluice.InvalidResponseError, match=r"elsewhere\.example"):
        driver.call(server.url, "chat", "x", settings=RETRY)


@pytest.mark.parametrize("status", [429, 503])
def test_a_refused_request_is_sent_again(server: ContractServer, driver: Driver, status: int) -> None:
    refusal = answers(status, api_error("queue full"), retry_after="0")
    server.on(CHAT, refusal, refusal, answers(200, chat_answer("at last")))
    assert driver.call(server.url, "chat", "x", settings=RETRY).text == "at last"
    assert len(server.requests) == 3
    assert len({request.body for request in server.requests}) == 1


def test_retries_end(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, answers(429, api_error("queue full", code="queue_full"), retry_after="0"))
    with pytest.raises(sluice.RateLimitedError) as caught:
        driver.call(server.url, "chat", "x", settings=RETRY)
    assert len(server.requests) == 1 + FAST_RETRY.max_retries
    assert (caught.value.reason, caught.value.retry_after_s) == ("queue_full", 0.0)


def test_what_will_never_be_admitted_is_not_sent_again(server: ContractServer, driver: Driver) -> None:
    refusal = api_error("Request too large", code="rate_limit_exceeded")
    server.on(CHAT, answers(429, refusal, x_should_retry="false"))
    with pytest.raises(sluice.RateLimitedError) as caught:
        driver.call(server.url, "chat", "x", settings=RETRY)
    assert not caught.value.retryable
    assert len(server.requests) == 1


def test_a_long_retry_after_is_the_caller_s_to_wait_for(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, answers(429, api_error("quota"), retry_after="3600"))
    with pytest.raises(sluice.RateLimitedError) as caught:
        driver.call(server.url, "chat", "x", settings=RETRY)
    assert caught.value.retry_after_s == 3600
    assert len(server.requests) == 1


def test_a_retry_after_beyond_the_total_time_is_not_waited_for(
    server: ContractServer, driver: Driver
) -> None:
    server.on(CHAT, answers(503, api_error("busy"), retry_after="50"))
    with pytest.raises(sluice.UnavailableError):
        driver.call(server.url, "chat", "x", settings=RETRY, timeout_s=30.0)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 500, 502])
def test_other_errors_are_not_retried(server: ContractServer, driver: Driver, status: int) -> None:
    server.on(CHAT, answers(status, api_error("no")))
    with pytest.raises(sluice.ApiError):
        driver.call(server.url, "chat", "x", settings=RETRY)
    assert len(server.requests) == 1


async def cut_before_answer(request: Request, wire: Wire) -> None:
    wire.cut()


async def cut_inside_body(request: Request, wire: Wire) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    wire.cut()


async def not_http(request: Request, wire: Wire) -> None:
    await wire.send(b"SSH-2.0-OpenSSH_9.2\r\n")
    wire.cut()


@pytest.mark.parametrize("handler", [cut_before_answer, cut_inside_body, not_http])
def test_a_broken_connection_is_not_retried_for_a_generation(
    server: ContractServer, driver: Driver, handler: Any
) -> None:
    server.on(CHAT, handler, answers(200, chat_answer()))
    with pytest.raises(sluice.ConnectionFailedError, match="broke"):
        driver.call(server.url, "chat", "x", settings=RETRY)
    assert len(server.requests) == 1


def test_a_broken_connection_is_retried_for_a_question_without_effect(
    server: ContractServer, driver: Driver
) -> None:
    server.on("GET /version", cut_before_answer, answers(200, {"version": "1"}))
    assert driver.call(server.url, "version", settings=RETRY).version == "1"
    assert len(server.requests) == 2


def test_nobody_there(driver: Driver) -> None:
    with socket.socket() as unused:
        # A port that is bound but not listened on refuses connections.
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(sluice.ConnectionFailedError, match=url) as caught:
            driver.call(url, "models", settings=RETRY)
    assert caught.value.retryable


def test_a_server_that_comes_up_late_is_reached(server: ContractServer) -> None:
    server.on("GET /version", answers(200, {"version": "1"}))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"

        class Late(RetryPolicy):
            def delay_s(self, *args: Any, **kwargs: Any) -> float | None:
                client._settings = replaced  # the address answers from now on
                return super().delay_s(*args, **kwargs)

        with Sluice(server.url) as other:
            replaced = other._settings
        with Sluice(url, retry=Late(base_delay_s=0.0)) as client:
            assert client.version().version == "1"


async def silence(request: Request, wire: Wire) -> None:
    await wire.until_client_leaves()


def test_read_timeout(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, silence)
    with pytest.raises(sluice.RequestTimeoutError) as caught:
        driver.call(server.url, "chat", "x", settings={**RETRY, "timeouts": Timeouts(read_s=0.1)})
    assert (caught.value.phase, caught.value.retryable) == ("read", False)
    assert server.client_left.wait(WAIT_S), "the server must learn that nobody waits any more"
    assert len(server.requests) == 1


async def trickle(request: Request, wire: Wire) -> None:
    await wire.send(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    while True:
        await wire.piece(b" ")
        try:
            await asyncio.wait_for(wire.reader.read(1), 0.02)
        except TimeoutError:
            continue
        wire.server.client_left.set()
        return wire.cut()


def test_total_timeout_ends_an_answer_that_never_pauses(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, trickle)
    with pytest.raises(sluice.RequestTimeoutError, match=r"total of 3 s") as caught:
        driver.call(server.url, "chat", "x", timeout_s=3.0)
    assert caught.value.phase == "total"
    assert server.client_left.wait(WAIT_S)


def test_total_timeout_includes_the_wait_for_headers(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, silence)
    with pytest.raises(sluice.RequestTimeoutError) as caught:
        driver.call(server.url, "chat", "x", settings={"timeouts": Timeouts(total_s=0.2)})
    assert caught.value.phase == "total"


def test_connections_are_reused(server: ContractServer, client: Sluice) -> None:
    server.on(CHAT, answers(200, chat_answer()), streams("a"), answers(429, api_error("no"), retry_after="0"))
    client.chat("x")
    with client.stream_chat("x") as stream:
        assert [chunk.text for chunk in stream] == ["a", ""]
    with pytest.raises(sluice.RateLimitedError):
        client.chat("x")
    assert {request.connection for request in server.requests} == {1}


@pytest.mark.parametrize("name", ["connect_s", "read_s", "total_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_timeouts_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Timeouts(**{name: value})


def test_an_impossible_timeout_of_a_call_is_refused(server: ContractServer, driver: Driver) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        driver.call(server.url, "chat", "x", timeout_s=-1.0)
    assert server.requests == []
