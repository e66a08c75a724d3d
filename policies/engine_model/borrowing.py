"""A prefix that another engine lends: the blocks that it is read into, and that stay in the cache (MFS stage 1).

A lender computes a prefix and one token more, because the last token of a prompt is always computed. Of the prefix's
full blocks those are read that are not cached here. While they are read, an allocation of its own holds them; then they
stay in the prefix cache, where the prefill finds them as hits. The sim engine and the simulator borrow by this.
"""

from collections.abc import Sequence
from typing import NamedTuple

from policies.engine_model.blocks import Allocation, BlockHash, BlockPool


class Borrowed(NamedTuple):
    """The blocks of a prefix that is read. `tokens` of it are not cached yet, and only these are read."""

    hashes: tuple[BlockHash, ...]
    allocation: Allocation
    tokens: int


def borrow(pool: BlockPool, prompt: Sequence[BlockHash], lent_tokens: int) -> Borrowed | None:
    """Takes the blocks for a prefix of the prompt with the block hashes `prompt`, of which another engine holds
    `lent_tokens` tokens, the last one included. Returns None, and changes nothing, where nothing is to be read: all of
    it is cached, or there is no room.
    """
    hashes = tuple(prompt[: max(0, lent_tokens - 1) // pool.block_size_tokens])
    missing = len(hashes) - pool.hits(hashes)
    allocation = pool.allocate(hashes, len(hashes)) if missing > 0 else None
    if allocation is None:
        return None
    return Borrowed(hashes, allocation, missing * pool.block_size_tokens)


def keep(pool: BlockPool, borrowed: Borrowed) -> None:
    """Takes what was read into the prefix cache."""
    pool.commit(borrowed.allocation, borrowed.hashes)
    pool.release(borrowed.allocation)


def give_up(pool: BlockPool, borrowed: Borrowed) -> None:
    """Gives the blocks of a read back that has failed."""
    pool.release(borrowed.allocation)
