"""Where the KV of prompts lies in a simulated cluster, and how much of it a prefill reads from there (MFS stage 1).

Each cached block belongs to the node that computed it first. A prefill reads its longest known prefix from the node
that has the prefix's last block: whoever computed that block had all blocks before it. So popular prefixes are read
from one node by many, as in the paper's one-to-many contention (MFS 2.2, 6.3).

Not claimed: eviction (the store is unbounded), copies at the readers, and a choice among several holders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.engine_model import scheduler
from policies.engine_model.scheduler import EngineModel
from policies.flow.stages import home_of


@dataclass(slots=True)
class Staged:
    """The facts about a request at its prefill instance that its flows need.

    `home` is the node of the instance that has the request's KV. Of its prompt, `lent_tokens` are read from `lender`;
    `fetched` says whether the flows for that have been submitted. `batch` is the last step that computes the prompt.
    """

    home: str
    lender: str
    lent_tokens: int
    batch: str = ""
    fetched: bool = False


class KvStore:
    """The nodes of all cached blocks of a cluster, by hash. Blocks have `block_tokens` tokens."""

    def __init__(self, known: Mapping[int, str]) -> None:
        self._node: dict[int, str] = dict(known)

    def put(self, hashes: Sequence[int], node: str) -> None:
        """Notes that `node` has these blocks; the blocks that another node has stay there."""
        for block in hashes:
            self._node.setdefault(block, node)

    def longest(self, hashes: Sequence[int]) -> tuple[int, str]:
        """Returns (number of leading blocks that are known, the node of the last of them or "" where there is none)."""
        node = ""
        for count, block in enumerate(hashes):
            found = self._node.get(block)
            if found is None:
                return count, node
            node = found
        return len(hashes), node


class LentModel(EngineModel):
    """An engine that reads known prefixes from other nodes: their tokens are not computed.

    `span` are the instance's nodes, over which its requests are spread by their ids. The last token of a prompt is
    always computed. The engine's sequences must have an owner with the fields `staged` and `hashes`.
    """

    store: KvStore | None
    span: tuple[str, ...]

    def computed(self, seq: scheduler.Sequence) -> None:
        """Notes that the prompt's KV lies at its home now."""
        owner: Any = seq.owner
        if self.store is not None:
            self.store.put(owner.hashes, owner.staged.home)

    def _allocate(self, seq: scheduler.Sequence) -> bool:
        if not super()._allocate(seq):
            return False
        size = self.pool.block_size_tokens
        owner: Any = seq.owner
        blocks, lender = 0, ""
        if self.store is not None:
            blocks, lender = self.store.longest(owner.hashes[: (seq.prompt_tokens - 1) // size])
            seq.computed = seq.cached_tokens = blocks * size
        owner.staged = Staged(home_of(owner.attempt_id, self.span), lender, blocks * size)
        return True
