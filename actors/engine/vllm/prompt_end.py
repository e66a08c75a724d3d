"""Prompts that end inside a character, which only prompts of token ids can do.

vLLM's detokenizer gives its stream the whole prompt as the text that came before. A stream forgets that text if it ends
inside a character, and then puts out the prompt in front of the first output (seen with tokenizers 0.23). The tokens of
an unfinished character are therefore given to the stream one by one, as if they were output: it holds them back until
the character is whole.
"""

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState

LONGEST_CHARACTER = 4
"""Most tokens of one character: UTF-8 has at most 4 bytes, and a token at least one."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def mend(state: "RequestState") -> None:
    """Makes the text of a request, which has no output yet, begin behind its prompt wherever that ends."""
    detokenizer, prompt = state.detokenizer, state.prompt_token_ids
    if not isinstance(detokenizer, FastIncrementalDetokenizer) or not prompt:
        return
    tokenizer = detokenizer.tokenizer

    def unfinished(token_ids: list[int]) -> bool:
        tail = token_ids[-LONGEST_CHARACTER:]
        return bool(tokenizer.decode(tail, skip_special_tokens=False).endswith(_UNFINISHED))

    if not unfinished(prompt):
        return
    heads = [prompt[:-n] for n in range(1, min(LONGEST_CHARACTER, len(prompt) + 1))]
    # bytes that never become a character have no head; without any context the text cannot repeat the prompt
    head = next((head for head in heads if not unfinished(head)), list[int]())
    detokenizer.stream = DecodeStream(ids=head, skip_special_tokens=detokenizer.skip_special_tokens)
    if head:
        for token_id in prompt[len(head) :]:
            detokenizer.stream.step(tokenizer, token_id)
