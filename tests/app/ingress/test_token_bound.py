"""The fewest tokens of a text by its length: never more than it has, and no bound where tokenizers drop text."""

import json
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from app.ingress.token_bound import TokenBound, bound_of
from tests.app.ingress.play import byte_tokenizer


def composing() -> Tokenizer:
    """As Qwen's: bytes after NFC."""
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def lacking() -> Tokenizer:
    """As SmolLM2's: its vocabulary lacks some bytes, and what consists of them vanishes."""
    spec = json.loads(byte_tokenizer().to_str())
    letters = {"\x04": "Ą", "\x06": "Ć", "\xf1": "ñ"}
    for letter in letters.values():
        del spec["model"]["vocab"][letter]
    spec["model"]["merges"] = []
    return Tokenizer.from_str(json.dumps(spec))


def special() -> Tokenizer:
    """Bytes, and an added token that is longer than any word."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|a_token_longer_than_others|>", normalized=False)])
    return tokenizer


def falling_back() -> Tokenizer:
    """As Llama 2's: characters, and single bytes for unknown ones."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "▁a", "e", "▁▁", "▁▁▁▁"]
    merges = [("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁")]
    model = models.BPE({piece: at for at, piece in enumerate(pieces)}, merges, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
PIECES = st.sampled_from(
    [
        "e\u0304\u0301",
        "\u03b1\u0313\u0300\u0345",
        "\x04\x06",
        "👩‍👩‍👧",
        "    ",
        "a a",
        "<|a_token_longer_than_others|>",
    ]
)


@cache
def made(make: Callable[[], Tokenizer]) -> tuple[Tokenizer, TokenBound]:
    return make(), bound_of(make())


@pytest.mark.parametrize("make", [byte_tokenizer, composing, lacking, special, falling_back])
@given(start=TEXT, piece=PIECES, times=st.integers(0, 50), end=TEXT)
def test_a_text_has_that_many_tokens(
    make: Callable[[], Tokenizer], start: str, piece: str, times: int, end: str
) -> None:
    tokenizer, bound = made(make)
    assert bound.chars_per_token is not None
    text = start + piece * times + end
    assert bound.fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_the_bound_is_met_by_the_longest_token() -> None:
    tokenizer, bound = made(special)
    text = "<|a_token_longer_than_others|>" * 100
    assert bound.fewest(text) == len(tokenizer.encode(text)) == 100
    # 30 characters make a token at most, and 31 make two at least
    assert bound.fewest("x" * 31) == 2


def test_what_becomes_no_token_does_not_count() -> None:
    tokenizer, bound = made(lacking)
    text = "\x04" * 1000 + "\x06" * 1000
    assert bound.dropped == "\x04\x06"
    assert bound.fewest(text) == len(tokenizer.encode(text)) == 0
    # a character beyond ASCII never vanishes altogether: U+40000 is f1 80 80 80
    assert len(tokenizer.encode("\U00040000")) == 3


def test_composed_characters_count_all_that_they_are_made_of() -> None:
    plain, composed = bound_of(byte_tokenizer()), bound_of(composing())
    assert plain.chars_per_token is not None
    assert composed.chars_per_token == 4 * plain.chars_per_token


def with_normalizer(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizer
    return tokenizer


def with_pre_tokenizer(first: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = byte_tokenizer()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, level])
    return tokenizer


def with_token(token: AddedToken) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([token])
    return tokenizer


UNKNOWN = "<unk>"


LITTLE: dict[str, tuple[Tokenizer, str]] = {
    "unknown words": (Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN)), "x" * 1000),
    "long words": (Tokenizer(models.WordPiece({UNKNOWN: 0}, unk_token=UNKNOWN)), "x" * 1000),
    "fused unknown letters": (
        Tokenizer(models.BPE({UNKNOWN: 0, "a": 1}, [], unk_token=UNKNOWN, fuse_unk=True)),
        "x" * 1000,
    ),
    "dropped unknown letters": (Tokenizer(models.BPE({"a": 0}, [])), "x" * 1000),
    "Strip": (with_normalizer(normalizers.Strip()), " " * 1000),
    "Replace": (with_normalizer(normalizers.Replace("xx", "")), "x" * 1000),
    "StripAccents": (
        with_normalizer(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
        "\u0301" * 1000,
    ),
    "Whitespace": (with_pre_tokenizer(pre_tokenizers.Whitespace()), " " * 1000),
    "Split": (with_pre_tokenizer(pre_tokenizers.Split(" ", "removed")), " " * 1000),
    "rstrip": (with_token(AddedToken("<|end|>", rstrip=True)), "<|end|>" + " " * 1000),
}


@pytest.mark.parametrize("case", LITTLE)
def test_a_tokenizer_that_makes_little_of_much_has_no_bound(case: str) -> None:
    tokenizer, text = LITTLE[case]
    assert len(tokenizer.encode(text)) <= 1
    assert bound_of(tokenizer).fewest(text) == 0
