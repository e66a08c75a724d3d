"""The whole path over real sim engines: answers in every shape, streamed and whole alike, and the official client.

Engines, router, links and HTTP are the ones that run live; only Ray is left out.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.engine.registry import ENGINES, engine_config
from actors.engine.report import Reporter
from actors.engine.server import EngineServer
from actors.wire.channel import Identity
from actors.wire.messages import Duty
from tests.app.ingress.rig import Rig, rig, until


@dataclass
class Sim:
    """One sim engine behind its server, known to the router."""

    server: EngineServer
    reporter: Reporter

    @classmethod
    async def start(
        cls, made: Rig, directory: Path, name: str, role: str, duty: Duty = "active", **options: Any
    ) -> "Sim":
        facts = {"engine_id": name, "role": role}
        config = engine_config("sim", facts, {"max_model_len": 512, "kv_blocks": 512, **options})
        engine = ENGINES["sim"].make(config)
        router = made.router.me
        me = Identity("engine", name, router.secret, tls=router.tls)
        address = f"unix:{directory}/{name}.sock" if router.tls is None else "tcp:127.0.0.1:0"
        server = EngineServer(engine, me, [address], node="local", duty=duty)
        await server.start()

        async def find() -> tuple[str, ...]:
            return made.router.addresses

        reporter = Reporter(me, server, find)
        reporter.start()
        return cls(server, reporter)

    async def stop(self) -> None:
        await self.reporter.stop()
        await self.server.stop()

    async def kill(self) -> None:
        """Ends every connection and the listening at once, as others see it of a process that is killed."""
        link = self.reporter._link
        for task in (self.reporter._task, link._task):
            if task is not None:
                task.cancel()
        for server in self.server._servers:
            server.close()
        for channel in [
            *self.server._clients,
            *self.server._others,
            *([link.channel] if link.channel else []),
        ]:
            channel.abort("killed")
        await self.stop()

    def idle(self) -> bool:
        status = self.server.status()
        return (status.running, status.waiting, status.leases) == (0, 0, 0)


@pytest.fixture
async def engines() -> AsyncIterator[dict[str, Sim]]:
    made: dict[str, Sim] = {}
    yield made
    for sim in made.values():
        await sim.stop()


@pytest.fixture
async def sim(tmp_path: Path, engines: dict[str, Sim]) -> AsyncIterator[Rig]:
    async with rig(tmp_path, []) as made:
        for name, role in (("p", "prefill"), ("d", "decode")):
            engines[name] = await Sim.start(made, tmp_path, name, role)
        await until(lambda: len(made.connections.engines()) == 2 and made.connections.ready() is None)
        await until(lambda: (told := made.connections.fleet_status) is not None and len(told.statuses) == 2)
        yield made
        await made.idle()
        for engine in engines.values():
            await until(engine.idle, "an idle engine")


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def streamed(made: Rig, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await made.client.post(
        path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def folded(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Streamed choices put together: text, finish reason, logprobs."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = made.setdefault(choice["index"], {"text": "", "finish": None, "logprobs": None})
            one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            one["finish"] = choice["finish_reason"] or one["finish"]
            for key, values in (choice["logprobs"] or {}).items():
                one["logprobs"] = one["logprobs"] or {}
                one["logprobs"].setdefault(key, []).extend(values)
    return made


def whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        choice["index"]: {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "finish": choice["finish_reason"],
            "logprobs": choice["logprobs"],
        }
        for choice in answer["choices"]
    }


CHAT = {"messages": [{"role": "user", "content": "tell me something about rivers"}], "max_tokens": 12}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 3, "seed": 1}),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"logprobs": True}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 1}),
    ("/v1/completions", {"prompt": "one two three", "max_tokens": 5}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 5}),
    ("/v1/completions", {"prompt": ["one", "two three"], "max_tokens": 5, "n": 2}),
    ("/v1/completions", {"prompt": [[5], [6, 7]], "max_tokens": 3}),
    ("/v1/completions", {"prompt": "one two", "max_tokens": 4, "echo": True}),
    ("/v1/completions", {"prompt": "one two", "max_tokens": 4, "logprobs": 2}),
    ("/v1/completions", {"prompt": "one two", "max_tokens": 4, "logprobs": 1, "echo": True}),
]


@pytest.mark.parametrize(("path", "body"), SHAPES, ids=str)
async def test_streamed_and_whole_say_the_same(sim: Rig, path: str, body: dict[str, Any]) -> None:
    answer = await sim.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    chunks = await streamed(sim, path, body)
    assert folded(chunks) == whole(answer.json())
    usage = dict(answer.json()["usage"])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_finish_and_length(sim: Rig) -> None:
    answer = (await sim.client.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    chunks = await streamed(sim, "/v1/chat/completions", CHAT)
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(("path", "body"), [*SHAPES[:2], SHAPES[5]], ids=str)
async def test_the_running_usage_is_that_of_the_text_so_far(
    sim: Rig, path: str, body: dict[str, Any]
) -> None:
    body = body | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    answer = await sim.client.post(path, json=body)
    *chunks, last = events(answer.text)
    assert (
        last["choices"] == []
        and last["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1]


async def test_kv_moves_between_the_engines_and_is_counted(sim: Rig) -> None:
    await sim.client.post("/v1/chat/completions", json=CHAT)
    assert sim.metric("sluice_kv_transfers_total") == 1
    assert sim.metric("sluice_kv_transfer_bytes_total") > 0
    assert sim.metric("sluice_prefill_seconds_count") == 1
    assert sim.metric("sluice_pool_wait_seconds_count") == 1
    assert sim.metric("sluice_ttft_seconds_count", **{"class": "standard"}) == 1
    assert sim.metric("sluice_generation_tokens_total") == 12
    assert sim.metric("sluice_requests_total", code="200", model="tiny", **{"class": "standard"}) == 1
    text = (await sim.client.get("/metrics")).text
    for name in (
        "sluice_engine_kv_blocks_used",
        "sluice_router_decision_seconds_bucket",
        "sluice_router_connected 1.0",
    ):
        assert name in text


async def test_a_stop_string_ends_the_text_before_it(sim: Rig) -> None:
    text = (await sim.client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"][
        "content"
    ]
    stop = text.split()[4]
    body = CHAT | {"stop": stop}
    answer = (await sim.client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["message"]["content"] == text[: text.index(stop)]
    assert answer["stop_reason"] == stop
    assert folded(await streamed(sim, "/v1/chat/completions", body))[0]["text"] == text[: text.index(stop)]


async def test_logprobs_in_both_shapes(sim: Rig) -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    content = (await sim.client.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert len(content) == 3
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] <= 0
    body = {"prompt": "one two", "max_tokens": 3, "logprobs": 2, "echo": True}
    choice = (await sim.client.post("/v1/completions", json=body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    lengths = {len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {2 + 3}  # the prompt's and the answer's
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["text_offset"][0] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
async def test_what_this_engine_cannot_do_is_400(sim: Rig, fields: dict[str, Any], param: str) -> None:
    answer = await sim.client.post("/v1/chat/completions", json=CHAT | fields | {"stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_many_at_once_all_finish_and_nothing_stays(sim: Rig) -> None:
    async def one(index: int) -> int:
        body = {
            "prompt": [index % 100 + 1] * (index % 50 + 1),
            "max_tokens": 1 + index % 7,
            "stream": index % 2 == 0,
        }
        answer = await sim.client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        return 1

    assert sum(await asyncio.gather(*(one(index) for index in range(150)))) == 150


async def test_random_disconnects_leave_nothing(sim: Rig) -> None:
    async def one(index: int) -> None:
        body = {"prompt": [index + 1] * 40, "max_tokens": 100, "stream": True}
        try:
            async with asyncio.timeout(0.001 * (index % 40)):
                await sim.client.post("/v1/completions", json=body)
        except TimeoutError:
            pass

    await asyncio.gather(*(one(index) for index in range(200)))
    await sim.idle()


async def test_a_colocated_engine_serves_alone(tmp_path: Path, engines: dict[str, Sim]) -> None:
    async with rig(tmp_path, []) as made:
        engines["c"] = await Sim.start(made, tmp_path, "c", "colocated")
        await until(lambda: made.connections.ready() is None)
        answer = await made.client.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["usage"]["completion_tokens"] == 12
        assert made.metric("sluice_kv_transfers_total") == 0
        await made.idle()


async def test_the_official_client_works_unmodified(sim: Rig) -> None:
    async with openai.AsyncOpenAI(base_url=f"{sim.url}/v1", api_key="none") as client:
        models = [model.id async for model in client.models.list()]
        assert models == ["tiny"]
        messages: Any = [{"role": "user", "content": "tell me something about rivers"}]
        answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
        text = answer.choices[0].message.content
        assert text
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        pieces = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in pieces if c.choices) == text
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.completion_tokens == 8
        completion = await client.completions.create(model="tiny", prompt="a b c", max_tokens=3, logprobs=1)
        assert completion.choices[0].logprobs is not None
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=messages, temperature=5)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages)


LONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 40}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 40, "n": 3, "seed": 1}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 40, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": ["one", "two three"], "max_tokens": 40, "n": 2, "logprobs": 1}),
]


@pytest.mark.parametrize(("path", "body"), LONG, ids=["chat", "n", "logprobs", "prompts"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_answer_whose_engine_dies_is_the_undisturbed_one(
    tmp_path: Path, engines: dict[str, Sim], path: str, body: dict[str, Any], stream: bool
) -> None:
    async with rig(tmp_path, []) as made:
        for name, role in (("p", "prefill"), ("d", "decode"), ("e", "decode")):
            engines[name] = await Sim.start(made, tmp_path, name, role, timing={"decode_base_s": 0.03})
        await until(lambda: len(made.connections.engines()) == 3 and made.connections.ready() is None)
        await until(lambda: made.connections.fleet_status is not None)
        undisturbed = (await made.client.post(path, json=body)).json()
        task = asyncio.create_task(
            streamed(made, path, body) if stream else made.client.post(path, json=body)  # type: ignore[arg-type]
        )
        lives = made.connections.live
        await until(lambda: any(life.output_tokens > 8 for life in lives.values()))
        used = {life.decode_engine for life in lives.values()} - {None}
        dead = engines.pop(used.pop() or "")
        await dead.stop()
        answer = await task
        last = answer[-1] if stream else answer.json()
        text = folded(answer) if stream else whole(answer.json())
        assert text == whole(undisturbed)
        assert last["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"]
        assert last["sluice"]["migrations"] == len(last["sluice"]["resumed"]) > 0
        await made.idle()
        for engine in engines.values():
            await until(engine.idle, "an idle engine")


async def test_a_request_that_waits_in_the_pool_for_several_leases_keeps_its_kv(
    tmp_path: Path, engines: dict[str, Sim]
) -> None:
    """The only slot is taken for some three leases; the second request is neither rescued nor computed again."""
    async with rig(tmp_path, []) as made:
        engines["p"] = await Sim.start(made, tmp_path, "p", "prefill", lease_s=3.0)
        engines["d"] = await Sim.start(made, tmp_path, "d", "decode", slots=1, timing={"decode_base_s": 0.05})
        await until(lambda: len(made.connections.engines()) == 2 and made.connections.ready() is None)
        await until(lambda: made.connections.fleet_status is not None)

        def ask(tokens: int) -> Any:
            body = {"prompt": "one two", "max_tokens": tokens}
            return asyncio.create_task(made.client.post("/v1/completions", json=body))

        first = ask(200)
        await until(lambda: any(life.output_tokens for life in made.connections.live.values()), "a token")
        answers = [await ask(2), await first]
        assert [answer.status_code for answer in answers] == [200, 200]
        await until(lambda: all(engine.idle() for engine in engines.values()), "idle engines")
        metrics = engines["p"].server.engine.metrics()
        assert metrics.leases_expired == 0
        # two prompts of equal length, each computed once
        prompts = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert metrics.prefill_tokens == sum(prompts) - sum(cached)
        assert engines["d"].server.engine.metrics().transfers == 2


async def test_where_kv_cannot_move_the_decode_engine_computes_the_prompt(
    tmp_path: Path, engines: dict[str, Sim]
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    async with rig(tmp_path, []) as made:
        for name, role in (("p", "prefill"), ("d", "decode")):
            options = {"faults": str(orders), "pull_timeout_s": 0.3}
            engines[name] = await Sim.start(made, tmp_path, name, role, **options)
        await until(lambda: len(made.connections.engines()) == 2 and made.connections.ready() is None)
        body = {"prompt": "one two three", "max_tokens": 5}
        undisturbed = (await made.client.post("/v1/completions", json=body)).json()["choices"]
        (orders / "d").write_text('{"cut": true}')
        await until(lambda: engines["d"].server.engine._faults.order.cut, "the order")  # type: ignore[attr-defined]
        answer = await made.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == undisturbed
        refused = await made.client.post(
            "/v1/completions", json=body, headers={"x-sluice-mode": "disaggregated"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "kv_load")
        await made.idle()


TOLD = [
    "parse", "tokenise", "submit", "to the router", "queue", "decide prefill", "from the router",
    "to the prefill engine", "wait for a slot", "prefill", "report", "from the prefill engine",
    "to the router", "pool", "decide decode", "from the router",
    "to the decode engine", "wait for a slot", "transfer", "wait for a step", "step", "from the decode engine", "write",
]  # fmt: skip


async def explained(made: Rig, request_id: str) -> list[Any]:
    answer = await made.client.get(f"/sluice/admin/explain/{request_id}")
    assert answer.status_code == 200, answer.text
    times: list[Any] = answer.json()["times"]
    return times


async def test_the_way_of_a_request_is_told_hop_by_hop_where_its_client_asked(sim: Rig) -> None:
    headers = {"x-sluice-times": "on", "x-request-id": "wanted"}
    answer = await sim.client.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=headers)
    assert answer.status_code == 200
    await sim.idle()
    (attempt,) = await explained(sim, "wanted")
    way = attempt["hops"]
    assert [hop["name"] for hop in way] == TOLD
    assert {hop["process"] for hop in way} >= {"p", "d"}
    assert way[0]["since_s"] == 0.0
    for before, after in itertools.pairwise(way):
        assert before["until_s"] == after["since_s"] <= after["until_s"]
    kinds = {hop["name"]: hop["kind"] for hop in way}
    assert (kinds["pool"], kinds["to the prefill engine"], kinds["step"]) == ("wait", "wire", "work")


async def test_what_nobody_asked_for_is_not_noted(sim: Rig) -> None:
    for headers in ({}, {"x-sluice-times": "off"}):
        answer = await sim.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        await sim.idle()
        assert await explained(sim, answer.json()["id"]) == []
        assert not sim.router._following


async def test_each_choice_that_is_split_off_and_each_prompt_has_its_own_way(sim: Rig) -> None:
    body = {"prompt": ["one two", "three four five"], "max_tokens": 4}
    headers = {"x-sluice-times": "on"}
    answer = await sim.client.post("/v1/completions", json=body, headers=headers)
    await sim.idle()
    ways = await explained(sim, answer.json()["id"])
    assert len({one["attempt_id"] for one in ways}) == 2
    # the answer is written whole at its end, which is no part of the way to the first token
    assert [one["hops"][-1]["name"] for one in ways] == ["from the decode engine"] * 2
