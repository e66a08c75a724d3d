"""BR-0 balances loads without predictions (BalanceRoute 3, algorithm 2; docs/design.md restores the symbols that
the paper's text lacks).

    F(S, g) = w - G max(0, w - m_g),  w = sum of s_r over S,  m_g = M - L_g,  M = max_g L_g
            = minus the change of I = sum_g (M - L_g) when S is admitted to g

`stages` describes the two stages, `loads` the loads and margins (symbol -> field), and `kernel` the subset search.
With `bypass` (D.6) each entry is decided at once: argmax_g F({r}, g) over all feasible workers that have no more than
`bypass_slots` sequences above beta_max. An entry that would exceed this everywhere waits, and the next one is decided.
Virtual load and slots are the same fields.
Deviations: priorities, ageing, overdue entries and KV room (see `stages`).
Not claimed: any forecast of which requests finish when (BR-H has one).
"""

import random
from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.routing.balance.stages import MAX_WINDOW, Aim, StageLimits, groups
from policies.routing.base import Assignment, Feasible, Needs, Overcommit, Ranked, least_cost
from policies.routing.params import BadParameter, Number, Whole, check
from policies.state.views import Snapshot, Worker


@dataclass(frozen=True, slots=True)
class BalanceRoute0:
    """Balances KV tokens over the workers of a barrier without any forecast."""

    paper: ClassVar[str] = "BalanceRoute 3, algorithm 2"
    formula: ClassVar[str] = "cost = -score, score F = w_tokens - workers * max(0, w_tokens - margin_tokens)"
    needs: ClassVar[Needs] = Needs.NONE
    # The text of the paper lacks W. 12 is the best of 1 to 12 by a rule that was written down before its runs, for BR-0
    # and for BR-H (`python -m benchmarks run balance_route_tuning`). It costs time, because a tick sums 2^W subsets for
    # a worker: `python -m benchmarks.decisions` has a row for this W and one for 8.
    window: Annotated[int, Whole(1, MAX_WINDOW, "entries")] = 12
    """W, the number of pool entries from which stage 2 chooses."""
    # ASSUMPTION: the text of the paper lacks the threshold.
    abundance: Annotated[float, Number(low=0.0, unit="slots")] = 2.0
    """Free slots per worker at or above which stage 1 runs."""
    # ASSUMPTION: half of the longest lease, so that an entry that was passed over for as long as a lease lasts stands
    # two mean prompts further ahead. The paper has no value, because it has no such rule.
    ageing_s: Annotated[float, Number(above=0.0, unit="s")] | None = 300.0
    """Wait in the pool that is worth as much as one prompt of the pool's mean length. With null waits do not count."""
    pool_wide: bool = False
    """Whether the best single entry is sought in the whole pool instead of the window (ours)."""
    max_wait_s: Annotated[float, Number(low=0.0, unit="s")] | None = None
    """Wait in the pool after which an entry is overdue and is placed before all others of its class, whatever its size
    (ours). With null only entries are overdue whose lease is about to end because it is renewed no more, or whose TTFT
    objective is about to be missed.
    """
    reserve_tokens: Annotated[int, Whole(0, 1_000_000, "tokens")] = 16
    """Free KV kept for each sequence besides its prompt, as `DispatchConfig.reserve_tokens`."""
    bypass: bool = False
    """Whether each entry is decided at once instead of in rounds (BalanceRoute D.6)."""
    bypass_slots: Annotated[int, Whole(0, unit="slots")] | None = None
    """Sequences that a worker may get with `bypass` beyond its slots. With null the dispatcher's `overcommit_slots` are
    the limit. A number must not be larger than these, so it is the smaller of the two limits.
    """
    name: str = "balance_route_0"

    def __post_init__(self) -> None:
        check(self)

    @property
    def overcommits(self) -> Overcommit:
        """The bypass fills workers above their slots (BalanceRoute D.6); the rounds do not."""
        return Overcommit.ALWAYS if self.bypass else Overcommit.NEVER

    def check_overcommit(self, slots: int) -> None:
        """Raises BadParameter if the bypass is to send more sequences beyond a worker's slots than the `slots` that the
        dispatcher allows.
        """
        if self.bypass and self.bypass_slots is not None and self.bypass_slots > slots:
            raise BadParameter(
                f"policy {self.name}: bypass_slots is {self.bypass_slots}, but the dispatcher allows {slots}: set its "
                f'overcommit_slots to {self.bypass_slots} or more (and overcommit not to "never"), or bypass_slots to '
                f"{slots} or less, or to null for as many as the dispatcher allows"
            )

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        if self.bypass:
            return self._at_once(feasible, snapshot, rng)
        from policies.routing.balance.round import balance  # numba: see `registry.prepare`

        assigned: tuple[Assignment, ...] = ()
        for entries, workers in groups(feasible, snapshot):
            assigned += balance(entries, snapshot, workers, Aim(), self._limits(), rng)
        return assigned

    def _limits(self) -> StageLimits:
        return StageLimits(
            self.window, self.abundance, self.reserve_tokens, self.ageing_s, self.pool_wide, self.max_wait_s
        )

    def _at_once(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        extra = snapshot.overcommit_slots if self.bypass_slots is None else self.bypass_slots
        # most entries share their list of workers
        full: set[tuple[int, int]] = set()
        for entry, allowed in feasible:
            slots, w = entry.request.slots, entry.request.prompt_tokens
            if (id(allowed), slots) in full:
                continue
            ids = {worker.id for worker in allowed if _below_cap(worker, slots, extra)}
            if not ids:
                full.add((id(allowed), slots))
                continue
            ((_, workers),) = groups([(entry, allowed)], snapshot)
            ranked = [self._ranked(worker, w, workers) for worker in workers if worker.id in ids]
            return (Assignment(entry.request.attempt_id, least_cost(self.name, ranked, rng)),)
        return ()

    def _ranked(self, worker: Worker, w: int, workers: list[Worker]) -> Ranked:
        """Returns a worker with its cost -F({r}, g) for a request of `w` tokens."""
        loads = [other.kv_tokens for other in workers if other.barrier == worker.barrier]
        margin = max(loads) - worker.kv_tokens
        score = float(w - len(loads) * max(0, w - margin))
        return Ranked(worker.id, -score, {"score": score, "margin_tokens": float(margin)})


def _below_cap(worker: Worker, slots: int, extra: int) -> bool:
    """Whether a worker's sequences stay within the cap of the bypass (D.6) with `slots` more: its slots and `extra`."""
    return worker.slots_used + min(slots, worker.slots) <= worker.slots + extra
