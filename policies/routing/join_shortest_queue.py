"""Join the shortest queue: the worker with the fewest requests (vLLM's router and BalanceRoute's strongest baseline).

    prefill:  queue(d) = requests that compute there                    -> Worker.prefilling (+ slots_used if colocated)
    decode:   queue(d) = sequences that decode or are on their way       -> Worker.slots_used

What the engine itself reports is not added: our own charges are exact and instant, its report is 0.1 s old.
Not claimed: balance of KV tokens; a request of 10 tokens counts as much as one of 10,000.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import Assignment, Decision, Ranked, first_feasible, least_cost
from policies.state.views import PoolEntry, Request, Role, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class JoinShortestQueue:
    """No parameters."""

    formula: ClassVar[str] = "cost = prefilling + decoding, as far as the stage has them"
    name: str = "join_shortest_queue"

    def choose(
        self, request: Request, candidates: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return least_cost(self.name, [_prefill_queue(worker) for worker in candidates], rng)

    def assign(
        self, feasible: Sequence[tuple[PoolEntry, Sequence[Worker]]], snapshot: Snapshot, rng: random.Random
    ) -> tuple[Assignment, ...]:
        head = first_feasible(feasible)
        if head is None:
            return ()
        entry, workers = head
        ranked = [Ranked(w.id, float(w.slots_used), {"decoding": float(w.slots_used)}) for w in workers]
        return (Assignment(entry.request.rid, least_cost(self.name, ranked, rng)),)


def _prefill_queue(worker: Worker) -> Ranked:
    decoding = worker.slots_used if worker.role is Role.COLOCATED else 0
    cost = float(worker.prefilling + decoding)
    return Ranked(worker.id, cost, {"prefilling": float(worker.prefilling), "decoding": float(decoding)})
