"""Checksums of lent KV, which guard what is new in a read: sorted index lists, chunks, the allocator.

The core makes a lease's handle before its worker hears of it, so checksums cannot ride in the handle. The lender's
worker computes them when the lease begins, one a NIXL descriptor (a block of a layer), into a table that is registered
with NIXL, and then says so in the lease table. A reader waits for that, fetches the checksums of what it has read, and
compares them with those of its own memory. A mismatch refuses the read, and the prompt is prefilled again.

**full** checks all descriptors; **sampled** one in `SAMPLE`, chosen by descriptor and lease, so that lender and reader
choose alike. A reader that has another share of a block than its lender (another tensor parallel size) checks nothing.

CRC-32 finds every change of up to 32 bits in a row, and any other with probability 1 - 2^-32. It is computed in host
memory, about 1 GB/s a core, in a thread of its own.
"""

import concurrent.futures
import contextlib
import ctypes
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Mode = Literal["off", "sampled", "full"]

SAMPLE = 16
"""One descriptor in this many is checked by `sampled`. ASSUMPTION: a block has a descriptor for each layer, so a block
that is wrong as a whole is found in a model of 30 layers with probability 1 - (15/16)^30 = 0.86."""

SHARES: dict[str, int] = {"sampled": SAMPLE, "full": 1}
"""Modes that check anything, with the number of descriptors of which one is checked."""

_WORD_BYTES = 4
_HASH = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SumsAt:
    """A lender's table of checksums: address, number of descriptors, bytes of them all, and its share (one descriptor
    in `share` has a checksum).
    """

    address: int
    count: int
    bytes: int
    share: int


def share_of(mode: str) -> int | None:
    """Returns the share of a mode, or None for "off". Raises ValueError for any other name."""
    if mode != "off" and mode not in SHARES:
        raise ValueError(f"integrity is {mode!r}: set it to off, sampled or full")
    return SHARES.get(mode)


def chosen(indices: npt.NDArray[Any], generation: int, share: int) -> npt.NDArray[np.bool_]:
    """Returns which descriptors are checked under this lease: about one in `share`, the same for lender and reader.
    What a share of 16 chooses is among what a share of 4 or 1 chooses.
    """
    mixed = (indices.astype(np.uint64) + np.uint64(generation % (1 << 64))) * _HASH
    return np.asarray((mixed >> np.uint64(40)) % np.uint64(share) == 0)


def checksum(address: int, length: int) -> int:
    """Returns the CRC-32 of `length` bytes of this process's memory."""
    return zlib.crc32((ctypes.c_ubyte * length).from_address(address))


def checksums(blocks: npt.NDArray[np.uint64], indices: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Returns the CRC-32 of each of these descriptors; `blocks` has address and length of every descriptor."""
    places = blocks[indices, :2].tolist()
    return np.fromiter(
        (checksum(address, length) for address, length in places), np.uint32, count=len(places)
    )


class SumsTable:
    """The checksums of what this worker lends, registered with NIXL, and the thread that computes all checksums."""

    def __init__(self, agent: Any, backends: list[str], blocks: npt.NDArray[np.uint64], share: int) -> None:
        self._blocks = blocks
        self._sums = np.zeros(len(blocks), dtype=np.uint32)
        self._share = share
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="sluice-integrity")
        region = [(int(self._sums.ctypes.data), self._sums.nbytes, 0, "")]
        self._registration = agent.register_memory(agent.get_reg_descs(region, "DRAM"), backends=backends)

    @property
    def at(self) -> SumsAt:
        """Where other workers find the table."""
        total = int(self._blocks[:, 1].sum())
        return SumsAt(int(self._sums.ctypes.data), len(self._sums), total, self._share)

    def lend(self, indices: npt.NDArray[Any], generation: int, ready: Callable[[], None]) -> None:
        """Computes the checksums of these descriptors, and then calls `ready`, both in the thread for checksums."""
        wanted = indices[chosen(indices, generation, self._share)]

        def compute() -> None:
            self._sums[wanted] = checksums(self._blocks, wanted)
            ready()

        self._pool.submit(compute)

    def compare(
        self, blocks: npt.NDArray[np.uint64], indices: npt.NDArray[Any], expected: npt.NDArray[np.uint32]
    ) -> "concurrent.futures.Future[int]":
        """Counts the descriptors whose checksums are not as expected, in the thread for checksums."""
        return self._pool.submit(lambda: int((checksums(blocks, indices) != expected).sum()))

    def close(self) -> None:
        """Ends the thread; what it has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Fetch:
    """One read of a lender's checksums. The constructor raises NIXL's errors, and then holds nothing."""

    def __init__(
        self, agent: Any, backends: list[str], source: str, sums: SumsAt, indices: npt.NDArray[Any]
    ) -> None:
        self._agent = agent
        self._got = np.zeros(len(indices), dtype=np.uint32)
        local, remote = [], []
        base = int(self._got.ctypes.data)
        for first, count in runs(indices):
            size = count * _WORD_BYTES
            local.append((base + first * _WORD_BYTES, size, 0))
            remote.append((sums.address + int(indices[first]) * _WORD_BYTES, size, 0))
        region = [(base, self._got.nbytes, 0, "")]
        self._registration = agent.register_memory(agent.get_reg_descs(region, "DRAM"), backends=backends)
        self._handle: Any = None
        # unless NIXL says otherwise
        self._state = "ERR"
        try:
            get_descs = agent.get_xfer_descs
            self._handle = agent.initialize_xfer(
                "READ", get_descs(local, "DRAM"), get_descs(remote, "DRAM"), source
            )
            self._state = agent.transfer(self._handle)
        except Exception:
            with contextlib.suppress(Exception):
                self.close()
            raise

    def poll(self) -> npt.NDArray[np.uint32] | None:
        """Returns the checksums, or None while the read is under way. Raises RuntimeError if it failed, and NIXL's
        errors, of which the first ends the read.
        """
        state = self._look()
        if state == "PROC":
            return None
        if state != "DONE":
            raise RuntimeError(f"NIXL's state of a read of checksums is {state}")
        return self._got

    def close(self) -> bool:
        """Frees what the read holds, and returns whether it could: not while the read is under way. Raises NIXL's
        errors; nothing is freed then, because NIXL may still write.
        """
        if self._look() == "PROC":
            return False
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
        with contextlib.suppress(Exception):
            self._agent.deregister_memory(self._registration)
        return True

    def _look(self) -> str:
        if self._state == "PROC":
            # NIXL raises an error for a lender that has gone, and its read has ended then
            self._state = "ERR"
            self._state = self._agent.check_xfer_state(self._handle)
        return self._state


def runs(indices: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Returns position and length of each longest run of indices that step by one."""
    if not len(indices):
        return []
    starts = np.flatnonzero(np.diff(indices, prepend=indices[0] - 2) != 1)
    ends = np.append(starts[1:], len(indices))
    return [(int(a), int(b - a)) for a, b in zip(starts, ends, strict=True)]
