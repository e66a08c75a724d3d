"""The composition of BR-H, NetKV and classes in one unit, request-seconds (DESIGN 3.6; no paper has it).

    value(S, g) = sum over r in S of (credit_r + age_r - weight_r * cost(r, g) - rent(r, g)) - N s D * mean overflow
    mean overflow = sum_h gamma^h max(0, w - m_g(h)) / sum_h gamma^h

    cost(r, g)  transfer + queue + first step                   -> netkv's terms, with the transfers of all senders
                                                                   (`fleet_network`) and of this round
    weight_r    cost_weight * TTFT objective / slack, 1..max    -> Terms.ttft_slo_s, Request.arrived_s; `max_weight`
    credit_r    weight * (wait until the next chance to be admitted + no less than any cost): so that without a balance
                term and rent every feasible set is worth more than none        -> `wait_s`
    age_r       ageing * seconds in the pool                    -> PoolEntry.entered_s; `ageing`
    rent(r, g)  what others lose while r holds its slot         -> `slot_rent`; `rent_weight`, `near_scarcity`
    N           who is delayed when that worker's step grows: N = B (u + (1 - u) occupancy^k) + Q f
                B the running requests of its barrier, else its own batch      -> Worker.slots_used, .barrier
                Q the entries that find no free slot                           -> Snapshot.pool, Worker.free_slots
                f the share of the workers that end their steps with it: so much of the departures comes later
                u what a second of streaming counts against one of waiting     -> `stream_weight`; k -> `scarcity`
    s           seconds by which a step grows per KV token      -> `seconds_per_kv_token`
    D           steps for which an overflow lasts               -> `hold_steps`
    m_g(h), w   as in BR-H                                      -> loads.HorizonLoads

What the experiment `composition` changed in DESIGN's first design, and what each change was worth: docs/composition.md.
- rent: without it the pool is served by age whatever the outputs, and near slots go to who comes first.
- age: the shortest first alone leaves the longest until they are overdue.
- D: the discounted sum made an overflow last 10 steps; a request that does not fit under the envelope stays hundreds.
- N: a slower step delays a first token only where slots are scarce; where they are not, a price that all running
  requests pay outbids every transfer. Occupancy stands for the chance to wait.
- all that wait find a slot: each takes its best worker, largest first. `abundance`: free slots an entry of the pool.
- the window holds the W entries that are first by rent and age, not the largest: those first are the slowest steps
  first. Without forecasts they are the oldest.
- overdue entries (older than `max_wait_s`, or two thirds of their lease gone) go before all others, oldest first, each
  to its best worker: nobody starves behind shorter ones.

When slots are scarce all 2^W subsets of the window are valued at once: value depends on more than w, so two probes are
not exact. Both stages equal brute force. `round` is in plain Python; `assign` runs the same compiled.
`credit` "tokens" pays `credit_s_per_token` * s_r instead: with cost_weight and ageing 0 and no rent the value is F_H up
to a factor, with alpha : beta = credit_s_per_token / sum_h gamma^h : N s D / sum_h gamma^h.
Not claimed: joint choice over several workers; which of several equal paths a transfer takes.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from policies.routing import params
from policies.routing.balance.balance_route_0 import check_limits
from policies.routing.balance.loads import HorizonLoads
from policies.routing.balance.stages import Feasible, StageLimits, group_workers, split_by_group
from policies.routing.base import Assignment, Needs
from policies.routing.composition.entry_costs import Prices
from policies.routing.composition.request_seconds import RequestSecondsRound
from policies.state.views import Snapshot

CREDITS = ("wait", "tokens")
MAX_WINDOW = 12  # 2^W subsets are valued per popped worker


@dataclass(frozen=True, slots=True)
class Composition:
    """Parameters: see the module's docstring, `balance_route_h` and `netkv`. Times in s."""

    needs: ClassVar[Needs] = Needs.HITS | Needs.NETWORK | Needs.LENGTHS
    formula: ClassVar[str] = (
        "cost = -score, score = credit_less_cost_s + age_s - rent_s - slowdown_s"
        " (rent_s = usual_holds * (queue_rent_s + near_rent_s), slowdown_s = N * seconds_per_kv_token * hold_steps"
        " * sum_h gamma^h * max(0, w_tokens - m(h)) / sum_h gamma^h)"
    )
    horizon: int = 48  # ASSUMPTION: this one and all below that `netkv` and `balance_route_h` mark so
    gamma: float = 0.9
    seconds_per_kv_token: float = 1e-7  # ASSUMPTION: 100 kB of KV per token read at 1 TB/s
    # ASSUMPTION, and all marked "tried": the best of a few on seeds 100 to 105 of the experiment
    hold_steps: float = 300.0
    stream_weight: float = 0.01  # tried
    scarcity: float = 8.0  # tried
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
    near_scarcity: float = 3.0  # tried
    ageing: float = 1.0  # tried: 0 has the least mean wait and twice the 95th percentile
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
        check_limits(self.name, self.window, self.abundance, self.max_wait_s, self.reserve_tokens)
        params.integer(self.name, "window", self.window, 1, MAX_WINDOW)

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        from policies.routing.composition.compiled_round import quick_seconds  # numba: see `registry.prepare`

        prices, limits = self._prices(), self._limits()
        assigned: tuple[Assignment, ...] = ()
        for group, entries in sorted(split_by_group(feasible).items()):
            workers = group_workers(snapshot, group)
            assigned += quick_seconds(
                entries, snapshot, workers, self.horizon, self.gamma, prices, limits, rng
            )
        return assigned

    def round(
        self, group: str, entries: Feasible, snapshot: Snapshot, rng: random.Random
    ) -> RequestSecondsRound:
        """One group's round in plain Python: what `assign` does compiled, to read and to compare with."""
        loads = HorizonLoads(group_workers(snapshot, group), self.horizon, self.gamma, 1.0, None)
        return RequestSecondsRound(entries, snapshot, loads, self._limits(), self._prices(), rng)

    def _limits(self) -> StageLimits:
        return StageLimits(self.window, self.abundance, self.max_wait_s, self.reserve_tokens)

    def _prices(self) -> Prices:
        return Prices(
            self.seconds_per_kv_token,
            self.hold_steps,
            self.stream_weight,
            self.scarcity,
            self.step_base_s,
            self.step_per_seq_s,
            self.max_inflight,
            self.strict_priorities,
            self.wait_s,
            self.max_weight,
            self.cost_weight,
            self.credit_s_per_token if self.credit == "tokens" else None,
            self.rent_weight,
            self.near_scarcity,
            self.ageing,
        )
