"""Bad requests, as vLLM's and OpenAI's servers answer them: the status and the field at fault, before any
work begins.
"""

import ast
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.api.conversation import messages_for_template
from app.api.errors import ApiError
from app.api.extensions import Defaults
from app.api.plan import Plan, plan_chat, plan_completion

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi there"}
CONTEXT, VOCAB = 64, 100
ROOT = Path(__file__).parents[3]


def check_chat(**more: Any) -> Plan:
    plan = plan_chat(json.dumps(CHAT | more).encode(), {}, Defaults())
    assert plan.request is not None
    messages_for_template(plan.request)
    plan.prompts = ["x"]
    plan.fit([[1] * 10], CONTEXT, VOCAB)
    return plan


def check_completion(**more: Any) -> Plan:
    plan = plan_completion(json.dumps(COMPLETION | more).encode(), {}, Defaults())
    plan.fit([[1] * 10 if isinstance(p, str) else p for p in plan.prompts], CONTEXT, VOCAB)
    return plan


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    # 10 of the prompt and 55 are more than 64
    ({"max_tokens": 55}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 60, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [100]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": "5"}, "stop_token_ids"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"100": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"priority": "urgent"}, "priority"),
    ({"priority": 1001}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
    ({"slo": {"tpot_ms": -1}}, "slo.tpot_ms"),
    ({"slo": {"ttft": 5}}, "slo"),
    ({"slo": 5}, "slo"),
    ({"session": 5}, "session"),
    ({"session": "x" * 513}, "session"),
    ({"user": 5}, "user"),
    ({"user": "x" * 513}, "user"),
    ({"ignore_eos": "x"}, "ignore_eos"),
    # known to the peers, not served here: refused by name
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"guided_json": {}}, "guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
]

ONLY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}]},
        "messages[0].content[1]",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 55}, "max_completion_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": "x"}, "tools"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": {}}, "prediction"),
    ({"chat_template": "x"}, "chat_template"),
    ({"documents": [{}]}, "documents"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
]

ONLY_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": [100]}, "prompt"),  # outside the vocabulary
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1] * 64}, "prompt"),  # leaves no room in the context
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 1000, "n": 2}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"echo": 1}, "echo"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"messages": []}, "messages"),
    ({"tools": [{}]}, "tools"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]


def refused(call: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    error = orjson.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"].replace("The prompt", "prompt").replace(
        "Token", "prompt logit_bias stop_token_ids"
    )


@pytest.mark.parametrize(("fields", "param"), BOTH + ONLY_CHAT, ids=str)
def test_a_bad_chat_request_names_its_field(fields: dict[str, Any], param: str) -> None:
    refused(check_chat, fields, param)


@pytest.mark.parametrize(("fields", "param"), BOTH + ONLY_COMPLETION, ids=str)
def test_a_bad_completion_request_names_its_field(fields: dict[str, Any], param: str) -> None:
    refused(check_completion, fields, param)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"5", b"{'a': 1}", b'{"messages": [}', b"\xff\xfe", b'{"a": "\xff"}',
        b'{"a": "\\ud800"}', b'{"a":' * 100_000, b"\x00", b'{"prompt": "a"} trailing',
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_400_without_a_field(body: bytes) -> None:
    for plan in (lambda: plan_chat(body, {}, Defaults()), lambda: plan_completion(body, {}, Defaults())):
        with pytest.raises(ApiError) as caught:
            plan()
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, None, "invalid_json")


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("name", [b"temperature", b"top_p", b"presence_penalty"])
def test_numbers_must_be_finite(literal: bytes, name: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        plan_completion(b'{"prompt": "a", "%s": %s}' % (name, literal), {}, Defaults())
    assert (caught.value.status, caught.value.param) == (400, name.decode())


@pytest.mark.parametrize("missing", ["messages", "prompt"])
def test_a_missing_prompt_is_named(missing: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan_chat(b"{}", {}, Defaults()) if missing == "messages" else plan_completion(b"{}", {}, Defaults())
    assert (caught.value.param, caught.value.code) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({b"x-sluice-priority": b"urgent"}, "x-sluice-priority"),
        ({b"x-sluice-priority": b"\xff"}, "x-sluice-priority"),
        ({b"x-sluice-priority": b"5000"}, "x-sluice-priority"),
        ({b"x-sluice-slo-ttft-ms": b"fast"}, "x-sluice-slo-ttft-ms"),
        ({b"x-sluice-slo-ttft-ms": b"nan"}, "x-sluice-slo-ttft-ms"),
        ({b"x-sluice-slo-tpot-ms": b"-5"}, "x-sluice-slo-tpot-ms"),
        ({b"x-sluice-timeout-s": b"soon"}, "x-sluice-timeout-s"),
        ({b"x-sluice-timeout-s": b"0"}, "x-sluice-timeout-s"),
        ({b"x-sluice-timeout-s": b"-1"}, "x-sluice-timeout-s"),
        ({b"x-sluice-timeout-s": b"inf"}, "x-sluice-timeout-s"),
        ({b"x-sluice-timeout-s": b""}, "x-sluice-timeout-s"),
        ({b"x-sluice-session": b"x" * 513}, "x-sluice-session"),
        ({b"x-sluice-mode": b"both"}, "x-sluice-mode"),
        ({b"x-sluice-mode": b"\xff"}, "x-sluice-mode"),
    ],
)
def test_a_bad_extension_header_is_named(headers: dict[bytes, bytes], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan_chat(orjson.dumps(CHAT), headers, Defaults())
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "invalid_value")


def test_who_may_never_come_back_gets_no_time_for_it() -> None:
    assert ApiError(503, "m", retry_after_s=float("inf")).headers() == []
    assert ApiError(503, "m", retry_after_s=0.2).headers() == [(b"retry-after", b"1")]


def codes(path: Path) -> set[str]:
    """Returns the codes of errors that a module has as literals."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            found += [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            if isinstance(node.func, ast.Name) and node.func.id == "bad_request":
                found += node.args[2:]
    return {word.value for word in found if isinstance(word, ast.Constant) and isinstance(word.value, str)}


def test_operations_say_what_to_do_about_each_code() -> None:
    modules = [path for room in ("api", "ingress") for path in (ROOT / "app" / room).rglob("*.py")]
    answered = set[str]().union(*map(codes, modules))
    assert {"invalid_json", "prompt_memory"} <= answered
    told = (ROOT / "docs" / "operations.md").read_text()
    assert sorted(code for code in answered if f"`{code}`" not in told) == []
