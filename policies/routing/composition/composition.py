"""The composition of BR-H, NetKV and classes in one unit, request-seconds (no paper has it).

    value(S, g) = sum over r in S of (credit_r + age_r - weight_r * cost(r, g) - rent(r, g)) - N s D * mean overflow
    mean overflow = sum_h gamma^h max(0, w - m_g(h)) / sum_h gamma^h

    cost(r, g)  transfer + queue + first step                   -> netkv's terms, with the transfers of all senders
                                                                   (`round`) and of this round
    weight_r    cost_weight * TTFT objective / slack, 1..max    -> Terms.ttft_slo_s, Request.arrived_s; `max_weight`
    credit_r    weight * (wait until the next chance to be admitted + an upper bound of all costs): without a balance
                term and rent every feasible set is then worth more than none   -> `wait_s`
    age_r       ageing * seconds in the pool                    -> PoolEntry.entered_s; `ageing`
    rent(r, g)  what others lose while r holds its slot         -> `slot_rent`; `rent_weight`, `near_scarcity`
    N           who is delayed when that worker's step grows: N = B (u + (1 - u) occupancy^k) + Q f
                B the running requests of its barrier, else its own batch      -> Worker.slots_used, .barrier
                Q the entries that find no free slot                           -> Snapshot.pool, Worker.free_slots
                f the share of the workers that end their steps with it, whose departures all come later
                u what a second of streaming counts against one of waiting     -> `stream_weight`; k -> `scarcity`
    s           seconds by which a step grows per KV token      -> `seconds_per_kv_token`
    D           steps for which an overflow lasts               -> `hold_steps`
    m_g(h), w   as in BR-H                                      -> `balance.loads`

The terms that the first design did not have, and why (docs/composition.md has what each was worth):
- rent: without it the pool is served by age whatever the outputs, and near slots go to the first that come.
- age: serving the shortest first leaves the longest until they are overdue.
- D: the discounted sum made an overflow last 10 steps; a request that does not fit under the envelope stays hundreds.
- N: a slower step delays a first token only where slots are scarce; where they are not, a price that all running
  requests pay outbids every transfer. Occupancy stands for the chance to wait.
- Where all that wait find a slot, each takes its best worker, largest first. `abundance` is the free slots an entry of
  the pool from which that is so.
- The window takes the W entries with the lowest rent minus age, not the W largest: choosing the largest first would
  schedule the entries that slow every step the most. Without forecasts they are the oldest.
- Overdue entries (older than `max_wait_s`, or with two thirds of their lease gone) go before all others, oldest first,
  each to its best worker, so that nobody starves behind shorter ones.

When slots are scarce all 2^W subsets of the window are valued at once: the value depends on more than w, so two probes
are not exact. Both stages equal brute force.
`credit` "tokens" pays `credit_s_per_token` * s_r instead: with cost_weight and ageing 0 and no rent the value is F_H up
to a factor, with alpha : beta = credit_s_per_token / sum_h gamma^h : N s D / sum_h gamma^h.
Not claimed: joint choice over several workers; which of several equal paths a transfer takes.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from policies.routing import params
from policies.routing.balance.stages import StageLimits, check_limits, groups
from policies.routing.base import Assignment, Feasible, Needs
from policies.state.views import Snapshot

CREDITS = ("wait", "tokens")


@dataclass(frozen=True, slots=True)
class Composition:
    """The parameters of the module's docstring, of `balance_route_h` and of `netkv`. Times in s."""

    formula: ClassVar[str] = (
        "cost = -score, score = credit_less_cost_s + age_s - rent_s - slowdown_s"
        " (rent_s = usual_holds * (queue_rent_s + near_rent_s), slowdown_s = N * seconds_per_kv_token * hold_steps"
        " * sum_h gamma^h * max(0, w_tokens - m(h)) / sum_h gamma^h)"
    )
    needs: ClassVar[Needs] = Needs.HITS | Needs.NETWORK | Needs.LENGTHS
    horizon: int = 48  # ASSUMPTION: this one and all below that `netkv` and `balance_route_h` mark so
    gamma: float = 0.9
    seconds_per_kv_token: float = 1e-7  # ASSUMPTION: 100 kB of KV per token read at 1 TB/s
    # ASSUMPTION: these three, `near_scarcity` and `ageing` are the best of the few values that docs/composition.md
    # lists, on seeds 100 to 105 of `python -m benchmarks run composition`.
    hold_steps: float = 300.0
    stream_weight: float = 0.01
    scarcity: float = 8.0
    step_base_s: float = 0.02
    step_per_seq_s: float = 0.0005
    max_inflight: int = 16
    strict_priorities: bool = False
    wait_s: float = 0.5  # ASSUMPTION
    max_weight: float = 8.0  # ASSUMPTION
    cost_weight: float = 1.0
    credit: str = "wait"
    credit_s_per_token: float = 1e-6
    rent_weight: float = 1.0
    near_scarcity: float = 3.0
    ageing: float = 1.0  # 0: least mean wait, twice its p95
    window: int = 8
    abundance: float = 1.0
    max_wait_s: float = 60.0  # ASSUMPTION
    reserve_tokens: int = 16
    name: str = "composition"

    def __post_init__(self) -> None:
        params.integer(self.name, "horizon", self.horizon, 0, 4096)
        params.number(self.name, "gamma", self.gamma, above=0.0, high=1.0)
        params.number(self.name, "seconds_per_kv_token", self.seconds_per_kv_token, low=0.0)
        params.number(self.name, "hold_steps", self.hold_steps, low=0.0)
        params.number(self.name, "stream_weight", self.stream_weight, high=1.0, above=0.0)
        params.number(self.name, "scarcity", self.scarcity, low=0.0)
        params.number(self.name, "step_base_s", self.step_base_s, above=0.0)
        params.number(self.name, "step_per_seq_s", self.step_per_seq_s, low=0.0)
        params.integer(self.name, "max_inflight", self.max_inflight, 0, 1_000_000)
        params.flag(self.name, "strict_priorities", self.strict_priorities)
        params.number(self.name, "wait_s", self.wait_s, above=0.0)
        params.number(self.name, "max_weight", self.max_weight, low=1.0)
        params.number(self.name, "cost_weight", self.cost_weight, low=0.0)
        params.one_of(self.name, "credit", self.credit, CREDITS)
        params.number(self.name, "credit_s_per_token", self.credit_s_per_token, above=0.0)
        params.number(self.name, "rent_weight", self.rent_weight, low=0.0)
        params.number(self.name, "near_scarcity", self.near_scarcity, low=0.0)
        params.number(self.name, "ageing", self.ageing, low=0.0)
        limits = StageLimits(self.window, self.abundance, self.max_wait_s, self.reserve_tokens)
        check_limits(self.name, limits)

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        from policies.routing.composition.round import compose  # numba: see `registry.prepare`

        assigned: tuple[Assignment, ...] = ()
        for entries, workers in groups(feasible, snapshot):
            assigned += compose(self, entries, snapshot, workers, rng)
        return assigned
