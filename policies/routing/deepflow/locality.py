"""The locality policy follows prefix hits while the load is balanced, and otherwise load (DeepFlow 5.2 and lines
3-6 of its algorithm 1).

    if max_i C_i - min_i C_i <= bound:  the longest prefix hit, ties by load     -> cache_aware.longest_hit
    else:                               the least load                           -> load_score.load_score

The paper does not define is_load_balanced. Here the load is balanced if FlowKV's load scores of the workers lie
within `bound` of each other. The bound also limits the damage of a hot prefix: once its worker is busier by
`bound`, the next requests go elsewhere, and their blocks are cached there too.
Not claimed: the choice between colocated and disaggregated workers (`pd_heatmap` and `combined` make it).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.routing.base import Decision, Needs, Ranked, least_cost
from policies.routing.flowkv.load_score import LoadWeights, load_score
from policies.routing.params import Number
from policies.routing.simple.cache_aware import longest_hit
from policies.state.views import Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class Locality(LoadWeights):
    """Chooses the longest prefix hit while the load is balanced, and otherwise the least load."""

    needs: ClassVar[Needs] = Needs.HITS
    paper: ClassVar[str] = "DeepFlow 5.2 and algorithm 1, lines 3-6"
    formula: ClassVar[str] = "cost = load / (1 + load) - hit_tokens if spread <= bound, else load"
    bound: Annotated[float, Number(low=0.0)] = 0.3  # ASSUMPTION
    """Largest spread of load scores that counts as balanced."""
    name: str = "locality"

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return least_cost(self.name, local_or_least_loaded(request, workers, snapshot, self, self.bound), rng)


def local_or_least_loaded(
    request: Request, workers: Sequence[Worker], snapshot: Snapshot, weights: LoadWeights, bound: float
) -> list[Ranked]:
    """Returns the workers with their costs: by prefix hit if their load scores lie within `bound` of each other,
    otherwise by load.
    """
    hits = snapshot.hits.tokens(request)
    scores = {worker.id: load_score(worker, weights)[0] for worker in workers}
    spread = max(scores.values()) - min(scores.values())
    if spread <= bound:
        ranked = [longest_hit(worker, hits, weights) for worker in workers]
    else:
        ranked = [
            Ranked(worker, score, {"hit_tokens": float(hits.get(worker, 0)), "load": score})
            for worker, score in scores.items()
        ]
    return [Ranked(r.worker, r.cost, {**r.terms, "spread": spread, "bound": bound}) for r in ranked]
