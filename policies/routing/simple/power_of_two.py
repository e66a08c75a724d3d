"""The policy of the power of two choices draws `choices` workers at random and takes the shortest queue among them
(Mitzenmacher 2002; BalanceRoute 6.1).

    queue(d) = the queue of join_shortest_queue (requests that compute; sequences that decode)
    drawn without replacement; with `choices` >= the candidates it is join_shortest_queue.

The ranking lists the drawn workers first and then the others; the term `drawn` is 1 or 0. The cost of a worker that
was not drawn is its own queue plus the longest queue plus one, so that it ranks below every drawn one.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.routing.base import Decision, Needs, Ranked, least_cost
from policies.routing.params import Whole, check
from policies.state.views import PoolEntry, Request, Role, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Chooses the shortest queue among a few workers drawn at random."""

    needs: ClassVar[Needs] = Needs.NONE
    paper: ClassVar[str] = "Mitzenmacher 2002; BalanceRoute 6.1 (baseline)"
    formula: ClassVar[str] = "cost = queue if drawn, else queue + (longest queue + 1)"
    choices: Annotated[int, Whole(1, 1_000_000, "workers")] = 2
    """Workers that are drawn and compared."""
    name: str = "power_of_two"

    def __post_init__(self) -> None:
        check(self)

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return self._shorter(workers, [_prefill_queue(worker) for worker in workers], rng)

    def choose_decode(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return self._shorter(workers, [worker.slots_used for worker in workers], rng)

    def _shorter(self, workers: Sequence[Worker], queues: Sequence[int], rng: random.Random) -> Decision:
        queue_of = dict(zip((worker.id for worker in workers), queues, strict=True))
        drawn = set(rng.sample(sorted(queue_of), min(self.choices, len(queue_of))))
        beyond = max(queues) + 1
        ranked = [
            Ranked(
                worker,
                float(queue if worker in drawn else queue + beyond),
                {"queue": float(queue), "drawn": float(worker in drawn)},
            )
            for worker, queue in queue_of.items()
        ]
        return least_cost(self.name, ranked, rng)


def _prefill_queue(worker: Worker) -> int:
    return worker.prefilling + (worker.slots_used if worker.role is Role.COLOCATED else 0)
