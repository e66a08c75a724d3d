"""The memory in which weights from another engine land, and how the loader, in another process, hears of them.

The engine's owner reads the weights while the engine's other processes import. They land in a file without a name
(`memfd_create`), which goes with the last process that has it, so a killed engine leaves nothing behind. A worker opens
it under `/proc` of the owner. A second such file tells the worker how far the read has come: one word, and the layout.

    waiting   nobody has promised weights yet
    reading   the first `arrived` pieces are there, and have been checked
    failed    no more will come: the loader reads the rest from disk
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator
from enum import IntEnum

import msgspec
import numpy as np

from actors.engine.weights.checkpoint import Bytes
from policies.weights.checkpoint import LENGTH_BYTES, Layout, Piece, Tensor, WeightFile, header_end, tensors

PROGRESS_BYTES = 1 << 20
"""Size of the second file, which has pages only for what is written: the layout of some thousand files."""
_RECORD_AT = 16
_STATE = 1 << 40  # the word is state * _STATE + arrived

NAME = "sluice-weights-progress"
"""The second file's name, which others do not have that get its number once it is closed."""

POLL_S = 0.002


class State(IntEnum):
    """How far a read has come."""

    WAITING = 0
    READING = 1
    FAILED = 2


class _Record(msgspec.Struct, frozen=True):
    """The facts by which the worker finds the pieces."""

    pages: str
    files: tuple[tuple[str, int], ...]
    piece_bytes: int


def _begins(layout: Layout) -> list[int]:
    """Returns where each file begins in the landing's memory, and where the last one ends: at whole pages."""
    begins = [0]
    for file in layout.files:
        begins.append(begins[-1] + -(-file.size // mmap.PAGESIZE) * mmap.PAGESIZE)
    return begins


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Landing:
    """The owner's side. The loader gets `path`. One thread writes."""

    def __init__(self) -> None:
        progress = os.memfd_create(NAME)
        os.ftruncate(progress, PROGRESS_BYTES)
        self.path = _path(progress)
        self._map: Bytes = np.memmap(self.path, np.uint8, mode="r+")
        self._word = self._map[:8].view(np.int64)
        self._descriptors = [progress]
        self._memory: Bytes | None = None
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def open(self, layout: Layout) -> None:
        """Makes room for these files. Raises OSError if there is none."""
        record_at, begins = _RECORD_AT, _begins(layout)
        pages = os.memfd_create("sluice-weights")
        self._descriptors.append(pages)
        os.ftruncate(pages, begins[-1])
        self._memory = np.memmap(_path(pages), np.uint8, mode="r+")
        self._layout, self._begins = layout, begins
        files = tuple((file.name, file.size) for file in layout.files)
        record = msgspec.msgpack.encode(_Record(_path(pages), files, layout.piece_bytes))
        if record_at + len(record) > PROGRESS_BYTES:
            raise OSError(f"the description of {len(files)} files is too long")
        self._map[8:record_at].view(np.int64)[0] = len(record)
        self._map[record_at : record_at + len(record)] = np.frombuffer(record, np.uint8)
        self.arrived(0)

    def view(self, piece: Piece) -> Bytes:
        """Returns the memory of a piece."""
        assert self._memory is not None
        begin = self._begins[piece.file] + piece.begin
        return self._memory[begin : begin + piece.size]

    def returned(self, piece: Piece) -> None:
        """Does nothing: what is lent of a landing is no copy."""

    def arrived(self, pieces: int) -> None:
        """Tells the loader that the first `pieces` are there."""
        self._word[0] = State.READING * _STATE + pieces

    def fail(self) -> None:
        """Tells the loader that no more will come."""
        self._word[0] = State.FAILED * _STATE

    def close(self) -> None:
        """Gives the memory back as soon as nobody has it mapped any more. Idempotent."""
        self._memory = None
        # a late word goes nowhere
        self._word = self._word.copy()
        self._map = self._map[:0].copy()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


class Landed:
    """The loader's side, in a worker's process. `wait_s` is the longest time without any progress: whoever reads has
    bounds of its own, so this one holds only if the reader's thread is stuck. Raises OSError if there is no landing.
    """

    def __init__(self, path: str, wait_s: float) -> None:
        if NAME not in os.readlink(path):
            raise FileNotFoundError(f"{path} is no landing any more")
        self._map: Bytes = np.memmap(path, np.uint8, mode="r")
        self._word = self._map[:8].view(np.int64)
        self._wait_s = wait_s
        self.whole = False
        """Whether `tensors` has returned all of them."""

    def tensors(self) -> Iterator[tuple[Tensor, Bytes]]:
        """Yields each tensor as soon as its bytes are there, with its memory, in the order of files and bytes. Ends
        early when no more come. Raises BadCheckpoint if what came is no checkpoint.
        """
        if not self._wait(lambda state, arrived: state is State.READING):
            return
        size = int(self._map[8:_RECORD_AT].view(np.int64)[0])
        record = msgspec.msgpack.decode(self._map[_RECORD_AT : _RECORD_AT + size].tobytes(), type=_Record)
        layout = Layout(tuple(WeightFile(*file) for file in record.files), record.piece_bytes)
        begins = _begins(layout)
        memory: Bytes = np.memmap(record.pages, np.uint8, mode="c")
        for number, file in enumerate(layout.files):
            begin = begins[number]
            if not self._has(layout, number, LENGTH_BYTES):
                return
            end = header_end(memory[begin : begin + LENGTH_BYTES].tobytes(), file)
            if not self._has(layout, number, end):
                return
            for one in tensors(memory[begin + LENGTH_BYTES : begin + end].tobytes(), number, file):
                if not self._has(layout, number, one.end):
                    return
                yield one, memory[begin + one.begin : begin + one.end]
        self.whole = True

    def _has(self, layout: Layout, file: int, end: int) -> bool:
        """Waits until everything up to the byte `end` of a file is there; returns False if it will not come."""
        needed = layout.needed(file, end)
        return self._wait(lambda state, arrived: arrived >= needed)

    def _wait(self, holds: Callable[[State, int], bool]) -> bool:
        until_s, last = time.monotonic() + self._wait_s, -1
        while True:
            word = int(self._word[0])
            state, arrived = State(word // _STATE), word % _STATE
            if state is State.FAILED:
                return False
            if holds(state, arrived):
                return True
            if word != last:
                until_s, last = time.monotonic() + self._wait_s, word
            elif time.monotonic() > until_s:
                return False
            time.sleep(POLL_S)
