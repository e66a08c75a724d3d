"""The composition joins BR-H, NetKV and request classes in one unit, request-seconds (no paper has it).

    value(S, g) = sum over r in S of (credit_r + age_r - weight_r * cost(r, g) - rent(r, g)) - N s D * mean overflow
    mean overflow = sum_h gamma^h max(0, w - m_g(h)) / sum_h gamma^h

    cost(r, g)  transfer + queue + first step                   -> netkv's terms, with the transfers of all senders
                                                                   (`round`) and of this round; T_queue as with netkv's
                                                                   `queue` "slot", by forecast outputs if there are any
    weight_r    cost_weight * TTFT objective / slack, 1..max    -> Terms.ttft_slo_s, Request.ttft_from_s; `max_weight`
    credit_r    weight * (wait until the next chance to be admitted + an upper bound of all costs), so that without a
                balance term and rent every feasible set is worth more than none  -> `wait_s`
    age_r       seconds in the pool / ageing_s                  -> PoolEntry.entered_s; `ageing_s`
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
  per pool entry from which this rule applies. The best worker may be one without a free slot, up to
  Snapshot.overcommit_slots beyond: the entry then queues there, because that costs less than the transfer to a free
  one. When slots are scarce no entry queues in an engine: in the pool it can take whatever slot frees first.
- The window takes the W entries with the lowest rent minus age, not the W largest. Choosing the largest first would
  schedule the entries that slow every step the most. Without forecasts the W entries are the oldest.
- Overdue entries go first, each to its best worker as long as a slot is free for it: those whose lease is about to end
  (`PoolEntry.is_overdue`) before all others, and those that are about to miss their TTFT objective (`is_pressing`), or
  are older than `max_wait_s`, if it is set, before the others of their class. Entries whose leases are renewed are
  never overdue by them, however long they wait; age brings them forward.

When slots are scarce all 2^W subsets of the window are valued at once. BR-H's two probes would not be exact,
because the value depends on more than w. Both stages give the same result as brute force. With `credit` "tokens"
the credit is `credit_s_per_token` * s_r. With cost_weight 0, no ageing and no rent the value is then F_H up to a
factor, with alpha : beta = credit_s_per_token / sum_h gamma^h : N s D / sum_h gamma^h.
Not claimed: a joint choice over several workers, or which of several equal paths a transfer takes.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.balance.stages import groups
from policies.routing.base import Assignment, Feasible, Needs, Overcommit
from policies.routing.composition.parameters import Parameters
from policies.routing.params import check
from policies.state.views import Snapshot


@dataclass(frozen=True, slots=True)
class Composition(Parameters):
    """Weighs transfer, queue, balance and classes of a whole round in one unit, request-seconds."""

    paper: ClassVar[str] = "none; it joins NetKV and BalanceRoute"
    formula: ClassVar[str] = (
        "cost = -score, score = credit_less_cost_s + age_s - rent_s - slowdown_s"
        " (rent_s = usual_holds * (queue_rent_s + near_rent_s), slowdown_s = N * seconds_per_kv_token * hold_steps"
        " * sum_h gamma^h * max(0, w_tokens - m(h)) / sum_h gamma^h)"
    )
    needs: ClassVar[Needs] = Needs.HITS | Needs.NETWORK | Needs.LENGTHS
    overcommits: ClassVar[Overcommit] = Overcommit.BESIDE_FREE_SLOTS
    name: str = "composition"

    def __post_init__(self) -> None:
        check(self)

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        from policies.routing.composition.round import compose  # numba: see `registry.prepare`

        assigned: tuple[Assignment, ...] = ()
        for entries, workers in groups(feasible, snapshot):
            assigned += compose(self, entries, snapshot, workers, rng)
        return assigned
