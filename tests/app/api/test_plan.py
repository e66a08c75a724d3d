"""The plan of a good request: parameters for the engine, defaults, extensions."""

import json
from typing import Any

import orjson
import pytest

from app.api.conversation import messages_for_template
from app.api.errors import ApiError
from app.api.extensions import ClassSlo, Defaults
from app.api.plan import Plan, plan_chat, plan_completion
from policies.request.terms import Terms


def chat(headers: Any = None, **more: Any) -> Plan:
    return plan_chat(
        orjson.dumps({"messages": [{"role": "user", "content": "hi"}]} | more), headers or {}, Defaults()
    )


def completion(**more: Any) -> Plan:
    return plan_completion(orjson.dumps({"prompt": "hi"} | more), {}, Defaults())


def test_only_what_was_given_goes_to_the_engine() -> None:
    assert chat().params == {}
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "presence_penalty": 1.0,
             "frequency_penalty": -1.0, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2,
             "stop_token_ids": [5], "skip_special_tokens": False}  # fmt: skip
    assert chat(**given).params == given


def test_forms_that_engines_do_not_know_are_made_the_one_they_know() -> None:
    assert chat(stop="x").params["stop"] == ["x"]
    assert chat(stop=["x", "y"]).params["stop"] == ["x", "y"]
    assert chat(n=3).params["n"] == 3
    assert "n" not in chat(n=1).params
    assert chat(logit_bias={"007": 5}).params["logit_bias"] == {"7": 5.0}
    assert "response_format" not in chat(response_format={"type": "text"}).params
    assert chat(logprobs=True).params["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=3).params["logprobs"] == 3
    assert "logprobs" not in chat(logprobs=False).params
    assert completion(logprobs=0).params["logprobs"] == 0


def test_null_means_not_given_and_the_unknown_is_ignored() -> None:
    plan = chat(
        temperature=None, stop=None, n=None, stream=None, tools=None, user="me", metadata={"a": 1}, xyz=5
    )
    assert (plan.params, plan.n, plan.stream) == ({}, 1, False)


def test_the_harmless_value_of_an_unsupported_field_passes() -> None:
    chat(functions=[], modalities=["text"], audio=None, use_beam_search=False, best_of=1)
    completion(suffix="", best_of=1, use_beam_search=False)
    assert completion(best_of=2, n=2).n == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # a chat may fill the rest of the context: 64 - 10
        ({}, 54),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 54}, 54),
    ],
)
def test_the_token_budget_of_a_chat(fields: dict[str, int], expected: int) -> None:
    plan = chat(**fields)
    plan.prompts = ["x"]
    assert plan.fit([[1] * 10], 64, 100) == [expected]


def test_a_completion_without_max_tokens_gets_openais_default() -> None:
    assert completion().fit([[1]], 64, 100) == [16]


def test_prompts_in_all_four_forms() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("interactive", (-1, "interactive")), ("standard", (0, "standard")), ("batch", (1, "batch")),
        (-5, (-5, "interactive")), (0, (0, "standard")), (7, (7, "batch")), (None, (0, "standard")),
    ],
)  # fmt: skip
def test_priority_is_a_class_or_a_number(value: int | str | None, expected: tuple[int, str]) -> None:
    plan = chat(priority=value)
    assert (plan.terms.priority, plan.terms.request_class) == expected
    if value is not None:
        by_header = chat({b"x-sluice-priority": str(value).encode()})
        assert (by_header.terms.priority, by_header.terms.request_class) == expected


def test_the_body_wins_over_the_headers() -> None:
    headers = {
        b"x-sluice-priority": b"batch",
        b"x-sluice-slo-ttft-ms": b"900",
        b"x-sluice-slo-tpot-ms": b"90",
        b"x-sluice-session": b"header",
        b"x-sluice-user": b"header",
    }
    plan = chat(headers, priority="interactive", slo={"ttft_ms": 500}, session="body", user="someone")
    assert plan.user == "someone"
    assert plan.terms == Terms(-1, "interactive", 0.5, 0.09, "body", slo_presses=False)
    plan = chat(headers)
    assert plan.user == "header"
    assert plan.terms == Terms(1, "batch", 0.9, 0.09, "header", slo_presses=False)


def test_the_operators_defaults_fill_in_what_a_request_leaves_open() -> None:
    defaults = Defaults(7, 60.0, {"batch": ClassSlo(ttft_s=9.0, tpot_s=0.9)})
    body = {"prompt": "hi", "slo": {"ttft_ms": 500}}
    plan = plan_completion(orjson.dumps(body | {"priority": "batch"}), {}, defaults)
    assert plan.terms == Terms(1, "batch", 0.5, 0.9, timeout_s=60.0, slo_presses=False)
    assert plan.max_tokens == 7
    plan = plan_completion(orjson.dumps(body), {}, defaults)
    assert plan.terms == Terms(ttft_slo_s=0.5, timeout_s=60.0, slo_presses=False)


@pytest.mark.parametrize(
    ("own_ms", "of_class_s", "presses"),
    [(None, None, True), (None, 2.0, True), (1, None, False), (60_000, None, False), (1, 2.0, False),
     (1999, 2.0, False), (2000, 2.0, True), (3000, 2.0, True)],
)  # fmt: skip
@pytest.mark.parametrize("by_header", [False, True])
def test_a_clients_own_objective_presses_only_where_it_is_no_shorter_than_that_of_its_class(
    own_ms: float | None, of_class_s: float | None, presses: bool, by_header: bool
) -> None:
    defaults = Defaults(class_slo={"standard": ClassSlo(ttft_s=of_class_s), "batch": ClassSlo(ttft_s=1e-3)})
    body: dict[str, Any] = {"prompt": "hi"}
    headers = {}
    if own_ms is not None and by_header:
        headers[b"x-sluice-slo-ttft-ms"] = str(own_ms).encode()
    elif own_ms is not None:
        body["slo"] = {"ttft_ms": own_ms}
    assert plan_completion(orjson.dumps(body), headers, defaults).terms.slo_presses is presses


@pytest.mark.parametrize(
    ("asked", "most_s", "expected", "limits_itself"),
    [
        (None, 60.0, 60.0, False), (b"2.5", 60.0, 2.5, True), (b"61", 60.0, 60.0, False),
        (b"60", 60.0, 60.0, False), (b"2.5", None, 2.5, True), (None, None, None, False),
    ],
)  # fmt: skip
def test_a_request_may_take_less_time_than_the_operator_allows_and_not_more(
    asked: bytes | None, most_s: float | None, expected: float | None, limits_itself: bool
) -> None:
    headers = {} if asked is None else {b"x-sluice-timeout-s": asked}
    said = orjson.dumps({"messages": [{"role": "user", "content": "hi"}]})
    for plan in (
        plan_completion(orjson.dumps({"prompt": "hi"}), headers, Defaults(7, most_s)),
        plan_chat(said, headers, Defaults(7, most_s)),
    ):
        assert (plan.terms.timeout_s, plan.limits_itself) == (expected, limits_itself)


def test_only_echoed_logprobs_need_the_prompt_where_the_answer_is() -> None:
    assert completion(echo=True, logprobs=2).terms.local
    assert completion(echo=True, logprobs=2).params["prompt_logprobs"] == 2
    assert not completion(echo=True).terms.local
    assert not completion(logprobs=2).terms.local


def test_a_mode_comes_by_header_and_does_not_contradict_the_body() -> None:
    assert completion().terms.mode is None
    for mode in ("colocated", "disaggregated"):
        assert chat({b"x-sluice-mode": mode.encode()}).terms.mode == mode
    body = orjson.dumps({"prompt": "hi", "echo": True, "logprobs": 1})
    assert plan_completion(body, {b"x-sluice-mode": b"colocated"}, Defaults()).terms.local
    with pytest.raises(ApiError, match="cannot be served disaggregated"):
        plan_completion(body, {b"x-sluice-mode": b"disaggregated"}, Defaults())


def test_tools_send_the_request_along_for_the_engines_parser() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat().engine_chat is None
    assert chat(tools=tools).engine_chat is not None
    assert chat(tools=tools, tool_choice="none").engine_chat is None


def test_engines_get_of_a_chat_what_they_know() -> None:
    known = {
        "messages": [
            {"role": "user", "content": "\u00e4", "name": "n", "more": {"a": [1.5, None, 10**30]}},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": {"b": None}}}}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "user": "u",
        "stop": None,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"x": True}}},
        "chat_template_kwargs": {"enable_thinking": False},
        "include_reasoning": False,
    }
    own = {"priority": "interactive", "slo": {"ttft_ms": 5}, "session": "s"}
    body = json.dumps(known | own | {"metadata": {"x": "y" * 1000}}).encode()
    sent = plan_chat(body, {}, Defaults()).engine_chat
    assert sent is not None
    assert json.loads(sent) == known


def test_messages_for_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    plan = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "5", "tool_call_id": "1"},
        ]
    )
    assert plan.request is not None
    user, assistant, tool = messages_for_template(plan.request)
    assert user["content"] == "a\nb"
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert tool == {"role": "tool", "content": "5", "tool_call_id": "1"}
