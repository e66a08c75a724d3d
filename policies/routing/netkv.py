"""NetKV: the decode worker of least transfer + queue + first step (NetKV III-V, algorithm 1), with its ablation ladder.

    b_eff  = b_r * (1 - lambda_r(d)/l_r)                   b_r -> PoolEntry.kv_bytes, lambda -> Snapshot.hits
    B_eff  = B[tau] * (1 - c[tau]) / (1 + n[tau][p])       B, c, L -> Oracle.path; n -> Worker.transfers of the sender p
    T_xfer = b_eff / B_eff + L[tau]
    T_queue = max(0, q_d - (beta_max - beta_d)) * t_iter(beta_d)
    T_decode = t_iter(beta_d + 1),  t_iter(beta) = a + b * beta          a, b -> step_base_s, step_per_seq_s
    d* = argmin of the sum over the feasible workers

    beta_d + q_d -> Worker.slots_used, or what the engine reports if that is more; beta_d -> at most beta_max of them
    beta_max     -> Worker.slots

`variant` is the ladder: "cla" (CLA*: load_weight * load - cache_weight * hit ratio, no network), "topo_only" (static
tiers), "static" (+ own transfers n), "full" (+ congestion, pair estimates). Oracle data that are stale or missing take
the ladder down by themselves (`oracle.Oracle.path`); without any, the network term is left out for every candidate.
Deviations: what fits nowhere waits in the pool instead of being rejected (DESIGN 2). With `strict_priorities`, n counts
only transfers of the same or a higher class (DESIGN 3.3; a class stands for its flow level: ASSUMPTION).
Not claimed: overlap of transfer and computing; joint optimality over concurrent requests.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.routing import params
from policies.routing.base import Assignment, Decision, Ranked, first_feasible, least_cost
from policies.routing.oracle import Path
from policies.state.views import PoolEntry, Request, Snapshot, Worker, WorkerId

VARIANTS = ("cla", "topo_only", "static", "full")


@dataclass(frozen=True, slots=True)
class NetKV:
    """Parameters: see the module's docstring. Times in s."""

    variant: str = "full"
    step_base_s: float = 0.02  # ASSUMPTION: a; fit it to the engines deployed
    step_per_seq_s: float = 0.0005  # ASSUMPTION: b
    max_inflight: int = 16  # NetKV V-C: roughly the NIC's saturated flow count
    strict_priorities: bool = False
    cache_weight: float = (
        1.0  # CLA*: tuned to (1.0, 1.0) for chat and RAG, (1.5, 0.7) for long contexts (NetKV VI-A)
    )
    load_weight: float = 1.0
    name: str = "netkv"

    def __post_init__(self) -> None:
        params.one_of(self.name, "variant", self.variant, VARIANTS)
        params.number(self.name, "step_base_s", self.step_base_s, above=0.0)
        params.number(self.name, "step_per_seq_s", self.step_per_seq_s, low=0.0)
        params.integer(self.name, "max_inflight", self.max_inflight, 0, 1_000_000)
        params.flag(self.name, "strict_priorities", self.strict_priorities)
        params.number(self.name, "cache_weight", self.cache_weight, low=0.0)
        params.number(self.name, "load_weight", self.load_weight, low=0.0)

    def assign(
        self, feasible: Sequence[tuple[PoolEntry, Sequence[Worker]]], snapshot: Snapshot, rng: random.Random
    ) -> tuple[Assignment, ...]:
        head = first_feasible(feasible)
        if head is None:
            return ()
        entry, workers = head
        return (Assignment(entry.request.rid, self.rank(entry, workers, snapshot, rng)),)

    def rank(
        self, entry: PoolEntry, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        """The best of `workers` for one entry."""
        hits = snapshot.hits.tokens(entry.request)
        if self.variant == "cla":
            ranked = [self._cla(entry.request, worker, hits) for worker in workers]
        else:
            paths = paths_from(entry.prefill_worker, workers, snapshot, self.variant == "full")
            flows = self._flows(entry, paths, snapshot) if self.variant != "topo_only" else {}
            ranked = [
                self._cost(entry, worker, hits.get(worker.id, 0), paths.get(worker.id), flows)
                for worker in workers
            ]
        return least_cost(self.name, ranked, rng)

    def _cla(self, request: Request, worker: Worker, hits: Mapping[WorkerId, int]) -> Ranked:
        hit_ratio = hits.get(worker.id, 0) / max(1, request.prompt_tokens)
        load = sequences_on(worker) / worker.slots
        cost = self.load_weight * load - self.cache_weight * hit_ratio
        return Ranked(worker.id, cost, {"load": load, "hit_ratio": hit_ratio})

    def _flows(self, entry: PoolEntry, paths: Mapping[WorkerId, Path], snapshot: Snapshot) -> dict[int, int]:
        lowest = entry.request.priority if self.strict_priorities else None
        return own_flows(entry.prefill_worker, paths, snapshot, self.max_inflight, lowest)

    def _cost(
        self, entry: PoolEntry, worker: Worker, hit_tokens: int, path: Path | None, flows: Mapping[int, int]
    ) -> Ranked:
        transfer_s = transfer_seconds(entry, hit_tokens, path, flows)
        queue_s, step_s = queue_and_step_seconds(
            sequences_on(worker), worker.slots, self.step_base_s, self.step_per_seq_s
        )
        terms = {"transfer_s": transfer_s, "queue_s": queue_s, "first_step_s": step_s}
        if path is not None:
            terms |= {
                "tier": float(path.tier),
                "residual_bytes_per_s": path.residual_bytes_per_s,
                "own_flows": float(flows.get(path.tier, 0)),
            }
        return Ranked(worker.id, transfer_s + queue_s + step_s, terms)


def sequences_on(worker: Worker) -> int:
    """q_d + beta_d: sequences that run or wait there, others' included when the engine reports more than we charged."""
    reported = (worker.engine_running or 0) + (worker.engine_waiting or 0)
    return max(worker.slots_used, reported)


def queue_and_step_seconds(total: int, slots: int, base_s: float, per_seq_s: float) -> tuple[float, float]:
    """(T_queue, T_decode) of one more sequence where `total` run or wait already."""
    running = min(total, slots)
    queue_s = max(0, total - slots) * (base_s + per_seq_s * running)
    return queue_s, base_s + per_seq_s * (running + 1)


def transfer_seconds(entry: PoolEntry, hit_tokens: int, path: Path | None, flows: Mapping[int, int]) -> float:
    """T_xfer; 0 without a path (no network term)."""
    if path is None:
        return 0.0
    share = 1.0 - min(1.0, hit_tokens / max(1, entry.request.prompt_tokens))
    sharing = 1 + flows.get(path.tier, 0)
    return entry.kv_bytes * share * sharing / path.residual_bytes_per_s + path.latency_s


def paths_from(
    sender: WorkerId, workers: Sequence[Worker], snapshot: Snapshot, live: bool
) -> dict[WorkerId, Path]:
    """The path to each worker, or none at all if one of them has no path: costs must stay comparable."""
    oracle = snapshot.oracle
    if oracle is None:
        return {}
    node = snapshot.workers[sender].node if sender in snapshot.workers else ""
    paths: dict[WorkerId, Path] = {}
    for worker in workers:
        path = oracle.path(sender, node, worker.id, worker.node, snapshot.now_s, live)
        if path is None:
            return {}
        paths[worker.id] = path
    return paths


def own_flows(
    sender: WorkerId,
    paths: Mapping[WorkerId, Path],
    snapshot: Snapshot,
    most: int,
    lowest_priority: int | None,
) -> dict[int, int]:
    """n[tau][p]: the sender's transfers in flight by tier, at most `most`; with `lowest_priority` only those of that
    class or a higher one. Empty where the oracle cannot tell own flows from others (NetKV III-D).
    """
    oracle, source = snapshot.oracle, snapshot.workers.get(sender)
    if oracle is None or source is None or not source.transfers or not oracle.own_flows_excluded:
        return {}
    flows: dict[int, int] = {}
    for to, priority, count in source.transfers:
        if lowest_priority is not None and priority > lowest_priority:
            continue
        path = paths.get(to)
        receiver = snapshot.workers.get(to)
        if path is not None:
            tier: int | None = path.tier
        else:
            tier = oracle.tier(sender, source.node, to, receiver.node) if receiver is not None else None
        if tier is not None:
            flows[tier] = min(most, flows.get(tier, 0) + count)
    return flows
