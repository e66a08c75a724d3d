"""Cache+load-aware: a weighted sum of prefix hit and load (NetKV's CLA*, the scoring part of Mooncake's Conductor and
llm-d's composite scorer).

    cost(d) = w_load * C_d - w_cache * lambda_r(d) / l_r           w -> load_weight, cache_weight
                                                                   lambda -> Snapshot.hits, C -> load_score.load_score

NetKV's tuned weights are (1.0, 1.0) for chat and RAG, (1.5, 0.7) for long contexts (VI-A): the first are the
defaults. Its load is not defined in the paper; ours is FlowKV's score.
Not claimed: the network (`netkv`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing import params
from policies.routing.base import Decision, Needs, Ranked, least_cost
from policies.routing.flowkv.load_score import LoadWeights, load_score
from policies.state.views import PoolEntry, Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class CacheLoadAware(LoadWeights):
    """`cache_weight`, `load_weight`, and the eight weights inside the load."""

    needs: ClassVar[Needs] = Needs.HITS
    formula: ClassVar[str] = "cost = load_weight * load - cache_weight * hit_ratio"
    cache_weight: float = 1.0
    load_weight: float = 1.0
    name: str = "cache_load_aware"

    def __post_init__(self) -> None:
        self.check(self.name)
        params.number(self.name, "cache_weight", self.cache_weight, low=0.0)
        params.number(self.name, "load_weight", self.load_weight, low=0.0)

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
