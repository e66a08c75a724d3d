"""BR-0: prediction-free balance routing (BalanceRoute 3, algorithm 2; lost symbols restored in docs/design.md).

    F(S, g) = w - G max(0, w - m_g),  w = sum of s_r over S,  m_g = M - L_g,  M = max_g L_g
            = minus the change of I = sum_g (M - L_g) when S is admitted to g

The two stages are described in `stages`, loads and margins (symbol -> field) in `loads`, the subset search in `kernel`.
With `bypass` (D.6) an entry is decided at once: argmax_g F({r}, g) over all feasible workers. Virtual load and slots
are the same fields, and how far a worker may be filled above beta_max is the dispatcher's `overcommit_slots`.
Deviations: see `stages` (priorities, overdue entries, KV room). Not claimed: anything about who leaves when (BR-H).
"""

import random
from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.routing.balance.stages import MAX_WINDOW, Aim, StageLimits, groups
from policies.routing.base import Assignment, Feasible, Needs, Ranked, first_feasible, least_cost
from policies.routing.params import Number, Whole, check
from policies.state.views import Snapshot, Worker


@dataclass(frozen=True, slots=True)
class BalanceRoute0:
    """Balances KV tokens over the workers of a barrier without any forecast."""

    paper: ClassVar[str] = "BalanceRoute 3, algorithm 2"
    formula: ClassVar[str] = "cost = -score, score F = w_tokens - workers * max(0, w_tokens - margin_tokens)"
    needs: ClassVar[Needs] = Needs.NONE
    # ASSUMPTION, this and the next: the paper's text has lost W and the threshold
    window: Annotated[int, Whole(1, MAX_WINDOW, "entries")] = 8
    """W: entries of the pool from which stage 2 chooses."""
    abundance: Annotated[float, Number(low=0.0, unit="slots")] = 2.0
    """Free slots per worker from which stage 1 fills them."""
    # ASSUMPTION: well below a lease of 30 s less the dispatcher's margin of 8 s
    max_wait_s: Annotated[float, Number(low=0.0, unit="s")] = 10.0
    """Wait in the pool after which an entry is placed first, whatever its size."""
    reserve_tokens: Annotated[int, Whole(0, 1_000_000, "tokens")] = 16
    """Free KV kept for each sequence besides its prompt, as `DispatchConfig.reserve_tokens`."""
    bypass: bool = False
    """Decide each entry at once instead of in rounds (BalanceRoute D.6)."""
    name: str = "balance_route_0"

    def __post_init__(self) -> None:
        check(self)

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        if self.bypass:
            return self._at_once(feasible, snapshot, rng)
        from policies.routing.balance.round import balance  # numba: see `registry.prepare`

        assigned: tuple[Assignment, ...] = ()
        for entries, workers in groups(feasible, snapshot):
            assigned += balance(entries, snapshot, workers, Aim(), self._limits(), rng)
        return assigned

    def _limits(self) -> StageLimits:
        return StageLimits(self.window, self.abundance, self.max_wait_s, self.reserve_tokens)

    def _at_once(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        head = first_feasible(feasible)
        if head is None:
            return ()
        ((entry, allowed),), workers = groups([head], snapshot)[0]
        ids, w = {worker.id for worker in allowed}, entry.request.prompt_tokens
        ranked = [self._ranked(worker, w, workers) for worker in workers if worker.id in ids]
        return (Assignment(entry.request.attempt_id, least_cost(self.name, ranked, rng)),)

    def _ranked(self, worker: Worker, w: int, workers: list[Worker]) -> Ranked:
        """F({r}, g) of one worker."""
        loads = [other.kv_tokens for other in workers if other.barrier == worker.barrier]
        margin = max(loads) - worker.kv_tokens
        score = float(w - len(loads) * max(0, w - margin))
        return Ranked(worker.id, -score, {"score": score, "margin_tokens": float(margin)})
