"""Free KV blocks as segments, so that a prompt's blocks lie side by side and NIXL reads them as few descriptors.

NIXL joins two neighbours of a read's index lists only where both indices step by +1, in the order of the lists. vLLM
frees a request's blocks from its tail and hands them out in that order, so the blocks of a pool that has been used for
a while run downwards or lie scattered, and nothing joins. FlowKV (3.3) therefore allocates from segments, and aligns
the blocks of both sides (`connector.pairs`).

- `SegmentQueue` replaces the free queue of vLLM's block pool. It keeps vLLM's eviction order, in which the oldest block
  is the first. For `n` blocks it looks at the `window * n` oldest free ones, at most at `n + LOOKED_AT`, and takes them
  by best fit: from the shortest run that holds all of them, else whole runs beginning with the longest. A run that is
  longer than needed gives up the end whose block is older. The blocks that follow the request's last block are taken
  first.
- `FlowKVQueue` is FlowKV's form, without a bound: it looks at all free blocks, whatever their age. It keeps segments
  that grow at head and tail when blocks come back, in order of length and start. Their age is ignored, so it evicts
  prefixes that would still be asked for.

Both are deviations from vLLM in which block is evicted, never in how many are free.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.request import Request

WINDOW = 8
"""Free blocks that are looked at for each block that is asked for. In a model of the queue with prefixes by Zipf's law,
of which no result is kept, 2, 4 and 8 cost 0.2, 0.7 and 1.0 points of prefix hits and left 24, 10 and 6 % of the runs.
"""

LOOKED_AT = 4096
"""Most free blocks that are looked at beyond those that are asked for. To choose among 4,096 takes the scheduler's
thread about 7 ms of CPU on a shared core; the half million of a prompt of a million tokens would take it a second."""


def best_fit(n: int, oldest: Sequence[int], after: int | None) -> list[int]:
    """Returns `n` of the block ids `oldest`, which are ordered from the oldest to the youngest.

    `after` is the block behind which they are to follow, if it is known. Raises ValueError for too few candidates.
    """
    if n > len(oldest):
        raise ValueError(f"{n} blocks asked for, {len(oldest)} to choose from")
    age = {block: position for position, block in enumerate(oldest)}
    chosen: list[int] = []
    if after is not None:
        while len(chosen) < n and after + 1 in age:
            after += 1
            chosen.append(after)
            del age[after]
    if len(chosen) == n:
        return chosen
    # (length, minus the age of the end that would be taken first, first block): the oldest of equals is the last
    runs = sorted(
        (length, -min(age[first], age[first + length - 1]), first) for first, length in runs_of(sorted(age))
    )
    rest: list[int] = []
    left = n - len(chosen)
    while left > 0:
        length, _, first = runs[-1]
        if length < left:
            runs.pop()
            rest.extend(range(first, first + length))
            left -= length
            continue
        fit = runs[bisect_left(runs, (left, -len(oldest), -1))][0]
        length, _, first = runs[bisect_right(runs, (fit, 1, 0)) - 1]
        if age[first] > age[first + length - 1]:
            first += length - left
        rest.extend(range(first, first + left))
        left = 0
    return chosen + sorted(rest)


def runs_of(ascending: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the runs (first block, length) of distinct block ids in ascending order."""
    runs: list[tuple[int, int]] = []
    first = previous = None
    for block in ascending:
        if first is None or previous is None:
            first = block
        elif block != previous + 1:
            runs.append((first, previous - first + 1))
            first = block
        previous = block
    if first is not None and previous is not None:
        runs.append((first, previous - first + 1))
    return runs


class Segments:
    """Free blocks as maximal runs of ids, which join their neighbours at head and tail (FlowKV 3.3)."""

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._length: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        for first, length in runs_of(sorted(blocks)):
            self._put(first, length)

    def __iter__(self) -> Any:
        """Yields the segments as (first block, length), in ascending order."""
        return ((first, self._length[first]) for first in self._starts)

    def add(self, block: int) -> None:
        """Adds a block that is not in a segment."""
        first, length = block, 1
        at = bisect_left(self._starts, block)
        if at < len(self._starts) and self._starts[at] == block + 1:
            length += self._drop(block + 1)
        if at > 0 and self._starts[at - 1] + self._length[self._starts[at - 1]] == block:
            first = self._starts[at - 1]
            length += self._drop(first)
        self._put(first, length)

    def take(self, block: int) -> None:
        """Takes a block out of its segment. Raises KeyError if it is in none."""
        at = bisect_right(self._starts, block) - 1
        first = self._starts[at] if at >= 0 else block + 1
        if not first <= block < first + self._length.get(first, 0):
            raise KeyError(f"block {block} is not free")
        length = self._drop(first)
        if block > first:
            self._put(first, block - first)
        if block + 1 < first + length:
            self._put(block + 1, first + length - block - 1)

    def best_fit(self, n: int, after: int | None) -> list[int]:
        """Returns `n` free blocks, without taking them: those that follow `after`, then the head of the shortest
        segment that is long enough, else whole segments beginning with the longest. The caller has made sure that
        there are `n`.
        """
        chosen: list[int] = []
        follows = None
        if after is not None and after + 1 in self._length:
            follows = after + 1
            chosen.extend(range(follows, follows + min(n, self._length[follows])))
        rest: list[int] = []
        left = n - len(chosen)
        longest = len(self._by_length)
        while left > 0:
            fits = bisect_left(self._by_length, (left, -1))
            if fits < longest and self._by_length[fits][1] == follows:
                # what follows the request's last block is taken already, whole if more was wanted
                fits += 1
            if fits < longest:
                _, first = self._by_length[fits]
                rest.extend(range(first, first + left))
                break
            longest -= 1
            length, first = self._by_length[longest]
            if first != follows:
                rest.extend(range(first, first + length))
                left -= length
        return chosen + sorted(rest)

    def _put(self, first: int, length: int) -> None:
        insort(self._starts, first)
        insort(self._by_length, (length, first))
        self._length[first] = length

    def _drop(self, first: int) -> int:
        length = self._length.pop(first)
        del self._starts[bisect_left(self._starts, first)]
        del self._by_length[bisect_left(self._by_length, (length, first))]
        return length


class SegmentQueue(FreeKVCacheBlockQueue):
    """vLLM's free queue, from which blocks are taken by best fit among the oldest (see the module's docstring)."""

    def __init__(
        self, before: FreeKVCacheBlockQueue, blocks: list[KVCacheBlock], window: int = WINDOW
    ) -> None:
        """Takes the free blocks and their order over from `before`, which may not be used any more. `blocks` are all
        blocks of the pool, by id.
        """
        if window < 1:
            raise ValueError(f"the window of a segment queue must be at least 1, not {window}")
        self._blocks = blocks
        self._window = window
        self.num_free_blocks = before.num_free_blocks
        self.fake_free_list_head = before.fake_free_list_head
        self.fake_free_list_tail = before.fake_free_list_tail
        self.after: Callable[[], int | None] | None = None

    def popleft(self) -> KVCacheBlock:
        """Takes one block. Raises ValueError if none is free."""
        if self.num_free_blocks == 0:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes `n` blocks, of which at least `n` must be free, in runs of ascending ids."""
        if n == 0:
            return []
        assert self.num_free_blocks >= n
        chosen = [
            self._blocks[block] for block in self._choose(n, None if self.after is None else self.after())
        ]
        for block in chosen:
            self.remove(block)
        return chosen

    def _choose(self, n: int, after: int | None) -> list[int]:
        oldest: list[int] = []
        block = self.fake_free_list_head.next_free_block
        for _ in range(min(self._window * n, n + LOOKED_AT, self.num_free_blocks)):
            assert block is not None
            oldest.append(block.block_id)
            block = block.next_free_block
        return best_fit(n, oldest, after)


class FlowKVQueue(SegmentQueue):
    """FlowKV's segments over all free blocks, which ignore how long ago a block was used (FlowKV 3.3)."""

    def __init__(self, before: FreeKVCacheBlockQueue, blocks: list[KVCacheBlock]) -> None:
        super().__init__(before, blocks)
        self._segments = Segments(block.block_id for block in self.get_all_free_blocks())

    def _choose(self, n: int, after: int | None) -> list[int]:
        return self._segments.best_fit(n, after)

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block out of the queue."""
        super().remove(block)
        self._segments.take(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        """Puts a block back as the youngest."""
        super().append(block)
        self._segments.add(block.block_id)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Puts blocks back as the youngest, the last one as the youngest of all."""
        super().append_n(blocks)
        for block in blocks:
            self._segments.add(block.block_id)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Puts blocks back as the oldest, the first one as the oldest of all."""
        super().prepend_n(blocks)
        for block in blocks:
            self._segments.add(block.block_id)


class SegmentedManager(KVCacheManager):
    """vLLM's KV cache manager, which tells the free queue behind which block a request goes on."""

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        """Allocates as vLLM does. The hint is of use with one group of layers, whose last block is the request's."""
        queue = self.block_pool.free_block_queue
        managers = self.coordinator.single_type_managers
        if not isinstance(queue, SegmentQueue) or len(managers) != 1:
            return super().allocate_slots(request, *args, **kwargs)
        queue.after = partial(_last_block, managers[0].req_to_blocks, request.request_id)
        try:
            return super().allocate_slots(request, *args, **kwargs)
        finally:
            queue.after = None


def _last_block(held: dict[str, list[KVCacheBlock]], request_id: str) -> int | None:
    blocks = held.get(request_id)
    return blocks[-1].block_id if blocks and not blocks[-1].is_null else None


def allocate_by(allocator: str, manager: KVCacheManager) -> None:
    """Makes a new KV cache manager allocate by `allocator`: `stock` (vLLM's own order), `segments` or `flowkv`. Raises
    ValueError for another name.
    """
    pool = manager.block_pool
    if allocator == "stock":
        return
    if allocator == "segments":
        pool.free_block_queue = SegmentQueue(pool.free_block_queue, pool.blocks)
    elif allocator == "flowkv":
        pool.free_block_queue = FlowKVQueue(pool.free_block_queue, pool.blocks)
    else:
        raise ValueError(f"block_allocator is {allocator!r}: give stock, segments or flowkv")
    manager.__class__ = SegmentedManager
