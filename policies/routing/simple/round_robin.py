"""Round robin chooses the next worker in turn (baseline; no paper).

The cursor is the worker chosen last (`snapshot.last_chosen`, kept by the reducer). The next one is the first
candidate whose id is greater in sorted order or, if there is none, the first of all. So the turn continues in order
when workers come and go.
Not claimed: fairness by load; the policy counts only requests.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import RANKED, Decision, Needs, Ranked, Reason
from policies.state.views import PoolEntry, Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Chooses the next worker in turn. The policy has no parameters."""

    needs: ClassVar[Needs] = Needs.NONE
    paper: ClassVar[str] = "none (baseline)"
    formula: ClassVar[str] = "cost = turns_away"
    name: str = "round_robin"

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return _next(workers, snapshot.last_chosen.get("prefill"))

    def choose_decode(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        return _next(workers, snapshot.last_chosen.get("decode"))


def _next(workers: Sequence[Worker], last: str | None) -> Decision:
    ids = sorted(worker.id for worker in workers)
    start = next((i for i, worker in enumerate(ids) if last is not None and worker > last), 0)
    turn = (ids[start:] + ids[:start])[:RANKED]
    ranking = tuple(Ranked(worker, float(i), {"turns_away": float(i)}) for i, worker in enumerate(turn))
    reason = Reason.ONLY_CANDIDATE if len(ids) == 1 else Reason.NEXT_IN_TURN
    return Decision(turn[0], ranking, reason)
