"""What a snapshot shows of the prefix indexes: hits, looked up when a policy asks.

The index is too large to copy, so this view reads it: it is right until the next event, which is as long as a decision
takes. Answers are kept per request until a KV event changes one: a queue's head is decided again at every event.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from policies.state.prefix_index import PrefixIndex
from policies.state.views import Request, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class IndexHits:
    """PrefixHits over the indexes of all groups; `memo` maps a live request to (version, hits)."""

    indexes: Mapping[str, PrefixIndex]
    memo: dict[RequestId, tuple[int, dict[WorkerId, int]]]

    def tokens(self, request: Request) -> Mapping[WorkerId, int]:
        """Cached tokens at the prompt's head by worker; empty when the request's block hashes are not known."""
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
