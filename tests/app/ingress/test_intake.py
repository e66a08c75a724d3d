"""Long prompts: the loop lives while they are tokenised, those that cannot fit cost nothing, and few wait."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.wire import messages as wire
from app.api import chunks
from app.api.plan import plan_chat, plan_completion
from app.api.structure import check_structure
from app.ingress import asgi, exchange
from app.ingress.config import IngressConfig
from app.ingress.tokenizer import HfCodec, WordCodec
from tests.app.ingress.play import byte_tokenizer
from tests.app.ingress.rig import MODEL, pair, rig, until

MIB = 2**20
CONFIG = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02)
CHARS_PER_TOKEN = 7
"""Letters of the longest token of `byte_tokenizer`, in which a byte is a letter."""


class CountingCodec(HfCodec):
    """The codec of a directory, which notes the length of each text that it tokenises, when it did so, and whether it
    rendered a conversation in the main thread.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.encoded: list[int] = []
        self.spans_s: list[tuple[float, float]] = []
        self.rendered_here: list[bool] = []

    def render_chat(self, *args: Any) -> str:
        self.rendered_here.append(threading.current_thread() is threading.main_thread())
        return super().render_chat(*args)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.encoded.append(len(text))
        began_s = time.monotonic()
        try:
            return super().encode(text, add_special_tokens)
        finally:
            self.spans_s.append((began_s, time.monotonic()))


@pytest.fixture
def codec(tmp_path: Path) -> CountingCodec:
    """A byte-level BPE tokenizer whose template shows nothing but the contents."""
    directory = tmp_path / "model"
    directory.mkdir()
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return CountingCodec(directory)


@asynccontextmanager
async def ticker() -> AsyncIterator[list[float]]:
    """Wakes every 10 ms and notes the time."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.01)
            ticks.append(time.monotonic())

    task = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        task.cancel()


def too_long(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


async def test_the_loop_goes_on_while_a_long_prompt_is_tokenised(
    tmp_path: Path, codec: CountingCodec
) -> None:
    text = "the END is near, and " * (4 * MIB // 21)
    # 4 Mi characters are 599,186 tokens of 7 at least, and 1.8 million in truth
    context = 700_000
    async with rig(tmp_path, pair(tmp_path, max_model_len=context), codec=codec) as made:
        body = {"prompt": text, "max_tokens": 1}
        async with ticker() as ticks:
            answer = await made.client.post("/v1/completions", json=body)
        assert "The prompt has 1797" in too_long(answer)
        assert codec.encoded == [len(text)]
        await made.idle()
    # `Tokenizer.encode` holds the GIL from its beginning to its end, so that nothing would tick meanwhile
    ((began_s, ended_s),) = codec.spans_s
    assert sum(began_s < at_s < ended_s for at_s in ticks) > 10


def prompt(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "max_tokens": 1}


def conversation(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


async def test_what_cannot_fit_is_refused_before_any_work(tmp_path: Path, codec: CountingCodec) -> None:
    long = "x" * 4 * MIB
    async with rig(tmp_path, pair(tmp_path), codec=codec) as made:
        for path, body in (prompt(long), conversation(long)):
            message = too_long(await made.client.post(path, json=body))
            # 4 x 2^20 / 7 = 599,186.3
            assert message.startswith("The prompt has at least 599187 tokens; the model's context is 1024 ")
        await made.client.post("/v1/completions", json={"prompt": ["short", "x" * 20_000], "max_tokens": 1})
        ids = await made.client.post("/v1/completions", json={"prompt": [[1], [5] * 20_000], "max_tokens": 1})
        assert too_long(ids).startswith("The prompt has 20000 tokens;")
        assert codec.encoded == []
        await made.idle()


async def test_what_may_fit_by_its_length_is_tokenised(tmp_path: Path, codec: CountingCodec) -> None:
    context = 4096
    most = (context - 1) * CHARS_PER_TOKEN
    async with rig(tmp_path, pair(tmp_path, max_model_len=context), codec=codec) as made:
        for more in (0, 1):
            path, body = prompt("x" * (most + more))
            too_long(await made.client.post(path, json=body))
        assert codec.encoded == [most]
        await made.idle()


class Gate:
    """Holds the tokenising of long prompts until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.texts: list[str] = []
        encode = WordCodec.encode

        def held(codec: WordCodec, text: str, special: bool) -> list[int]:
            if len(text) > 100:
                self.texts.append(text)
                self.open.wait(100)
            return encode(codec, text, special)

        monkeypatch.setattr(WordCodec, "encode", held)


ONE_THREAD = IngressConfig(
    served_names=(MODEL,),
    offload_prompt_chars=100,
    tokenise_threads=1,
    max_tokenising_chars=1000,
    sweep_interval_s=0.02,
)
"""Long prompts are those of more than 100 characters; one is tokenised at a time, and 1,000 characters may wait."""


async def test_few_long_prompts_wait_and_short_ones_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with rig(tmp_path, pair(tmp_path), ONE_THREAD) as made:

        def send(text: str) -> asyncio.Task[httpx.Response]:
            path, body = prompt(text)
            return asyncio.create_task(made.client.post(path, json=body))

        # one prompt may be longer than all that may wait
        first = send("a " * 600)
        await until(lambda: gate.texts)
        refused = await send("b " * 100)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "tokenising_full")
        assert error["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        assert (await send("short")).status_code == 200
        gate.open.set()
        assert (await first).status_code == 200
        assert (await send("b " * 100)).status_code == 200
        await made.idle()


async def test_long_prompts_of_one_tenant_leave_room_and_threads_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with rig(tmp_path, pair(tmp_path), ONE_THREAD) as made:

        def send(letter: str, user: str) -> asyncio.Task[httpx.Response]:
            path, body = prompt(f"{letter} " * 125)
            return asyncio.create_task(made.client.post(path, json=body | {"user": user}))

        # four prompts of 250 characters fill the room
        greedy = [send("a", "greedy")]
        await until(lambda: gate.texts)
        greedy += [send("b", "greedy") for _ in range(3)]
        await until(lambda: made.app.in_flight == 4)
        other = send("c", "other")
        await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = [await one for one in greedy if one.done()]
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tokenising_full")
        gate.open.set()
        answers = await asyncio.gather(*greedy, other)
        assert sorted(answer.status_code for answer in answers) == [200] * 4 + [429]
        # the other one begins level with the greedy one, whose second prompt waits longer
        assert [text[0] for text in gate.texts] == ["a", "b", "c", "b"]
        await made.idle()


async def test_a_long_prompt_does_not_wait_for_what_others_do_in_threads(tmp_path: Path) -> None:
    config = IngressConfig(served_names=(MODEL,), offload_prompt_chars=100, sweep_interval_s=0.02)
    go_on, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    async with rig(tmp_path, pair(tmp_path), config) as made:
        path, body = prompt("a " * 200)
        other = loop.run_in_executor(None, go_on.wait, 60)
        try:
            async with asyncio.timeout(20):
                assert (await made.client.post(path, json=body)).status_code == 200
            assert not other.done()
        finally:
            go_on.set()
            await other
        await made.idle()


async def test_a_prompt_whose_client_has_left_is_not_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    config = IngressConfig(
        served_names=(MODEL,), offload_prompt_chars=100, tokenise_threads=1, sweep_interval_s=0.02
    )
    async with rig(tmp_path, pair(tmp_path), config) as made:
        tasks = []
        for letter in "ab":
            path, body = prompt(f"{letter} " * 100)
            tasks.append(asyncio.create_task(made.client.post(path, json=body)))
            await until(lambda: made.app.in_flight == len(tasks))
        await until(lambda: gate.texts)
        tasks[1].cancel()
        await until(lambda: made.app.in_flight == 1)
        gate.open.set()
        assert (await tasks[0]).status_code == 200
        await until(lambda: not made.app._preparing)
        assert len(gate.texts) == 1
        await made.idle()


async def test_a_long_conversation_that_the_template_refuses_is_answered(
    tmp_path: Path, codec: CountingCodec
) -> None:
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    async with rig(tmp_path, pair(tmp_path), codec=HfCodec(tmp_path / "model")) as made:
        path, body = conversation("x" * 20_000)
        answer = await made.client.post(path, json=body)
        assert answer.status_code == 400
        assert "roles must alternate" in answer.json()["error"]["message"]
        await made.idle()


async def test_a_long_conversation_is_rendered_and_tokenised_aside(
    tmp_path: Path, codec: CountingCodec
) -> None:
    async with rig(tmp_path, pair(tmp_path, max_model_len=20_000), codec=codec) as made:
        path, body = conversation("the END is " * 2000)
        answer = await made.client.post(path, json=body)
        assert answer.json()["usage"]["prompt_tokens"] == len(codec.encode("the END is " * 2000, False))
        (prefill,) = made.engines["p"].of(wire.Prefill)
        assert len(prefill.tokens) == answer.json()["usage"]["prompt_tokens"]
        path, body = conversation("the END")
        assert (await made.client.post(path, json=body)).status_code == 200
        assert codec.rendered_here == [False, True]
        await made.idle()


# ------------------------------------------------------------------------------------------------------ large bodies

STEPS = ("look at the structure", "parsing", "rendering")
"""The steps before a large conversation is tokenised, in their order."""


async def test_the_loop_goes_on_while_a_large_body_is_parsed(
    tmp_path: Path, codec: CountingCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed_here: list[bool] = []

    def plan(body: bytes, headers: Any, defaults: Any) -> Any:
        parsed_here.append(threading.current_thread() is threading.main_thread())
        return plan_chat(body, headers, defaults)

    monkeypatch.setattr(asgi, "plan_chat", plan)
    async with rig(tmp_path, pair(tmp_path, max_model_len=100_000), codec=codec) as made:
        for size in (1000, 100_000):
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            body["metadata"] = {"x": "y" * size}
            answer = await made.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
        assert parsed_here == [True, False]
        await made.idle()


async def test_others_are_served_while_a_large_body_is_parsed_and_its_template_rendered(
    tmp_path: Path, codec: CountingCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each step begins, and ends when the loop says so; a step in the loop itself would wait for itself
    begun, go_on = {n: threading.Event() for n in STEPS}, {n: threading.Event() for n in STEPS}

    def held(step: str, large: bool) -> None:
        if large:
            begun[step].set()
            assert go_on[step].wait(10), f"the {step} waits for the loop, which waits for it"

    def structure(body: bytes) -> None:
        held("look at the structure", len(body) > asgi.PARSED_ASIDE_BYTES)
        check_structure(body)

    def plan(body: bytes, headers: Any, defaults: Any) -> Any:
        held("parsing", len(body) > asgi.PARSED_ASIDE_BYTES)
        return plan_chat(body, headers, defaults)

    def render(messages: list[dict[str, Any]], *more: Any) -> str:
        held("rendering", messages[0]["content"] == "of the large body")
        return CountingCodec.render_chat(codec, messages, *more)

    monkeypatch.setattr(asgi, "check_structure", structure)
    monkeypatch.setattr(asgi, "plan_chat", plan)
    monkeypatch.setattr(codec, "render_chat", render)
    async with rig(tmp_path, pair(tmp_path), codec=codec) as made, ticker() as ticks:
        path, body = conversation("of the large body")
        pad = {"metadata": {"x": "y" * 100_000}}
        large = asyncio.create_task(made.client.post(path, json=body | pad))
        for step in STEPS:
            await until(begun[step].is_set, step)
            beats = len(ticks)
            await until(lambda beats=beats: len(ticks) > beats + 2, "the loop goes on")  # type: ignore[misc]
            assert (await made.client.post(path, json=conversation("a")[1])).status_code == 200
            assert not large.done()
            go_on[step].set()
        assert (await large).status_code == 200
        await made.idle()


async def test_a_large_body_that_is_wrong_is_answered_as_a_small_one(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        pad = {"metadata": {"x": "y" * 100_000}}
        for body, code in (
            ({"prompt": "a", "temperature": 9}, "invalid_value"),
            ({"prompt": "a", "x": [[]] * 70_000}, "body_too_complex"),
            ({"prompt": "a", "model": "other"}, "model_not_found"),
        ):
            answer = await made.client.post("/v1/completions", json=body | pad)
            assert answer.json()["error"]["code"] == code
            assert "x-request-id" in answer.headers
        answer = await made.client.post("/v1/completions", content=b"{" + b" " * 100_000)
        assert answer.json()["error"]["code"] == "invalid_json"
        assert made.app._parsing == 0
        await made.idle()


async def test_who_leaves_while_a_large_body_is_parsed_costs_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def plan(body: bytes, headers: Any, defaults: Any) -> Any:
        assert go_on.wait(60)
        return plan_completion(body, headers, defaults)

    monkeypatch.setattr(asgi, "plan_completion", plan)
    large = {"prompt": "a", "max_tokens": 2, "metadata": {"x": "y" * 100_000}}
    async with rig(tmp_path, pair(tmp_path), replace(CONFIG, max_in_flight=1)) as made:
        task = asyncio.create_task(made.client.post("/v1/completions", json=large))
        await until(lambda: made.app._parsing == 1)
        # it counts as under way
        refused = await made.client.post("/v1/completions", json={"prompt": "a"})
        assert refused.json()["error"]["code"] == "too_many_requests"
        task.cancel()
        server = made.listener._server
        assert server is not None
        await until(
            lambda: all(c._current is None for c in server.server_state.connections), "a closed connection"
        )  # type: ignore[union-attr]
        go_on.set()
        await until(lambda: made.app._parsing == 0)
        assert not made.engines["p"].of(wire.Prefill)
        answer = await made.client.post("/v1/completions", json=large)
        assert answer.status_code == 200
        await made.idle()


async def test_without_memory_for_it_a_request_is_answered_with_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(body: bytes, headers: Any, defaults: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(asgi, "plan_completion", plan)
    async with rig(tmp_path, pair(tmp_path)) as made:
        for pad in ("", "y" * 100_000):
            answer = await made.client.post("/v1/completions", json={"prompt": "a", "metadata": {"x": pad}})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
            assert answer.headers["retry-after"] == "1"
        assert (await made.client.get("/health")).status_code == 200
        await made.idle()


async def test_answers_with_too_many_log_probabilities_are_shed(tmp_path: Path) -> None:
    """The memory of what is kept until the end is counted; a stream keeps nothing."""
    bounds = replace(CONFIG, max_answer_bytes=100_000)
    entry = ("a", 1, -0.5, [("b", 2, -1.0)] * 20)
    async with rig(tmp_path, pair(tmp_path, auto=False), bounds) as made:
        for stream in (True, False):
            body = {"prompt": "a", "max_tokens": 100, "logprobs": 20, "stream": stream}
            task = asyncio.create_task(made.client.post("/v1/completions", json=body))
            n = 1 if stream else 2
            await until(lambda n=n: len(made.engines["p"].of(wire.Prefill)) == n)
            attempt_id = made.engines["p"].of(wire.Prefill)[-1].attempt_id
            made.engines["p"].finish_prefill(attempt_id)
            await until(lambda n=n: len(made.engines["d"].of(wire.Decode)) == n)
            made.engines["d"].admit(attempt_id)
            # 21 candidates x 200 bytes = 4,200 bytes a token; the 24th passes the bound
            for _ in range(30):
                made.engines["d"].token(attempt_id, "a ", logprobs=[entry])
            made.engines["d"].token(attempt_id, "a ", finish="stop", logprobs=[entry])
            answer = await task
            if stream:
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "answer_memory")
                assert answer.headers["x-should-retry"] == "false"
            assert made.app.requests.answers.held_bytes == 0
        await made.idle()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_large_answer_is_built_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """With no time for more than one part a turn, others have a turn for each part."""
    monkeypatch.setattr(exchange, "TURN_S", 0.0)
    monkeypatch.setattr(chunks, "PART_ENTRIES", 1)
    entry = ("a", 1, -0.5, [("b", 2, -1.0)])
    turns = 0
    async with rig(tmp_path, pair(tmp_path, auto=False), CONFIG) as made:
        loop, answers, p, d = asyncio.get_running_loop(), made.app.requests.answers, *made.engines.values()

        def turn() -> None:
            nonlocal turns
            if not made.connections.live and answers.held_bytes:
                turns += 1
                if leaves and turns == 5:
                    asked.cancel()
            if not asked.done():
                loop.call_soon(turn)

        body = {"prompt": "a", "max_tokens": 400, "logprobs": 1}
        asked = asyncio.create_task(made.client.post("/v1/completions", json=body))
        await until(lambda: p.of(wire.Prefill), "a prefill")
        attempt_id = p.of(wire.Prefill)[-1].attempt_id
        p.finish_prefill(attempt_id)
        await until(lambda: d.of(wire.Decode), "a decode")
        d.admit(attempt_id)
        turn()
        for _ in range(399):
            d.token(attempt_id, "a", logprobs=[entry])
        d.token(attempt_id, "a", finish="stop", logprobs=[entry])
        if leaves:
            with pytest.raises(asyncio.CancelledError):
                await asked
        else:
            answer = (await asked).json()
            assert answer["choices"][0]["logprobs"]["tokens"] == ["a"] * 400
            assert turns >= 400
        await made.idle()
        assert answers.held_bytes == 0
        labels = {"code": "499" if leaves else "200", "class": "standard", "model": MODEL}
        assert made.metric("sluice_requests_total", **labels) == 1
