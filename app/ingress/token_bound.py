"""A number of tokens that a text has at least, from its length alone: a text that cannot fit is not tokenised.

    tokens >= characters that are not dropped / (source characters of a normalised one x longest token)

The bound holds for BPE on bytes (GPT-2, Llama 3, Qwen) and for BPE with single bytes as a last resort (Llama 2, Gemma).
Other tokenizers may make one token of any amount of text (an unknown word, blanks beside a token that strips them), and
have no bound.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

COMPOSED = 4
"""Most characters that NFC or NFKC compose to one. Source: Unicode Standard Annex 15, "Maximum Expansion Factors": NFD
expands a character to 4 at most, and it gives the same for a text and for the text's NFC.
"""

_LENGTHENS = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
"""Normalizers after which a text has no fewer characters."""

_KEEPS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
"""Pre-tokenizers that leave nothing out; others do so by option."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The bound of one tokenizer. Without `chars_per_token` there is none.

    `dropped` are the control characters of which the vocabulary lacks the byte, so that they become no tokens at all.
    """

    chars_per_token: int | None
    dropped: str = ""

    def fewest(self, text: str) -> int:
        """Returns a number of tokens that `text` has at least: 0 if that cannot be said."""
        if self.chars_per_token is None:
            return 0
        kept = len(text) - sum(map(text.count, self.dropped))
        return -(-kept // self.chars_per_token)


def bound_of(tokenizer: Tokenizer) -> TokenBound:
    """Returns the bound of a tokenizer without truncation."""
    spec = json.loads(tokenizer.to_str())
    composed, dropped, added = _composed(spec["normalizer"]), _dropped(spec), spec["added_tokens"]
    if (
        composed is None
        or dropped is None
        or (dropped and spec["normalizer"] is not None)
        or not all(map(_keeps, _steps(spec["pre_tokenizer"], "pretokenizers")))
        # such a token takes all blanks beside it along
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return TokenBound(None)
    contents = [token["content"] for token in added]
    if tokenizer.normalizer is not None:
        contents += map(tokenizer.normalizer.normalize_str, contents)
    longest = max(map(len, (*spec["model"]["vocab"], *contents)))
    return TokenBound(longest * composed, dropped)


def _steps(spec: dict[str, Any] | None, children: str) -> Iterable[dict[str, Any]]:
    """Yields the normalizers or pre-tokenizers that a tokenizer has, one after another."""
    if spec is None:
        return
    if spec["type"] == "Sequence":
        for child in spec[children]:
            yield from _steps(child, children)
    else:
        yield spec


def _composed(spec: dict[str, Any] | None) -> int | None:
    """Returns the most characters of which the normalizers make one, or None if any number may vanish."""
    most = 1
    for step in _steps(spec, "normalizers"):
        kind = step["type"]
        if kind in ("NFC", "NFKC"):
            most *= COMPOSED
        elif kind == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif kind not in _LENGTHENS:
            return None
    return most


def _keeps(step: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer splits the text without leaving any of it out."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPS


def _dropped(spec: dict[str, Any]) -> str | None:
    """Returns the control characters that become no token, or None if other characters may become none, too."""
    model, vocabulary = spec["model"], spec["model"]["vocab"]
    if model["type"] != "BPE":
        return None
    steps = (*_steps(spec["normalizer"], "normalizers"), *_steps(spec["pre_tokenizer"], "pretokenizers"))
    if not any(step["type"] == "ByteLevel" for step in steps):
        whole = model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        return "" if whole else None
    lacking = {byte for byte, letter in enumerate(_byte_letters()) if letter not in vocabulary}
    control = {*range(0x20), 0x7F}
    # A character beyond ASCII has a byte of 0x80 to 0xBF, which stays even where the vocabulary lacks its first byte.
    if not lacking <= control | {*range(0xC0, 0x100)}:
        return None
    return "".join(chr(byte) for byte in sorted(lacking & control))


def _byte_letters() -> str:
    """Returns the letter that stands for each byte in a byte-level vocabulary.

    Source: `bytes_to_unicode` of GPT-2's encoder.py. Bytes that Latin-1 prints stand for themselves, and the others for
    the letters from U+0100 on.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printed else next(others)) for byte in range(0x100))
