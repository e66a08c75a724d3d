"""The KV blocks that one worker's requests hold, and how many copies of each the engine keeps in memory.

A request that hits a cached block uses the engine's copy of it. Every other block it computes or pulls for itself, even
if another request is about to cache the same block: vLLM caches pulled blocks when the pull has ended, and keeps the
copies that were made until then (`KVCacheManager.allocate_slots` with `delay_cache_blocks`). So what a request shares
is known when it is sent to the worker: the head of its prompt that the worker has cached, by its own KV events, in
blocks that a request there uses. Hits on idle blocks use free memory like new blocks.

The blocks of a request are known by the chained hashes of its prompt (`Request.block_hashes`); a request without hashes
shares nothing here. Blocks of output, and a prompt's last, partial block, belong to one request.

Not claimed: which of several copies a request uses. The engine's next report corrects what is counted too little here,
because the difference counts as foreign; an engine that gives copies up (`engine_model.blocks`) is counted too much.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from policies.state.views import Request


@dataclass(slots=True)
class HeldBlocks:
    """The full prompt blocks of a worker's requests, each with the number of requests that hold it.

    `copies` counts the copies of a block beyond its first, for blocks that have any. A block has at most as many copies
    as holders. `shared_tokens` are the tokens of all holdings less those of all copies.
    """

    holders: Counter[int] = field(default_factory=Counter)
    copies: Counter[int] = field(default_factory=Counter)
    shared_tokens: int = 0

    def add(self, request: Request, hits: int) -> int:
        """Counts the blocks of a request. The first `hits` of those that are held here are shared, and the request has
        a copy of its own of all others. Returns the number of shared ones, which `remove` needs.
        """
        hashes = request.block_hashes
        held = self.blocks_held(request)
        hits = min(hits, held)
        self.holders.update(hashes)
        if hits < held:
            self.copies.update(hashes[hits:held])
        self.shared_tokens += hits * request.block_tokens
        return hits

    def share(self, request: Request, hits: int, now: int) -> None:
        """Counts the first `now` blocks of a request as shared, of which `hits` were before. The only copy of a block
        stays.
        """
        copies, given_up = self.copies, 0
        if not copies:
            return
        for block in request.block_hashes[hits:now]:
            if block in copies:
                _count_down(copies, block)
                given_up += 1
        self.shared_tokens += given_up * request.block_tokens

    def remove(self, request: Request, hits: int) -> None:
        """Takes the blocks of a request back, which `add` has counted, of which `hits` are shared. The copies of its
        own go with it, but not the last copy of a block that others hold.
        """
        if self.copies:
            self._remove_with_copies(request, hits)
            return
        holders, still_held = self.holders, 0
        # most blocks have one holder; `del` of a Counter would be a call in Python
        pop = holders.pop
        for block in request.block_hashes:
            count = holders[block]
            if count == 1:
                pop(block)
            else:
                holders[block] = count - 1
                still_held += 1
        self.shared_tokens -= still_held * request.block_tokens

    def _remove_with_copies(self, request: Request, hits: int) -> None:
        holders, copies, was_shared = self.holders, self.copies, 0
        for at, block in enumerate(request.block_hashes):
            count = holders[block] - 1
            if not count:
                holders.pop(block)
                continue
            holders[block] = count
            further = copies.get(block, 0)
            # one who shares takes a copy along where there would be more copies than holders
            if further and (at >= hits or further == count):
                _count_down(copies, block)
            else:
                was_shared += 1
        self.shared_tokens -= was_shared * request.block_tokens

    def blocks_held(self, request: Request) -> int:
        """Returns the number of blocks at the head of a request's prompt that requests hold here.

        The hashes are chained: who holds a block holds all blocks before it. So the head's end is found by bisection.
        """
        hashes, holders = request.block_hashes, self.holders
        if not hashes or hashes[0] not in holders:
            return 0
        return bisect_left(hashes, True, key=lambda block: block not in holders)


def _count_down(counts: Counter[int], key: int) -> None:
    """Takes one from the count of `key`, which is at least 1. A count of 0 is removed."""
    count = counts[key]
    if count == 1:
        counts.pop(key)
    else:
        counts[key] = count - 1
