"""An answer may differ from the undisturbed one at a near tie, and nowhere else."""

import random

import pytest

from benchmarks.chaos.answers import Said
from benchmarks.chaos.vllm_asks import compare, drawn, fixed_asks

WANT = Said(" the sea is", [" the", " sea", " is"], [-0.1, -0.7, -0.1], [2.0, 0.004, 3.0], finish="length")


@pytest.mark.parametrize(
    ("text", "finish", "verdict"),
    [
        (" the sea is", "length", None),
        # another token at the second position, a tie
        (" the sun is", "length", "near tie"),
        # " seas" differs where " is" begins, but " sea" was the choice
        (" the seas", "length", "near tie"),
        (" a sea is", "length", "wrong"),
        (" the sea was", "length", "wrong"),
        (" the sea is", "stop", "wrong"),
        (" the sea is in", "length", "wrong"),
    ],
)
def test_only_a_tie_excuses(text: str, finish: str, verdict: str | None) -> None:
    found = compare(Said(text, finish=finish), WANT)
    assert (found and found[0]) == verdict


def test_other_tool_calls_are_wrong() -> None:
    want = Said(calls={0: ["person", '{"name": "A"}']}, finish="tool_calls")
    assert compare(Said(calls={0: ["person", '{"name": "A"}']}, finish="tool_calls"), want) is None
    assert compare(Said(calls={0: ["person", '{"name": "A'], 1: ["", ""]}), want) is not None


def test_the_fixed_set_has_every_form_under_a_name_of_its_own() -> None:
    asks = fixed_asks()
    assert len({ask.key for ask in asks}) == len(asks)
    assert {ask.form for ask in asks} == {"chat", "text", "long", "n", "stop", "schema", "tool"}
    for ask in asks:
        assert ask.body["temperature"] == 0 or ask.body["top_k"] == 1
        assert ask.body.get("n", 1) == (2 if ask.form == "n" else 1)


def test_some_streams_last_for_more_than_a_minute() -> None:
    asks, rng = fixed_asks(), random.Random(2)
    drawn_s = [ask.output_s for _ in range(200) if (ask := drawn(asks, rng, 0.1)).stream]
    assert 5 <= sum(seconds > 60 for seconds in drawn_s) <= 50
