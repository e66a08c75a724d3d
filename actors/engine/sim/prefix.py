"""Prefixes that another engine lends a sim engine's prefill (`Prefill.prefix`), read before the prefill is queued.

The blocks that are not cached here are taken, filled by the read, and left in the prefix cache, where the prefill finds
them as hits. No prefill fails for its prefix: whatever goes wrong, the prompt is computed. A read that has begun runs
to its end before its blocks are used for anything else.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from actors.engine.sim.peers import Puller, SimHandle
from actors.engine.sim.tasks import PrefillTask
from policies.engine_model import text
from policies.engine_model.blocks import Allocation, BlockHash, BlockPool
from policies.engine_model.timing import TimingProfile

_handles = msgspec.msgpack.Decoder(SimHandle)


class PrefixReads:
    """The reads of prefixes of one engine, and their totals. `queue(task)` queues a prefill that is to be computed now;
    it is called exactly once for each, not before `begin` has returned where something is read.
    """

    def __init__(
        self,
        engine_id: str,
        timing: TimingProfile,
        pool: BlockPool,
        puller: Puller,
        queue: Callable[[PrefillTask], None],
    ) -> None:
        self._engine_id, self._timing, self._pool = engine_id, timing, pool
        self._puller, self._queue = puller, queue
        self._open: set[_PrefixRead] = set()
        self.transfers = self.n_bytes = self.blocks = self.failures = 0
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, task: PrefillTask, tokens: Sequence[int], prefix: bytes) -> None:
        """Reads what is not cached here of a lent prefix, then queues the prefill."""
        handle = _handle_of(prefix, tokens)
        if handle is None or handle.engine_id == self._engine_id:
            self._queue(task)
            return
        size = self._pool.block_size_tokens
        # the last token of what was lent only completed the lender's prefill
        hashes = task.seq.hashes[: (handle.tokens - 1) // size]
        missing = len(hashes) - self._pool.hits(hashes)
        allocation = self._pool.allocate(hashes, len(hashes)) if missing > 0 else None
        if allocation is None:
            # all of it is cached, or there is no room to read it into
            self._puller.end(handle)
            self._queue(task)
            return
        n_bytes = handle.kv_bytes * missing * size // handle.tokens
        read = _PrefixRead(self, task, handle, hashes, allocation, n_bytes)
        self._open.add(read)
        self._puller.pull(handle, n_bytes, read)

    def stop(self) -> None:
        """Ends all reads. Nothing is queued any more."""
        for read in self._open:
            if read.timer is not None:
                read.timer.cancel()
        self._open.clear()

    def move(self, read: "_PrefixRead") -> None:
        """Lets the bytes of a read move that the lender does not pace."""
        if read in self._open:
            seconds = self._timing.transfer_s(read.n_bytes)
            read.timer = asyncio.get_running_loop().call_later(seconds, self.ended, read, seconds)

    def ended(self, read: "_PrefixRead", seconds: float) -> None:
        """Takes the blocks of a read, which took `seconds`, into the cache."""
        if read not in self._open:
            return
        self._open.remove(read)
        self._puller.end(read.handle)
        blocks = read.allocation.blocks - read.allocation.hits
        self._pool.commit(read.allocation, read.hashes)
        self._pool.release(read.allocation)
        self.transfers += 1
        self.n_bytes += read.n_bytes
        self.blocks += blocks
        self.seconds += seconds
        self._queue(read.task)

    def failed(self, read: "_PrefixRead") -> None:
        """Gives the blocks of a read up."""
        if read not in self._open:
            return
        self._open.remove(read)
        if read.timer is not None:
            read.timer.cancel()
        self._pool.release(read.allocation)
        self.failures += 1
        self._queue(read.task)


class _PrefixRead:
    """One read; the `Reader` that the puller tells of it."""

    def __init__(
        self,
        reads: PrefixReads,
        task: PrefillTask,
        handle: SimHandle,
        hashes: tuple[BlockHash, ...],
        allocation: Allocation,
        n_bytes: int,
    ) -> None:
        self._reads, self.task, self.handle = reads, task, handle
        self.hashes, self.allocation, self.n_bytes = hashes, allocation, n_bytes
        self.timer: asyncio.TimerHandle | None = None

    def granted(self, paced: bool) -> None:
        if not paced:
            self._reads.move(self)

    def sent(self, seconds: float, chunk: int) -> None:
        self._reads.ended(self, seconds)

    def read_failed(self, reason: str) -> None:
        self._reads.failed(self)


def _handle_of(prefix: bytes, tokens: Sequence[int]) -> SimHandle | None:
    """Returns the handle of a lent prefix; None if no sim engine made it, or if it is no head of the prompt."""
    try:
        handle = _handles.decode(prefix)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    if not 0 < handle.tokens <= len(tokens):
        return None
    return handle if handle.prompt_hash == text.prompt_hash(list(tokens[: handle.tokens])) else None
