"""Streams: chunks, every way they can end, and that leaving early tells the server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from typing import Any

import pytest

import sluice
from sluice import AsyncSluice, Sluice, Timeouts
from tests.sluice.conftest import FAST_RETRY
from tests.sluice.drivers import Driver
from tests.sluice.server import (
    WAIT_S,
    ContractServer,
    Request,
    Wire,
    answers,
    api_error,
    chat_chunk,
    streams,
)

CHAT = "POST /v1/chat/completions"
RETRY = {"retry": FAST_RETRY}
ANSWER = {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}


def texts(chunks: list[Any]) -> list[str]:
    return [chunk.text for chunk in chunks if chunk.text]


def test_chunks_usage_and_finish_reason(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, streams("Hel", "lo", usage=(5, 2)))
    chunks, error, stream = driver.stream(server.url, "stream_chat", "x", max_tokens=2)
    assert error is None
    assert texts(chunks) == ["Hel", "lo"]
    assert stream.usage.completion_tokens == 2
    assert (stream.finish_reason, stream.request_id) == ("stop", "req-stream")
    request = server.requests[0]
    assert request.json["stream"] is True
    assert request.json["stream_options"] == {"include_usage": True}
    assert request.headers["accept"] == "text/event-stream"


def test_completion_chunks(server: ContractServer, driver: Driver) -> None:
    async def handle(request: Request, wire: Wire) -> None:
        await wire.start_stream()
        await wire.event({"id": "c", "choices": [{"index": 1, "text": "B"}, {"index": 0, "text": "A"}]})
        await wire.end_stream()

    server.on("POST /v1/completions", handle)
    chunks, error, _ = driver.stream(server.url, "stream_completions", ["p", "q"], n=1)
    assert error is None
    assert texts(chunks) == ["A"]
    assert [choice.text for choice in chunks[0].choices] == ["B", "A"]
    assert server.requests[0].json["prompt"] == ["p", "q"]


def test_stream_true_is_the_same_stream(server: ContractServer, client: Sluice) -> None:
    server.on(CHAT, streams("Hel", "lo", usage=(5, 2)))
    with client.chat("x", stream=True, max_tokens=2) as chunks:
        assert texts(list(chunks)) == ["Hel", "lo"]
    server.on("POST /v1/completions", streams(usage=(1, 0)))
    with client.completions("p", stream=True, max_tokens=2) as pieces:
        assert list(pieces)[-1].usage is not None
    assert [request.json["stream"] for request in server.requests] == [True, True]
    server.on(CHAT, answers(200, ANSWER))
    assert client.chat("x", stream=False, max_tokens=2).text == "hi"
    assert "stream" not in server.requests[-1].json


async def test_stream_true_is_awaited_by_the_async_client(server: ContractServer) -> None:
    server.on(CHAT, streams("Hel", "lo", usage=(5, 2)))
    async with AsyncSluice(server.url) as client:
        async with await client.chat("x", stream=True, max_tokens=2) as chunks:
            assert texts([chunk async for chunk in chunks]) == ["Hel", "lo"]
        server.on("POST /v1/completions", streams(usage=(1, 0)))
        async with await client.completions("p", stream=True, max_tokens=2) as pieces:
            assert [piece async for piece in pieces][-1].usage is not None


def test_bytes_may_be_cut_anywhere(server: ContractServer, driver: Driver) -> None:
    payload = ": keep-alive\r\n\r\nevent: x\r\ndata: " + json.dumps(
        chat_chunk("größe 🙂"), ensure_ascii=False
    )
    raw = (payload + "\r\n\r\ndata: [DONE]\r\n\r\n").encode()

    async def handle(request: Request, wire: Wire) -> None:
        await wire.start_stream()
        for position in range(len(raw)):
            await wire.piece(raw[position : position + 1])
        await wire.end_stream(done=False)

    server.on(CHAT, handle)
    chunks, error, _ = driver.stream(server.url, "stream_chat", "x")
    assert error is None
    assert texts(chunks) == ["größe 🙂"]


def test_an_error_event_comes_after_the_chunks_before_it(server: ContractServer, driver: Driver) -> None:
    async def handle(request: Request, wire: Wire) -> None:
        await wire.start_stream(x_request_id="req-5")
        text = "".join(
            f"data: {json.dumps(content)}\n\n"
            for content in (
                chat_chunk("a"),
                api_error("decode engine d1 died", type="engine_failed", code="engine_died"),
            )
        )
        await wire.piece(text.encode())  # both in one write
        await wire.end_stream(done=False)

    server.on(CHAT, handle)
    chunks, error, _ = driver.stream(server.url, "stream_chat", "x", settings=RETRY)
    assert texts(chunks) == ["a"]
    assert isinstance(error, sluice.EngineFailedError)
    assert (error.message, error.reason, error.status_code) == ("decode engine d1 died", "engine_died", None)
    assert error.request_id == "req-5"
    assert len(server.requests) == 1, "a stream that has begun is never retried"


def test_text_that_mentions_an_error_is_text(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, streams('{"error": {"message": "no"}}'))
    chunks, error, _ = driver.stream(server.url, "stream_chat", "x")
    assert error is None
    assert texts(chunks) == ['{"error": {"message": "no"}}']


async def end_without_done(request: Request, wire: Wire) -> None:
    await wire.start_stream()
    await wire.event(chat_chunk("a"))
    await wire.end_stream(done=False)


async def cut_between_events(request: Request, wire: Wire) -> None:
    await wire.start_stream()
    await wire.event(chat_chunk("a"))
    wire.cut()


async def cut_inside_event(request: Request, wire: Wire) -> None:
    await wire.start_stream()
    await wire.event(chat_chunk("a"))
    await wire.piece(b'data: {"id": "c')
    wire.cut()


@pytest.mark.parametrize("handler", [end_without_done, cut_between_events, cut_inside_event])
def test_a_cut_stream_is_never_taken_for_a_complete_one(
    server: ContractServer, driver: Driver, handler: Any
) -> None:
    server.on(CHAT, handler)
    chunks, error, _ = driver.stream(server.url, "stream_chat", "x", settings=RETRY)
    assert texts(chunks) == ["a"]
    assert isinstance(error, sluice.StreamInterruptedError)
    assert not error.retryable
    assert len(server.requests) == 1


@pytest.mark.parametrize("payload", ["not json", '{"choices": 3}', "[]"])
def test_an_event_that_is_no_chunk(server: ContractServer, driver: Driver, payload: str) -> None:
    async def handle(request: Request, wire: Wire) -> None:
        await wire.start_stream()
        await wire.event(chat_chunk("a"))
        await wire.event(payload)
        await wire.end_stream()

    server.on(CHAT, handle)
    chunks, error, _ = driver.stream(server.url, "stream_chat", "x")
    assert texts(chunks) == ["a"]
    assert isinstance(error, sluice.InvalidResponseError)


def test_an_answer_that_is_no_event_stream(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, answers(200, b"<html>login</html>", content_type="text/html"))
    _, error, _ = driver.stream(server.url, "stream_chat", "x")
    assert isinstance(error, sluice.InvalidResponseError)
    assert "text/html" in str(error)


def test_a_refusal_before_the_first_byte_is_retried(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, answers(429, api_error("full"), retry_after="0"), streams("a"))
    chunks, error, _ = driver.stream(server.url, "stream_chat", "x", settings=RETRY)
    assert error is None
    assert texts(chunks) == ["a"]
    assert len(server.requests) == 2


def test_bad_input_is_known_before_any_chunk(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, answers(400, api_error("too long", param="messages")))
    chunks, error, _ = driver.stream(server.url, "stream_chat", "x", settings=RETRY)
    assert chunks == []
    assert isinstance(error, sluice.BadRequestError)
    assert error.param == "messages"


async def endless(request: Request, wire: Wire) -> None:
    """Streams until the client leaves, and tells the test."""
    await wire.start_stream()
    leaves = asyncio.ensure_future(wire.reader.read(1))
    # either end of the connection may be the first that knows
    with contextlib.suppress(ConnectionError):
        while not leaves.done():
            await wire.event(chat_chunk("a"))
            await asyncio.wait([leaves], timeout=0.01)
        leaves.result()
    wire.server.client_left.set()
    wire.cut()


async def one_then_silence(request: Request, wire: Wire) -> None:
    await wire.start_stream()
    await wire.event(chat_chunk("a"))
    await wire.until_client_leaves()


def test_leaving_the_block_closes_the_connection(server: ContractServer, client: Sluice) -> None:
    server.on(CHAT, endless)
    with client.stream_chat("x") as stream:
        assert next(stream).text == "a"
    assert server.client_left.wait(WAIT_S)
    assert list(stream) == []


def test_an_exception_in_the_block_closes_the_connection(server: ContractServer, client: Sluice) -> None:
    server.on(CHAT, endless)
    stream = client.stream_chat("x")
    with pytest.raises(ZeroDivisionError), stream:
        raise ZeroDivisionError(next(stream).text)
    assert server.client_left.wait(WAIT_S)


def test_a_forgotten_stream_is_closed_with_a_warning(server: ContractServer, client: Sluice) -> None:
    server.on(CHAT, one_then_silence)

    def forget() -> None:
        assert next(client.stream_chat("x")).text == "a"
        gc.collect()

    with pytest.warns(ResourceWarning, match="with block"):
        forget()
    assert server.client_left.wait(WAIT_S)


async def test_leaving_the_async_block_closes_the_connection(server: ContractServer) -> None:
    server.on(CHAT, endless)
    async with AsyncSluice(server.url) as client, client.stream_chat("x") as stream:
        assert (await anext(stream)).text == "a"
        await stream.close()
        assert await asyncio.to_thread(server.client_left.wait, WAIT_S)
        assert [chunk async for chunk in stream] == []


async def test_cancelling_the_reader_closes_the_connection(server: ContractServer) -> None:
    server.on(CHAT, one_then_silence)
    received = asyncio.Event()

    async def read(client: AsyncSluice) -> None:
        async with client.stream_chat("x") as stream:
            async for _ in stream:
                received.set()

    async with AsyncSluice(server.url) as client:
        task = asyncio.create_task(read(client))
        await received.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.client_left.wait, WAIT_S)


async def test_cancelling_a_call_closes_the_connection(server: ContractServer) -> None:
    async def silence(request: Request, wire: Wire) -> None:
        await wire.until_client_leaves()

    server.on(CHAT, silence)
    async with AsyncSluice(server.url) as client:
        task = asyncio.create_task(client.chat("x"))
        assert await asyncio.to_thread(server.arrived.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.client_left.wait, WAIT_S)


def test_silence_inside_a_stream_is_a_read_timeout(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, one_then_silence)
    chunks, error, _ = driver.stream(
        server.url, "stream_chat", "x", settings={"timeouts": Timeouts(read_s=4.0)}
    )
    assert texts(chunks) == ["a"]
    assert isinstance(error, sluice.RequestTimeoutError)
    assert error.phase == "read"
    assert server.client_left.wait(WAIT_S)


def test_total_timeout_ends_a_stream_that_never_pauses(server: ContractServer, driver: Driver) -> None:
    server.on(CHAT, endless)
    chunks, error, _ = driver.stream(server.url, "stream_chat", "x", timeout_s=3.0)
    assert len(chunks) > 1
    assert isinstance(error, sluice.RequestTimeoutError)
    assert error.phase == "total"
    assert server.client_left.wait(WAIT_S)


def test_nothing_is_sent_before_the_stream_is_used(server: ContractServer, client: Sluice) -> None:
    server.on(CHAT, streams("a"))
    stream = client.stream_chat("x")
    assert server.requests == []
    assert [chunk.text for chunk in stream] == ["a", ""]
    assert len(server.requests) == 1


async def test_many_streams_at_once(server: ContractServer) -> None:
    server.on(CHAT, streams(*"abcdefgh"))

    async def read(client: AsyncSluice) -> str:
        async with client.stream_chat("x") as stream:
            return "".join([chunk.text async for chunk in stream])

    async with AsyncSluice(server.url) as client:
        assert await asyncio.gather(*(read(client) for _ in range(50))) == ["abcdefgh"] * 50


def test_tool_calls_come_in_pieces(server: ContractServer, driver: Driver) -> None:
    def piece(**function: str) -> dict[str, Any]:
        call = {"index": 0, "id": "t1", "type": "function", "function": function}
        return {**chat_chunk(None), "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    async def handle(request: Request, wire: Wire) -> None:
        await wire.start_stream()
        await wire.event(piece(name="weather", arguments=""))
        await wire.event(piece(arguments='{"city": "Rome"}'))
        await wire.end_stream()

    server.on(CHAT, handle)
    chunks, error, _ = driver.stream(server.url, "stream_chat", "x")
    assert error is None
    calls = [chunk.choices[0].delta.tool_calls[0].function for chunk in chunks]
    assert (calls[0].name, calls[1].arguments) == ("weather", '{"city": "Rome"}')
