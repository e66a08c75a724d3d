"""Answers to prompts whose text ends with U+FFFD: they begin behind the prompt's text, whatever comes first.

vLLM's processors of inputs and outputs and its tokenizer are real; what the core samples is given.
"""

from typing import Any, ClassVar

import pytest

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

from tokenizers.decoders import DecodeStream  # noqa: E402
from vllm.v1.engine import FinishReason  # noqa: E402

from actors.engine.vllm import prompt_end  # noqa: E402
from tests.actors.engine.vllm.small import SmallModel  # noqa: E402
from tests.actors.engine.vllm.test_resume import Rig, after, text  # noqa: E402

FACE = "\N{GRINNING FACE}"
ANSWER = '{"count": 1}'


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel()


async def answer(model: SmallModel, prompt: list[int], ids: list[int], **params: Any) -> str:
    return text(await Rig(model).decode(ids, FinishReason.LENGTH, params, prompt=prompt))


# Ends of prompts: text in front of the last character, with which it may share a token, and that character.
ENDS = [("", FACE), ("is", " " + FACE), ("", "\u4f60"), ("", "\N{CYRILLIC SMALL LETTER ZHE}\u4f60")]


@pytest.mark.parametrize(("word", "end"), ENDS)
async def test_a_character_that_the_answer_completes_is_the_answer_s(
    model: SmallModel, word: str, end: str
) -> None:
    ids, before = model.tokens(end), model.tokens(f"What follows {word}")
    assert len(ids) > 1
    for cut in range(1, len(ids)):
        said = await answer(model, [*before, *ids[:cut]], [*ids[cut:], *model.tokens(" and more")])
        whole_already = model.tokenizer.decode(ids[:cut]).rstrip("\N{REPLACEMENT CHARACTER}")
        assert said == f"{end} and more".removeprefix(whole_already)


@pytest.mark.parametrize(("word", "end"), ENDS)
async def test_a_character_that_the_answer_does_not_complete_is_none_of_the_answer(
    model: SmallModel, word: str, end: str
) -> None:
    ids, before = model.tokens(end), model.tokens(f"What follows {word}")
    for cut in range(1, len(ids)):
        assert await answer(model, [*before, *ids[:cut]], model.tokens(ANSWER)) == ANSWER


async def test_bytes_of_the_answer_that_end_no_character_do_not_repeat_the_prompt_s(
    model: SmallModel,
) -> None:
    """The prompt ends with one replacement character already; a second, whole one belongs to the answer."""
    first, second = model.tokens(FACE)[:2]
    prompt = [*model.tokens("Say: "), first]
    assert await answer(model, prompt, [second, *model.tokens(ANSWER)]) == ANSWER
    assert await answer(model, prompt, [first, *model.tokens(ANSWER)]) == "\N{REPLACEMENT CHARACTER}" + ANSWER


async def test_a_token_with_a_whole_character_and_half_of_the_next_is_not_repeated(model: SmallModel) -> None:
    vocabulary = ((i, model.tokenizer.decode([i])) for i in range(len(model.tokenizer)))
    mixed = next(i for i, said in vocabulary if said[0].isalpha() and said.endswith("\ufffd"))
    assert await answer(model, [*model.tokens("Say: "), mixed], model.tokens(ANSWER)) == ANSWER


@pytest.mark.parametrize("count", [1, 4, 5, 9])
async def test_a_prompt_that_ends_in_no_character_at_all_is_not_repeated(
    model: SmallModel, count: int
) -> None:
    half = model.tokens(FACE)[:1]
    for prompt in ([*model.tokens("Say: "), *(count * half)], count * half):
        assert await answer(model, prompt, model.tokens(ANSWER)) == ANSWER
        assert await answer(model, prompt, model.tokens(FACE)[1:]) == FACE


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("whole", [False, True])
async def test_special_tokens_behind_the_end_do_not_bring_the_prompt_back(
    model: SmallModel, skip: bool, count: int, whole: bool
) -> None:
    """Text can end with U+FFFD itself, and templates may put special tokens behind it, which the text leaves out."""
    end = model.tokens("\N{REPLACEMENT CHARACTER}") if whole else model.tokens(FACE)[:1]
    prompt = [*model.tokens("Say: "), *end, *(count * [model.tokenizer.eos_token_id])]
    assert await answer(model, prompt, model.tokens(ANSWER), skip_special_tokens=skip) == ANSWER


class CountingStream:
    """A stream that notes the tokens that it gets."""

    steps: ClassVar[list[int]] = []

    def __init__(self, **options: Any) -> None:
        self._stream = DecodeStream(**options)

    def step(self, tokenizer: Any, token_id: int) -> str | None:
        self.steps.append(token_id)
        return self._stream.step(tokenizer, token_id)


@pytest.mark.parametrize("count", [1, 450])
async def test_special_tokens_behind_the_end_are_not_given_to_the_stream(
    model: SmallModel, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A stream decodes all that it has got again with each token, in the engine's event loop: a prompt with thousands
    of them would stop the engine's signs of life.
    """
    monkeypatch.setattr(prompt_end, "DecodeStream", CountingStream)
    for specials in ([model.tokenizer.eos_token_id], [0, 1, 2]):
        CountingStream.steps.clear()
        behind = (specials * count)[:count]
        prompt = [*model.tokens("Say: "), *model.tokens(FACE)[:1], *behind]
        assert await answer(model, prompt, model.tokens(ANSWER)) == ANSWER
        assert CountingStream.steps == [*model.tokens(FACE)[:1], *model.tokens(ANSWER)]


async def test_stop_strings_and_plain_prompts_are_as_ever(model: SmallModel) -> None:
    half = [*model.tokens("Say: "), *model.tokens(FACE)[:1]]
    ids = model.tokens("one two three")
    for prompt in (half, model.tokens("Say:"), [model.tokenizer.eos_token_id] * 9):
        assert await answer(model, prompt, ids) == "one two three"
        assert await answer(model, prompt, ids, stop=["\N{REPLACEMENT CHARACTER}"]) == "one two three"
        assert await answer(model, prompt, ids, stop=["two"]) == "one "


@pytest.mark.parametrize("completed", [False, True])
async def test_an_answer_goes_on_elsewhere_behind_such_a_prompt(model: SmallModel, completed: bool) -> None:
    face = model.tokens(" " + FACE)
    prompt = [*model.tokens("Say:"), face[0]]
    ids = [*(face[1:] if completed else []), *model.tokens(ANSWER)]
    whole = FACE + ANSWER if completed else ANSWER
    rig = Rig(model)
    pieces = await rig.decode(ids, FinishReason.LENGTH, {}, prompt=prompt)
    assert text(pieces) == whole
    for k in range(1, len(ids)):
        resume = after(pieces, k)
        rest = await rig.decode(ids[k:], FinishReason.LENGTH, {}, prompt=prompt, resume=resume)
        assert whole[: resume.chars] + text(rest) == whole, f"cut after {k} tokens"
