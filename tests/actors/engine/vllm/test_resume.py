"""Answers that go on at a seam: texts, stop strings and tool calls, put together from the parts of two engines.

vLLM's processors of inputs and outputs, its tokenizer and its parsers are real; what the core samples is given.
"""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

from vllm.v1.engine import EngineCoreOutput, FinishReason  # noqa: E402
from vllm.v1.engine.output_processor import OutputProcessor  # noqa: E402

from actors.engine.leases import AttemptLeases  # noqa: E402
from actors.engine.vllm import runner, tools  # noqa: E402
from actors.engine.vllm.config import SCHEDULERS, VllmEngineConfig  # noqa: E402
from actors.engine.vllm.connector import DUE, ENDS  # noqa: E402
from actors.engine.vllm.resume import output_before, resumed_seed  # noqa: E402
from actors.engine.vllm.runner import TaskRunner  # noqa: E402
from actors.engine.vllm.tools import ChoiceParser, ToolParsing  # noqa: E402
from actors.wire.messages import Admitted, Decode, Failed, Out, Prefill, Resume  # noqa: E402
from app.api.extensions import Defaults  # noqa: E402
from app.api.plan import plan_chat  # noqa: E402
from tests.actors.engine.vllm.small import MAX_MODEL_LEN, SmallModel  # noqa: E402

PROMPT = list(range(1000, 1010))
HANDLE = msgspec.msgpack.encode(
    {
        "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "r", "remote_host": "127.0.0.1",
        "remote_port": 7, "tp_size": 1, "remote_block_ids": [[1]],
    }
)  # fmt: skip


class Given:
    """A core that computes nothing: it keeps the requests, and the test puts out their tokens."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.aborted: list[str] = []
        self.rejected: list[Any] = []

    async def add_request_async(self, request: Any) -> None:
        self.requests.append(request)

    async def abort_requests_async(self, ids: list[str]) -> None:
        self.aborted += ids

    async def reject(self, name: str, transfer: Any, **_: Any) -> None:
        self.rejected.append(transfer)


class Sink:
    """The engine's sink, which keeps everything in order."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def tokens(self, items: list[Out]) -> None:
        self.sent += items

    def __getattr__(self, name: str) -> Any:
        return self.sent.append

    @property
    def pieces(self) -> list[Out]:
        return [one for one in self.sent if isinstance(one, Out)]

    def failed_with(self) -> tuple[str, str | None, bool]:
        (failed,) = [one for one in self.sent if isinstance(one, Failed)]
        return failed.code, failed.param, failed.retryable


class Rig:
    """The front half of an engine."""

    def __init__(
        self,
        model: SmallModel,
        interval: int = 1,
        reasoning: str | None = None,
        traced: bool = False,
        **changes: Any,
    ) -> None:
        self.model, self.core, self.sink = model, Given(), Sink()
        self.numbers = iter(range(1000))
        scheduler = SimpleNamespace(scheduler_cls=SCHEDULERS[False], stream_interval=1)
        fields = {
            "model_config": model.config.model_config,
            "scheduler_config": scheduler,
            "speculative_config": None,
        }
        self.outputs = OutputProcessor(
            model.tokenizer, log_stats=traced, stream_interval=interval, tracing_enabled=traced
        )
        llm: Any = SimpleNamespace(
            vllm_config=SimpleNamespace(**(fields | changes)), model_config=model.config.model_config,
            tokenizer=model.tokenizer, input_processor=model.inputs, output_processor=self.outputs,
            engine_core=self.core, notify_kv_transfer_request_rejected=self.core.reject,
        )  # fmt: skip
        config = VllmEngineConfig(
            engine_id="d", model="small", role="decode", tool_parser="hermes", reasoning_parser=reasoning
        )
        self.runner = TaskRunner(
            config, llm, self.sink, ToolParsing.build(config, llm), ("generate",), AttemptLeases(), 1
        )

    async def decode(
        self, ids: list[int], end: FinishReason | None, params: dict[str, Any], **more: Any
    ) -> list[Out]:
        """Runs a decode for which the core samples `ids` and then ends with `end`; all its pieces."""
        before, known = len(self.sink.pieces), len(self.core.requests)
        handle = more.pop("handle", None)
        prompt = more.pop("prompt", PROMPT)
        self.runner.decode(Decode(f"r{next(self.numbers)}", prompt, params, handle, 60.0, **more))
        await settle()
        if len(self.core.requests) > known:
            request_id = self.core.requests[-1].request_id
            for n, token in enumerate(ids, 1):
                finish = end if n == len(ids) else None
                self.outputs.process_outputs([EngineCoreOutput(request_id, [token], finish_reason=finish)])
        await settle()
        return self.sink.pieces[before:]


async def settle() -> None:
    """Lets everything run that can run at once."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel()


def text(pieces: list[Out]) -> str:
    return "".join(piece.text for piece in pieces)


def after(pieces: list[Out], count: int, short_by: int = 0) -> Resume:
    """The word of an ingress that got the first `count` pieces, and sent on all but `short_by` of their characters."""
    ids = [token for piece in pieces[:count] for token in piece.token_ids or []]
    chars = len(text(pieces[:count])) + sum(piece.chars for piece in pieces[:count])
    return Resume(0, len(ids), ids, max(0, chars - short_by))


TEXTS = [
    "Here you are: \N{GRINNING FACE}\N{PARTY POPPER} caf\N{LATIN SMALL LETTER E WITH ACUTE}!",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 ok",
    "one two  three\n\n  four",
]


@pytest.mark.parametrize("whole", TEXTS)
@pytest.mark.parametrize("short_by", [0, 1, 100])
async def test_a_text_is_the_same_wherever_it_is_cut(model: SmallModel, whole: str, short_by: int) -> None:
    """The characters of several bytes are spread over up to four tokens, so that some cuts are inside of them."""
    rig, ids = Rig(model), model.tokens(whole)
    pieces = await rig.decode(ids, FinishReason.LENGTH, {})
    assert text(pieces) == whole
    assert any(not piece.text for piece in pieces) == (not whole.isascii())
    for k in range(1, len(ids)):
        resume = after(pieces, k, short_by)
        rest = await rig.decode(ids[k:], FinishReason.LENGTH, {}, resume=resume)
        assert whole[: resume.chars] + text(rest) == whole, f"cut after {k} tokens"
        assert [token for piece in rest for token in piece.token_ids or []] == ids[k:]
        assert (sum(piece.n_tokens for piece in rest), rest[-1].finish) == (len(ids) - k, "length")
        assert output_before(rig.core.requests[-1].sampling_params) == ids[:k]


async def test_an_engine_that_sends_several_tokens_at_once_sends_none_twice(model: SmallModel) -> None:
    ids = model.tokens("one two three four five six seven eight nine ten")
    for k in range(1, len(ids)):
        first = await Rig(model).decode(ids, FinishReason.LENGTH, {})
        rest = await Rig(model, interval=3).decode(ids[k:], FinishReason.LENGTH, {}, resume=after(first, k))
        assert [token for piece in rest for token in piece.token_ids or []] == ids[k:]
        assert text(first[:k]) + text(rest) == "one two three four five six seven eight nine ten"


@pytest.mark.parametrize("included", [False, True])
async def test_a_stop_string_across_the_seam_ends_the_text(model: SmallModel, included: bool) -> None:
    rig = Rig(model)
    ids = model.tokens("one two three four five")
    params = {"stop": ["ee fo", "zzz"], "include_stop_str_in_output": included}
    wanted = "one two three fo" if included else "one two thr"
    pieces = await rig.decode(ids, None, params)
    assert (text(pieces), pieces[-1].finish, pieces[-1].stop_reason) == (wanted, "stop", "ee fo")
    for k in range(1, len(pieces)):
        resume = after(pieces, k)
        rest = await rig.decode(ids[k:], None, params, resume=resume)
        assert text(pieces[:k]) + text(rest) == wanted, f"cut after {k} tokens"
        assert (rest[-1].finish, rest[-1].stop_reason) == ("stop", "ee fo")


@pytest.mark.parametrize(
    ("params", "last", "finish", "reason", "rest"),
    [
        ({"stop": ["ee fo"]}, " four", "stop", "ee fo", "r"),
        ({"max_tokens": 4}, " four", "length", None, " four"),
        ({"stop_token_ids": [1234]}, 1234, "stop", 1234, ""),
        ({}, "eos", "stop", None, ""),
    ],
)
async def test_output_that_has_its_end_is_answered_with_it_at_once(
    model: SmallModel, params: dict[str, Any], last: Any, finish: str, reason: Any, rest: str
) -> None:
    """The core is not asked, and the lender of the KV gets it back. The client lacks what it got of the last token."""
    rig = Rig(model)
    token = {"eos": model.tokenizer.eos_token_id}.get(last) or (
        last if isinstance(last, int) else model.tokens(last)[0]
    )
    known = "one two th" if "stop" in params else "one two three"
    resume = Resume(0, 4, [*model.tokens("one two three"), token], len(known))
    (piece,) = await rig.decode([], None, params, resume=resume, handle=HANDLE)
    assert (piece.text, piece.n_tokens, piece.token_ids) == (rest, 0, [])
    assert (piece.finish, piece.stop_reason) == (finish, reason)
    assert isinstance(rig.sink.sent[0], Admitted)
    assert rig.core.requests == []
    assert [transfer["remote_engine_id"] for transfer in rig.core.rejected] == ["p"]
    assert not rig.runner.busy
    assert not rig.runner.streams


async def test_an_end_before_min_tokens_is_none(model: SmallModel) -> None:
    rig = Rig(model)
    ids = model.tokens("one two three four five")
    pieces = await rig.decode(ids, FinishReason.LENGTH, {"stop": [" two"], "min_tokens": 4})
    assert text(pieces) == "one two three four five"
    for k in range(1, 5):
        resume = after(pieces, k)
        rest = await rig.decode(
            ids[k:], FinishReason.LENGTH, {"stop": [" two"], "min_tokens": 4}, resume=resume
        )
        assert text(pieces[:k]) + text(rest) == "one two three four five"


async def test_a_context_that_is_full_ends_at_once(model: SmallModel) -> None:
    rig = Rig(model)
    ids = model.tokens("one two three")[:1] * (MAX_MODEL_LEN - len(PROMPT))
    (piece,) = await rig.decode([], None, {}, resume=Resume(0, len(ids), ids, 0))
    assert piece.finish == "length"


# ---------------------------------------------------------------------------------------------------------- tools

CHAT = json.dumps({
    "model": "small",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
}).encode()  # fmt: skip

CALLS = (
    'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "\u4f60\u597d"}}\n</tool_call>'
)


class Client:
    """A client's sum of OpenAI deltas: reasoning, content, and name, id and arguments of each call."""

    def __init__(self, pieces: list[Out]) -> None:
        self.content, self.reasoning, self.calls = "", "", dict[int, dict[str, str]]()
        for piece in pieces:
            delta = json.loads(piece.delta or b"{}")
            self.content += delta.get("content") or ""
            self.reasoning += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", []):
                mine = self.calls.setdefault(call["index"], {"name": "", "id": "", "arguments": ""})
                mine["id"] += call.get("id") or ""
                for name, value in call.get("function", {}).items():
                    mine[name] += value or ""


@pytest.mark.parametrize("short_by", [0, 30])
async def test_tool_calls_are_the_same_wherever_they_are_cut(model: SmallModel, short_by: int) -> None:
    """A client that has all of the first part, or lacks its last pieces of about 30 characters."""
    rig, ids = Rig(model), [*model.tokens(CALLS), model.tokenizer.eos_token_id]
    pieces = await rig.decode(ids, FinishReason.STOP, {}, chat=CHAT)
    wanted = Client(pieces)
    assert wanted.content.strip() == "I look."
    assert [call["name"] for call in wanted.calls.values()] == ["weather", "weather"]
    assert json.loads(wanted.calls[1]["arguments"]) == {"city": "\u4f60\u597d"}
    assert sum(piece.chars for piece in pieces) == len(CALLS)
    for k in range(1, len(ids)):
        got = k
        while got > 1 and sum(piece.chars for piece in pieces[got:k]) < short_by:
            got -= 1
        resume = after(pieces, k, sum(piece.chars for piece in pieces[got:k]))
        rest = await rig.decode(ids[k:], FinishReason.STOP, {}, chat=CHAT, resume=resume)
        # An id that comes twice for a call would be a sum of both.
        begun = Client(pieces[:got]).calls
        client = Client([*pieces[:got], *rest])
        assert client.content == wanted.content, f"cut after {k} tokens"
        for index, call in client.calls.items():
            assert {**call, "id": ""} == {**wanted.calls[index], "id": ""}, f"cut after {k} tokens"
            assert begun.get(index, call)["id"] in ("", call["id"])
        assert len(client.calls) == 2
        assert rest[-1].finish == pieces[-1].finish == "tool_calls"
        assert sum(piece.n_tokens for piece in rest) == len(ids) - k


@pytest.mark.parametrize("most", [1, 2])
async def test_an_answer_with_too_many_tool_calls_ends(
    model: SmallModel, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The parsers read all of them again at each token."""
    monkeypatch.setattr(tools, "MAX_CALLS", most)
    rig, ids = Rig(model), [*model.tokens(CALLS), model.tokenizer.eos_token_id]
    pieces = await rig.decode(ids, FinishReason.STOP, {}, chat=CHAT)
    assert len(Client(pieces).calls) == most
    if most == 2:
        assert pieces[-1].finish == "tool_calls"
    else:
        assert rig.sink.failed_with() == ("bad_output", None, False)
    assert not rig.runner.busy


THOUGHT = "Here is my thought process: it rains in \u4f60\u597d often. Here is my response: Take an umbrella."


@pytest.mark.parametrize("short_by", [0, 30])
async def test_reasoning_is_the_same_wherever_it_is_cut(model: SmallModel, short_by: int) -> None:
    """Granite's parser keeps the state of its own between pieces, and tells thought from answer by text alone."""
    rig, ids = Rig(model, reasoning="granite"), [*model.tokens(THOUGHT), model.tokenizer.eos_token_id]
    pieces = await rig.decode(ids, FinishReason.STOP, {}, chat=CHAT)
    wanted = Client(pieces)
    assert (wanted.reasoning.strip(), wanted.content.strip()) == (
        "it rains in \u4f60\u597d often.",
        "Take an umbrella.",
    )
    for k in range(1, len(ids)):
        got = k
        while got > 1 and sum(piece.chars for piece in pieces[got:k]) < short_by:
            got -= 1
        resume = after(pieces, k, sum(piece.chars for piece in pieces[got:k]))
        rest = await rig.decode(ids[k:], FinishReason.STOP, {}, chat=CHAT, resume=resume)
        client = Client([*pieces[:got], *rest])
        assert (client.reasoning, client.content) == (wanted.reasoning, wanted.content), (
            f"cut after {k} tokens"
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative_config": object()},
        {"scheduler_config": SimpleNamespace(scheduler_cls=SCHEDULERS[True], stream_interval=4)},
    ],
)
async def test_parsed_output_in_pieces_of_several_tokens_is_not_taken_over(
    model: SmallModel, changes: dict[str, Any]
) -> None:
    rig = Rig(model, **changes)
    assert await rig.decode([], None, {}, chat=CHAT, resume=Resume(0, 1, [5], 0)) == []
    assert rig.sink.failed_with() == ("not_resumable", None, True)


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("resume", "params"),
    [
        (Resume(0, 3, [], 0), {}),
        (Resume(0, 2, [5, 10_000_000], 0), {}),
        (Resume(0, 1, [-1], 0), {}),
        (Resume(0, 1, [1000], 500), {}),
        (Resume(1, 1, [1000], 0), {"n": 2}),
    ],
)
async def test_what_cannot_be_the_beginning_is_refused(
    model: SmallModel, resume: Resume, params: dict[str, Any]
) -> None:
    rig = Rig(model)
    assert await rig.decode([], None, params, resume=resume) == []
    assert rig.sink.failed_with() == ("not_resumable", None, True)
    assert rig.core.requests == []
    assert not rig.runner.busy
    assert not rig.runner.streams
    assert not rig.outputs.request_states


async def test_an_engine_with_another_scheduler_says_that_it_cannot(model: SmallModel) -> None:
    other = SimpleNamespace(scheduler_cls="vllm.DiffusionScheduler", stream_interval=1)
    rig = Rig(model, scheduler_config=other)
    assert await rig.decode([], None, {}, resume=Resume(0, 1, [1000], 0)) == []
    assert rig.sink.failed_with() == ("not_resumable", None, True)


async def test_an_answer_that_its_grammar_does_not_accept_is_no_fault_of_the_request(
    model: SmallModel,
) -> None:
    """The core ends it with an error before it has put anything out (see the scheduler's test)."""
    rig = Rig(model)
    params = {"response_format": {"type": "json_object"}}
    assert await rig.decode([], None, params, resume=Resume(0, 1, [1000], 0)) == []
    request_id = rig.core.requests[-1].request_id
    rig.outputs.process_outputs([EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)])
    await settle()
    assert rig.sink.failed_with() == ("not_resumable", None, True)
    assert not rig.runner.busy


# ----------------------------------------------------------------------- whose fault an error of vLLM is

SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
}
TOOLS = json.dumps(
    {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    }
).encode()


@pytest.mark.parametrize(
    ("params", "chat", "code", "param"),
    [
        ({}, None, "internal", None),
        (SCHEMA, None, "bad_request", "response_format"),
        ({}, TOOLS, "bad_request", "tools"),
    ],
)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_an_error_over_a_schema_or_tools_is_no_fault_of_the_engine(
    model: SmallModel,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    params: dict[str, Any],
    chat: bytes | None,
    code: str,
    param: str | None,
) -> None:
    """A client could otherwise have any engine quarantined by two requests over which vLLM stumbles."""
    rig = Rig(model)

    def stumbles(*_: Any, **__: Any) -> None:
        raise AttributeError("'int' object has no attribute 'items'")

    monkeypatch.setattr(model.inputs, "process_inputs", stumbles)
    message = Prefill("r", PROMPT, params, 60.0, chat=chat) if kind == "prefill" else None
    if message is not None:
        rig.runner.prefill(message)
    else:
        rig.runner.decode(Decode("r", PROMPT, params, None, 60.0, chat=chat))
    await settle()
    assert rig.sink.failed_with() == (code, param, False)
    (failed,) = rig.sink.sent
    # clients read the message of a bad request, and learn no exception of an engine
    assert ("AttributeError" in failed.message) == (code == "internal")
    assert not rig.runner.busy


async def test_a_class_of_priority_beside_tools_is_nothing_that_vllm_reads(model: SmallModel) -> None:
    own = {"priority": "interactive", "slo": {"ttft_ms": 100}, "session": "s", "metadata": {"a": "b"}}
    chat = plan_chat(json.dumps(json.loads(TOOLS) | own).encode(), {}, Defaults()).engine_chat
    rig = Rig(model)
    (piece,) = await rig.decode([1000], FinishReason.STOP, {}, chat=chat)
    assert piece.finish == "stop"


async def test_no_request_chooses_the_backend_of_everybody_s_grammars(model: SmallModel) -> None:
    """A core takes the backend of its first request for all later ones. This schema is one that vLLM by default gives
    to outlines, which has no `json_object`.
    """
    rig = Rig(model)
    patterns = {"type": "object", "patternProperties": {"^a": {"type": "string"}, "^b": {"type": "string"}}}
    first = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": patterns}}}
    assert await rig.decode([], None, first) == []
    assert rig.sink.failed_with() == ("bad_request", None, False)
    assert rig.core.requests == []
    for params in ({"response_format": {"type": "json_object"}}, SCHEMA):
        await rig.decode([1000], FinishReason.STOP, params)
        assert rig.core.requests[-1].sampling_params.structured_outputs._backend == "xgrammar"


@pytest.mark.parametrize(("params", "code"), [({}, "internal"), (SCHEMA, "bad_output")])
async def test_an_answer_that_breaks_its_grammar_is_no_fault_of_the_engine(
    model: SmallModel, params: dict[str, Any], code: str
) -> None:
    rig = Rig(model)
    await rig.decode([1000, 1001], None, params)
    request_id = rig.core.requests[-1].request_id
    rig.outputs.process_outputs([EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)])
    await settle()
    assert rig.sink.failed_with() == (code, None, True)
    assert not rig.runner.busy


@pytest.mark.parametrize(("chat", "code"), [(None, "internal"), (TOOLS, "bad_output")])
async def test_an_output_that_is_no_tool_call_is_no_fault_of_the_engine(
    model: SmallModel, monkeypatch: pytest.MonkeyPatch, chat: bytes | None, code: str
) -> None:
    rig = Rig(model)

    def stumbles(*_: Any) -> None:
        raise KeyError("arguments")

    monkeypatch.setattr(ChoiceParser, "delta", stumbles)
    if chat is None:
        monkeypatch.setattr(runner, "out", stumbles)
    await rig.decode([1000], None, {}, chat=chat)
    assert rig.sink.failed_with() == (code, None, False)
    assert not rig.runner.busy


# ------------------------------------------------------------------------------------------------------ parameters


async def test_a_choice_keeps_its_index_and_derives_its_own_seed(model: SmallModel) -> None:
    rig = Rig(model)
    params = {"seed": 41, "prompt_logprobs": 2, "max_tokens": 9}
    pieces = await rig.decode([1001], FinishReason.STOP, params, resume=Resume(3, 1, [1000], 0))
    assert [piece.index for piece in pieces] == [3]
    sampling = rig.core.requests[-1].sampling_params
    assert sampling.seed == resumed_seed(41 + 3, 1)
    assert (sampling.max_tokens, sampling.prompt_logprobs) == (9, None)


async def test_the_kv_of_the_prompt_is_pulled_and_that_of_the_output_counted(model: SmallModel) -> None:
    rig = Rig(model)
    rig.runner.decode(Decode("r", PROMPT, {}, HANDLE, 60.0, resume=Resume(0, 2, [1000, 1001], 0)))
    await settle()
    extra = rig.core.requests[-1].sampling_params.extra_args
    assert extra["kv_transfer_params"]["remote_engine_id"] == "p"
    assert output_before(rig.core.requests[-1].sampling_params) == [1000, 1001]
    assert [task.kv_tokens for task in rig.runner.decodes] == [len(PROMPT) + 2]
    rig.runner.cancel("r")
    await settle()
    assert rig.core.aborted == [rig.core.requests[-1].request_id]


async def test_a_jump_of_the_wall_clock_does_not_change_when_kv_is_due(
    model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(model)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    begun_s = time.monotonic()
    rig.runner.decode(Decode("r", PROMPT, {}, HANDLE, 60.0, kv_due_s=5.0))
    rig.runner.decode(Decode("s", PROMPT, {}, HANDLE, 60.0))
    await settle()
    due_at_s, none = (
        request.sampling_params.extra_args["kv_transfer_params"][DUE] for request in rig.core.requests
    )
    assert begun_s + 5.0 <= due_at_s <= time.monotonic() + 5.0
    assert none is None


async def test_a_read_ends_with_its_request(model: SmallModel) -> None:
    rig = Rig(model)
    begun_s = time.monotonic()
    rig.runner.decode(Decode("r", PROMPT, {}, HANDLE, 3.0))
    await settle()
    ends_at_s = rig.core.requests[-1].sampling_params.extra_args["kv_transfer_params"][ENDS]
    assert begun_s + 3.0 <= ends_at_s <= time.monotonic() + 3.0


async def test_no_output_yet_is_a_request_from_its_start(model: SmallModel) -> None:
    rig = Rig(model)
    params = {"seed": 41, "prompt_logprobs": 2}
    pieces = await rig.decode([1000], FinishReason.STOP, params, resume=Resume(2, 0, [], 0))
    assert [(piece.index, piece.finish) for piece in pieces] == [(2, "stop")]
    sampling = rig.core.requests[-1].sampling_params
    assert (sampling.seed, sampling.extra_args, sampling.prompt_logprobs) == (43, None, 2)


@pytest.mark.parametrize("traced", [False, True])
async def test_vllm_is_told_the_place_in_a_trace_only_where_it_makes_spans(
    model: SmallModel, traced: bool
) -> None:
    rig = Rig(model, traced=traced)
    place = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for number, trace in enumerate((place, None)):
        rig.runner.decode(Decode(f"t{number}", PROMPT, {}, None, 60.0, trace=trace))
    await settle()
    told = [request.trace_headers for request in rig.core.requests]
    assert told == [{"traceparent": place} if traced else None, None]
    rig.runner.stop()


async def test_output_that_has_its_end_is_answered_where_vllm_makes_spans(model: SmallModel) -> None:
    rig = Rig(model, traced=True)
    resume = Resume(0, 4, model.tokens("one two three four"), len("one two three"))
    (piece,) = await rig.decode([], None, {"max_tokens": 4}, resume=resume)
    assert (piece.text, piece.finish) == (" four", "length")
    assert rig.core.requests == []
