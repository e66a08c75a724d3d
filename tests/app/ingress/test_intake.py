"""Long prompts: the loop lives while they are tokenised, those that cannot fit cost nothing, and few wait."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from actors.wire import messages as wire
from app.ingress.config import IngressConfig
from app.ingress.tokenizer import HfCodec, WordCodec
from tests.app.ingress.play import byte_tokenizer
from tests.app.ingress.rig import MODEL, pair, rig, until

MIB = 2**20
CHARS_PER_TOKEN = 7
"""Letters of the longest token of `byte_tokenizer`, in which a byte is a letter."""


class CountingCodec(HfCodec):
    """The codec of a directory, which notes the length of each text that it tokenises, and whether it rendered a
    conversation in the main thread.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.encoded: list[int] = []
        self.rendered_here: list[bool] = []

    def render_chat(self, *args: Any) -> str:
        self.rendered_here.append(threading.current_thread() is threading.main_thread())
        return super().render_chat(*args)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.encoded.append(len(text))
        return super().encode(text, add_special_tokens)


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
    """Wakes every 10 ms and notes the seconds since the last time."""
    gaps = [0.0]

    async def tick() -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now_s = time.monotonic()
            gaps.append(now_s - last_s)
            last_s = now_s

    task = asyncio.create_task(tick())
    try:
        yield gaps
        # the tick that was due while the loop stood still
        await asyncio.sleep(0.02)
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
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    async with rig(tmp_path, pair(tmp_path, max_model_len=context), codec=codec) as made:
        body = {"prompt": text, "max_tokens": 1}
        async with ticker() as gaps:
            answer = await made.client.post("/v1/completions", json=body)
        assert "The prompt has 1797" in too_long(answer)
        assert codec.encoded == [len(text)]
        await made.idle()
    # `Tokenizer.encode` would hold the GIL for four times as long as for a quarter of the text
    began_s = time.monotonic()
    tokenizer.encode(text[: len(text) // 4])
    assert max(gaps) < time.monotonic() - began_s


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


async def test_few_long_prompts_wait_and_short_ones_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    config = IngressConfig(
        served_names=(MODEL,),
        offload_prompt_chars=100,
        tokenise_threads=1,
        max_tokenising_chars=1000,
        sweep_interval_s=0.02,
    )
    async with rig(tmp_path, pair(tmp_path), config) as made:

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
