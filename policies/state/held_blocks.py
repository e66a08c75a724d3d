"""The KV blocks that one worker's requests hold, so that a block of several requests is counted once.

An engine keeps a cached block once in memory, however many of its requests use it (vLLM's use counts). The blocks of a
request are known by the chained hashes of its prompt (`Request.block_hashes`); a request without hashes shares nothing
here. Blocks of output, and a prompt's last, partial block, belong to one request.

The engine may keep copies that are counted once here, because two prompts came before either was cached. Its next
report then shows more KV in use than is charged, and the difference counts as foreign.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from policies.state.views import Request


@dataclass(slots=True)
class HeldBlocks:
    """The full prompt blocks of a worker's requests, each with the number of requests that hold it.

    `shared_tokens` are the tokens of all holdings beyond a block's first: the sum over requests minus the union.
    """

    holders: Counter[int] = field(default_factory=Counter)
    shared_tokens: int = 0

    def add(self, request: Request) -> None:
        """Counts the blocks of a request."""
        hashes, before = request.block_hashes, len(self.holders)
        if hashes:
            self.holders.update(hashes)
            new = len(self.holders) - before
            self.shared_tokens += (len(hashes) - new) * request.block_tokens

    def remove(self, request: Request) -> None:
        """Takes the blocks of a request back, which `add` has counted."""
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

    def tokens_held(self, request: Request) -> int:
        """Returns the tokens at the head of a request's prompt that are in blocks held here.

        The hashes are chained: who holds a block holds all blocks before it. So the head's end is found by bisection.
        """
        hashes, holders = request.block_hashes, self.holders
        if not hashes or hashes[0] not in holders:
            return 0
        return bisect_left(hashes, True, key=lambda block: block not in holders) * request.block_tokens
