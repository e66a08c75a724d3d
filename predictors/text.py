"""The functions here compute cheap signals of a prompt's text, and keys that identify a prompt without storing it.

Keys are BLAKE2b digests, so equal prompts have equal keys and the text cannot be recovered. A deployment that
shares its outcome logs passes a secret `salt`, so that nobody can test guesses of a prompt against them.
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
# Only this many characters at the end are scanned, because a megabyte of prompt must not cost the ingress a
# millisecond per pattern.
_SCAN_CHARS = 20_000


def digest(text: str, salt: bytes = b"") -> str:
    """Returns a 128-bit digest of `text` in hex. `salt` has at most 64 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=salt).hexdigest()


def normalise(prompt: str) -> str:
    """Returns the prompt as it enters the keys, with white space collapsed and case folded."""
    return _WHITESPACE.sub(" ", prompt).strip().casefold()


def prompt_key(prompt: str, salt: bytes = b"") -> str:
    """Returns the key of the whole normalised prompt."""
    return digest(normalise(prompt), salt)


def template_key(prompt: str, salt: bytes = b"") -> str:
    """Returns the key of the first TEMPLATE_CHARS characters of the normalised prompt with digits masked, so that
    requests made from one template have equal keys.
    """
    head = normalise(prompt[: 4 * TEMPLATE_CHARS])[:TEMPLATE_CHARS]
    return digest(re.sub(r"\d+", "0", head), salt)


def signals(prompt: str, last_turn: str | None = None) -> TextSignals:
    """Returns the signals of a prompt. `last_turn` is the newest message of a conversation (default: the whole
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
