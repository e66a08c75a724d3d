"""BR-H balances loads with a short lookahead (BalanceRoute 4, algorithm 3; docs/design.md restores the symbols that
the paper's text lacks).

    F_H(S, g) = alpha w sum_h gamma^h - beta sum_h gamma^h max(0, w - m_g(h)),  h = 0..H

The two stages are BR-0's (`stages`), with F_H for F and min_h m_g(h) in stage 2's key. `loads` has the projections
(symbol -> field), which are computed once a round and updated by each admission. H = 0, alpha = 1, beta = G gives
BR-0. The paper searches subsets by enumeration; two probes among their sums are exact for F_H too (`kernel`).
Without forecasts every request is assumed to stay, and the lookahead sees only that fuller batches grow faster.
The score takes an admitted request as w at every step, as in the paper. What is admitted is then booked as it will
grow, by a token a step for each sequence (the paper: "updated incrementally").

Beyond the paper are `ageing_s`, `pool_wide` and `max_wait_s` (see `stages`) and three terms in tokens that are
subtracted from every margin; in the paper all of them are 0:

    slack * mean prompt of the pool
    pool_lag * max(0, mean KV of a running sequence - mean prompt of the pool)
    center * mean margin of the workers without a free slot

A request leaves with all the tokens that it has generated, so the margin it frees is larger than its prompt was. A
policy that fills margins up to the envelope therefore admits prompts that are larger than the average arrival. The
pool is left with small prompts, which soon fit nowhere, and the envelope can only rise. `pool_lag` lowers the aim
in proportion to this effect. `center` 1 aims at the mean load instead of the heaviest one, so that a miss on either
side is half as large. G is then no longer the right beta: a token above the mean costs as much as beta - 1 tokens
below it. Together the two halve the imbalance that slack and ageing leave (`balance_route_cluster`).

`refill` True, also beyond the paper, assumes that a slot freed by a forecast departure is filled again with an
equal load while the pool lasts. The first departures of the group are left out of the projection, as many as
entries remain in the pool. The paper's projection lets such a load drop and prefers to fill the drop ahead of time.
Neither was found to be better: with `center` and true lengths they differ by less than seeds do
(`balance_route_sensitivity`, `balance_route_tuning`). Once the pool is empty the projection is the paper's.
Not claimed: any forecast of later arrivals. Forecasts of requests that are still in the pool are not used either
(the paper's "constant of additional load").
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from policies.routing.balance.stages import MAX_WINDOW, Aim, StageLimits, groups
from policies.routing.base import Assignment, Feasible, Needs
from policies.routing.params import Number, Whole, check
from policies.state.views import Departure, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class BalanceRouteH:
    """Balances KV tokens over the workers of a barrier, with a short lookahead at which requests finish when."""

    paper: ClassVar[str] = "BalanceRoute 4, algorithm 3"
    formula: ClassVar[str] = (
        "cost = -score, score F_H = alpha * w_tokens * sum_h gamma^h - beta * sum_h gamma^h * max(0, w_tokens - m(h)),"
        " min_h m(h) = margin_tokens, h = 0..horizon"
    )
    needs: ClassVar[Needs] = Needs.NONE
    # The centre of the paper's sweep {1, 24, 48, 96} x {0.5, 0.7, 0.9, 1.0}. Ours (`python -m benchmarks run
    # balance_route_sensitivity`) finds smaller differences between H 1 to 96 and between gamma 0.5 to 1.0 than
    # between seeds.
    horizon: Annotated[int, Whole(0, 4096, "steps")] = 48
    """H, the number of decode steps that the lookahead covers."""
    gamma: Annotated[float, Number(above=0.0, high=1.0)] = 0.9
    """Discount factor of each further step."""
    alpha: Annotated[float, Number(above=0.0)] = 1.0
    """Weight of the admitted tokens. Only the ratio alpha / beta matters."""
    # G to 4 G make little difference in `balance_route_tuning`; G / 2 and less have more imbalance.
    beta: Annotated[float, Number(low=0.0)] | None = None
    """Weight of an overflow. With null it is G, the number of workers."""
    # As `BalanceRoute0.window`, which says why.
    window: Annotated[int, Whole(1, MAX_WINDOW, "entries")] = 12
    """W, the number of pool entries from which stage 2 chooses."""
    abundance: Annotated[float, Number(low=0.0, unit="slots")] = 2.0  # ASSUMPTION
    """Free slots per worker at or above which stage 1 runs."""
    # ASSUMPTION: as `BalanceRoute0.ageing_s`, which says why.
    ageing_s: Annotated[float, Number(above=0.0, unit="s")] | None = 300.0
    """Wait in the pool that is worth as much as one prompt of the pool's mean length. With null waits do not count."""
    pool_wide: bool = False
    """Whether the best single entry is sought in the whole pool instead of the window (ours)."""
    max_wait_s: Annotated[float, Number(low=0.0, unit="s")] | None = None
    """Wait in the pool after which an entry is overdue and is placed before all others of its class, whatever its size
    (ours). With null only entries are overdue whose lease is about to end because it is renewed no more, or whose TTFT
    objective is about to be missed.
    """
    # ASSUMPTION: these three defaults are 0, the paper's rule, because other values were found on sweeps whose
    # entries wait in the pool for minutes. There beta 3, pool_lag 1, center 1 and ageing_s 1,200 more than halve the
    # imbalance.
    slack: Annotated[float, Number(low=0.0)] = 0.0
    """Tokens subtracted from every margin, in mean prompts of the pool."""
    pool_lag: Annotated[float, Number(low=0.0)] = 0.0
    """Share of the gap from the pool's mean prompt to a running sequence's mean KV that is subtracted from every
    margin.
    """
    center: Annotated[float, Number(low=0.0, high=1.0)] = 0.0
    """Share of the full workers' mean margin that is subtracted from every margin; 1 aims at the mean load."""
    refill: bool = False
    """Whether slots freed by forecast departures are assumed to be filled again while the pool lasts."""
    reserve_tokens: Annotated[int, Whole(0, 1_000_000, "tokens")] = 16
    """Free KV kept for each sequence besides its prompt, as `DispatchConfig.reserve_tokens`."""
    name: str = "balance_route_h"

    def __post_init__(self) -> None:
        check(self)

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        from policies.routing.balance.round import balance  # numba: see `registry.prepare`

        assigned: tuple[Assignment, ...] = ()
        for entries, workers in groups(feasible, snapshot):
            if self.refill:
                spare = len(entries) - sum([worker.free_slots for worker in workers])
                workers = _refilled(workers, spare)
            slack_tokens = self._slack_tokens(entries, workers)
            aim = Aim(self.horizon, self.gamma, self.alpha, self.beta, slack_tokens)
            assigned += balance(entries, snapshot, workers, aim, self._limits(), rng)
        return assigned

    def _limits(self) -> StageLimits:
        return StageLimits(
            self.window, self.abundance, self.reserve_tokens, self.ageing_s, self.pool_wide, self.max_wait_s
        )

    def _slack_tokens(self, entries: Feasible, workers: Sequence[Worker]) -> float:
        """Returns the tokens that are subtracted from every margin, the sum of the module docstring's three terms."""
        slack_tokens = 0.0
        if self.slack or self.pool_lag:
            mean_tokens = sum([entry.request.prompt_tokens for entry, _ in entries]) / len(entries)
            slack_tokens += self.slack * mean_tokens
            running = sum([worker.slots_used for worker in workers])
            if self.pool_lag and running:
                context_tokens = sum([worker.kv_tokens for worker in workers]) / running
                slack_tokens += self.pool_lag * max(0.0, context_tokens - mean_tokens)
        if self.center:
            slack_tokens += self.center * _mean_margin_of_full(workers)
        return slack_tokens


def _mean_margin_of_full(workers: Sequence[Worker]) -> float:
    """Returns the mean margin, in tokens, of the workers without a free slot, or 0 if all workers have one."""
    envelope: dict[str, int] = {}
    for worker in workers:
        envelope[worker.barrier] = max(worker.kv_tokens, envelope.get(worker.barrier, 0))
    margins = [envelope[worker.barrier] - worker.kv_tokens for worker in workers if not worker.free_slots]
    return sum(margins) / len(margins) if margins else 0.0


def _refilled(workers: list[Worker], entries: int) -> list[Worker]:
    """Returns the workers without the group's first departures, which `entries` pool entries are assumed to
    replace, one for each sequence. Departures at the same step are taken in the order of the workers.
    """
    order = sorted((gone.step, row, gone) for row, worker in enumerate(workers) for gone in worker.departures)
    kept: dict[int, list[Departure]] = {row: [] for _, row, _ in order}
    for _, row, gone in order:
        entries -= gone.sequences
        if entries < 0:
            kept[row].append(gone)
    return [
        replace(worker, departures=tuple(kept[row])) if row in kept else worker
        for row, worker in enumerate(workers)
    ]
