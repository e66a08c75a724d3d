"""The layout of a checkpoint of safetensors files, and the pieces in which it moves from engine to engine.

A file of this format is the length of its header (8 bytes, little-endian), the header (JSON: each tensor's dtype, shape
and place in the data), and the data. Files travel byte by byte, so whoever has all of them has the checkpoint.

    files, in the order of their names      pieces: `piece_bytes` each, the last one of a file shorter
    a tensor is there                       when the first k pieces are, where k is the last piece that holds it

Two checkpoints are the same if their fingerprints are: a hash over names, sizes and headers of all files, and over the
first bytes of up to `SAMPLES` tensors. Other weights of the same shapes, such as those of a fine-tuned model, differ in
these. Whether the bytes of a piece arrived unchanged is another question, which a hash of each piece answers.
"""

import hashlib
import json
import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

PIECE_BYTES = 16 << 20
"""Bytes of a piece. ASSUMPTION: long enough that the two messages for each do not matter (2 ms at 100 Gbit/s), short
enough that a reader passes it on soon, and that few of them together need little registered memory."""

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""Most bytes of a header, as in the safetensors library (`MAX_HEADER_SIZE`)."""

SAMPLES = 512
SAMPLE_BYTES = 4096
"""Tensors, and bytes of each, that a fingerprint contains: 2 MiB to read, of a checkpoint of any size."""


class BadCheckpoint(ValueError):
    """An error: these files, or this description of files, are no checkpoint that can be lent. The message says why."""


class WeightFile(NamedTuple):
    """One file of a checkpoint."""

    name: str
    size: int


class Tensor(NamedTuple):
    """One tensor: its dtype by its name in the format, and where its bytes lie in which file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    begin: int
    end: int


class Piece(NamedTuple):
    """A part of one file that moves at once."""

    file: int
    begin: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint and how they are cut. Raises BadCheckpoint where a size or a name cannot be."""

    files: tuple[WeightFile, ...]
    piece_bytes: int = PIECE_BYTES

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        if not names or len(set(names)) != len(names):
            raise BadCheckpoint(
                f"a checkpoint of the files {names}: there must be some, with different names"
            )
        for file in self.files:
            if file.size < LENGTH_BYTES or not file.name or "/" in file.name:
                raise BadCheckpoint(f"{file.name!r} of {file.size} bytes is no safetensors file")
        if self.piece_bytes < 1:
            raise BadCheckpoint(f"pieces of {self.piece_bytes} bytes: they must have at least 1")

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The number of each file's first piece, and behind the last file the number of all pieces."""
        counts = (math.ceil(file.size / self.piece_bytes) for file in self.files)
        return tuple(accumulate(counts, initial=0))

    @property
    def pieces(self) -> int:
        """The number of pieces."""
        return self._firsts[-1]

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    def piece(self, number: int) -> Piece:
        """Returns a piece by its number, from 0 on. Raises IndexError for a number that is none."""
        if not 0 <= number < self.pieces:
            raise IndexError(f"there are {self.pieces} pieces, and no number {number}")
        file = bisect(self._firsts, number) - 1
        begin = (number - self._firsts[file]) * self.piece_bytes
        return Piece(file, begin, min(self.piece_bytes, self.files[file].size - begin))

    def needed(self, file: int, end: int) -> int:
        """Returns how many of the first pieces hold everything up to the byte `end` (exclusive) of a file."""
        if not 0 <= end <= self.files[file].size:
            raise BadCheckpoint(f"{self.files[file].name} has {self.files[file].size} bytes, not {end}")
        return self._firsts[file] + math.ceil(end / self.piece_bytes)


def header_end(length: bytes, file: WeightFile) -> int:
    """Returns where the header of a file ends, by the first bytes of the file. Raises BadCheckpoint."""
    size = int.from_bytes(length, "little")
    end = LENGTH_BYTES + size
    if len(length) != LENGTH_BYTES or size > MOST_HEADER_BYTES or end > file.size:
        raise BadCheckpoint(f"{file.name} does not begin as a safetensors file")
    return end


def tensors(header: bytes, number: int, file: WeightFile) -> list[Tensor]:
    """Returns the tensors of file `number` by its header (without the length), in the order of their bytes. Raises
    BadCheckpoint if the header is none, or if its tensors do not lie inside the file.
    """
    begin = LENGTH_BYTES + len(header)
    try:
        told: Mapping[str, Any] = json.loads(header)
        found = [
            Tensor(
                name,
                str(one["dtype"]),
                tuple(int(n) for n in one["shape"]),
                number,
                *(begin + int(at) for at in one["data_offsets"]),
            )
            for name, one in told.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"the header of {file.name} cannot be read: {error!r}") from None
    for one in found:
        if not begin <= one.begin <= one.end <= file.size:
            raise BadCheckpoint(f"{one.name} does not lie inside {file.name}")
    return sorted(found, key=lambda one: (one.begin, one.end, one.name))


def samples(found: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Returns file, first byte and number of bytes of what a fingerprint contains of these tensors."""
    step = max(1, math.ceil(len(found) / SAMPLES))
    return [(one.file, one.begin, min(SAMPLE_BYTES, one.end - one.begin)) for one in found[::step]]


def fingerprint(layout: Layout, headers: Iterable[bytes], sampled: Iterable[bytes]) -> str:
    """Returns the fingerprint of a checkpoint by the headers of its files and the bytes of its `samples`."""
    mixed = hashlib.sha256()
    for file, header in zip(layout.files, headers, strict=True):
        mixed.update(f"{file.name}\n{file.size}\n{len(header)}\n".encode())
        mixed.update(header)
    for part in sampled:
        mixed.update(len(part).to_bytes(4, "big") + part)
    return mixed.hexdigest()


def difference(mine: tuple[str, str], theirs: tuple[str, str]) -> str | None:
    """Returns in words why weights of others cannot be ours, or None. Each side is a fingerprint, empty for a node
    without files, and a hash of the model's configuration, which alone is compared where a fingerprint is missing.
    """
    if mine[0] and theirs[0]:
        return (
            None
            if mine[0] == theirs[0]
            else "it has another checkpoint (names, shapes, dtypes or content differ)"
        )
    return None if mine[1] == theirs[1] else "its config.json is another one"
