"""The load-aware policy chooses the worker of least load score (FlowKV appendix B; DeepFlow's load_aware). NetKV's
LA is another policy.

    argmin_i C_i                                                   -> load_score.load_score

Formula, symbols and deviations are those of `load_score`. The weights are this policy's parameters. Prefill and
decode have an instance each and therefore their own weights, as in the paper.
Not claimed: any regard to prefix hits or the network.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import Decision, Needs, Ranked, least_cost
from policies.routing.flowkv.load_score import LOAD_FORMULA, LoadWeights, load_score
from policies.state.views import PoolEntry, Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class LoadAware(LoadWeights):
    """Chooses the worker of least load score. Prefill and decode have an instance each and therefore their own
    weights.
    """

    needs: ClassVar[Needs] = Needs.NONE
    paper: ClassVar[str] = "FlowKV appendix B; DeepFlow 5.2 (load_aware)"
    formula: ClassVar[str] = LOAD_FORMULA
    name: str = "load_aware"

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return least_cost(
            self.name, [Ranked(worker.id, *load_score(worker, self)) for worker in workers], rng
        )

    def choose_decode(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return self.choose_prefill(entry.request, workers, snapshot, rng)
