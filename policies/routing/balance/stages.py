"""BalanceRoute's two stages (3.2, 4.2, algorithms 2 and 3), shared by BR-0 and BR-H.

    stage 1, while the free slots are >= abundance * G: the worker with most free slots (then margin) takes the one
             request of the pool that maximises F
    stage 2, below: workers popped by (free slots, min_h m_g(h)) descending; each takes, of the first W pool entries by
             s_r descending, the subset that maximises F, or the best single one of the whole pool if that is better or
             no subset is above 0; it is pushed back while it has slots

    free slots -> Worker.free_slots; |S| counts sequences; pool, W -> one priority class at a time, the most urgent
    first (a class that can still be placed is never passed by a lower one)

The paper looks for the single one in its window too. Near saturation most ticks have one slot to give and every request
overflows: the W largest then rarely hold the one that harms least (a closed loop of 16 workers: imbalance of BR-0 6 %,
of BR-H 30 % lower over the whole pool, at the cost of a bisection).

Choosing by size alone collects in the pool what fits seldom, and what is overdue does harm wherever it goes. `ageing`
prevents both: a single one is chosen by F plus its age in units of `max_wait_s` times `ageing` mean prompts of the pool
(8 workers of nine slots, long contexts: imbalance of BR-0 40 % lower; benchmarks/experiments). 0 is the paper's rule.

Before both, entries that have waited longer than `max_wait_s` go to the fitting worker of largest margin, oldest first:
choosing by size alone would starve some sizes under lasting load (the paper leaves that to the pool's TTL). Every
admission is booked on loads, slots and KV room at once, so that a batch fits as a whole; equal keys are ordered by one
seeded draw per worker and round. What fits nowhere stays. Workers are tried only for entries that the dispatcher calls
feasible for them.

`Round` is the base of the composition's plain round, and does windows of more than `subset.FEW` entries. BR-0 and BR-H
with smaller ones run the same steps compiled (`quick_round`), some four times as fast.
"""

import heapq
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from policies.routing.balance.decisions import Others, decide, terms_of
from policies.routing.balance.loads import Loads
from policies.routing.balance.subset import best_subset
from policies.routing.base import Assignment, Reason
from policies.state.fast_frozen import fast_constructor
from policies.state.views import PoolEntry, RequestId, Role, Snapshot, Worker

Feasible = Sequence[tuple[PoolEntry, Sequence[Worker]]]


@dataclass(frozen=True, slots=True)
class StageLimits:
    """`window` W; `abundance` free slots per worker from which stage 1 runs; waits in s; KV reserve per sequence;
    `ageing`: what an entry that has waited `max_wait_s` counts more, in mean prompts of the pool.
    """

    window: int
    abundance: float
    max_wait_s: float
    reserve_tokens: int
    ageing: float = 0.0


@dataclass(slots=True)
class Item:
    """A pool entry of this round: s_r, its sequences, and the rows (bitmask) that it may go to."""

    entry: PoolEntry
    tokens: int
    sequences: int
    rows: int


def price_of_age(limits: StageLimits, mean_tokens: float, gain: float) -> float:
    """What a second in the pool adds to a score; `mean_tokens` of the pool's prompts."""
    if not (limits.ageing and limits.max_wait_s):
        return 0.0
    return limits.ageing * mean_tokens * gain / limits.max_wait_s


def group_workers(snapshot: Snapshot, group: str) -> list[Worker]:
    """The decode workers of a group, by id: all that step, whether they may take more or not."""
    workers = [w for w in snapshot.workers.values() if w.role is Role.DECODE and w.group == group]
    return sorted(workers, key=lambda worker: worker.id)


def split_by_group(feasible: Feasible) -> dict[str, list[tuple[PoolEntry, Sequence[Worker]]]]:
    """The placeable entries by group, their order kept."""
    groups: dict[str, list[tuple[PoolEntry, Sequence[Worker]]]] = {}
    for placeable in feasible[:]:  # all at once: a dispatcher's are looked for when asked for
        if placeable[1]:
            group = placeable[0].group
            if group not in groups:
                groups[group] = []
            groups[group].append(placeable)
    return groups


_tokens: Callable[[Item], int] = attrgetter("tokens")
_assignment = fast_constructor(Assignment)


class Round:
    """One tick's working state for one group: slots, KV room, loads, and what is left of the pool."""

    def __init__(
        self, feasible: Feasible, snapshot: Snapshot, loads: Loads, limits: StageLimits, rng: random.Random
    ) -> None:
        self.snapshot, self.loads, self.limits = snapshot, loads, limits
        self._reserve = limits.reserve_tokens
        self.workers = loads.workers
        self.free = [worker.free_slots for worker in self.workers]
        self._total_free = sum(self.free)
        self.touched = [False] * len(self.workers)
        self.assigned: list[Assignment] = []
        self._draw = [rng.random() for _ in self.workers]
        self._alike = (
            False  # all entries have one sequence and may go to the same workers: any that has room fits
        )
        self._items = self._make_items(feasible)
        self._open = self._open_rows()
        self.room = [0] * len(self.workers)
        for row in self._open:
            worker = self.workers[row]
            self.room[row] = worker.free_kv_tokens if worker.slots_used else worker.kv_capacity_tokens
        loads.only(self._open)
        mean_tokens = (
            sum([item.tokens for item in self._items]) / max(1, len(self._items)) if limits.ageing else 0.0
        )
        self._worth_per_s = price_of_age(limits, mean_tokens, loads.gain)
        self._oldest_s = min([item.entry.entered_s for item in self._items], default=0.0)
        self._others = Others(self.workers, sorted(self._open, key=self._key), self.free, loads.min_margin)
        self.left: list[Item] = []
        self._keys: list[int] = []

    def run(self) -> tuple[Assignment, ...]:
        """Overdue entries, then the stages for each priority class."""
        overdue = self._place_overdue()
        left = (
            [i for i in self._items if i.entry.request.attempt_id not in overdue] if overdue else self._items
        )
        for priority in sorted({item.entry.request.terms.priority for item in left}):
            same = [item for item in left if item.entry.request.terms.priority == priority]
            self.left = sorted(same, key=_tokens, reverse=True)  # stable: equal sizes by age
            self._keys = [-item.tokens for item in self.left]
            self._stages()
        return tuple(self.assigned)

    # ---------------------------------------------------------------------------------------------------- stages

    def _stages(self) -> None:
        heap = self._heap(
            self._open
        )  # a row leaves it when it is full or nothing of this class fits it any more
        while heap and self.left:
            row = heapq.heappop(heap)[-1]
            moved = self._fill(row) if self._abundant() else self._refine(row)
            if moved:
                heap = self._heap([row, *[key[-1] for key in heap]])
            elif moved is not None and self.free[row]:
                heapq.heappush(heap, self._key(row))

    def _abundant(self) -> bool:
        """Whether stage 1 goes on."""
        return self._total_free >= self.limits.abundance * len(self.workers)

    def _fill(self, row: int) -> bool | None:
        """Stage 1: the single best of the whole pool."""
        best = self._best_single(row, self.loads.peak(row))
        return None if best is None else self._admit(row, [best[0]], Reason.FILL, best[1])

    def _refine(self, row: int) -> bool | None:
        """Stage 2: the best subset of the window, or the best single one of the pool."""
        peak = self.loads.peak(row)
        best = self._best_single(row, peak)
        if best is None:
            return None
        index, score = best
        if self.free[row] > 1:
            window = self._window(row)
            if not self.touched[row]:  # an empty worker takes one of any size, but no set that has no room
                window = [i for i in window if self._room_for(row, self.left[i])]
            chosen = best_subset(
                [-self._keys[i] for i in window],
                [1] * len(window) if self._alike else [self._slots(row, self.left[i]) for i in window],
                self.free[row],
                self.room[row],
                self.limits.reserve_tokens,
                peak,
                lambda sums: self.loads.scores(row, sums),
            )
            if chosen is not None and chosen.score > max(0.0, score):
                indices = [window[i] for i in chosen.indices]
                return self._admit(row, indices, Reason.BEST_SUBSET, chosen.score)
        reason = Reason.BEST_SUBSET if score > 0 else Reason.LEAST_HARM
        return self._admit(row, [index], reason, score)

    def _place_overdue(self) -> set[RequestId]:
        """Entries above `max_wait_s`, in the order in which they should be served."""
        placed: set[RequestId] = set()
        for item in [item for item in self._items if item.entry.entered_s < self._overdue_before_s(item)]:
            if not any(self.free[row] for row in self._open):
                break
            rows = [row for row in self._open if self._fits(row, item)]
            if not rows:
                continue
            row, score = self._best_row(item, rows)
            self.left = [item]
            self._keys = [-item.tokens]
            self._admit(row, [0], Reason.OVERDUE, score)
            placed.add(item.entry.request.attempt_id)
        return placed

    def _overdue_before_s(self, item: Item) -> float:
        """The entry is overdue if it came before this."""
        return self.snapshot.now_s - self.limits.max_wait_s

    def _best_row(self, item: Item, rows: Sequence[int]) -> tuple[int, float]:
        """Where an overdue entry goes, and its score there: the largest margin."""
        row = max(rows, key=lambda r: (self.loads.min_margin(r), -self._draw[r]))
        return row, self.loads.scores(row, [item.tokens])[0]

    # ------------------------------------------------------------------------------------------------- selection

    def _best_single(self, row: int, peak: float) -> tuple[int, float] | None:
        """Index in `left` and score of the fitting entry of best score: the nearest to the peak from below or above."""
        if self.limits.ageing:
            return self._best_aged(row, peak)
        start = bisect_left(self._keys, -peak)  # first entry not above the peak
        first, end = self._first(row), len(self.left)
        below, above = max(start, first), start - 1
        if not self._alike:
            while below < end and not self._fits(row, self.left[below]):
                below += 1
            while above >= first and not self._fits(row, self.left[above]):
                above -= 1
        indices = [below] if below < end else []
        if above >= first:
            indices.append(above)
        if not indices:
            return None
        scores = self.loads.scores(row, [self.left[i].tokens for i in indices])
        best = 0 if len(indices) == 1 or scores[0] >= scores[1] else 1
        return indices[best], scores[best]

    def _best_aged(self, row: int, peak: float) -> tuple[int, float] | None:
        """The same by score plus age; the score alone is returned. Scores fall on both sides of the peak, so a side is
        left where even the oldest entry's age could not make up for it.
        """
        left, now_s, per_s = self.left, self.snapshot.now_s, self._worth_per_s
        first, start = self._first(row), bisect_left(self._keys, -peak)
        most = per_s * (now_s - self._oldest_s)
        found: tuple[float, int, float] | None = None
        for side in (range(max(start, first), len(left)), range(start - 1, first - 1, -1)):
            for i in side:
                item = left[i]
                if not (self._alike or self._fits(row, item)):
                    continue
                score = self.loads.scores(row, [item.tokens])[0]
                if found is not None and score + most <= found[0]:
                    break
                worth = score + per_s * (now_s - item.entry.entered_s)
                if found is None or worth > found[0]:
                    found = worth, i, score
        return None if found is None else (found[1], found[2])

    def _window(self, row: int) -> list[int]:
        """The first W entries by s_r descending that fit the worker on their own."""
        first, left, found = self._first(row), self.left, list[int]()
        if self._alike:
            return list(range(first, min(first + self.limits.window, len(left))))
        for i in range(first, len(left)):
            if self._fits(row, left[i]):
                found.append(i)
                if len(found) == self.limits.window:
                    break
        return found

    def _first(self, row: int) -> int:
        """The first entry that is not too large for what an admission has left of the worker's room."""
        return bisect_left(self._keys, self._reserve - self.room[row]) if self.touched[row] else 0

    def _fits(self, row: int, item: Item) -> bool:
        if not item.rows >> row & 1:
            return False
        slots = 1 if item.sequences == 1 else self._slots(row, item)
        if slots > self.free[row]:
            return False
        if not self.touched[row]:  # the dispatcher's word counts
            return True
        return item.tokens + self._reserve * slots <= self.room[row]

    def _room_for(self, row: int, item: Item) -> bool:
        return item.tokens + self._reserve * self._slots(row, item) <= self.room[row]

    def _slots(self, row: int, item: Item) -> int:
        """The slots that it takes there: all of them if it has more sequences than the worker has slots."""
        return 1 if item.sequences == 1 else min(item.sequences, self.workers[row].slots)

    # --------------------------------------------------------------------------------------------------- booking

    def _admit(self, row: int, indices: Sequence[int], reason: Reason, score: float) -> bool:
        """Books the entries `left[indices]` on the worker; True if the envelope moved."""
        items = [self.left[i] for i in indices]
        if len(items) == 1:
            tokens, sequences = items[0].tokens, self._slots(row, items[0])
        else:
            tokens, sequences = sum(i.tokens for i in items), sum(self._slots(row, i) for i in items)
        margin, size = self.loads.min_margin(row), self.loads.group_size(row)
        terms = terms_of(score, tokens, margin, size, self.free[row], len(items))
        terms.update(self._extra_terms(row, items))
        decision = decide(self.workers[row].id, terms, self._others.without(row), reason)
        for item in items:
            self.assigned.append(_assignment(item.entry.request.attempt_id, decision))
        self.free[row] -= sequences
        self._total_free -= sequences
        self.room[row] -= tokens + self._reserve * sequences
        self.touched[row] = True
        for i in sorted(indices, reverse=True) if len(indices) > 1 else indices:
            del self.left[i], self._keys[i]
        return self.loads.add(row, tokens, sequences)

    def _extra_terms(self, row: int, items: Sequence[Item]) -> dict[str, float]:
        """Terms of a subclass' own objective, before the admission is booked."""
        return {}

    def _heap(self, rows: Sequence[int]) -> list[tuple[int, float, float, int]]:
        free, rank, draw = self.free, self.loads.rank, self._draw
        heap = [(-free[row], rank(row), draw[row], row) for row in rows if free[row] > 0]  # `_key` of each
        heapq.heapify(heap)
        return heap

    def _key(self, row: int) -> tuple[int, float, float, int]:
        return -self.free[row], self.loads.rank(row), self._draw[row], row

    def _make_items(self, feasible: Feasible) -> list[Item]:
        """Entries with their rows. Lists of workers that are one object are looked at once."""
        row_of = {worker.id: row for row, worker in enumerate(self.workers)}
        known: dict[int, int] = {}
        items: list[Item] = []
        last, mask, several = None, 0, False
        for entry, workers in feasible:
            if workers is not last:
                last = workers
                if id(workers) not in known:
                    known[id(workers)] = sum([1 << row_of[worker.id] for worker in workers])
                mask = known[id(workers)]
            request = entry.request
            slots = request.slots
            if slots > 1:
                several = True
            items.append(Item(entry, request.prompt_tokens or 1, slots, mask))
        self._masks = set(known.values())
        self._alike = len(self._masks) == 1 and not several
        return items

    def _open_rows(self) -> list[int]:
        """Rows that some entry may go to."""
        masks = 0
        for mask in self._masks:
            masks |= mask
        return [row for row in range(len(self.workers)) if masks >> row & 1]
