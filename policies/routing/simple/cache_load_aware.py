"""The cache- and load-aware policy weighs prefix hit against load (NetKV's CLA*; Mooncake's Conductor and llm-d
score in the same way).

    cost(d) = w_load * C_d - w_cache * lambda_r(d) / l_r           w -> load_weight, cache_weight
                                                                   lambda -> Snapshot.hits, C -> load_score.load_score

NetKV's tuned weights (cache, load) are (1.0, 1.0) for chat and RAG, the defaults here, and (1.5, 0.7) for long
contexts (VI-A). The paper does not define its load; ours is FlowKV's score.
Not claimed: any regard to the network (`netkv` has it).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.routing.base import Decision, Needs, Ranked, least_cost
from policies.routing.flowkv.load_score import LoadWeights, load_score
from policies.routing.params import Number
from policies.state.views import PoolEntry, Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class CacheLoadAware(LoadWeights):
    """Weighs the prefix hit against the load score. The eight other weights belong to the load score."""

    needs: ClassVar[Needs] = Needs.HITS
    paper: ClassVar[str] = "NetKV VI-A (CLA*)"
    formula: ClassVar[str] = "cost = load_weight * load - cache_weight * hit_ratio"
    cache_weight: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of the share of the prompt that is cached."""
    load_weight: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of the load score."""
    name: str = "cache_load_aware"

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        hits = snapshot.hits.tokens(request)
        ranked = []
        for worker in workers:
            load, _ = load_score(worker, self)
            hit_ratio = hits.get(worker.id, 0) / max(1, request.prompt_tokens)
            cost = self.load_weight * load - self.cache_weight * hit_ratio
            ranked.append(Ranked(worker.id, cost, {"load": load, "hit_ratio": hit_ratio}))
        return least_cost(self.name, ranked, rng)

    def choose_decode(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return self.choose_prefill(entry.request, workers, snapshot, rng)
