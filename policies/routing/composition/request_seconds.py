"""One round of the composition: values in request-seconds on top of BalanceRoute's stages. Formulas: `composition`.

This is the one to read. What runs is the same compiled (`quick_seconds`), which a test holds to the same bits.
"""

import itertools
import random
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from policies.routing.balance.loads import HorizonLoads
from policies.routing.balance.stages import Feasible, Item, Round, StageLimits
from policies.routing.base import Reason
from policies.routing.composition.entry_costs import EntryCosts, Prices
from policies.routing.composition.slot_rent import SlotRent
from policies.state.views import Snapshot, Worker

FloatArray = npt.NDArray[np.float64]

LEASE_SHARE = 2.0 / 3.0  # ASSUMPTION: an entry is overdue when so much of its lease is gone


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
        self.costs = EntryCosts(snapshot, self.workers, self._open, prices)
        queued = max(0, len(snapshot.pool) - self._total_free)
        self.rent = SlotRent(
            snapshot,
            self.workers,
            queued,
            slowest_step_s(self.workers, prices),
            prices.rent_weight,
            prices.near_scarcity,
        )
        self._waiting = delayed(self.workers, queued, prices)
        self._held = prices.hold_steps / loads.total_discount
        bits = np.arange(1, 1 << limits.window)[:, None] >> np.arange(limits.window) & 1
        self._subsets: FloatArray = bits.astype(np.float64)

    # ---------------------------------------------------------------------------------------------------- stages

    def _stages(self) -> None:
        self._in_turn = sorted(self.left, key=self._turn)
        self._counted = len(self.left)
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
            best, value = self._best_row(item, rows)
            self._admit(best, [0], Reason.FILL, value)
            return True
        return None

    def _best_row(self, item: Item, rows: Sequence[int]) -> tuple[int, float]:
        """The row of most value, and the value. Overdue entries go there too."""
        over = self._horizon.overflow_everywhere(item.tokens)
        worths = self._worths(item, rows)
        values = [worth - self._slowdown(r) * float(over[r]) for worth, r in zip(worths, rows, strict=True)]
        best = max(range(len(rows)), key=lambda i: (values[i], -self._draw[rows[i]]))
        return rows[best], values[best]

    def _overdue_before_s(self, item: Item) -> float:
        """Long before its lease ends."""
        entry, now_s = item.entry, self.snapshot.now_s
        most_s = min(self.limits.max_wait_s, (entry.lease_until_s - entry.entered_s) * LEASE_SHARE)
        return now_s - most_s

    def _refine(self, row: int) -> bool | None:
        """Stage 2: all subsets of the window at once."""
        window = self._window(row)
        if not window:
            return None
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
        """The W entries that fit the worker and whose turn is first."""
        if self._counted != len(self.left):  # entries have left since, from anywhere
            left = set(map(id, self.left))
            self._in_turn = [item for item in self._in_turn if id(item) in left]
            self._counted = len(self.left)
        fitting = (item for item in self._in_turn if self._fits(row, item))
        return [self._index(item) for item in itertools.islice(fitting, self.limits.window)]

    def _turn(self, item: Item) -> tuple[float, float]:
        """By rent and age alone, then by age: without forecasts the oldest is first."""
        return self.rent.hold(item.entry) * self.rent.queue_s - self._age_s(item), item.entry.entered_s

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
        facts = [(item.tokens, k, self._worth(item, row)) for item, k in zip(items, slots, strict=True)]
        sums, counts, worth = np.zeros((3, len(subsets)))
        for member, (tokens, k, worth_s) in zip(subsets.T, facts, strict=True):  # one after the other
            sums += member * tokens
            counts += member * k
            worth += member * worth_s
        ok = (counts <= self.free[row]) & (sums + self.limits.reserve_tokens * counts <= self.room[row])
        return worth - self._slowdown(row) * self._horizon.overflow(row, sums), ok

    def _admit(self, row: int, indices: Sequence[int], reason: Reason, score: float) -> bool:
        items = [self.left[index] for index in indices]
        moved = super()._admit(row, indices, reason, score)
        for item in items:
            self.costs.admit(item, row, self._slots(row, item))
        return moved

    def _extra_terms(self, row: int, items: Sequence[Item]) -> dict[str, float]:
        """Sums over the set; `near_rent_s` is its mean by hold."""
        w = np.array([sum(item.tokens for item in items)], dtype=np.float64)
        holds = sum(self.rent.hold(item.entry) for item in items)
        rent_s = sum(self.rent_s(item, row) for item in items)
        age_s = sum(self._age_s(item) for item in items)
        return {
            "credit_less_cost_s": sum(self._worth(item, row) for item in items) + rent_s - age_s,
            "age_s": age_s,
            "cost_s": sum(self.costs.one_s(item, row) for item in items),
            "rent_s": rent_s,
            "usual_holds": holds,
            "queue_rent_s": self.rent.queue_s,
            "near_rent_s": rent_s / holds - self.rent.queue_s if holds else 0.0,
            "slowdown_s": self._slowdown(row) * float(self._horizon.overflow(row, w)[0]),
        }

    # ---------------------------------------------------------------------------------------------------- values

    def _slowdown(self, row: int) -> float:
        """N * s * D / sum gamma^h: request-seconds lost per discounted token-step above the envelope."""
        return self._waiting[row] * self._prices.seconds_per_kv_token * self._held

    def _age_s(self, item: Item) -> float:
        """What the wait until now adds to a value."""
        return self._prices.ageing * max(0.0, self.snapshot.now_s - item.entry.entered_s)

    def _worth(self, item: Item, row: int) -> float:
        """credit_r + age_r - weight_r * cost(r, g) - rent(r, g)."""
        weight, credit = self.costs.weight(item), self.costs.credit(item)
        worth = credit - weight * self.costs.one_s(item, row) if weight else credit
        return worth + self._age_s(item) - self.rent_s(item, row)

    def _worths(self, item: Item, rows: Sequence[int]) -> list[float]:
        """The same on each of the rows."""
        weight, credit = self.costs.weight(item), self.costs.credit(item) + self._age_s(item)
        costs_s = self.costs.each_s(item, rows) if weight else [0.0] * len(rows)
        return [
            credit - weight * cost_s - self.rent_s(item, row)
            for cost_s, row in zip(costs_s, rows, strict=True)
        ]

    def rent_s(self, item: Item, row: int) -> float:
        """rent(r, g)."""
        return self.rent.hold(item.entry) * self.rent.per_hold_s(item.entry, row)


def slowest_step_s(workers: Sequence[Worker], prices: Prices) -> float:
    """The length of the slowest decode step now."""
    return max(
        prices.step_base_s
        + prices.step_per_seq_s * worker.slots_used
        + prices.seconds_per_kv_token * worker.kv_tokens
        for worker in workers
    )


def delayed(workers: Sequence[Worker], queued: int, prices: Prices) -> list[float]:
    """N of each worker, before a round's admissions."""
    running: dict[str, int] = {}
    members: dict[str, int] = {}
    for worker in workers:
        running[worker.barrier] = running.get(worker.barrier, 0) + worker.slots_used
        members[worker.barrier] = members.get(worker.barrier, 0) + 1
    occupied = min(1.0, sum(running.values()) / sum(worker.slots for worker in workers))
    each = prices.stream_weight + (1.0 - prices.stream_weight) * float(occupied**prices.scarcity)
    return [
        each * max(1, running[w.barrier] if w.barrier else w.slots_used)
        + queued * (members[w.barrier] if w.barrier else 1) / len(workers)
        for w in workers
    ]
