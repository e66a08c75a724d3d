"""The exact bytes of answers, against literal JSON."""

import json
from typing import Any

import pytest

from actors.wire.messages import Out
from app.api import chunks
from app.api.chunks import Choice, Envelope, StreamWriter, merge_deltas, usage_json, whole_parts


def envelope(chat: bool, usage_null: bool = False) -> Envelope:
    return Envelope("id-1", 123, "m", chat, usage_null)


def choice(chat: bool, **more: Any) -> Choice:
    return Choice(**({"index": 0, "chat": chat, "logprobs": False, "keep": False} | more))


def parsed(data: bytes) -> list[Any]:
    assert data.endswith(b"\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in data.decode().strip().split("\n\n")]


def test_a_chat_stream() -> None:
    writer, one = StreamWriter(envelope(True)), choice(True)
    role, first = parsed(writer.piece(one, Out("r", 'a "b"\n', 1)))
    assert role == {
        "id": "id-1", "object": "chat.completion.chunk", "created": 123, "model": "m",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }  # fmt: skip
    assert first["choices"] == [
        {"index": 0, "delta": {"content": 'a "b"\n'}, "logprobs": None, "finish_reason": None}
    ]
    (second,) = parsed(writer.piece(one, Out("r", "é", 1)))
    assert second["choices"][0]["delta"] == {"content": "é"}
    (last,) = parsed(writer.piece(one, Out("r", "", 1, finish="stop", stop_reason="END")))
    assert last["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
    ]


def test_a_completion_stream() -> None:
    writer, one = StreamWriter(envelope(False)), choice(False, index=2)
    (first,) = parsed(writer.piece(one, Out("r", "a", 1)))
    assert first == {
        "id": "id-1", "object": "text_completion", "created": 123, "model": "m",
        "choices": [{"index": 2, "text": "a", "logprobs": None, "finish_reason": None}],
    }  # fmt: skip
    (last,) = parsed(writer.piece(one, Out("r", "b", 1, finish="length")))
    assert last["choices"] == [{"index": 2, "text": "b", "logprobs": None, "finish_reason": "length"}]


def test_what_says_nothing_is_not_sent() -> None:
    writer, one = StreamWriter(envelope(False)), choice(False)
    assert writer.piece(one, Out("r", "", 1)) == b""
    chat = choice(True)
    (role,) = parsed(
        StreamWriter(envelope(True)).piece(chat, Out("r", "", 1))
    )  # but a chat opens with its role
    assert role["choices"][0]["delta"]["role"] == "assistant"


def test_usage_in_the_stream() -> None:
    writer, one = StreamWriter(envelope(True, usage_null=True)), choice(True)
    usage = usage_json(3, 2, 1)
    for event in parsed(writer.piece(one, Out("r", "a", 1))):
        assert event["usage"] is None
    (last,) = parsed(writer.usage(usage, [one]))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip


def test_the_running_usage_counts_the_chunk_that_it_is_in() -> None:
    writer, one = StreamWriter(envelope(True, usage_null=True)), choice(True)
    events = []
    for tokens in (1, 3):
        events += parsed(writer.piece(one, Out("r", "a", tokens), lambda: usage_json(3, one.tokens, 1)))
    # the first chunk has the role only
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 4]


def test_chat_logprobs() -> None:
    entries = [("é", 5, -0.5, [("é", 5, -0.5), ("x", 6, float("-inf"))])]
    writer, one = StreamWriter(envelope(True)), choice(True, logprobs=True)
    event = parsed(writer.piece(one, Out("r", "é", 1, logprobs=entries)))[-1]
    (entry,) = event["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], bytes(entry["bytes"]).decode()) == ("é", -0.5, "é")
    assert [(t["token"], t["logprob"]) for t in entry["top_logprobs"]] == [("é", -0.5), ("x", -9999.0)]


def test_completion_logprobs_with_an_echoed_prompt() -> None:
    one = choice(False, logprobs=True, keep=True, echo="ab c", echo_first="ab")
    prompt = [None, (" c", 7, -1.0, [(" c", 7, -1.0)])]
    one.absorb(Out("r", " d", 1, logprobs=[(" d", 8, -2.0, [])], prompt_logprobs=prompt))
    one.absorb(Out("r", " e", 1, logprobs=[(" e", 9, -3.0, [])], finish="stop"))
    made = json.loads(b"".join(whole_parts(envelope(False), [one], usage_json(2, 2, 0))))["choices"][0]
    assert made["text"] == "ab c d e"
    assert made["logprobs"] == {
        "tokens": ["ab", " c", " d", " e"],
        "token_logprobs": [None, -1.0, -2.0, -3.0],
        "top_logprobs": [None, {" c": -1.0}, None, None],
        "text_offset": [0, 2, 4, 6],
    }


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 7])
def test_log_probabilities_of_a_whole_answer_are_made_in_parts(
    monkeypatch: pytest.MonkeyPatch, chat: bool, tokens: int
) -> None:
    entries = [
        (f'"\u00e9{i}', i, -0.5 * i, [("x", 1, -1.0), ("\n", 2, -2.0)][: i % 3]) for i in range(tokens)
    ]
    made = choice(chat, logprobs=True, keep=True, entries=entries)
    expected = b"".join(chunks._logprobs(choice(chat, logprobs=True), entries))  # in one part
    monkeypatch.setattr(chunks, "PART_ENTRIES", 3)
    parts = list(whole_parts(envelope(chat), [made, choice(chat)], usage_json(1, tokens, 0)))
    assert b',"logprobs":' + expected + b',"finish_reason"' in b"".join(parts)
    first, second = json.loads(b"".join(parts))["choices"]
    assert second["logprobs"] is None and first["logprobs"] == json.loads(expected)
    # a part for each three tokens, beside those that any answer has
    assert len(parts) >= -(-tokens // 3) + 6


def test_a_whole_chat_answer() -> None:
    one = choice(True, keep=True)
    one.absorb(Out("r", "a", 1))
    one.absorb(Out("r", "b", 1, finish="stop"))
    assert json.loads(b"".join(whole_parts(envelope(True), [one], usage_json(1, 2, 0)))) == {
        "id": "id-1", "object": "chat.completion", "created": 123, "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "ab"}, "logprobs": None, "finish_reason": "stop"}
        ],
        "usage": {
            "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }  # fmt: skip


def test_deltas_fold_into_one_message() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
    more = {"index": 0, "function": {"arguments": "}"}}
    other = {"index": 1, "id": "e", "function": {"name": "g"}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None}, {"content": "a"}, {"content": "b", "reasoning_content": "r1"},
        {"reasoning_content": "r2"}, {"tool_calls": [call]}, {"tool_calls": [more, other]},
    ]  # fmt: skip
    assert merge_deltas(deltas) == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "r1r2",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "e", "function": {"name": "g", "arguments": ""}},
        ],
    }
