"""Of one round of the composition: what an entry costs on a worker, in seconds. Formulas: `composition`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.routing.balance.stages import Item
from policies.routing.netkv.fleet_flows import FleetFlows, FleetNetworkTerm
from policies.routing.netkv.netkv import queue_and_step_seconds, sequences_on
from policies.routing.netkv.network_term import effective_bytes
from policies.state.views import PoolEntry, Request, RequestId, Snapshot, Worker, WorkerId

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost; see `composition` for each symbol. Seconds unless named otherwise; others have no unit."""

    seconds_per_kv_token: float
    hold_steps: float
    stream_weight: float
    scarcity: float
    step_base_s: float
    step_per_seq_s: float
    max_inflight: int
    strict_priorities: bool
    wait_s: float
    max_weight: float
    cost_weight: float
    credit_s_per_token: float | None
    rent_weight: float
    near_scarcity: float
    ageing: float


def slack_weight(request: Request, now_s: float, most: float) -> float:
    """weight_r: 1 with the whole TTFT objective ahead or without one, growing as 1/slack, at most `most`."""
    slo_s = request.terms.ttft_slo_s
    if slo_s is None or slo_s <= 0:
        return 1.0
    slack_s = request.arrived_s + slo_s - now_s
    return most if slack_s * most <= slo_s else max(1.0, slo_s / slack_s)


class EntryCosts:
    """Transfer + queue + first step, and the credit that goes with them; this round's admissions count."""

    def __init__(
        self, snapshot: Snapshot, workers: Sequence[Worker], open_rows: Sequence[int], prices: Prices
    ) -> None:
        self._snapshot, self._workers, self._open, self._prices = snapshot, workers, open_rows, prices
        self._admitted = [0] * len(workers)
        self._queue_and_step_s = [self._after_admissions(row) for row in range(len(workers))]
        self._hit_tokens: dict[RequestId, Mapping[WorkerId, int]] = {}
        self._dearest: dict[tuple[WorkerId, int, int], tuple[float, float]] = {}  # s, s per byte
        self._fleets: dict[int | None, FleetFlows] = {}  # by the lowest class that counts
        self._networks: dict[tuple[WorkerId, int | None], FleetNetworkTerm] = {}
        self._credits: dict[RequestId, float] = {}
        self._weights: dict[RequestId, float] = {}

    def weight(self, item: Item) -> float:
        """cost_weight * slack weight."""
        attempt_id = item.entry.request.attempt_id
        if attempt_id not in self._weights:
            prices = self._prices
            slack = slack_weight(item.entry.request, self._snapshot.now_s, prices.max_weight)
            self._weights[attempt_id] = prices.cost_weight * slack
        return self._weights[attempt_id]

    def credit(self, item: Item) -> float:
        """credit_r: the wait until the next chance plus no less than any cost, so that admitting is worth it."""
        if self._prices.credit_s_per_token is not None:
            return self._prices.credit_s_per_token * item.tokens
        attempt_id = item.entry.request.attempt_id
        if attempt_id not in self._credits:
            dearest = self._dearest_s(item)
            weight = slack_weight(item.entry.request, self._snapshot.now_s, self._prices.max_weight)
            self._credits[attempt_id] = weight * self._prices.wait_s + self.weight(item) * dearest
        return self._credits[attempt_id]

    def one_s(self, item: Item, row: int) -> float:
        """cost(r, g)."""
        worker = self._workers[row]
        hit_tokens = self._hits(item).get(worker.id, 0)
        transfer_s = self._network(item.entry).seconds(worker, effective_bytes(item.entry, hit_tokens))
        queue_s, step_s = self._queue_and_step_s[row]
        return transfer_s + queue_s + step_s

    def each_s(self, item: Item, rows: Sequence[int]) -> list[float]:
        """The same on each of the rows."""
        workers, hits = [self._workers[row] for row in rows], self._hits(item)
        transfers_s = self._network(item.entry).seconds_each(workers, effective_bytes(item.entry, 0))
        steps_s = [self._queue_and_step_s[row] for row in rows]
        costs = [t + queue_s + step_s for t, (queue_s, step_s) in zip(transfers_s, steps_s, strict=True)]
        if hits:
            for i, worker in enumerate(workers):
                if worker.id in hits:
                    costs[i] = self.one_s(item, rows[i])
        return costs

    def admit(self, item: Item, row: int, slots: int) -> None:
        """Its transfer and its sequences are on their way."""
        entry = item.entry
        self._network(entry)  # the snapshot's transfers are counted before this one
        for lowest, fleet in self._fleets.items():
            if lowest is None or entry.request.terms.priority <= lowest:
                fleet.add(entry.prefill_worker, self._workers[row], 1)
        for network in self._networks.values():
            network.moved()
        self._admitted[row] += slots
        self._queue_and_step_s[row] = self._after_admissions(row)

    def _dearest_s(self, item: Item) -> float:
        """No less than its cost on any worker that it may go to, but for what this round admits there."""
        key = item.entry.prefill_worker, item.entry.request.terms.priority, item.rows
        if key not in self._dearest:
            rows = [row for row in self._open if item.rows >> row & 1]
            workers, network = [self._workers[row] for row in rows], self._network(item.entry)
            fixed_s, with_s = (network.seconds_each(workers, n_bytes) for n_bytes in (0.0, GIGABYTE))
            first_s = max(sum(self._queue_and_step_s[row]) for row in rows)
            slowest = max(b - a for a, b in zip(fixed_s, with_s, strict=True)) / GIGABYTE
            self._dearest[key] = max(fixed_s) + first_s, slowest
        least_s, per_byte_s = self._dearest[key]
        return least_s + item.entry.kv_bytes * per_byte_s

    def _hits(self, item: Item) -> Mapping[WorkerId, int]:
        attempt_id = item.entry.request.attempt_id
        if attempt_id not in self._hit_tokens:
            self._hit_tokens[attempt_id] = self._snapshot.hits.tokens(item.entry.request)
        return self._hit_tokens[attempt_id]

    def _after_admissions(self, row: int) -> tuple[float, float]:
        """T_queue and T_decode of one more sequence on the worker."""
        prices, worker = self._prices, self._workers[row]
        on_it = sequences_on(worker) + self._admitted[row]
        return queue_and_step_seconds(on_it, worker.slots, prices.step_base_s, prices.step_per_seq_s)

    def _network(self, entry: PoolEntry) -> FleetNetworkTerm:
        """The sender's network as of now; with strict priorities one per class."""
        sender, prices = entry.prefill_worker, self._prices
        lowest = entry.request.terms.priority if prices.strict_priorities else None
        key = (sender, lowest)
        if key not in self._networks:
            if lowest not in self._fleets:
                self._fleets[lowest] = FleetFlows(self._snapshot, lowest)
            self._networks[key] = FleetNetworkTerm(
                self._snapshot, sender, self._workers, prices.max_inflight, self._fleets[lowest]
            )
        return self._networks[key]
