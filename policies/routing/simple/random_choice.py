"""The random policy draws one of the workers with equal probability (baseline of BalanceRoute 6.1). It uses no
state and no load.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import Decision, Needs, Ranked, least_cost
from policies.state.views import PoolEntry, Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class RandomChoice:
    """Draws a worker at random. All workers have cost 0, so the seeded draw among ties decides. The policy has no
    parameters.
    """

    needs: ClassVar[Needs] = Needs.NONE
    paper: ClassVar[str] = "BalanceRoute 6.1 (baseline)"
    formula: ClassVar[str] = "cost = 0 for every worker; one is drawn"
    name: str = "random"

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return least_cost(self.name, [Ranked(worker.id, 0.0, {}) for worker in workers], rng)

    def choose_decode(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return self.choose_prefill(entry.request, workers, snapshot, rng)
