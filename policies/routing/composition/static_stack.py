"""The static stack, the baseline of the composition, applies NetKV's network term first and then BR-H among the
remaining workers.

For every entry it keeps only the feasible workers on the tier with the largest bandwidth B_tau (1 - c_tau)
(`oracle.Oracle.tier_path`). Own transfers are not counted, so that the choice does not change with every decision.
BalanceRoute's stages then place the entries on the workers kept. Without an oracle the policy is BR-H.
Not claimed: that anybody should run this policy. Each part is right about its own term and ignores the other's.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.balance.balance_route_h import BalanceRouteH
from policies.routing.base import Assignment, Feasible, Needs
from policies.state.views import PoolEntry, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class StaticStack(BalanceRouteH):
    """Keeps the workers of the fastest network tier for each entry, and balances among those as BR-H does."""

    paper: ClassVar[str] = "none (baseline of the composition)"
    needs: ClassVar[Needs] = Needs.NETWORK
    formula: ClassVar[str] = BalanceRouteH.formula + "; only workers of the fastest tier that has room"
    name: str = "static_stack"

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        nearest = [(entry, _nearest(entry, workers, snapshot)) for entry, workers in feasible]
        return BalanceRouteH.assign(self, nearest, snapshot, rng)


def _nearest(entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot) -> Sequence[Worker]:
    oracle, source = snapshot.oracle, snapshot.workers.get(entry.prefill_worker)
    if oracle is None or source is None or not oracle.bandwidth_bytes_per_s or not workers:
        return workers
    tiers = [oracle.tier(source.id, source.node, worker.id, worker.node) for worker in workers]
    speeds = {
        tier: oracle.tier_path(tier, snapshot.now_s, True).residual_bytes_per_s
        for tier in set(tiers)
        if tier is not None
    }
    best = max(speeds.values(), default=None)
    kept = [w for w, tier in zip(workers, tiers, strict=True) if tier is not None and speeds[tier] == best]
    return kept or workers
