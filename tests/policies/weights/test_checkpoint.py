"""How checkpoints are cut, read and compared, by hand-made files and for any sizes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.weights.checkpoint import (
    SAMPLE_BYTES,
    SAMPLES,
    BadCheckpoint,
    Layout,
    Piece,
    Tensor,
    WeightFile,
    difference,
    fingerprint,
    header_end,
    samples,
    tensors,
)


def layout(*sizes: int, piece_bytes: int = 10) -> Layout:
    return Layout(tuple(WeightFile(f"{i}.safetensors", size) for i, size in enumerate(sizes)), piece_bytes)


def header(**found: tuple[str, list[int], int, int]) -> bytes:
    told: dict[str, Any] = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for name, (dtype, shape, begin, end) in found.items()
    }
    return json.dumps({"__metadata__": {"format": "pt"}} | told).encode()


# ---------------------------------------------------------------------------------------------------------- pieces


def test_pieces_of_two_files() -> None:
    # 25 bytes: 10 + 10 + 5; 10 bytes: one piece
    cut = layout(25, 10)
    assert cut.pieces == 4
    assert cut.bytes == 35
    assert [cut.piece(i) for i in range(4)] == [
        Piece(0, 0, 10),
        Piece(0, 10, 10),
        Piece(0, 20, 5),
        Piece(1, 0, 10),
    ]


@pytest.mark.parametrize(
    ("file", "end", "needed"),
    [(0, 0, 0), (0, 1, 1), (0, 10, 1), (0, 11, 2), (0, 25, 3), (1, 0, 3), (1, 10, 4)],
)
def test_pieces_that_a_part_needs(file: int, end: int, needed: int) -> None:
    assert layout(25, 10).needed(file, end) == needed


@given(
    sizes=st.lists(st.integers(8, 200), min_size=1, max_size=6),
    piece_bytes=st.integers(1, 64),
    place=st.floats(0, 1),
)
def test_pieces_cover_every_byte_once_and_a_part_lies_in_the_pieces_it_needs(
    sizes: list[int], piece_bytes: int, place: float
) -> None:
    cut = layout(*sizes, piece_bytes=piece_bytes)
    seen: list[tuple[int, int]] = []
    for number in range(cut.pieces):
        piece = cut.piece(number)
        seen += [(piece.file, at) for at in range(piece.begin, piece.begin + piece.size)]
    assert seen == [(file, at) for file, size in enumerate(sizes) for at in range(size)]
    file, at = seen[int(place * (len(seen) - 1))]
    needed = cut.needed(file, at + 1)
    assert (file, at) in seen[: sum(cut.piece(i).size for i in range(needed))]
    assert (file, at) not in seen[: sum(cut.piece(i).size for i in range(needed - 1))]


@pytest.mark.parametrize("number", [-1, 4])
def test_there_is_no_such_piece(number: int) -> None:
    with pytest.raises(IndexError):
        layout(25, 10).piece(number)


@pytest.mark.parametrize(
    "files",
    [
        (),
        (WeightFile("a", 7),),
        (WeightFile("", 10),),
        (WeightFile("../a", 10),),
        (WeightFile("a", 10), WeightFile("a", 10)),
    ],
)
def test_what_is_no_checkpoint(files: tuple[WeightFile, ...]) -> None:
    with pytest.raises(BadCheckpoint):
        Layout(files)


def test_pieces_have_bytes() -> None:
    with pytest.raises(BadCheckpoint):
        layout(10, piece_bytes=0)


# --------------------------------------------------------------------------------------------------------- headers


def test_tensors_of_a_file_in_the_order_of_their_bytes() -> None:
    told = header(b=("F32", [2], 4, 12), a=("BF16", [1, 2], 0, 4))
    begin = 8 + len(told)
    file = WeightFile("x", begin + 12)
    assert header_end(len(told).to_bytes(8, "little"), file) == begin
    assert tensors(told, 3, file) == [
        Tensor("a", "BF16", (1, 2), 3, begin, begin + 4),
        Tensor("b", "F32", (2,), 3, begin + 4, begin + 12),
    ]


@pytest.mark.parametrize(
    ("length", "size"),
    [(b"\0" * 7, 100), ((93).to_bytes(8, "little"), 100), ((2**40).to_bytes(8, "little"), 2**41)],
)
def test_beginnings_that_are_none(length: bytes, size: int) -> None:
    with pytest.raises(BadCheckpoint):
        header_end(length, WeightFile("x", size))


@pytest.mark.parametrize(
    "told",
    [
        b"no json",
        b"[]",
        b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
        header(a=("F32", [1], 0, 5)),
        header(a=("F32", [1], 4, 0)),
        header(a=("F32", [1], -1, 3)),
    ],
)
def test_headers_that_are_none(told: bytes) -> None:
    with pytest.raises(BadCheckpoint):
        tensors(told, 0, WeightFile("x", 8 + len(told) + 4))


# --------------------------------------------------------------------------------------------------------- the same


def test_fingerprints_tell_names_sizes_headers_and_samples_apart() -> None:
    one = layout(25)
    known = fingerprint(one, [b"h"], [b"ab"])
    assert known == fingerprint(layout(25), [b"h"], [b"ab"])
    others = [
        fingerprint(layout(26), [b"h"], [b"ab"]),
        fingerprint(Layout((WeightFile("z", 25),), 10), [b"h"], [b"ab"]),
        fingerprint(one, [b"g"], [b"ab"]),
        fingerprint(one, [b"h"], [b"ac"]),
        fingerprint(one, [b"h"], [b"a", b"b"]),
    ]
    assert len({known, *others}) == 6


@given(number=st.integers(0, 3 * SAMPLES))
def test_samples_are_bounded_and_lie_inside_their_tensors(number: int) -> None:
    found = [Tensor(str(i), "F32", (1,), 0, 5000 * i, 5000 * i + i % 5000) for i in range(number)]
    chosen = samples(found)
    assert len(chosen) <= SAMPLES
    assert not number or chosen
    for file, begin, size in chosen:
        tensor = found[begin // 5000]
        assert (file, begin) == (0, tensor.begin)
        assert size == min(SAMPLE_BYTES, tensor.end - tensor.begin)


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (("f", "c"), ("f", "c"), True),
        # the same weights with another configuration file
        (("f", "c"), ("f", "d"), True),
        (("f", "c"), ("g", "c"), False),
        # a node without files
        (("", "c"), ("g", "c"), True),
        (("", "c"), ("g", "d"), False),
        (("", ""), ("g", "d"), False),
    ],
)
def test_whose_weights_are_ours(mine: tuple[str, str], theirs: tuple[str, str], same: bool) -> None:
    assert (difference(mine, theirs) is None) is same
