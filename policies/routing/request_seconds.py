"""One round of the composition: values in request-seconds on top of BalanceRoute's stages. Formulas: `composition`."""

import itertools
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.routing.base import Reason
from policies.routing.loads import HorizonLoads
from policies.routing.netkv import queue_and_step_seconds, sequences_on
from policies.routing.network import Network, effective_bytes
from policies.routing.stages import Feasible, Item, Round, StageLimits
from policies.state.views import Request, RequestId, Snapshot, WorkerId

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost; see `composition` for each symbol. Seconds unless named otherwise; u and k have no unit."""

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


def slack_weight(request: Request, now_s: float, most: float) -> float:
    """weight_r: 1 with the whole TTFT objective ahead or without one, growing as 1/slack, at most `most`."""
    slo_s = request.ttft_slo_s
    if slo_s is None or slo_s <= 0:
        return 1.0
    slack_s = request.arrived_s + slo_s - now_s
    return most if slack_s * most <= slo_s else max(1.0, slo_s / slack_s)


class RequestSecondsRound(Round):
    """Stage 1 gives the largest request to the worker of most value; stage 2 the worker the subset of most value."""

    def __init__(
        self,
        feasible: Feasible,
        snapshot: Snapshot,
        loads: HorizonLoads,
        limits: StageLimits,
        prices: Prices,
        rng: random.Random,
    ) -> None:
        super().__init__(feasible, snapshot, loads, limits, rng)
        self._horizon, self._prices = loads, prices
        self._admitted = [0] * len(self.workers)
        self._queue_and_step_s = [self._after_admissions(row) for row in range(len(self.workers))]
        self._hit_tokens: dict[RequestId, Mapping[WorkerId, int]] = {}
        self._rows: dict[int, list[int]] = {}  # of a bitmask
        self._networks: dict[tuple[WorkerId, int | None], Network] = {}
        self._credits: dict[RequestId, float] = {}
        self._weights: dict[RequestId, float] = {}
        self._waiting = self._delayed()
        self._held = prices.hold_steps / loads.total_discount
        bits = np.arange(1, 1 << limits.window)[:, None] >> np.arange(limits.window) & 1
        self._subsets: FloatArray = bits.astype(np.float64)

    # ---------------------------------------------------------------------------------------------------- stages

    def _stages(self) -> None:
        self._by_age = sorted(self.left, key=lambda item: item.entry.entered_s)
        self._aged = len(self._by_age)
        super()._stages()

    def _abundant(self) -> bool:
        """Enough free slots for all that wait: nobody's place is another's."""
        return self._total_free >= self.limits.abundance * len(self.left)

    def _fill(self, row: int) -> bool | None:
        """Stage 1, request first: `row` only says that there is room. True: slots changed elsewhere."""
        while self.left:
            item = self.left[0]
            rows = [r for r in self._open if self._fits(r, item)]
            if not rows:  # room only shrinks within a round: it stays in the pool
                del self.left[0], self._keys[0]
                continue
            over = self._horizon.overflow_everywhere(item.tokens)
            worths = self._worths(item, rows)
            values = [
                worth - self._slowdown(r) * float(over[r]) for worth, r in zip(worths, rows, strict=True)
            ]
            best = max(range(len(rows)), key=lambda i: (values[i], -self._draw[rows[i]]))
            self._admit(rows[best], [0], Reason.FILL, values[best])
            return True
        return None

    def _refine(self, row: int) -> bool | None:
        """Stage 2: all subsets of the window at once."""
        window = self._window(row)
        if not window:
            return None
        single = self._best_single(
            row, self.loads.peak(row)
        )  # by F_H alone: the pool's best fit belongs to the window
        if single is not None and single[0] not in window:
            window[-1] = single[0]
        items = [self.left[i] for i in window]
        values, ok = self.subset_values(row, items)
        best = int(np.where(ok, values, -np.inf).argmax())
        if ok[best] and values[best] > 0:
            indices = [index for bit, index in enumerate(window) if best + 1 >> bit & 1]
            return self._admit(row, indices, Reason.BEST_SUBSET, float(values[best]))
        singles = [(float(values[(1 << bit) - 1]), -bit) for bit in range(len(window))]
        value, bit = max(singles)
        return self._admit(row, [window[-bit]], Reason.LEAST_HARM, value)

    def _window(self, row: int) -> list[int]:
        """The W entries that have waited longest of those that fit the worker on their own."""
        if self._aged != len(self.left):  # entries have left since, from anywhere
            left = set(map(id, self.left))
            self._by_age = [item for item in self._by_age if id(item) in left]
            self._aged = len(self._by_age)
        fitting = (item for item in self._by_age if self._fits(row, item))
        return [self._index(item) for item in itertools.islice(fitting, self.limits.window)]

    def _index(self, item: Item) -> int:
        """Where it stands in `left`, which is sorted by size."""
        at = bisect_left(self._keys, -item.tokens)
        while self.left[at] is not item:
            at += 1
        return at

    def subset_values(self, row: int, items: Sequence[Item]) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
        """value(S, g) of every non-empty subset (index + 1 is its bitmask), and whether it fits the worker."""
        n = len(items)
        subsets = self._subsets[: (1 << n) - 1, :n]
        slots = [self._slots(row, item) for item in items]
        facts = np.array(
            [(item.tokens, k, self._worth(item, row)) for item, k in zip(items, slots, strict=True)],
            dtype=np.float64,
        )
        sums, counts, worth = (subsets @ facts).T
        ok = (counts <= self.free[row]) & (sums + self.limits.reserve_tokens * counts <= self.room[row])
        return worth - self._slowdown(row) * self._horizon.overflow(row, sums), ok

    def _admit(self, row: int, indices: Sequence[int], reason: Reason, score: float) -> bool:
        items = [self.left[index] for index in indices]
        moved = super()._admit(row, indices, reason, score)
        for item in items:
            self._admitted[row] += self._slots(row, item)
            self._network(item)
            for (sender, lowest), network in self._networks.items():
                if sender == item.entry.prefill_worker and (
                    lowest is None or item.entry.request.priority <= lowest
                ):
                    network.add_flows(self.workers[row], 1)
        self._queue_and_step_s[row] = self._after_admissions(row)
        return moved

    def _extra_terms(self, row: int, items: Sequence[Item]) -> dict[str, float]:
        w = np.array([sum(item.tokens for item in items)], dtype=np.float64)
        return {
            "credit_less_cost_s": sum(self._worth(item, row) for item in items),
            "cost_s": sum(self.cost_s(item, row) for item in items),
            "slowdown_s": self._slowdown(row) * float(self._horizon.overflow(row, w)[0]),
        }

    # ---------------------------------------------------------------------------------------------------- values

    def _delayed(self) -> list[float]:
        """N of each worker, before this round's admissions."""
        prices, queued = self._prices, max(0, len(self.snapshot.pool) - self._total_free)
        running: dict[str, int] = {}
        members: dict[str, int] = {}
        for worker in self.workers:
            running[worker.barrier] = running.get(worker.barrier, 0) + worker.slots_used
            members[worker.barrier] = members.get(worker.barrier, 0) + 1
        occupied = min(1.0, sum(running.values()) / sum(worker.slots for worker in self.workers))
        each = prices.stream_weight + (1.0 - prices.stream_weight) * float(occupied**prices.scarcity)
        return [
            each * max(1, running[w.barrier] if w.barrier else w.slots_used)
            + queued * (members[w.barrier] if w.barrier else 1) / len(self.workers)
            for w in self.workers
        ]

    def _slowdown(self, row: int) -> float:
        """N * s * D / sum gamma^h: request-seconds lost per discounted token-step above the envelope."""
        return self._waiting[row] * self._prices.seconds_per_kv_token * self._held

    def _worth(self, item: Item, row: int) -> float:
        """credit_r - weight_r * cost(r, g)."""
        weight = self._weight(item)
        credit = self._credit(item)
        return credit - weight * self.cost_s(item, row) if weight else credit

    def _worths(self, item: Item, rows: Sequence[int]) -> list[float]:
        """The same on each of the rows."""
        weight, credit = self._weight(item), self._credit(item)
        return [credit - weight * cost_s if weight else credit for cost_s in self._costs_s(item, rows)]

    def _weight(self, item: Item) -> float:
        rid = item.entry.request.rid
        if rid not in self._weights:
            prices = self._prices
            slack = slack_weight(item.entry.request, self.snapshot.now_s, prices.max_weight)
            self._weights[rid] = prices.cost_weight * slack
        return self._weights[rid]

    def _credit(self, item: Item) -> float:
        """credit_r: the wait until the next chance plus the dearest cost there is, so that admitting is worth it."""
        if self._prices.credit_s_per_token is not None:
            return self._prices.credit_s_per_token * item.tokens
        rid = item.entry.request.rid
        if rid not in self._credits:
            dearest = max(self._costs_s(item, self._rows_of(item.rows)))
            weight = slack_weight(item.entry.request, self.snapshot.now_s, self._prices.max_weight)
            self._credits[rid] = weight * self._prices.wait_s + self._weight(item) * dearest
        return self._credits[rid]

    def cost_s(self, item: Item, row: int) -> float:
        """Transfer + queue + first step of one request on one worker, with what this round sent already."""
        worker = self.workers[row]
        hit_tokens = self._hits(item).get(worker.id, 0)
        transfer_s = self._network(item).seconds(worker, effective_bytes(item.entry, hit_tokens))
        queue_s, step_s = self._queue_and_step_s[row]
        return transfer_s + queue_s + step_s

    def _costs_s(self, item: Item, rows: Sequence[int]) -> list[float]:
        """The same on each of the rows."""
        workers, hits = [self.workers[row] for row in rows], self._hits(item)
        transfers_s = self._network(item).seconds_each(workers, effective_bytes(item.entry, 0))
        steps_s = [self._queue_and_step_s[row] for row in rows]
        costs = [t + queue_s + step_s for t, (queue_s, step_s) in zip(transfers_s, steps_s, strict=True)]
        if hits:
            for i, worker in enumerate(workers):
                if worker.id in hits:
                    costs[i] = self.cost_s(item, rows[i])
        return costs

    def _rows_of(self, mask: int) -> list[int]:
        if mask not in self._rows:
            self._rows[mask] = [row for row in self._open if mask >> row & 1]
        return self._rows[mask]

    def _hits(self, item: Item) -> Mapping[WorkerId, int]:
        rid = item.entry.request.rid
        if rid not in self._hit_tokens:
            self._hit_tokens[rid] = self.snapshot.hits.tokens(item.entry.request)
        return self._hit_tokens[rid]

    def _after_admissions(self, row: int) -> tuple[float, float]:
        """T_queue and T_decode of one more sequence on the worker, this round's admissions counted."""
        prices, worker = self._prices, self.workers[row]
        on_it = sequences_on(worker) + self._admitted[row]
        return queue_and_step_seconds(on_it, worker.slots, prices.step_base_s, prices.step_per_seq_s)

    def _network(self, item: Item) -> Network:
        """The sender's network as of now; with strict priorities one per class."""
        sender, prices = item.entry.prefill_worker, self._prices
        lowest = item.entry.request.priority if prices.strict_priorities else None
        key = (sender, lowest)
        if key not in self._networks:
            self._networks[key] = Network(
                self.snapshot, sender, self.workers, True, prices.max_inflight, lowest
            )
        return self._networks[key]
