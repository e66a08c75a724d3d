"""The text of the sim engine. Token i is a pure function of (prompt hash, seed, choice, i), so a request has the same
text wherever and however often it is computed, colocated or disaggregated, preempted or not.

The text is not sampled: temperature, top_p and the like do not shape it. A token is a word with a leading space.
"""

import math
from array import array
from collections.abc import Sequence

import xxhash

WORDS: tuple[str, ...] = tuple(
    " " + word
    for word in (  # noqa: SIM905  (a list literal of 64 words is 64 lines)
        "a about after all also an and any as at be because but by can come could day do even find first for from "
        "get give go good have he her here him his how I if in into it its just know like look make man many me "
        "more my new no not now of on one only or other our out over"
    ).split()
)
assert len(WORDS) == 64

_MASK64 = 2**64 - 1


def prompt_hash(tokens: Sequence[int]) -> int:
    """Returns the 64-bit hash of a prompt, which is the same in every process. Tokens must lie in 0 .. 2^32 - 1 (else
    OverflowError).
    """
    return xxhash.xxh3_64_intdigest(array("I", tokens).tobytes())


def text_base(hash_of_prompt: int, seed: int, choice: int) -> int:
    """Returns the 30-bit number from which all tokens of one choice follow."""
    data = array("Q", (hash_of_prompt & _MASK64, seed & _MASK64, choice)).tobytes()
    return xxhash.xxh3_64_intdigest(data) >> 34


MASK32 = 2**32 - 1
TOKEN_STRIDE = 0x9E3779B1
"""2^32 divided by the golden ratio, rounded to a near prime; multiples of it spread evenly over 32 bits."""
TOKEN_MIX = 0x2C1B3C6D


def token_start(base: int) -> int:
    """Returns the number `start` from which every token of a choice follows: token i is
    WORDS[((x ^ x >> 15) * TOKEN_MIX >> 26) & 63] with x = (start + i * TOKEN_STRIDE) & MASK32.

    This is a xorshift-multiply hash of a counter, cheap enough to be computed inline for every token.
    """
    return base * 0x85EBCA6B & MASK32


def token_id(base: int, i: int) -> int:
    """Returns the id of token `i` (from 0), which is an index into WORDS."""
    x = (token_start(base) + i * TOKEN_STRIDE) & MASK32
    return ((x ^ x >> 15) * TOKEN_MIX >> 26) & 63


def output_tokens(
    base: int, max_tokens: int, mean_tokens: float | None, min_tokens: int = 0
) -> tuple[int, bool]:
    """Returns the number of output tokens, and whether the text ended by itself.

    The length is drawn from a geometric distribution with mean `mean_tokens` and is at least `min_tokens`. With a mean
    of None the text never ends by itself and has `max_tokens` tokens.
    """
    if mean_tokens is None:
        return max_tokens, False
    u = (xxhash.xxh3_64_intdigest(base.to_bytes(8, "little")) + 1) / 2**64
    drawn = 1 if mean_tokens <= 1 else 1 + int(math.log(u) / math.log1p(-1 / mean_tokens))
    drawn = max(drawn, min_tokens)
    return (drawn, True) if drawn <= max_tokens else (max_tokens, False)


def logprob(base: int, i: int) -> float:
    """Returns a plausible logprob of token `i`; its probability lies in 0.5 .. 0.99."""
    return math.log(0.5 + 0.49 * ((base * 31 + i * 2654435761 >> 7) & 1023) / 1023)


def alternatives(base: int, i: int, k: int) -> list[tuple[str, int, float]]:
    """Returns the `k` most likely tokens at position `i` as (text, id, logprob), best first. The best is the token that
    was chosen.
    """
    chosen, best = token_id(base, i), logprob(base, i)
    rest = 1.0 - math.exp(best)
    found = [(WORDS[chosen], chosen, best)]
    for j in range(1, min(k, len(WORDS))):
        other = (chosen + j) % len(WORDS)
        found.append((WORDS[other], other, math.log(rest * 0.5**j)))
    return found[:k]


class StopMatcher:
    """Finds stop strings in text that arrives in pieces. It holds back an end of the text that may begin a stop string.

    Raises ValueError without stop strings, or when one is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not stops or not all(stops):
            raise ValueError("StopMatcher needs at least one stop string, none of them empty")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that is certain now, and the stop string that was found or None.

        Of several matches the earliest in the text wins, and at the same place the stop string listed first.
        """
        text = self._held + piece
        found = [(at, order) for order, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0]
        if found:
            at, order = min(found)
            self._held = ""
            return text[:at], self._stops[order]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Returns the text that was held back, when the output has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
