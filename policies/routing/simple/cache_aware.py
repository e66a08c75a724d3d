"""Cache-aware: the longest prefix hit, load breaks ties (NetKV's CA; DeepFlow's select_tes_prefix_match, 5.2).

    argmax_d lambda_r(d), then argmin_d C_d                        lambda -> Snapshot.hits, C -> load_score.load_score

One number: cost = -lambda + C/(1 + C); hits are whole tokens, so the load, below 1, only breaks ties.
Not claimed: any bound on load; a hot prefix draws everything to its worker (that is what `locality` is for).
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
    """Ranks a worker by its hit, then by its load."""
    score, _ = load_score(worker, weights)
    hit_tokens = hits.get(worker.id, 0)
    return Ranked(
        worker.id, score / (1.0 + score) - hit_tokens, {"hit_tokens": float(hit_tokens), "load": score}
    )
