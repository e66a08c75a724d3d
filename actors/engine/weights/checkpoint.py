"""The weights of a model folder, mapped: what a lender lends, and with what a reader compares the files of others."""

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from policies.weights.checkpoint import (
    LENGTH_BYTES,
    PIECE_BYTES,
    BadCheckpoint,
    Layout,
    Piece,
    Tensor,
    WeightFile,
    fingerprint,
    header_end,
    samples,
    tensors,
)

Bytes = npt.NDArray[np.uint8]

INDEX = "model.safetensors.index.json"


class Shelf(Protocol):
    """Memory that holds a checkpoint, or is to hold it."""

    @property
    def layout(self) -> Layout: ...

    def view(self, piece: Piece) -> Bytes:
        """Returns the memory of a piece, which stays mapped at least as long as the array lives. Raises OSError if it
        does not hold the piece any more.
        """

    def returned(self, piece: Piece) -> None:
        """Notes that nobody has the memory of a piece registered any more."""


class Checkpoint:
    """The safetensors files of a model's folder, in private mappings of their pages. Raises BadCheckpoint if the folder
    has none that the default loader would read, and OSError if they cannot be read.
    """

    def __init__(self, folder: Path, piece_bytes: int = PIECE_BYTES) -> None:
        self._paths = [folder / name for name in weight_names(folder)]
        self._states = [_state(path) for path in self._paths]
        self._layout = Layout(
            tuple(
                WeightFile(path.name, size)
                for path, (_, size, _) in zip(self._paths, self._states, strict=True)
            ),
            piece_bytes,
        )
        headers, self.tensors = self._headers()
        self.fingerprint = fingerprint(self._layout, headers, self._samples())
        self.config = config_hash(folder)
        self._maps = [_mapped(path) for path in self._paths]

    @property
    def layout(self) -> Layout:
        return self._layout

    def view(self, piece: Piece) -> Bytes:
        """Returns the pages of a piece. Raises OSError if its file is not what it was at first: other weights would go
        by the name of these, and pages behind the end of a shorter file would end this process (SIGBUS).
        """
        if _state(self._paths[piece.file]) != self._states[piece.file]:
            raise OSError(f"{self._paths[piece.file]} has changed since this engine started")
        return np.frombuffer(self._maps[piece.file], np.uint8, piece.size, piece.begin)

    def returned(self, piece: Piece) -> None:
        """Gives copies of pages back to the system: a network card for which a private mapping is registered as
        writable gets a copy of each page, which would stay.
        """
        begin = piece.begin - piece.begin % mmap.PAGESIZE
        self._maps[piece.file].madvise(mmap.MADV_DONTNEED, begin, piece.begin + piece.size - begin)

    def _headers(self) -> tuple[list[bytes], list[Tensor]]:
        """Returns the headers of all files, and their tensors."""
        headers, found = [], []
        for number, (file, path) in enumerate(zip(self._layout.files, self._paths, strict=True)):
            with path.open("rb") as opened:
                end = header_end(opened.read(LENGTH_BYTES), file)
                headers.append(opened.read(end - LENGTH_BYTES))
            found += tensors(headers[-1], number, file)
        return headers, found

    def _samples(self) -> Iterator[bytes]:
        """Yields the bytes of the samples. They are read, because whoever waits for a mapped page keeps all other
        threads of the process waiting.
        """
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(path.open("rb", buffering=0)) for path in self._paths]
            for file, begin, size in samples(self.tensors):
                yield os.pread(opened[file].fileno(), size, begin)


def _state(path: Path) -> tuple[int, int, int]:
    """Returns what changes when a file is replaced or written."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _mapped(path: Path) -> mmap.mmap:
    """Returns a mapping of a file that is writable, because some networks register nothing else. Nobody writes."""
    with path.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def weight_names(folder: Path) -> list[str]:
    """Returns the names of the safetensors files that vLLM's default loader reads from `folder`, in order: those that
    an index names, if there is one. Raises BadCheckpoint if there are none, or if the loader would not read these.
    """
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise BadCheckpoint(f"{folder} has no safetensors files")
    if any(name.startswith("consolidated") for name in names):
        raise BadCheckpoint(f"{folder} has Mistral's own format")
    index = folder / INDEX
    if not index.is_file():
        return names
    try:
        named: set[Any] = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{index} cannot be read: {error!r}") from None
    if not named or not named <= set(names):
        raise BadCheckpoint(f"{index} names files that are not there")
    return sorted(named)


def config_hash(folder: Path) -> str:
    """Returns a hash of the model's configuration, whatever the order of its keys. Raises BadCheckpoint without one."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{folder}: config.json cannot be read: {error}") from None
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
