"""NetKV's network term is the time in seconds to move a request's KV from its prefill worker (the sender) to each
worker.

    T_xfer = b_eff * (1 + n[tau][p] / U[tau]) / (B[tau] (1 - c[tau])) + L[tau]

U is 1, as in NetKV, unless the operator says how many flows of B fit at once into the links by which the sender's
flows leave (`Oracle.uplinks`). Of n own transfers in flight the next one then meets n / U on average and not all n.
If a large U is treated as 1, a transfer is sent to a slower tier to avoid others that it would not have met
(benchmarks.experiments.netkv_ladder has the numbers).

All factors but b_eff depend only on the tier, so they are computed once for each tier and sender and not for each
candidate. A pair with a fresh estimate of its own is the exception. If one of the candidates has no path, no
candidate gets a term, because costs must stay comparable.
"""

from collections.abc import Mapping, Sequence

from policies.network.oracle import Path, TransferIntent
from policies.state.views import PoolEntry, Snapshot, Worker, WorkerId


class NetworkTerm:
    """The network term from `sender` to `workers`. With `live` it uses congestion and pair estimates, otherwise
    static tiers. Without `estimates` it leaves out what was learnt from our own transfers: the pair estimates and
    learnt congestion.

    Own transfers in flight count up to `most` per tier, or not at all if `most` is None. With `lowest_priority`
    only those of that class or a higher one count. If the oracle cannot distinguish own flows from others, they
    never count (NetKV III-D).
    """

    def __init__(
        self,
        snapshot: Snapshot,
        sender: WorkerId,
        workers: Sequence[Worker],
        live: bool,
        most: int | None,
        lowest_priority: int | None = None,
        estimates: bool = True,
    ) -> None:
        source, self._oracle = snapshot.workers.get(sender), snapshot.oracle
        self._sender, self._node = sender, source.node if source is not None else ""
        self._now_s, self._live, self._most = snapshot.now_s, live, most
        self._estimates = estimates
        self._own: dict[WorkerId, Path] = {}
        self._by_tier: dict[int, Path] = {}
        self._flows: dict[int, int] = {}
        self._terms: dict[int, tuple[float, float]] = {}
        """The seconds per byte and the latency in seconds, by tier."""
        self._shown: dict[int, Mapping[str, float]] = {}
        """The result of `terms` for each tier, computed on first use."""
        self.known = self._oracle is not None and self._find_paths(workers)
        if self.known and source is not None and self._counts_flows():
            for to, priority, flows in source.transfers:
                receiver = snapshot.workers.get(to)
                if receiver is not None and (lowest_priority is None or priority <= lowest_priority):
                    self.add_flows(receiver, flows)

    def tier(self, worker: Worker) -> int | None:
        """Returns the tier between the sender and a worker, or None if the network is not known."""
        if self._oracle is None:
            return None
        if worker.id in self._own:
            return self._own[worker.id].tier
        return self._oracle.tier(self._sender, self._node, worker.id, worker.node)

    def seconds(self, worker: Worker, n_bytes: float) -> float:
        """Returns T_xfer of `n_bytes` to a worker, or 0 if the network is not known."""
        if not self.known:
            return 0.0
        if worker.id in self._own:
            path = self._own[worker.id]
            return n_bytes * self._sharing(path.tier) / path.residual_bytes_per_s + path.latency_s
        tier = self.tier(worker)
        assert tier is not None
        per_byte_s, latency_s = self._terms[tier] if tier in self._terms else self._make_terms(tier)
        return n_bytes * per_byte_s + latency_s

    def seconds_each(self, workers: Sequence[Worker], n_bytes: float) -> list[float]:
        """Returns T_xfer of `n_bytes` to each worker, or 0 for each if the network is not known."""
        if not self.known or self._oracle is None:
            return [0.0] * len(workers)
        tiers = self._oracle.tiers(self._sender, self._node, workers)
        # A worker without a tier occurs only if all workers have a path of their own.
        by_tier: dict[int | None, float] = {None: 0.0}
        for tier in self._oracle.bandwidth_bytes_per_s:
            per_byte_s, latency_s = self._terms[tier] if tier in self._terms else self._make_terms(tier)
            by_tier[tier] = n_bytes * per_byte_s + latency_s
        seconds = [by_tier[tier] for tier in tiers]
        if self._own:
            for i in [i for i, worker in enumerate(workers) if worker.id in self._own]:
                seconds[i] = self.seconds(workers[i], n_bytes)
        return seconds

    def flows(self, tier: int) -> float:
        """Returns n[tau][p], the own transfers in flight on a tier."""
        return self._flows.get(tier, 0)

    def _sharing(self, tier: int) -> float:
        """Returns 1 + n / U, the mean number of transfers that share a link of the tier, including the new one."""
        assert self._oracle is not None
        return 1 + self.flows(tier) / self._oracle.uplinks.get(tier, 1)

    def add_flows(self, worker: Worker, flows: int) -> None:
        """Counts `flows` more own transfers that are on their way to a worker."""
        tier = self.tier(worker)
        if tier is not None and self._most is not None and self._counts_flows():
            self._flows[tier] = min(self._most, self._flows.get(tier, 0) + flows)
            self._terms.pop(tier, None)
            self._shown.pop(tier, None)

    def terms(self, worker: Worker) -> Mapping[str, float]:
        """Returns tier, residual bandwidth and own flows for `explain`, or an empty mapping if the network is not
        known.
        """
        tier = self.tier(worker)
        if not self.known or tier is None:
            return {}
        own = self._own.get(worker.id) if self._own else None
        if own is not None:
            return self._path_terms(own)
        if tier not in self._shown:
            self._shown[tier] = self._path_terms(self._tier_path(tier))
        return self._shown[tier]

    def _path_terms(self, path: Path) -> Mapping[str, float]:
        assert self._oracle is not None
        terms = {
            "tier": float(path.tier),
            "residual_bytes_per_s": path.residual_bytes_per_s,
            "own_flows": float(self.flows(path.tier)),
        }
        uplinks = self._oracle.uplinks.get(path.tier)
        return terms if uplinks is None else {**terms, "uplinks": float(uplinks)}

    def _counts_flows(self) -> bool:
        return self._most is not None and self._oracle is not None and self._oracle.own_flows_excluded

    def _find_paths(self, workers: Sequence[Worker]) -> bool:
        assert self._oracle is not None
        if self._live and self._estimates:
            self._own = self._oracle.pair_paths(self._sender, self._node, workers, self._now_s)
        return bool(self._oracle.bandwidth_bytes_per_s) or all(w.id in self._own for w in workers)

    def _tier_path(self, tier: int) -> Path:
        assert self._oracle is not None
        if tier not in self._by_tier:
            self._by_tier[tier] = self._oracle.tier_path(tier, self._now_s, self._live, self._estimates)
        return self._by_tier[tier]

    def _make_terms(self, tier: int) -> tuple[float, float]:
        path = self._tier_path(tier)
        self._terms[tier] = (self._sharing(tier) / path.residual_bytes_per_s, path.latency_s)
        return self._terms[tier]


def effective_bytes(entry: PoolEntry, hit_tokens: int) -> float:
    """Returns b_eff, the bytes that must move if the receiver already holds `hit_tokens` of the prompt."""
    return entry.kv_bytes * (1.0 - min(1.0, hit_tokens / max(1, entry.request.prompt_tokens)))


def transfer_intent(entry: PoolEntry, worker: Worker, snapshot: Snapshot, most: int = 16) -> TransferIntent:
    """Returns the transfer that a decision for `worker` puts on the network. `most` caps the own flows (NetKV V-C)."""
    request, sender = entry.request, entry.prefill_worker
    hit_tokens = snapshot.hits.tokens(request).get(worker.id, 0)
    n_bytes = effective_bytes(entry, hit_tokens)
    tier = predicted_s = None
    if snapshot.oracle is not None:
        network = NetworkTerm(snapshot, sender, [worker], live=True, most=most)
        tier, predicted_s = network.tier(worker), network.seconds(worker, n_bytes) if network.known else None
    return TransferIntent(
        request.attempt_id,
        sender,
        worker.id,
        round(n_bytes),
        request.terms.priority,
        tier,
        predicted_s,
    )
