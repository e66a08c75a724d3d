"""The ticking source: its steps on the sim engines' clock, its answers, and both of its servers."""

import asyncio
import json
import time
from collections.abc import MutableMapping
from itertools import pairwise
from typing import Any

import httpx
import pytest

from benchmarks.live import measure
from benchmarks.live.bare import LAST, TOKEN
from benchmarks.live.servers import Command, free_ports, running
from benchmarks.live.sse import events_of, text_of
from benchmarks.peers.launch import source_argv
from benchmarks.peers.source import Application, Batch, data_of, prefilled

STEP_S = 0.02


class Counted:
    """A stream that notes the time of each of its tokens, and what the others had got by then."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.at_s: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def step(self) -> bool:
        self.at_s.append(time.monotonic())
        self.left -= 1
        if not self.left:
            self.done.set_result(None)
        return self.left > 0


async def test_streams_step_together_and_one_that_comes_during_a_step_joins_the_next() -> None:
    batch, first, late = Batch(STEP_S), Counted(8), Counted(2)
    begun_s = time.monotonic()
    batch.add(first)
    while len(first.at_s) < 1:
        await asyncio.sleep(STEP_S / 8)
    batch.add(late)
    got = len(first.at_s)
    await asyncio.gather(first.done, late.done)
    assert (len(first.at_s), len(late.at_s)) == (8, 2)
    # a step is never shorter than it should be, but for what the clock may be early
    assert first.at_s[0] - begun_s >= STEP_S - 1e-3
    assert first.at_s[-1] - begun_s >= 8 * STEP_S - 1e-3
    # the late one gets nothing at the end of the step during which it came
    assert late.at_s[0] > first.at_s[got]


async def test_a_stream_whose_reader_has_gone_gets_nothing_more() -> None:
    batch, gone, other = Batch(STEP_S), Counted(50), Counted(3)
    batch.add(gone)
    batch.add(other)
    while not gone.at_s:
        await asyncio.sleep(STEP_S / 8)
    batch.drop(gone)
    got = len(gone.at_s)
    await other.done
    assert len(gone.at_s) == got
    again = Counted(1)
    batch.add(again)
    await again.done


async def called(request: dict[str, Any]) -> list[MutableMapping[str, Any]]:
    """Returns the ASGI messages of the answer to a request whose body comes in two pieces."""
    body, sent = json.dumps(request).encode(), []
    pieces = [
        {"type": "http.request", "body": body[:9], "more_body": True},
        {"type": "http.request", "body": body[9:]},
    ]

    async def receive() -> MutableMapping[str, Any]:
        return pieces.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await Application(Batch(1e-3))({"type": "http", "method": "POST"}, receive, send)
    return sent


@pytest.mark.parametrize("tokens", [1, 2, 16])
async def test_a_decode_has_as_many_tokens_as_were_asked_for(tokens: int) -> None:
    sent = await called({"model": "source", "stream": True, "max_tokens": tokens})
    assert [one["type"] for one in sent[:1]] == ["http.response.start"]
    assert [one["more_body"] for one in sent[1:]] == [True] * (len(sent) - 2) + [False]
    body = b"".join(one["body"] for one in sent[1:])
    events = events_of(body)
    assert [text_of(event) for event in events] == ["", *[" word"] * tokens]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert body.endswith(b"data: [DONE]\n\n")


async def test_a_prefill_is_answered_at_once_with_the_place_of_its_kv() -> None:
    start, body = await called({"model": "source", "stream": False, "max_tokens": 1})
    answer = json.loads(body["body"])
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True
    assert answer == json.loads(prefilled({"model": "source"}))


def test_events_are_those_of_the_bare_listener_without_the_encoding_of_chunks() -> None:
    assert data_of(TOKEN).startswith(b"data: {") and data_of(TOKEN).endswith(b"}\n\n")
    assert data_of(LAST).endswith(b"data: [DONE]\n\n")
    assert events_of(data_of(TOKEN))[0]["choices"][0]["delta"] == {"content": " word"}


def silent(_text: str) -> None:
    """Progress that nobody reads."""


@pytest.mark.parametrize("server", ["uvicorn", "bare"])
def test_both_servers_answer_prefills_and_decodes(server: str) -> None:
    (port,) = free_ports(1)
    command = Command("source", source_argv("decode", port, 1e-3, server), port, timeout_s=60.0)
    with running(command, silent) as source:
        prefill = httpx.post(
            f"http://127.0.0.1:{port}/v1/chat/completions", json={"model": "m", "max_tokens": 1}, timeout=30.0
        )
        case = measure.with_python(source, "source", measure.Plan(4, 40, 16, 60.0), seed=1)
    assert prefill.json()["kv_transfer_params"]["remote_port"] == 5600
    assert (case.requests, case.failures) == (40, {})
    assert case.events_per_request == 18  # role, 16 tokens, [DONE]
    assert "decode source" in case.cpu_ms_per_request


def test_the_clock_of_steps_is_absolute() -> None:
    """Fifty tokens of a millisecond come in no less than fifty milliseconds, and none of them is left out."""

    async def streamed() -> list[float]:
        batch, one = Batch(1e-3), Counted(50)
        batch.add(one)
        begun_s = time.monotonic()
        await one.done
        return [begun_s, *one.at_s]

    times = asyncio.run(streamed())
    assert len(times) == 51
    assert times[-1] - times[0] >= 0.049
    assert all(later >= earlier for earlier, later in pairwise(times))
