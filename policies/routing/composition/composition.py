"""The composition joins BR-H, NetKV and request classes in one unit, request-seconds (no paper has it).

    value(S, g) = sum over r in S of (credit_r + age_r - weight_r * cost(r, g) - rent(r, g)) - N s D * mean overflow
    mean overflow = sum_h gamma^h max(0, w - m_g(h)) / sum_h gamma^h

    cost(r, g)  transfer + queue + first step                   -> netkv's terms, with the transfers of all senders
                                                                   (`round`) and of this round
    weight_r    cost_weight * TTFT objective / slack, 1..max    -> Terms.ttft_slo_s, Request.arrived_s; `max_weight`
    credit_r    weight * (wait until the next chance to be admitted + an upper bound of all costs), so that without a
                balance term and rent every feasible set is worth more than none  -> `wait_s`
    age_r       ageing * seconds in the pool                    -> PoolEntry.entered_s; `ageing`
    rent(r, g)  what others lose while r holds its slot         -> `slot_rent`; `rent_weight`, `near_scarcity`
    N           requests delayed when that worker's step grows: N = B (u + (1 - u) occupancy^k) + Q f
                B the running requests of its barrier or, without one, its own -> Worker.slots_used, .barrier
                Q the entries that find no free slot                           -> Snapshot.pool, Worker.free_slots
                f the share of the workers that end their steps with it, whose departures all come later
                u the weight of a second of streaming against one of waiting   -> `stream_weight`; k -> `scarcity`
    s           seconds by which a step grows per KV token      -> `seconds_per_kv_token`
    D           steps for which an overflow lasts               -> `hold_steps`
    m_g(h), w   as in BR-H                                      -> `balance.loads`

The first design did not have the following terms and rules (docs/composition.md has the gain of each):
- rent: without it the pool is served by age whatever the outputs are, and near slots go to the first entries that come.
- age: without it the shortest entries are served first, and the longest wait until they are overdue.
- D: the discounted sum alone makes an overflow last 10 steps, but a request that does not fit under the envelope stays
  for hundreds.
- N: a slower step delays a first token only if slots are scarce. If they are not, a price that all running requests pay
  exceeds the cost of every transfer. The power of the occupancy is the estimated chance that a request has to wait.
- If all waiting entries find a slot, each takes its best worker, largest first. `abundance` is the number of free slots
  per pool entry from which this rule applies.
- The window takes the W entries with the lowest rent minus age, not the W largest. Choosing the largest first would
  schedule the entries that slow every step the most. Without forecasts the W entries are the oldest.
- Overdue entries (older than `max_wait_s`, or with two thirds of their lease gone) go before all others, each to its
  best worker, so that no long entry waits without end behind shorter ones.

When slots are scarce all 2^W subsets of the window are valued at once. BR-H's two probes would not be exact,
because the value depends on more than w. Both stages give the same result as brute force. With `credit` "tokens"
the credit is `credit_s_per_token` * s_r. With cost_weight and ageing 0 and no rent the value is then F_H up to a
factor, with alpha : beta = credit_s_per_token / sum_h gamma^h : N s D / sum_h gamma^h.
Not claimed: a joint choice over several workers, or which of several equal paths a transfer takes.
"""

import random
from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.routing.balance.stages import MAX_WINDOW, groups
from policies.routing.base import Assignment, Feasible, Needs
from policies.routing.params import Number, OneOf, Whole, check
from policies.state.views import Snapshot

CREDITS = ("wait", "tokens")


@dataclass(frozen=True, slots=True)
class Composition:
    """Weighs transfer, queue, balance and classes of a whole round in one unit, request-seconds."""

    paper: ClassVar[str] = "none; it joins NetKV and BalanceRoute"
    formula: ClassVar[str] = (
        "cost = -score, score = credit_less_cost_s + age_s - rent_s - slowdown_s"
        " (rent_s = usual_holds * (queue_rent_s + near_rent_s), slowdown_s = N * seconds_per_kv_token * hold_steps"
        " * sum_h gamma^h * max(0, w_tokens - m(h)) / sum_h gamma^h)"
    )
    needs: ClassVar[Needs] = Needs.HITS | Needs.NETWORK | Needs.LENGTHS
    # ASSUMPTION: this default, and those below that `netkv` and `balance_route_h` mark as assumptions.
    horizon: Annotated[int, Whole(0, 4096, "steps")] = 48
    """H, the number of decode steps that the lookahead covers."""
    gamma: Annotated[float, Number(above=0.0, high=1.0)] = 0.9
    """Discount factor of each further step."""
    # ASSUMPTION: a token has 100 kB of KV, which is read at 1 TB/s.
    seconds_per_kv_token: Annotated[float, Number(low=0.0, unit="s")] = 1e-7
    """Time by which a KV token makes a decode step longer."""
    # ASSUMPTION: the next three defaults, `near_scarcity` and `ageing` are the best of the few values that
    # docs/composition.md lists, on seeds 100 to 105 of `python -m benchmarks run composition`.
    hold_steps: Annotated[float, Number(low=0.0, unit="steps")] = 300.0
    """D, the number of decode steps for which an overflow lasts."""
    stream_weight: Annotated[float, Number(high=1.0, above=0.0)] = 0.01
    """Weight u of a second of streaming against a second of waiting."""
    scarcity: Annotated[float, Number(low=0.0)] = 8.0
    """Exponent k of the occupancy; the power is the estimated chance that a request has to wait."""
    step_base_s: Annotated[float, Number(above=0.0, unit="s")] = 0.02
    """Fixed time of a decode step; fit it to the engines deployed."""
    step_per_seq_s: Annotated[float, Number(low=0.0, unit="s")] = 0.0005
    """Time that each sequence adds to a decode step; fit it to the engines deployed."""
    max_inflight: Annotated[int, Whole(0, 1_000_000, "transfers")] = 16
    """Largest number of transfers in flight per sender that is counted."""
    strict_priorities: bool = False
    """Whether only transfers of the same or a higher class count."""
    wait_s: Annotated[float, Number(above=0.0, unit="s")] = 0.5  # ASSUMPTION
    """Time until an entry's next chance to be admitted."""
    max_weight: Annotated[float, Number(low=1.0)] = 8.0  # ASSUMPTION
    """Largest weight of a request whose slack runs out."""
    cost_weight: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of transfer, queue and first step."""
    credit: Annotated[str, OneOf(CREDITS)] = "wait"
    """Kind of credit that an admission earns: the wait that it saves, or `credit_s_per_token` for each prompt token."""
    credit_s_per_token: Annotated[float, Number(above=0.0, unit="s")] = 1e-6
    """Credit for each prompt token with `credit: tokens`."""
    rent_weight: Annotated[float, Number(low=0.0)] = 1.0
    """Weight of the wait that a held slot causes to the pool."""
    near_scarcity: Annotated[float, Number(low=0.0)] = 3.0
    """Exponent of the occupancy; the power is the estimated chance that no near slot is free."""
    # With 0 the mean wait is least, and its 95th percentile twice as long.
    ageing: Annotated[float, Number(low=0.0)] = 1.0
    """Request-seconds by which an entry's value grows for each second in the pool."""
    window: Annotated[int, Whole(1, MAX_WINDOW, "entries")] = 8
    """W, the number of pool entries from which stage 2 chooses."""
    abundance: Annotated[float, Number(low=0.0, unit="slots")] = 1.0
    """Free slots per pool entry at or above which each entry takes its best worker."""
    max_wait_s: Annotated[float, Number(low=0.0, unit="s")] = 60.0  # ASSUMPTION
    """Wait in the pool after which an entry is placed before all others."""
    reserve_tokens: Annotated[int, Whole(0, 1_000_000, "tokens")] = 16
    """Free KV kept for each sequence besides its prompt, as `DispatchConfig.reserve_tokens`."""
    name: str = "composition"

    def __post_init__(self) -> None:
        check(self)

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        from policies.routing.composition.round import compose  # numba: see `registry.prepare`

        assigned: tuple[Assignment, ...] = ()
        for entries, workers in groups(feasible, snapshot):
            assigned += compose(self, entries, snapshot, workers, rng)
        return assigned
