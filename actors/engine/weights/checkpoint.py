"""The weights of a model folder, mapped: what a lender lends, and with what a reader compares the files of others."""

import hashlib
import json
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
        """Returns the memory of a piece, which stays mapped at least as long as the array lives."""


class Checkpoint:
    """The safetensors files of a model's folder, in private mappings of their pages. Raises BadCheckpoint if the folder
    has none that the default loader would read, and OSError if they cannot be read.
    """

    def __init__(self, folder: Path, piece_bytes: int = PIECE_BYTES) -> None:
        files = weight_names(folder)
        # writable, because some networks register nothing else; nobody writes
        self._maps: list[Bytes] = [np.memmap(folder / name, np.uint8, mode="c") for name in files]
        sizes = [len(mapped) for mapped in self._maps]
        self._layout = Layout(
            tuple(WeightFile(name, size) for name, size in zip(files, sizes, strict=True)), piece_bytes
        )
        headers, self.tensors = self._read()
        sampled = (self._maps[file][begin : begin + size] for file, begin, size in samples(self.tensors))
        self.fingerprint = fingerprint(self._layout, headers, (part.tobytes() for part in sampled))
        self.config = config_hash(folder)

    @property
    def layout(self) -> Layout:
        return self._layout

    def view(self, piece: Piece) -> Bytes:
        """Returns the pages of a piece."""
        return self._maps[piece.file][piece.begin : piece.begin + piece.size]

    def _read(self) -> tuple[list[bytes], list[Tensor]]:
        """Returns the headers of all files, and their tensors."""
        headers, found = [], []
        for number, (file, mapped) in enumerate(zip(self._layout.files, self._maps, strict=True)):
            end = header_end(mapped[:LENGTH_BYTES].tobytes(), file)
            headers.append(mapped[LENGTH_BYTES:end].tobytes())
            found += tensors(headers[-1], number, file)
        return headers, found


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
