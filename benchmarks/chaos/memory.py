"""Changes bytes in the memory of another process, where it has written lately: what a fault of the memory would do."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

PAGE_BYTES = 4096
LEAST_BYTES = 4 * 2**20
"""Least size of a mapping that is looked at. KV caches and weights are larger; what Python allocates is not."""

LEAST_PAGES = 128
"""Least pages in a row that were written: half a mebibyte, the keys of a layer for some hundred tokens."""

PIECE_BYTES = 2**26
Pages = Mapping[int, np.ndarray]
"""A sum of each page, by the first address of its mapping."""


def pages(pid: int) -> Pages:
    """Returns the sums of all pages of a process's large private mappings that may be written."""
    found: dict[int, np.ndarray] = {}
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end in _mappings(pid):
            memory.seek(start)
            sums = []
            for at in range(start, end, PIECE_BYTES):
                words = np.frombuffer(_read(memory, min(PIECE_BYTES, end - at)), dtype=np.uint64)
                sums.append(np.bitwise_xor.reduce(words.reshape(-1, PAGE_BYTES // 8), axis=1))
            found[start] = np.concatenate(sums)
    return found


def written(before: Pages, after: Pages) -> list[tuple[int, int]]:
    """Returns where a process has written between two looks: address and bytes of each row of pages."""
    rows = []
    for start, sums in after.items():
        old = before.get(start)
        if old is None or len(old) != len(sums):
            continue
        changed = np.flatnonzero(np.diff(np.concatenate([[0], (old != sums).astype(np.int8), [0]])))
        for first, last in changed.reshape(-1, 2):
            if last - first >= LEAST_PAGES:
                rows.append((start + int(first) * PAGE_BYTES, int(last - first) * PAGE_BYTES))
    return rows


def flip(pid: int, rows: list[tuple[int, int]]) -> int:
    """Turns every bit of one byte in the middle of each row, and returns their number."""
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for address, size in rows:
            memory.seek(address + size // 2)
            (byte,) = _read(memory, 1)
            memory.seek(address + size // 2)
            memory.write(bytes([byte ^ 0xFF]))
    return len(rows)


def _mappings(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, rights, _, _, inode, *_ = line.split()
        start, end = (int(side, 16) for side in place.split("-"))
        if rights == "rw-p" and inode == "0" and end - start >= LEAST_BYTES:
            yield start, end


def _read(memory: io.FileIO, size: int) -> bytes:
    read = b""
    while len(read) < size:
        piece = memory.read(size - len(read))
        if not piece:
            raise OSError(f"a mapping ends {size - len(read)} bytes early")
        read += piece
    return read
