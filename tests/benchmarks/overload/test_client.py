"""The load client: each answer's times and end, on a real server of this process, and what a problem means."""

import asyncio
import json
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import pytest
import uvicorn

from benchmarks.live.servers import free_ports
from benchmarks.overload.client import sent
from benchmarks.overload.load import Work
from benchmarks.overload.outcomes import end_of
from tests.benchmarks.overload.made import work


def event(choice: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


TEXT = event({"delta": {"content": "word"}, "finish_reason": None})
LAST = event({"delta": {"content": "word"}, "finish_reason": "length"}) + b"data: [DONE]\n\n"
REFUSAL = {"error": {"message": "so many words that the code comes late " * 10, "code": "ttft_objective"}}


async def application(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    """Answers as the prompt says: whole, with a text and then nothing, not at all, or with a refusal."""
    message = await receive()
    asked = json.loads(message["body"])["messages"][0]["content"]
    headers = dict(scope["headers"])
    if asked == "refuse" or headers.get(b"authorization") == b"Bearer wrong":
        body = json.dumps(REFUSAL, separators=(",", ":")).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 429, "headers": [length]})
        await send({"type": "http.response.body", "body": body})
        return
    if asked == "never":
        await receive()
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": TEXT, "more_body": True})
    if asked == "half":
        await receive()
        return
    await asyncio.sleep(0.05)
    await send({"type": "http.response.body", "body": LAST})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    (found,) = free_ports(1)
    server = uvicorn.Server(
        uvicorn.Config(application, host="127.0.0.1", port=found, lifespan="off", log_level="warning")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    yield found
    server.should_exit = True
    thread.join()


def of(text: str, at_s: float = 0.0) -> Work:
    made = work(at_s)
    return Work(at_s, made.request_class, made.tenant, made.prompt_tokens, made.output_tokens, text)


def form(one: Work) -> tuple[bytes, Sequence[str]]:
    return json.dumps({"messages": [{"role": "user", "content": one.text}]}).encode(), ()


def test_every_answer_has_its_times_and_its_end(port: int) -> None:
    load = [of("whole", 0.1), of("refuse"), of("half"), of("never"), of("whole", 0.4)]
    found = sent(port, load, form, 1.5)
    assert [one.end for one in found] == ["whole", "refused", "cut", "cut", "whole"]
    assert [one.work for one in found] == load
    whole, refusal, half, never, later = found
    for one in (whole, later):
        assert one.first_s is not None
        # uvloop's timers may be early by a millisecond
        assert one.work.at_s - 2e-3 <= one.sent_s <= one.first_s < one.ended_s < 1.5
    # the code stands behind more text than a problem shows
    assert refusal.reason == "ttft_objective" and refusal.first_s is None
    assert half.first_s is not None and half.first_s < 1.5 <= half.ended_s
    assert never.first_s is None and never.ended_s >= 1.5


def test_a_request_has_the_head_that_its_side_wants(port: int) -> None:
    def keyed(one: Work) -> tuple[bytes, Sequence[str]]:
        return form(one)[0], ["authorization: Bearer wrong"]

    (found,) = sent(port, [of("whole")], keyed, 2.0)
    assert found.end == "refused"


def test_a_server_that_is_not_there_fails_each_request() -> None:
    (free,) = free_ports(1)
    found = sent(free, [of("whole"), of("whole")], form, 1.0)
    assert [(one.end, one.reason) for one in found] == [
        ("failed", "no connection: ConnectionRefusedError")
    ] * 2


@pytest.mark.parametrize(
    ("problem", "body", "end"),
    [
        (None, b"", ("whole", "")),
        ("status 429: {..", b'{"error":{"message":"..","code":"late"}}', ("refused", "late")),
        ("status 503: {..", b'{"error":{"message":"busy","code":503}}', ("refused", "status 503")),
        ("status 408: ", b"", ("refused", "status 408")),
        (
            "status 500: Transparent ..",
            b"Transparent proxy request failed: Network error: Prefill server .. returned 503 ..",
            ("refused", "status 503 of a prefill engine"),
        ),
        ("status 500: Internal", b"Internal error", ("failed", "status 500")),
        ("status 401: {..", b'{"error":{"code":"invalid_api_key"}}', ("failed", "status 401 invalid_api_key")),
        # the body is that of an earlier answer on the connection
        (
            "connection ended: closed by the server",
            b'{"error":{"code":"late"}}',
            ("failed", "connection ended: closed by the server"),
        ),
        (
            'error event: {"message": "The engine is currently busy", "code": 503}',
            b"",
            ("refused", "status 503 in the stream"),
        ),
        ('error event: {"code": "engine_dead"}', b"", ("failed", 'error event: {"code": "engine_dead"} engine_dead')),
    ],
)  # fmt: skip
def test_a_problem_says_how_an_answer_ended(problem: str | None, body: bytes, end: tuple[str, str]) -> None:
    assert end_of(problem, body) == end
