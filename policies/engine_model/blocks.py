"""KV blocks of one engine: a pool that counts them, with a hash-chained prefix cache, use counts and LRU eviction.

Every block of the pool is in exactly one state:

    free       never written, or evicted
    private    owned by one allocation (a partial block, or output)
    shared     cached under its hash, used by >= 1 allocations
    idle       cached under its hash, used by no allocation: still a hit; the least recently used is evicted first

Blocks have no addresses here; only cached blocks have an identity, which is their hash. If another sequence has cached
the same prompt blocks meanwhile, a sequence gives its own copies up (vLLM keeps the duplicates; this pool counts them
once). Not claimed: fragmentation, and caching of generated blocks.

Changes (`Stored`, `Removed`, `Cleared`) say what enters and leaves the cache, in the same form for every engine kind
and for the router's prefix index. Their publisher numbers them (`actors.engine.kv_mirror`).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from policies.record import record

BlockHash = int


def block_hashes(tokens: Sequence[int], block_size_tokens: int, salt: int = 0) -> tuple[BlockHash, ...]:
    """Returns the chained 64-bit hashes of the full blocks of `tokens`. Equal hashes mean equal tokens from the first
    to the block's end.

    The hashes are the same in every process. Tokens must lie in 0 .. 2^32 - 1 (else OverflowError). Chains with
    different `salt` (`salt_of` makes one of a request's cache salt) have no hash in common.
    """
    data = array("I", tokens).tobytes()
    size = 4 * block_size_tokens
    hashes = []
    parent = salt
    digest = xxhash.xxh3_64_intdigest
    for start in range(0, len(data) - size + 1, size):
        parent = digest(data[start : start + size], parent)
        hashes.append(parent)
    return tuple(hashes)


def salt_of(cache_salt: str | None) -> int:
    """Returns the `salt` of the block hashes of a request with this cache salt; 0 for a request without one.

    Only routing relies on these hashes. An engine decides by its own which KV a request may use, so two salts that meet
    in one number (of 2^64) mislead a router and reveal nothing.
    """
    return xxhash.xxh3_64_intdigest(cache_salt.encode()) if cache_salt else 0


@record
class Stored:
    """Consecutive blocks of one chain were cached. `parent` is the hash before the first (None: the prompt's start)."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None = None


@record
class Removed:
    """Blocks were evicted from the cache."""

    hashes: tuple[BlockHash, ...]


@record
class Cleared:
    """The whole cache was dropped."""


Change = Stored | Removed | Cleared

MAX_UNREAD_CHANGES = 100_000
"""Most changes kept for a reader; when more come, all of them are dropped (`add_change`), so that memory is bounded."""


def add_change(changes: list[Change], change: Change) -> None:
    """Appends a change to a list that a reader drains. A list of `MAX_UNREAD_CHANGES` starts again from Cleared: its
    reader then knows less than is cached, but nothing wrong.
    """
    if len(changes) >= MAX_UNREAD_CHANGES:
        changes[:] = [Cleared()]
    changes.append(change)


class BlockError(Exception):
    """An allocation was used against the rules (double free, too many hashes), which is a bug; or a sequence needs more
    blocks than the whole pool has (`EngineModel.add`).
    """


class Allocation:
    """Blocks of one sequence: the hashes of its `shared` blocks (a prefix of the prompt's chain) and the number of its
    `private` blocks. `hits` is the number of blocks that were cached when it was made.
    """

    __slots__ = ("freed", "hits", "private", "shared")

    def __init__(self, shared: list[BlockHash], private: int) -> None:
        self.shared = shared
        self.private = private
        self.hits = len(shared)
        self.freed = False

    @property
    def blocks(self) -> int:
        return len(self.shared) + self.private


class BlockPool:
    """A pool of `total` blocks of `block_size_tokens` tokens. A call costs O(blocks that it touches).

    Changes of the cache are kept for `drain_changes` only with `record_changes`.
    """

    def __init__(self, total: int, block_size_tokens: int, record_changes: bool = False) -> None:
        if total < 1 or block_size_tokens < 1:
            raise ValueError(
                f"BlockPool: {total} blocks of {block_size_tokens} tokens: both must be at least 1"
            )
        self.total = total
        self.block_size_tokens = block_size_tokens
        self._refs: dict[BlockHash, int] = {}  # shared blocks, each >= 1
        self._idle: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first
        self._private = 0
        self._record = record_changes
        self._changes: list[Change] = []

    # ------------------------------------------------------------------------------------------------ queries

    @property
    def used(self) -> int:
        """Number of blocks that allocations hold."""
        return self._private + len(self._refs)

    @property
    def free(self) -> int:
        """Number of blocks that can be given out, idle cached blocks included."""
        return self.total - self._private - len(self._refs)

    @property
    def cached(self) -> int:
        """Number of cached blocks, shared or idle."""
        return len(self._refs) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size_tokens)

    def hits(self, hashes: Sequence[BlockHash]) -> int:
        """Returns the number of leading blocks of the chain `hashes` that are cached."""
        for index, block in enumerate(hashes):
            if block not in self._refs and block not in self._idle:
                return index
        return len(hashes)

    # ------------------------------------------------------------------------------------------------ changes

    def allocate(self, hashes: Sequence[BlockHash], blocks: int) -> Allocation | None:
        """Allocates `blocks` blocks for a sequence: the cached leading part of `hashes` is shared, the rest private.

        The caller leaves out of `hashes` the blocks that it must compute itself; `hits` of the result is the number of
        cached ones. Returns None, and changes nothing, if there are too few blocks.
        """
        n_hits = self.hits(hashes)
        if n_hits > blocks:
            raise BlockError(f"{n_hits} cached blocks for a sequence of {blocks} blocks")
        revived = sum(1 for block in hashes[:n_hits] if block in self._idle)
        if blocks - n_hits + revived > self.free:
            return None
        shared = list(hashes[:n_hits])
        for block in shared:
            self._take(block)
        private = blocks - n_hits
        self._evict_for(private)
        self._private += private
        return Allocation(shared, private)

    def grow(self, allocation: Allocation, blocks: int) -> bool:
        """Adds `blocks` private blocks to an allocation. Returns False, and changes nothing, if there are too few."""
        self._check(allocation)
        if blocks > self.free:
            return False
        self._evict_for(blocks)
        self._private += blocks
        allocation.private += blocks
        return True

    def reserve(self, blocks: int) -> bool:
        """Takes `blocks` private blocks, which `settle` will assign to allocations. Returns False, and changes nothing,
        if there are too few.
        """
        if blocks > self.free:
            return False
        self._evict_for(blocks)
        self._private += blocks
        return True

    def settle(self, allocation: Allocation, blocks: int) -> None:
        """Sets the size of an allocation to `blocks` blocks in all; the added blocks must have been reserved before."""
        self._check(allocation)
        allocation.private += blocks - allocation.blocks

    def commit(self, allocation: Allocation, hashes: Sequence[BlockHash]) -> None:
        """Caches an allocation's computed blocks under `hashes`, the chain from the prompt's start; blocks that are
        shared already stay.
        """
        self._check(allocation)
        done = len(allocation.shared)
        if len(hashes) > allocation.blocks:
            raise BlockError(f"{len(hashes)} hashes for {allocation.blocks} blocks")
        stored = []
        for block in hashes[done:]:
            if block not in self._refs and block not in self._idle:
                stored.append(block)
            self._private -= 1
            allocation.private -= 1
            self._take(block)
            allocation.shared.append(block)
        if stored and self._record:
            self._note_stored(hashes, set(stored))

    def release(self, allocation: Allocation) -> None:
        """Gives all blocks of an allocation back; cached blocks that nobody uses stay as idle hits.

        Raises BlockError at a second call.
        """
        self._check(allocation)
        allocation.freed = True
        self._private -= allocation.private
        # the end of a chain is evicted first, because the beginning is useful without it
        for block in reversed(allocation.shared):
            refs = self._refs[block] - 1
            if refs:
                self._refs[block] = refs
            else:
                del self._refs[block]
                self._idle[block] = None

    def clear(self) -> bool:
        """Empties the cache. Returns False, and changes nothing, while any block is in use (as vLLM does)."""
        if self.used:
            return False
        if self._idle and self._record:
            add_change(self._changes, Cleared())
        self._idle.clear()
        return True

    def drain_changes(self) -> list[Change]:
        """Returns the changes of the cache since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # ------------------------------------------------------------------------------------------------ internals

    def _check(self, allocation: Allocation) -> None:
        if allocation.freed:
            raise BlockError("the allocation was given back already")

    def _take(self, block: BlockHash) -> None:
        self._idle.pop(block, None)
        self._refs[block] = self._refs.get(block, 0) + 1

    def _evict_for(self, blocks: int) -> None:
        """Evicts idle blocks until `blocks` blocks are empty; the caller has checked that there are enough."""
        short = blocks - (self.total - self._private - len(self._refs) - len(self._idle))
        if short <= 0:
            return
        gone = []
        for _ in range(short):
            gone.append(self._idle.popitem(last=False)[0])
        if self._record:
            add_change(self._changes, Removed(tuple(gone)))

    def _note_stored(self, hashes: Sequence[BlockHash], stored: set[BlockHash]) -> None:
        """Adds one Stored change for each run of adjacent new blocks in the chain `hashes`."""
        run: list[BlockHash] = []
        parent: BlockHash | None = None
        previous: BlockHash | None = None
        for block in hashes:
            if block in stored:
                if not run:
                    parent = previous
                run.append(block)
            elif run:
                add_change(self._changes, Stored(tuple(run), parent))
                run = []
            previous = block
        if run:
            add_change(self._changes, Stored(tuple(run), parent))
