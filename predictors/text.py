"""Signals that the prompt's text gives away cheaply, and keys that name a prompt without keeping it.

Keys are BLAKE2b digests: equal prompts meet, the text cannot be read back. A deployment that shares its
outcome logs passes a secret `salt`, so that nobody can test guesses of a prompt against them.
"""

from __future__ import annotations

import hashlib
import re

from predictors.protocol import TextSignals

TEMPLATE_CHARS = 200
_WHITESPACE = re.compile(r"\s+")
_CODE = re.compile(r"```|\bdef |\bclass |\bfunction\b|#include|[{};]\s*$", re.MULTILINE)
_LIST = re.compile(r"^\s*(?:[-*\u2022]|\d{1,3}[.)])\s", re.MULTILINE)
_WORDS = re.compile(r"\b(\d{1,5})[\s-]*words?\b", re.IGNORECASE)
# Scanning stops here: a megabyte of prompt must not cost the ingress a millisecond per pattern.
_SCAN_CHARS = 20_000


def digest(text: str, salt: bytes = b"") -> str:
    """A 128-bit key of `text`, hex. `salt` is at most 64 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=salt).hexdigest()


def normalise(prompt: str) -> str:
    """The prompt as keys see it: white space collapsed, case folded."""
    return _WHITESPACE.sub(" ", prompt).strip().casefold()


def prompt_key(prompt: str, salt: bytes = b"") -> str:
    """Names the whole normalised prompt."""
    return digest(normalise(prompt), salt)


def template_key(prompt: str, salt: bytes = b"") -> str:
    """Names the first TEMPLATE_CHARS of the normalised prompt, digits masked: requests filled into one
    template meet.
    """
    head = normalise(prompt[: 4 * TEMPLATE_CHARS])[:TEMPLATE_CHARS]
    return digest(re.sub(r"\d+", "0", head), salt)


def signals(prompt: str, last_turn: str | None = None) -> TextSignals:
    """The signals of a prompt; `last_turn` is the newest message of a conversation (default: the whole
    prompt).
    """
    turn = prompt if last_turn is None else last_turn
    scanned = turn[-_SCAN_CHARS:]
    words = _WORDS.findall(scanned)
    return TextSignals(
        chars=len(prompt),
        last_turn_chars=len(turn),
        question_marks=scanned.count("?") + scanned.count("\uff1f"),
        code_marks=len(_CODE.findall(scanned)),
        list_marks=len(_LIST.findall(scanned)),
        requested_words=int(words[-1]) if words else None,
    )
