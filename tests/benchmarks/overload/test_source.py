"""The sources with slots: how many streams run at once, how prompts are computed together, and what is refused."""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from benchmarks.overload.fleet import Engines, Fleet, router_argv
from benchmarks.overload.sides import ROUTER, ROUTER_UNBOUNDED, sim_fleet
from benchmarks.overload.source import Limited, Prompts, Slots, Timing, words_of

STEP_S = 0.01


class Counted:
    """A stream that notes at which of its batch's steps it got its tokens."""

    def __init__(self, batch: "Steps", tokens: int) -> None:
        self.batch, self.left = batch, tokens
        self.at: list[int] = []
        self.done = asyncio.get_running_loop().create_future()

    def step(self) -> bool:
        self.at.append(self.batch.count)
        self.left -= 1
        if not self.left:
            self.done.set_result(None)
        return self.left > 0


class Steps(Slots):
    """A batch that counts its steps."""

    count = 0

    def begin_step(self) -> float | None:
        self.count += 1
        return super().begin_step()


async def test_no_more_streams_run_than_there_are_slots_and_the_others_follow_in_their_order() -> None:
    batch = Steps(STEP_S, 2)
    one, two, three, four = (Counted(batch, tokens) for tokens in (3, 1, 2, 1))
    for stream in (one, two, three, four):
        batch.add(stream)
    assert batch.unfinished == 4
    await asyncio.gather(one.done, two.done, three.done, four.done)
    assert (one.at, two.at, three.at, four.at) == ([1, 2, 3], [1], [2, 3], [4])
    assert batch.unfinished == 0


async def test_a_stream_that_was_dropped_while_it_waited_takes_no_slot() -> None:
    batch = Steps(STEP_S, 1)
    first, gone, last = (Counted(batch, 2) for _ in range(3))
    for stream in (first, gone, last):
        batch.add(stream)
    batch.drop(gone)
    assert batch.unfinished == 2
    await asyncio.gather(first.done, last.done)
    assert (first.at, gone.at, last.at) == ([1, 2], [], [3, 4])


async def test_prompts_are_computed_together_up_to_the_slots_and_the_budget() -> None:
    prompts, durations = Prompts(Timing(0.001, 0.00001), 2), []
    begin = prompts.begin_step

    def noted() -> float | None:
        durations.append(begin())
        return durations[-1]

    prompts.begin_step = noted  # type: ignore[method-assign]
    sizes = (100, 200, 300, 8000, 500)
    tasks = [asyncio.ensure_future(prompts.compute(tokens)) for tokens in sizes]
    await asyncio.sleep(0)
    assert prompts.tokens == sum(sizes)
    await asyncio.gather(*tasks)
    # two at once: 300 tokens; 300 and 8,000 are above 8,192 together, so 300, then 8,000 alone, then 500
    assert durations[:4] == pytest.approx([0.004, 0.004, 0.081, 0.006])
    assert prompts.tokens == 0


async def called(application: Limited, request: dict[str, Any]) -> tuple[int, bytes]:
    """Returns status and body of the answer to a request whose body comes in two pieces."""
    body, told = json.dumps(request).encode(), list[MutableMapping[str, Any]]()
    pieces = [
        {"type": "http.request", "body": body[:9], "more_body": True},
        {"type": "http.request", "body": body[9:]},
    ]

    async def receive() -> MutableMapping[str, Any]:
        return pieces.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        told.append(message)

    await application({"type": "http", "method": "POST"}, receive, send)
    return told[0]["status"], b"".join(one.get("body", b"") for one in told[1:])


def asked(stream: bool, words: int = 3, tokens: int = 2) -> dict[str, Any]:
    content = " ".join(["word"] * words)
    return {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "stream": stream}


async def test_a_prefill_takes_its_time_and_says_where_its_kv_lies() -> None:
    application = Limited(Slots(STEP_S, 1), Prompts(Timing(STEP_S), 1), None, None)
    status, body = await called(application, asked(stream=False))
    assert status == 200 and json.loads(body)["kv_transfer_params"]["remote_engine_id"] == "prefill"
    assert words_of(asked(stream=False, words=7)) == 7


async def test_a_bounded_source_refuses_what_is_too_much_and_serves_again_afterwards() -> None:
    application = Limited(Slots(STEP_S, 1), Prompts(Timing(5 * STEP_S), 1), most_requests=2, most_tokens=4)
    first, second = (asyncio.ensure_future(called(application, asked(stream=True))) for _ in range(2))
    await asyncio.sleep(0)
    assert (await called(application, asked(stream=True)))[0] == 503
    # three tokens wait, which is less than four; then there are six
    prompts = [asyncio.ensure_future(called(application, asked(stream=False))) for _ in range(2)]
    await asyncio.sleep(0)
    assert (await called(application, asked(stream=False)))[0] == 503
    assert [(await one)[0] for one in (first, second, *prompts)] == [200] * 4
    status, body = await called(application, asked(stream=True))
    assert status == 200 and body.endswith(b"data: [DONE]\n\n") and body.count(b'" word"') == 2


def test_a_fleet_travels_as_json() -> None:
    import dataclasses

    fleet = Fleet(Engines((1, 2), Timing(0.1, 0.2), 32, most_tokens=9), Engines((3,), Timing(0.3), 8))
    assert Fleet.read(json.dumps(dataclasses.asdict(fleet))) == fleet
    assert fleet.ports == (1, 2, 3) and fleet.bounded


def test_only_a_bounded_fleet_goes_without_retries_and_breakers() -> None:
    bounded = router_argv("router", 1, 2, sim_fleet(ROUTER, [3, 4, 5, 6]))
    assert [bounded[place + 1][-1] for place, word in enumerate(bounded) if word == "--prefill"] == ["3", "4"]
    assert [bounded[place + 1][-1] for place, word in enumerate(bounded) if word == "--decode"] == ["5", "6"]
    assert bounded[-2:] == ["--disable-retries", "--disable-circuit-breaker"]
    assert "--disable-retries" not in router_argv("router", 1, 2, sim_fleet(ROUTER_UNBOUNDED, [3, 4, 5, 6]))
    own = Engines((1,), Timing(0.1), 8, most_requests=12).argv("decode", 1)
    assert own[-2:] == ["--most-requests", "12"] and "--most-tokens" not in own
