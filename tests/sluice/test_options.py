"""Request bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice import SLO, Sluice
from sluice._options import chat_body, completion_body


def body(**options: Any) -> Any:
    return json.loads(chat_body("x", options, model=None, stream=False))  # type: ignore[arg-type]


def test_an_option_that_does_not_exist_is_refused_before_anything_is_sent() -> None:
    with Sluice("http://127.0.0.1:1") as client, pytest.raises(TypeError, match=r"'max_token'.*extra_body"):
        client.chat("x", max_token=3)  # type: ignore[call-overload]


def test_chat_only_options_are_no_completion_options() -> None:
    with pytest.raises(TypeError, match="'tools'"):
        completion_body("x", {"tools": []}, model=None, stream=False)  # type: ignore[typeddict-unknown-key]


def test_extra_body_wins() -> None:
    assert body(temperature=1.0, extra_body={"temperature": 0.0, "max_completion_tokens": 5}) == {
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0.0,
        "max_completion_tokens": 5,
    }


def test_extra_body_cannot_switch_streaming_on() -> None:
    with pytest.raises(TypeError, match="stream=True"):
        body(extra_body={"stream": True})


def test_falsy_values_are_values() -> None:
    sent = body(temperature=0.0, max_tokens=0, stop="", logprobs=False, priority=0)
    del sent["messages"]
    assert sent == {"temperature": 0.0, "max_tokens": 0, "stop": "", "logprobs": False, "priority": 0}


@pytest.mark.parametrize(
    ("slo", "sent"),
    [(SLO(100, 20), {"ttft_ms": 100, "tpot_ms": 20}), (SLO(tpot_ms=5.5), {"tpot_ms": 5.5}), (SLO(), {})],
)
def test_slo(slo: SLO, sent: dict[str, float]) -> None:
    assert body(slo=slo)["slo"] == sent


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms"])
def test_an_impossible_slo_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        SLO(**{name: value})


@pytest.mark.parametrize(
    "bad", [{"temperature": float("nan")}, {"user": "\ud800"}, {"tool_choice": {"a": object()}}]
)
def test_what_json_cannot_say_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        body(**bad)
