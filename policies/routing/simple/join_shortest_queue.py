"""Join-the-shortest-queue chooses the worker with the fewest requests (as vLLM's router does; BalanceRoute's
strongest baseline).

    prefill:  queue(d) = requests that compute there                    -> Worker.prefilling (+ slots_used if colocated)
    decode:   queue(d) = sequences that decode or are on their way       -> Worker.slots_used

The engine's own report is not added, because the router's charges are exact and immediate, and a report is up to
0.1 s old.
Not claimed: balance of KV tokens. A request of 10 tokens counts as much as one of 10,000.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import Decision, Needs, best_of
from policies.state.views import PoolEntry, Request, Role, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class JoinShortestQueue:
    """Chooses the worker with the fewest requests; it has no parameters."""

    needs: ClassVar[Needs] = Needs.NONE
    paper: ClassVar[str] = "BalanceRoute 6.1 (baseline)"
    formula: ClassVar[str] = "cost = prefilling + decoding, as far as the stage has them"
    name: str = "join_shortest_queue"

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        queues = [_prefill_queue(worker) for worker in workers]
        costs = [float(prefilling + decoding) for prefilling, decoding in queues]
        return best_of(
            self.name,
            workers,
            costs,
            lambda i: {"prefilling": float(queues[i][0]), "decoding": float(queues[i][1])},
            rng,
        )

    def choose_decode(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        costs = [float(worker.slots_used) for worker in workers]
        return best_of(self.name, workers, costs, lambda i: {"decoding": costs[i]}, rng)


def _prefill_queue(worker: Worker) -> tuple[int, int]:
    """Returns the number of requests whose prompt a worker computes, and of sequences that it decodes."""
    return worker.prefilling, worker.slots_used if worker.role is Role.COLOCATED else 0
