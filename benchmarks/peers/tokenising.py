"""The CPU time that Sluice's ingress spends to tokenise a prompt, which a router that passes prompts on does not.

Behind such a router each engine of vLLM tokenises instead, the prefill and the decode engine alike; the sources here do
not. So the time is part of Sluice's figures in every row, and reported apart. The sim engines' codec makes a token of a
word; the tokenizer of SmolLM2 is measured beside it, as an engine of vLLM needs one.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.ingress.tokenizer import HfCodec, TextCodec, WordCodec
from benchmarks.live.measure import prompts

PROMPTS = 20
"""The prompts of each length, which all differ."""
LEAST_S = 0.05
"""CPU seconds for which prompts of one length are tokenised at least."""


def measured(model: Path, words: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Returns tokens and CPU milliseconds a prompt, by tokenizer and length; `model` has the tokenizer of SmolLM2."""
    codecs: dict[str, TextCodec] = {"words": WordCodec(), "SmolLM2": HfCodec(model)}
    return [
        {"tokenizer": name, "words": length, **one(codec, prompts(seed, PROMPTS, length - 1))}
        for name, codec in codecs.items()
        for length in words
    ]


def one(codec: TextCodec, texts: Sequence[str]) -> dict[str, Any]:
    """Returns tokens and CPU milliseconds of a prompt, both as means over `texts`; the first pass is not counted."""
    tokens = sum(len(codec.encode(text, add_special_tokens=False)) for text in texts)
    passes, begun_s = 0, time.process_time()
    while time.process_time() - begun_s < LEAST_S:
        for text in texts:
            codec.encode(text, add_special_tokens=False)
        passes += 1
    spent_s = time.process_time() - begun_s
    return {"tokens": round(tokens / len(texts)), "cpu_ms": 1e3 * spent_s / (passes * len(texts))}
