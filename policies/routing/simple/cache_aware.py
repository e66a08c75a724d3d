"""The cache-aware policy chooses the longest prefix hit, and load breaks ties (NetKV's CA; DeepFlow's
select_tes_prefix_match, 5.2).

    argmax_d lambda_r(d), then argmin_d C_d                        lambda -> Snapshot.hits, C -> load_score.load_score

Both are one number, cost = -lambda + C/(1 + C). Hits are whole tokens and the second term is below 1, so the load
only breaks ties.
Not claimed: any bound on load. A hot prefix draws every request to its worker; `locality` prevents that.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import Decision, Needs, Ranked, least_cost
from policies.routing.flowkv.load_score import LoadWeights, load_score
from policies.state.views import PoolEntry, Request, Snapshot, Worker, WorkerId


@dataclass(frozen=True, slots=True)
class CacheAware(LoadWeights):
    """Chooses the longest prefix hit; the load score, with its eight weights, breaks ties."""

    needs: ClassVar[Needs] = Needs.HITS
    paper: ClassVar[str] = "NetKV VI-A (CA); DeepFlow 5.2 (select_tes_prefix_match)"
    formula: ClassVar[str] = "cost = load / (1 + load) - hit_tokens"
    name: str = "cache_aware"

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        hits = snapshot.hits.tokens(request)
        return least_cost(self.name, [longest_hit(worker, hits, self) for worker in workers], rng)

    def choose_decode(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return self.choose_prefill(entry.request, workers, snapshot, rng)


def longest_hit(worker: Worker, hits: Mapping[WorkerId, int], weights: LoadWeights) -> Ranked:
    """Returns a worker with its cost, by which workers are ranked by prefix hit and then by load."""
    score, _ = load_score(worker, weights)
    hit_tokens = hits.get(worker.id, 0)
    return Ranked(
        worker.id, score / (1.0 + score) - hit_tokens, {"hit_tokens": float(hit_tokens), "load": score}
    )
