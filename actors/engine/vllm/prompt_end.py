"""Prompts whose text ends with U+FFFD: inside a character, as prompts of token ids can, or with that character itself.

vLLM's detokenizer gives its stream the whole prompt as the text that came before. A stream takes U+FFFD at the end for
an unfinished character. It then forgets the prompt's text, and puts it out in front of the first output (seen with
tokenizers 0.23). The prompt's last tokens are therefore given to the stream one by one, as if they were output: it
holds their text back until the first output that ends with a whole character. If the output has completed the prompt's
last character, that character belongs to the answer. All that the prompt's own text had already is left out, so that
the answer is the text of prompt and output together, less the text of the prompt.
"""

from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from vllm.v1.engine.output_processor import RequestState

LONGEST_CHARACTER = 4
"""Most tokens of one character: UTF-8 has at most 4 bytes, and a token at least one."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class _BehindPrompt:
    """Stream of a detokenizer that holds text of the prompt back. It takes that text off the first piece, and then
    gives its place to the plain stream.
    """

    def __init__(self, detokenizer: FastIncrementalDetokenizer, stream: DecodeStream, held: str) -> None:
        self._detokenizer = detokenizer
        self._stream = stream
        self._held = held

    def step(self, tokenizer: "Tokenizer", token_id: int) -> str | None:
        piece: str | None = self._stream.step(tokenizer, token_id)
        if not piece:
            return piece
        self._detokenizer.stream = self._stream
        of_prompt = takewhile(lambda pair: pair[0] == pair[1], zip(self._held, piece, strict=False))
        return piece[len(list(of_prompt)) :]


@lru_cache(maxsize=4)
def _special(tokenizer: "Tokenizer") -> frozenset[int]:
    """Returns the ids of the tokens that `skip_special_tokens` leaves out of a text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def mend(state: "RequestState") -> None:
    """Makes the text of a request, which has no output yet, begin behind its prompt wherever that ends."""
    detokenizer, prompt = state.detokenizer, state.prompt_token_ids
    if not isinstance(detokenizer, FastIncrementalDetokenizer) or not prompt:
        return
    tokenizer, skip = detokenizer.tokenizer, detokenizer.skip_special_tokens

    def text(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=skip))

    # A character may be followed by tokens that are left out of the text. They do not finish it, and there may be very
    # many of them: a stream that got them would decode them all again with each one.
    end = len(prompt)
    left_out = _special(tokenizer) if skip else frozenset[int]()
    while end and (prompt[end - 1] in left_out or tokenizer.id_to_token(prompt[end - 1]) is None):
        end -= 1
    prompt, size = prompt[:end], LONGEST_CHARACTER

    def unfinished(token_ids: list[int]) -> bool:
        return text(token_ids[-size:]).endswith(_UNFINISHED)

    if not unfinished(prompt):
        return
    splits = ((prompt[:-n], prompt[-n:]) for n in range(1, size + 1))
    # Bytes that never become a character have no head. Without any context the text cannot repeat the prompt.
    head, rest = next((split for split in splits if not unfinished(split[0])), (list[int](), prompt[-size:]))
    stream = DecodeStream(ids=head, skip_special_tokens=skip)
    for token_id in rest:
        stream.step(tokenizer, token_id)
    context = head[-size:]
    held = text([*context, *rest])[len(text(context)) :]
    detokenizer.stream = _BehindPrompt(detokenizer, stream, held)
