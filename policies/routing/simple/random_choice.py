"""Random: one of the candidates with equal probability (baseline of BalanceRoute 6.1; no state, no load)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import Assignment, Decision, Ranked, first_feasible, least_cost
from policies.state.views import PoolEntry, Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class RandomChoice:
    """No parameters. Every candidate costs the same, so the seeded draw among ties decides."""

    formula: ClassVar[str] = "cost = 0 for every candidate; one is drawn"
    name: str = "random"

    def choose(
        self, request: Request, candidates: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return least_cost(self.name, [Ranked(worker.id, 0.0, {}) for worker in candidates], rng)

    def assign(
        self, feasible: Sequence[tuple[PoolEntry, Sequence[Worker]]], snapshot: Snapshot, rng: random.Random
    ) -> tuple[Assignment, ...]:
        head = first_feasible(feasible)
        if head is None:
            return ()
        entry, workers = head
        return (Assignment(entry.request.attempt_id, self.choose(entry.request, workers, snapshot, rng)),)
