"""The global prefix index of one engine group: which worker holds which KV block, by chained block hashes.

Only the engines' own KV events feed it (DeepFlow 5.2's global prompt tree; docs/design.md 3.2); nothing is guessed. A
block's hash covers its whole prefix, so a chain of hashes needs no tree of tokens:

    masks[hash]     bitmask of the workers that hold the block
    held[worker]    hashes of the worker's blocks, by which its entries are removed when it is dropped
    lookup          follows the workers that hold hash 0, then 0..1, ...; a worker drops out at its first miss

The structure was chosen by measurement (6,250 blocks = 100,000 tokens of 16, 256 workers, 1 M other blocks; one
contended core). A radix tree took 0.61 ms, this inverted index walked block by block 0.73 ms, a binary search per
worker 0.22 ms, and the inverted index searched by halves 0.075 ms: where the masks at both ends of a stretch are equal,
no worker dropped out in between. That holds only if every held block's parent is held too. Engines nearly always keep
it (they evict leaves first). Workers with a block whose parent is missing are known, and for them the chain is walked
block by block. So the answer is exact.

A feed carries an epoch (one life of the engine's publisher) and sequence numbers. After a gap, later batches are held
back until the missing ones are replayed. When too many are held back, the worker's content is dropped and a snapshot is
wanted (`wanted` lists these requests). A new epoch or a `drop` hides the old content at once by clearing one bit; its
entries are removed a few at a time (`sweep`).

The indexes of all groups and what is held back share one bound in bytes (`IndexMemory`). Beyond it blocks are refused
and counted: the index is then incomplete, but what it says is still true. Bytes are counted by constants, not measured,
because a replay must refuse the same blocks on every machine. Not claimed: that a table gives memory back when it
shrinks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from policies.engine_model.blocks import Change, Cleared, Removed, Stored
from policies.state.charges import Load
from policies.state.views import Request, RequestId, WorkerId

MAX_HELD_BACK = 1024
"""Most batches of one worker that may wait for a missing batch."""
SWEEP_BLOCKS = 256
"""Most entries of dropped content that one call removes."""
HELD_BACK_SHARE = 8
"""One part in this many of the bytes is for batches that are held back. ASSUMPTION: with the default it is 128 MiB,
which holds a gap of 8,192 blocks for each of 370 workers."""

# CPython on 64 bits: an integer of 64 bits has 36 bytes, and an entry of a dict 30 to 60, as the table is full or
# has just grown; `test_prefix_index` measures them
BLOCK_BYTES = 220
"""Bytes of a block: entries in the tables of masks and of parents, its hash, its parent's, and a small mask."""
HELD_BYTES = 96
"""Bytes of a worker's entry for a block that it holds, or for a parent that it lacks: an entry of a dict and a hash."""
BATCH_BYTES = 160
"""Bytes of a batch that is held back, without its changes."""
CHANGE_BYTES = 160
"""Bytes of a change in it, without its hashes."""
HASH_BYTES = 44
"""Bytes of a hash in a change: an integer, and its place in a tuple."""


def bytes_of(changes: Iterable[Change]) -> int:
    """Returns the memory of some changes in bytes."""
    hashes = 0
    number = 0
    for change in changes:
        number += 1
        if not isinstance(change, Cleared):
            hashes += len(change.hashes)
    return CHANGE_BYTES * number + HASH_BYTES * hashes


@dataclass(slots=True)
class IndexMemory:
    """The memory of the prefix indexes of all groups, `max_bytes` at most. The content is counted apart from what is
    held back, so that a full index still has room to wait for a missing batch.
    """

    max_bytes: int = 1 << 30
    content_bytes: int = 0
    held_back_bytes: int = 0

    @property
    def content_max_bytes(self) -> int:
        """Most bytes of content."""
        return self.max_bytes - self.held_back_max_bytes

    @property
    def held_back_max_bytes(self) -> int:
        """Most bytes of batches that are held back."""
        return self.max_bytes // HELD_BACK_SHARE

    @property
    def taken_bytes(self) -> int:
        """Bytes that are taken now."""
        return self.content_bytes + self.held_back_bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to a worker's engine: send batches `first` to `last` again or, where both are None, a snapshot."""

    epoch: str
    first: int | None
    last: int | None


@dataclass(slots=True)
class _Feed:
    """One worker's content, and the position of its feed. `bit` is the worker's bit number in the masks."""

    epoch: str
    bit: int
    next_seq: int = 0
    held: dict[int, int] = field(default_factory=dict)
    """Blocks that the worker holds, each with the number of its children that are held."""
    missing: dict[int, int] = field(default_factory=dict)
    """Parents that the worker does not hold, each with the number of its children that it holds."""
    counted_missing: int = 0
    """Number of entries of `missing` that are counted as memory."""
    held_back: dict[int, tuple[Change, ...]] = field(default_factory=dict)
    """Batches that wait for a missing one, by sequence number."""
    lost: bool = False
    """Whether the content was dropped, so that a snapshot is wanted."""


@dataclass(slots=True)
class PrefixIndex:
    """The index of one engine group. `version` grows with every change of the content; `refused` counts the blocks that
    were refused because the bytes of `memory`, which the indexes of other groups share, were taken.
    """

    memory: IndexMemory = field(default_factory=IndexMemory)
    version: int = 0
    refused: int = 0
    _masks: dict[int, int] = field(default_factory=dict)
    _parents: dict[int, int] = field(default_factory=dict)
    _feeds: dict[str, _Feed] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    """Workers by bit number."""
    _live: int = 0
    """Mask of the workers that have a feed."""
    _irregular: int = 0
    """Mask of the workers that hold a block without its parent."""
    _dead: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    """Dropped content whose entries are still to be removed: (bit, blocks held)."""
    _free_bits: list[int] = field(default_factory=list)
    _bits: int = 0
    _entries: int = 0
    """Number of blocks held by each worker, those of dropped content included, and of parents that they lack."""
    _counted_bytes: int = 0
    """Bytes of this index's content in `memory`."""

    # ------------------------------------------------------------------------------------------------------- feeds

    def apply(self, worker: str, epoch: str, seq: int, changes: tuple[Change, ...]) -> None:
        """Applies one batch of a worker's events, or holds it back after a gap. A batch that came before is ignored."""
        self.sweep()
        feed = self._feed(worker, epoch)
        if seq < feed.next_seq:
            return
        if feed.lost or seq > feed.next_seq:
            self._hold_back(feed, seq, changes)
            return
        self._carry_out(feed, changes)
        self._drain(feed)
        self._count()

    def restore(self, worker: str, epoch: str, next_seq: int, chains: Iterable[Stored]) -> None:
        """Replaces a worker's content by a snapshot taken before batch `next_seq`. Batches from `next_seq` on that were
        held back are applied afterwards.
        """
        known = self._feeds.get(worker)
        held_back = dict(known.held_back) if known is not None and known.epoch == epoch else {}
        self.drop(worker)
        feed = self._feed(worker, epoch)
        for chain in chains:
            self._store(feed, chain)
        self.version += 1
        feed.next_seq = next_seq
        for later, changes in held_back.items():
            if later >= next_seq:
                self._keep(feed, later, changes)
        self._drain(feed)
        self._count()

    def drop(self, worker: str) -> None:
        """Removes a worker from all answers at once; an unknown worker is no error."""
        feed = self._feeds.pop(worker, None)
        if feed is None:
            return
        self.version += 1
        self._live &= ~(1 << feed.bit)
        self._irregular &= ~(1 << feed.bit)
        del self._names[feed.bit]
        for seq in list(feed.held_back):
            self._take(feed, seq)
        self._entries -= feed.counted_missing
        self._dead.append((feed.bit, feed.held))
        self._count()

    def sweep(self) -> None:
        """Removes up to `SWEEP_BLOCKS` entries of dropped content; every batch and every tick does it. A bit is free
        again when no entry of it is left.
        """
        if not self._dead:
            return
        budget = SWEEP_BLOCKS
        while self._dead and budget:
            bit, held = self._dead[-1]
            while held and budget:
                self._unmask(held.popitem()[0], bit)
                self._entries -= 1
                budget -= 1
            if not held:
                self._dead.pop()
                self._free_bits.append(bit)
        if not self._masks:
            # an emptied dict keeps the memory of its largest size
            self._masks, self._parents = {}, {}
        self._count()

    @property
    def sweeps(self) -> bool:
        """Whether `sweep` has dropped content left to remove."""
        return bool(self._dead)

    @property
    def wanted(self) -> dict[str, Wanted]:
        """The request to each worker's engine whose feed has a gap, by worker."""
        holes = ((worker, self.wants(worker)) for worker in self._feeds)
        return {worker: hole for worker, hole in holes if hole is not None}

    def wants(self, worker: str) -> Wanted | None:
        """Returns the request that would close the gap in one worker's feed; None when the feed has no gap, and for a
        worker that never sent anything.
        """
        feed = self._feeds.get(worker)
        if feed is None:
            return None
        if feed.lost:
            return Wanted(feed.epoch, None, None)
        return Wanted(feed.epoch, feed.next_seq, min(feed.held_back) - 1) if feed.held_back else None

    def position(self, worker: str) -> tuple[str, int] | None:
        """Returns the epoch and next batch number of a worker's feed; None for a worker that never sent anything."""
        feed = self._feeds.get(worker)
        return None if feed is None else (feed.epoch, feed.next_seq)

    def content(self, worker: str) -> dict[int, int | None]:
        """Returns a copy of all blocks that a worker holds, each with its parent's hash, for tests and inspection."""
        feed = self._feeds.get(worker)
        return {} if feed is None else {block: self._parents.get(block) for block in feed.held}

    # ------------------------------------------------------------------------------------------------------ lookup

    def lookup(self, hashes: Sequence[int]) -> dict[str, int]:
        """Returns how many blocks at the head of the chain `hashes` each worker holds, by worker.

        Workers that hold none of them are left out.
        """
        # pairs of a number of blocks and a mask of the workers that hold exactly these
        drops: list[tuple[int, int]] = []
        if hashes:
            self._halve(hashes, self._live & ~self._irregular, drops)
            if self._irregular:
                self._walk(hashes, self._live & self._irregular, drops)
        found: dict[str, int] = {}
        for blocks, mask in drops:
            while mask and blocks:
                low = mask & -mask
                found[self._names[low.bit_length() - 1]] = blocks
                mask ^= low
        return found

    def _halve(self, hashes: Sequence[int], workers: int, drops: list[tuple[int, int]]) -> None:
        get = self._masks.get
        first, last = 0, len(hashes) - 1
        at_first = get(hashes[0], 0) & workers
        at_last = get(hashes[last], 0) & at_first
        if at_last:
            drops.append((last + 1, at_last))
        stretches = [(first, last, at_first, at_last)]
        while stretches:
            low, high, at_low, at_high = stretches.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                drops.append((high, at_low & ~at_high))
                continue
            middle = (low + high) // 2
            at_middle = get(hashes[middle], 0) & at_low
            stretches.append((low, middle, at_low, at_middle))
            stretches.append((middle, high, at_middle, at_high & at_middle))

    def _walk(self, hashes: Sequence[int], workers: int, drops: list[tuple[int, int]]) -> None:
        for blocks, block in enumerate(hashes):
            kept = self._masks.get(block, 0) & workers
            if kept != workers:
                drops.append((blocks, workers & ~kept))
                workers = kept
                if not workers:
                    return
        drops.append((len(hashes), workers))

    def blocks_held(self, worker: str, hashes: Sequence[int], most: int | None = None) -> int:
        """Returns how many blocks at the head of the chain `hashes` one worker holds; with `most`, of its first `most`
        blocks.
        """
        feed, end = self._feeds.get(worker), len(hashes) if most is None else most
        if feed is None:
            return 0
        held = feed.held
        if feed.missing:
            return next((n for n in range(end) if hashes[n] not in held), end)
        return bisect_left(hashes, True, 0, end, key=lambda block: block not in held)

    def holds(self, block: int) -> bool:
        """Whether some worker may hold a block; entries of dropped content that are still to be removed count too."""
        return block in self._masks

    # ------------------------------------------------------------------------------------------------------- sizes

    @property
    def blocks(self) -> int:
        """Number of distinct blocks in the index, with those of dropped workers that are still to be removed."""
        return len(self._masks)

    def memory_bytes(self) -> int:
        """Returns the bytes that are counted for the content."""
        # a mask has a bit for each worker: 4 bytes for each 30
        return len(self._masks) * (BLOCK_BYTES + self._bits // 7) + self._entries * HELD_BYTES

    def _count(self) -> None:
        now_bytes = self.memory_bytes()
        self.memory.content_bytes += now_bytes - self._counted_bytes
        self._counted_bytes = now_bytes

    # ----------------------------------------------------------------------------------------------------- changes

    def _feed(self, worker: str, epoch: str) -> _Feed:
        feed = self._feeds.get(worker)
        if feed is not None and feed.epoch == epoch:
            return feed
        self.drop(worker)
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit, self._bits = self._bits, self._bits + 1
        feed = self._feeds[worker] = _Feed(epoch, bit)
        self._names[bit] = worker
        self._live |= 1 << bit
        return feed

    def _hold_back(self, feed: _Feed, seq: int, changes: tuple[Change, ...]) -> None:
        self._keep(feed, seq, changes)
        if not self._too_much(feed):
            return
        for oldest in sorted(feed.held_back):
            if not self._too_much(feed):
                break
            self._take(feed, oldest)
        if not feed.lost:
            feed.lost = True
            self._clear(feed)

    def _too_much(self, feed: _Feed) -> bool:
        memory = self.memory
        return len(feed.held_back) > MAX_HELD_BACK or memory.held_back_bytes > memory.held_back_max_bytes

    def _keep(self, feed: _Feed, seq: int, changes: tuple[Change, ...]) -> None:
        """Holds a batch back."""
        if seq in feed.held_back:
            self._take(feed, seq)
        feed.held_back[seq] = changes
        self.memory.held_back_bytes += BATCH_BYTES + bytes_of(changes)

    def _take(self, feed: _Feed, seq: int) -> tuple[Change, ...]:
        """Returns a batch that was held back, and holds it back no longer."""
        changes = feed.held_back.pop(seq)
        self.memory.held_back_bytes -= BATCH_BYTES + bytes_of(changes)
        return changes

    def _drain(self, feed: _Feed) -> None:
        feed.lost = False
        while feed.next_seq in feed.held_back:
            self._carry_out(feed, self._take(feed, feed.next_seq))

    def _carry_out(self, feed: _Feed, changes: tuple[Change, ...]) -> None:
        for change in changes:
            match change:
                case Stored():
                    self._store(feed, change)
                case Removed():
                    for block in change.hashes:
                        self._remove(feed, block)
                case Cleared():
                    self._clear(feed)
        feed.next_seq += 1
        self.version += 1

    def _clear(self, feed: _Feed) -> None:
        """Drops the worker's content but keeps its feed, by giving the worker another bit."""
        worker = self._names[feed.bit]
        state = (feed.next_seq, feed.held_back, feed.lost)
        # it goes on being held back, and is counted already
        feed.held_back = {}
        self.drop(worker)
        fresh = self._feed(worker, feed.epoch)
        feed.bit, feed.held, feed.missing, feed.counted_missing = fresh.bit, fresh.held, fresh.missing, 0
        feed.next_seq, feed.held_back, feed.lost = state
        self._feeds[worker] = feed

    def _store(self, feed: _Feed, change: Stored) -> None:
        bit, parent = 1 << feed.bit, change.parent
        self._count()
        room_bytes = self.memory.content_max_bytes - self.memory.content_bytes
        new_bytes = BLOCK_BYTES + self._bits // 7 + HELD_BYTES
        for block in change.hashes:
            mask = self._masks.get(block, 0)
            if not mask & bit:
                cost_bytes = HELD_BYTES if mask else new_bytes
                if cost_bytes <= room_bytes:
                    room_bytes -= cost_bytes
                    if not mask and parent is not None:
                        self._parents[block] = parent
                    self._masks[block] = mask | bit
                    feed.held[block] = feed.missing.pop(block, 0)
                    self._entries += 1
                    self._count_child(feed, block, +1)
                else:
                    self.refused += 1
            parent = block
        self._note_missing(feed)

    def _remove(self, feed: _Feed, block: int) -> None:
        children = feed.held.pop(block, None)
        if children is None:
            return
        self._entries -= 1
        if children:
            feed.missing[block] = children
        self._count_child(feed, block, -1)
        self._unmask(block, feed.bit)
        self._note_missing(feed)

    def _count_child(self, feed: _Feed, block: int, sign: int) -> None:
        """Adds `sign` to the child count of the block's parent, whether the worker holds the parent or not."""
        parent = self._parents.get(block)
        if parent is None:
            return
        if parent in feed.held:
            feed.held[parent] += sign
            return
        count = feed.missing.get(parent, 0) + sign
        if count:
            feed.missing[parent] = count
        else:
            del feed.missing[parent]

    def _note_missing(self, feed: _Feed) -> None:
        self._entries += len(feed.missing) - feed.counted_missing
        feed.counted_missing = len(feed.missing)
        bit = 1 << feed.bit
        self._irregular = self._irregular | bit if feed.missing else self._irregular & ~bit

    def _unmask(self, block: int, bit: int) -> None:
        mask = self._masks[block] & ~(1 << bit)
        if mask:
            self._masks[block] = mask
        else:
            del self._masks[block]
            self._parents.pop(block, None)


@dataclass(frozen=True, slots=True)
class IndexHits:
    """A snapshot's view of the prefix indexes of all groups. It looks hits up when a policy asks for them.

    The indexes are too large to copy, so the view reads them directly. It is valid until the next event, and every
    decision ends before that. `memo` maps a live request to (version, hits): the answer is kept until a KV event
    changes an index, because policies ask again for a request that waits. `loads` says which blocks are in use.
    """

    indexes: Mapping[str, PrefixIndex]
    loads: Mapping[WorkerId, Load]
    memo: dict[RequestId, tuple[int, dict[WorkerId, int]]]

    def tokens(self, request: Request) -> Mapping[WorkerId, int]:
        """Returns the cached tokens at the prompt's head, by worker; empty when its block hashes are not known."""
        if not request.block_hashes:
            return {}
        version = sum(index.version for index in self.indexes.values())
        known = self.memo.get(request.attempt_id)
        if known is not None and known[0] == version:
            return known[1]
        hits = {
            worker: min(request.prompt_tokens, blocks * request.block_tokens)
            for index in self.indexes.values()
            for worker, blocks in index.lookup(request.block_hashes).items()
        }
        self.memo[request.attempt_id] = (version, hits)
        return hits

    def may_be_cached(self, request: Request, tokens: int) -> bool:
        """Whether some worker may cache the first `tokens` tokens of the prompt; no lookup is needed to know."""
        last = -(-tokens // max(1, request.block_tokens))
        if last > len(request.block_hashes):
            return False
        block = request.block_hashes[last - 1]
        return any(index.holds(block) for index in self.indexes.values())

    def tokens_in_use(self, request: Request, at_least: int = 1) -> Mapping[WorkerId, int]:
        """Returns of `tokens` those in blocks that requests of the worker use already, by worker, where these are at
        least `at_least`. Nothing is looked up unless that much may be cached, because for most requests it is not.
        """
        if not self.may_be_cached(request, at_least):
            return {}
        found: dict[WorkerId, int] = {}
        for worker, hit_tokens in self.tokens(request).items():
            tokens = self.tokens_in_use_on(worker, request) if hit_tokens >= at_least else 0
            if tokens >= at_least:
                found[worker] = tokens
        return found

    def tokens_in_use_on(self, worker: WorkerId, request: Request) -> int:
        """Returns `tokens_in_use` of one worker."""
        hit_tokens, load = self.tokens(request).get(worker, 0), self.loads.get(worker)
        if not hit_tokens or load is None:
            return 0
        return min(hit_tokens, load.blocks.blocks_held(request) * request.block_tokens)
