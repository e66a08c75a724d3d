"""Tests that synthetic text is pure and varied, and that stop strings are found wherever the pieces are cut."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.engine_model import text


def say(base: int, n: int) -> str:
    return "".join(text.WORDS[text.token_id(base, i)] for i in range(n))


def test_words_are_distinct_and_begin_with_a_space() -> None:
    assert len(set(text.WORDS)) == 64
    assert all(word.startswith(" ") and word.strip() for word in text.WORDS)


def test_text_depends_on_prompt_seed_and_choice_only() -> None:
    prompt = text.prompt_hash([1, 2, 3])
    assert say(text.text_base(prompt, 0, 0), 20) == say(text.text_base(text.prompt_hash([1, 2, 3]), 0, 0), 20)
    variants = {
        say(text.text_base(p, seed, choice), 20)
        for p in (prompt, text.prompt_hash([1, 2, 4]))
        for seed in (0, 1, -1)
        for choice in (0, 1)
    }
    assert len(variants) == 12


def test_prompts_hardly_ever_share_a_text() -> None:
    texts = {say(text.text_base(text.prompt_hash([i]), 0, 0), 12) for i in range(5000)}
    assert len(texts) == 5000


def test_the_inline_form_is_the_same() -> None:
    points = [(text.token_start(12345) + i * text.TOKEN_STRIDE) & text.MASK32 for i in range(50)]
    inline = [(x ^ x >> 15) * text.TOKEN_MIX >> 26 & 63 for x in points]
    assert inline == [text.token_id(12345, i) for i in range(50)]


def test_all_words_occur_about_equally_often() -> None:
    counts = Counter(text.token_id(base, i) for base in range(200) for i in range(100))
    assert len(counts) == 64
    assert max(counts.values()) < 2 * min(counts.values())


def test_lengths() -> None:
    assert text.output_tokens(7, 50, None) == (50, False)
    drawn = [text.output_tokens(base, 10**6, 40.0)[0] for base in range(4000)]
    assert 37 < sum(drawn) / len(drawn) < 43  # geometric, mean 40, standard error 0.6
    assert all(text.output_tokens(base, 10**6, 40.0, min_tokens=100)[0] >= 100 for base in range(50))
    assert all(
        text.output_tokens(base, 5, 1000.0, 0) == (5, False)
        for base in range(20)
        if text.output_tokens(base, 10**6, 1000.0)[0] > 5
    )
    assert text.output_tokens(3, 10, 1.0) == (1, True)


def test_alternatives_are_a_distribution_led_by_the_chosen_token() -> None:
    for i in range(50):
        found = text.alternatives(99, i, 5)
        assert found[0][1] == text.token_id(99, i)
        assert found[0][2] == text.logprob(99, i)
        assert [p for *_, p in found] == sorted((p for *_, p in found), reverse=True)
        assert sum(math.exp(p) for *_, p in found) <= 1.0
        assert len({token for _, token, _ in found}) == 5
    assert text.alternatives(99, 0, 0) == []


def test_stop_string_across_pieces() -> None:
    matcher = text.StopMatcher(["end of"])
    assert matcher.push("the e") == ("the ", None)
    assert matcher.push("nd ") == ("", None)
    assert matcher.push("off") == ("", "end of")


def test_held_text_is_given_back() -> None:
    matcher = text.StopMatcher(["abc"])
    assert matcher.push("xab") == ("x", None)
    assert matcher.push("ab") == ("ab", None)
    assert matcher.flush() == "ab"
    assert matcher.flush() == ""


def test_earliest_stop_wins() -> None:
    assert text.StopMatcher(["later", "late"]).push("too later") == ("too ", "later")
    assert text.StopMatcher(["b", "a"]).push("xab") == ("x", "a")


def test_empty_stops_are_refused() -> None:
    for stops in ([], [""], ["a", ""]):
        with pytest.raises(ValueError):
            text.StopMatcher(stops)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_matcher_equals_search_in_the_whole_text(whole: str, stops: list[str], step: int) -> None:
    """The matcher, given pieces of any size, finds a stop string at the first piece that completes one, and passes on
    exactly the text before it.
    """
    matcher = text.StopMatcher(stops)
    out, hit = "", None
    for start in range(0, len(whole), step):
        piece, hit = matcher.push(whole[start : start + step])
        out += piece
        if hit is not None:
            break
    seen = whole[: start + step] if whole else ""
    matches = [seen.find(stop) for stop in stops if stop in seen]
    if hit is None:
        assert not matches
        assert out + matcher.flush() == whole
    else:
        assert out == seen[: min(matches)]
        assert seen[min(matches) :].startswith(hit)
