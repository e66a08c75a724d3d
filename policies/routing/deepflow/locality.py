"""Locality while the load is balanced, load otherwise (DeepFlow 5.2 and lines 3-6 of its algorithm 1).

    if max_i C_i - min_i C_i <= bound:  the longest prefix hit, ties by load     -> cache_aware.longest_hit
    else:                               the least load                           -> load_score.load_score

is_load_balanced is not defined in the paper: here it is the spread of FlowKV's load score over the workers, with
`bound` in its units. The bound is also what limits the damage of a hot prefix: once its worker is that much busier, the
next requests go elsewhere, and their blocks are cached there too.
Not claimed: the choice between colocated and disaggregated workers (`pd_heatmap`, `combined`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing import params
from policies.routing.base import Decision, Needs, Ranked, least_cost
from policies.routing.flowkv.load_score import LoadWeights, load_score
from policies.routing.simple.cache_aware import longest_hit
from policies.state.views import Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class Locality(LoadWeights):
    """`bound`: largest spread of load scores that counts as balanced; and the eight weights of the score."""

    needs: ClassVar[Needs] = Needs.HITS
    formula: ClassVar[str] = "cost = load / (1 + load) - hit_tokens if spread <= bound, else load"
    bound: float = 0.3  # ASSUMPTION
    name: str = "locality"

    def __post_init__(self) -> None:
        self.check(self.name)
        params.number(self.name, "bound", self.bound, low=0.0)

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return least_cost(self.name, local_or_least_loaded(request, workers, snapshot, self, self.bound), rng)


def local_or_least_loaded(
    request: Request, workers: Sequence[Worker], snapshot: Snapshot, weights: LoadWeights, bound: float
) -> list[Ranked]:
    """The candidates ranked by hit if their load scores lie within `bound` of each other, else by load."""
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
