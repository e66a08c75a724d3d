"""BR-0: prediction-free balance routing (BalanceRoute 3, algorithm 2; symbols lost in the text restored by DESIGN 3.4).

    F(S, g) = w - G max(0, w - m_g),  w = sum of s_r over S,  m_g = M - L_g,  M = max_g L_g
            = minus the change of I = sum_g (M - L_g) when S is admitted to g

The two stages are in `stages`, loads and margins (symbol -> field) in `loads`, the subset search in `subset`; what runs
is the same compiled (`rounds`, `quick_round`).
With `bypass` (D.6) an entry is decided at once: argmax_g F({r}, g) over all feasible workers; virtual load and slots
are the same fields, and how far a worker may be filled above beta_max is the dispatcher's `overcommit_slots`.
Deviations: see `stages` (priorities, overdue entries, KV room). Not claimed: anything about who leaves when (BR-H).
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from policies.routing import params
from policies.routing.balance.loads import Aim, FlatLoads
from policies.routing.balance.rounds import balance
from policies.routing.balance.stages import Feasible, StageLimits, group_workers, split_by_group
from policies.routing.base import Assignment, Needs, Ranked, first_feasible, least_cost
from policies.state.views import Snapshot


@dataclass(frozen=True, slots=True)
class BalanceRoute0:
    """`window` W and `abundance` (free slots per worker from which stage 1 runs); waits in s, reserve per sequence."""

    needs: ClassVar[Needs] = Needs.NONE
    formula: ClassVar[str] = "cost = -score, score F = w_tokens - workers * max(0, w_tokens - margin_tokens)"
    window: int = 8  # ASSUMPTION: the text has lost W and the threshold
    abundance: float = 2.0  # ASSUMPTION
    max_wait_s: float = 10.0  # ASSUMPTION: well below a lease of 30 s less the dispatcher's margin of 8 s
    reserve_tokens: int = 16  # DispatchConfig.reserve_tokens
    bypass: bool = False
    name: str = "balance_route_0"

    def __post_init__(self) -> None:
        check_limits(self.name, self.window, self.abundance, self.max_wait_s, self.reserve_tokens)
        params.flag(self.name, "bypass", self.bypass)

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        if self.bypass:
            return self._at_once(feasible, snapshot, rng)
        limits = StageLimits(self.window, self.abundance, self.max_wait_s, self.reserve_tokens)
        assigned: tuple[Assignment, ...] = ()
        for group, entries in sorted(split_by_group(feasible).items()):
            workers = group_workers(snapshot, group)
            assigned += balance(entries, snapshot, workers, Aim(), limits, rng)
        return assigned

    def _at_once(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        head = first_feasible(feasible)
        if head is None:
            return ()
        entry, allowed = head
        loads = FlatLoads(group_workers(snapshot, entry.group))
        ids = {worker.id for worker in allowed}
        ranked = []
        for row, worker in enumerate(loads.workers):
            if worker.id in ids:
                score = loads.scores(row, [entry.request.prompt_tokens])[0]
                terms = {"score": float(score), "margin_tokens": float(loads.min_margin(row))}
                ranked.append(Ranked(worker.id, -float(score), terms))
        return (Assignment(entry.request.attempt_id, least_cost(self.name, ranked, rng)),)


def check_limits(policy: str, window: int, abundance: float, max_wait_s: float, reserve_tokens: int) -> None:
    """The parameters that BR-0, BR-H and the composition share. Raises BadParameter."""
    params.integer(policy, "window", window, 1, 64)
    params.number(policy, "abundance", abundance, low=0.0)
    params.number(policy, "max_wait_s", max_wait_s, low=0.0)
    params.integer(policy, "reserve_tokens", reserve_tokens, 0, 1_000_000)
