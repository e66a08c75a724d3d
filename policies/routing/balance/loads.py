"""Loads, envelopes and margins of the decode workers during one round, and the F-scores over them (BalanceRoute 3, 4).

    L_g(h)  load of worker g projected h steps ahead, KV tokens        M(h) = max_g L_g(h)       m_g(h) = M(h) - L_g(h)
    F(S, g)   = w - G max(0, w - m_g)                                                            (BR-0: H = 0)
    F_H(S, g) = alpha w sum_h gamma^h - beta sum_h gamma^h max(0, w - m_g(h)),  h = 0..H         (BR-H)

    L_g(0) -> Worker.kv_tokens (running and dispatched, BalanceRoute's virtual load); G, M: over the workers of one
    barrier, those without a barrier forming one group; gone by step h -> Worker.departures; the rest grows by one token
    a sequence a step. A request admitted in this round is taken to stay: s_r + h.

Both classes keep one round's state and are changed by `add`; BR-0's is plain Python, because numpy's call costs more
than one margin.
"""

import functools
import itertools
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from policies.state.views import Worker


class Loads(Protocol):
    """What the two stages need to know of the loads; rows are indices into `workers`."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    @property
    def gain(self) -> float:
        """What a token adds to the score while nothing overflows."""
        ...

    def group_size(self, row: int) -> int:
        """G: workers of the row's barrier."""
        ...

    def min_margin(self, row: int) -> float:
        """min_h m_g(h), tokens: what the worker takes without touching the envelope."""
        ...

    def only(self, rows: Sequence[int]) -> None:
        """From now on nothing but `group_size` is asked of other rows."""
        ...

    def rank(self, row: int) -> float:
        """Orders rows by `min_margin`, the largest first. Comparable until `add` says that margins have moved."""
        ...

    def peak(self, row: int) -> float:
        """The w, tokens, at which the score is largest; infinite if it never falls."""
        ...

    def scores(self, row: int, sums: Sequence[int]) -> list[float]:
        """F of each sum w."""
        ...

    def add(self, row: int, tokens: int, sequences: int) -> bool:
        """Books an admission of w = `tokens`; True if the envelope moved, so that other ranks are no longer right."""
        ...


class FlatLoads:
    """H = 0: F(S, g) = alpha w - beta max(0, w - m_g); alpha 1 and beta G is BR-0."""

    gain = 1.0

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self._load = [worker.kv_tokens for worker in workers]
        self._barrier = [worker.barrier for worker in workers]
        self._envelope: dict[str, int] = {}
        self._size: dict[str, int] = {}
        for barrier, load in zip(self._barrier, self._load, strict=True):
            self._envelope[barrier] = max(load, self._envelope.get(barrier, 0))
            self._size[barrier] = self._size.get(barrier, 0) + 1

    def group_size(self, row: int) -> int:
        return self._size[self._barrier[row]]

    def min_margin(self, row: int) -> float:
        return self._envelope[self._barrier[row]] - self._load[row]

    def only(self, rows: Sequence[int]) -> None:
        pass  # a margin is a subtraction

    def rank(self, row: int) -> float:
        """In a single barrier the loads order the margins, wherever the envelope is."""
        return self._load[row] if len(self._size) == 1 else -self.min_margin(row)

    def peak(self, row: int) -> float:
        return self.min_margin(row)

    def scores(self, row: int, sums: Sequence[int]) -> list[float]:
        margin, size = self.min_margin(row), self.group_size(row)
        return [w - size * max(0, w - margin) for w in sums]

    def add(self, row: int, tokens: int, sequences: int) -> bool:
        barrier = self._barrier[row]
        self._load[row] += tokens
        moved = self._load[row] > self._envelope[barrier]
        if moved:
            self._envelope[barrier] = self._load[row]
        return moved and len(self._size) > 1


class Aim(NamedTuple):
    """F_H: the parameters of `HorizonLoads`. As it stands here it is BR-0's F."""

    horizon: int = 0
    gamma: float = 1.0
    alpha: float = 1.0
    beta: float | None = None
    slack_tokens: float = 0.0

    @property
    def gain(self) -> float:
        """alpha * sum_h gamma^h."""
        return self.alpha * float(discounts(self.horizon, self.gamma)[1].sum())


class HorizonLoads:
    """H >= 0 with discount gamma. `beta` None stands for G of the row's barrier. `slack_tokens`: the score takes every
    margin to be that much smaller, so that the envelope is not filled to its edge.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        horizon: int,
        gamma: float,
        alpha: float,
        beta: float | None,
        slack_tokens: float = 0.0,
    ) -> None:
        self.workers = workers
        self._steps, self._discount = discounts(horizon, gamma)
        self.gain = alpha * float(self._discount.sum())
        self._slack = slack_tokens
        self._beta = beta
        self._load = projected_loads(workers, horizon)
        index = {name: i for i, name in enumerate(sorted({worker.barrier for worker in workers}))}
        self._barrier = [index[worker.barrier] for worker in workers]
        self._size = [self._barrier.count(i) for i in range(len(index))]
        members = [np.equal(self._barrier, i) for i in range(len(index))] if len(index) > 1 else [...]
        self._envelope = np.stack([self._load[rows].max(axis=0) for rows in members])
        self._barrier_of = np.array(self._barrier)  # of the rows that `_load` has
        self._at = list(range(len(workers)))  # where `_load` has a row
        self._rows: Sequence[int] = range(len(workers))
        self._min_margin = self._min_margins()
        self._seen: tuple[int, _Kinks] | None = None  # the row asked last

    @property
    def total_discount(self) -> float:
        """sum_h gamma^h."""
        return float(self._discount.sum())

    def only(self, rows: Sequence[int]) -> None:
        if 2 * len(rows) < len(self.workers):
            at = [self._at[row] for row in rows]
            self._load, self._barrier_of = self._load[at], self._barrier_of[at]
            self._min_margin = [self._min_margin[i] for i in at]
            for i, row in enumerate(rows):
                self._at[row] = i
            self._rows = rows

    def group_size(self, row: int) -> int:
        return self._size[self._barrier[row]]

    def min_margin(self, row: int) -> float:
        return self._min_margin[self._at[row]]

    def rank(self, row: int) -> float:
        return -self._min_margin[self._at[row]]

    def margins(self, row: int) -> npt.NDArray[np.float64]:
        """m_g(h), tokens, shape (H + 1,)."""
        margins: npt.NDArray[np.float64] = self._envelope[self._barrier[row]] - self._load[self._at[row]]
        return margins

    def peak(self, row: int) -> float:
        """The first margin, ascending, at which the penalty's slope reaches the gain's (F_H is concave in w)."""
        kinks = self._kinks(row)
        k = (
            bisect_left(kinks.slopes, self.gain / self._beta_of(row))
            if self._beta_of(row)
            else len(kinks.slopes)
        )
        return kinks.margins[k] if k < len(kinks.margins) else float("inf")

    def scores(self, row: int, sums: Sequence[int]) -> list[float]:
        if max(sums) <= self._min_margin[self._at[row]] - self._slack:
            return [self.gain * w for w in sums]
        kinks, beta = self._kinks(row), self._beta_of(row)
        return [self.gain * w - beta * kinks.overflow(w) for w in sums]

    def _kinks(self, row: int) -> "_Kinks":
        if self._seen is None or self._seen[0] != row:
            self._seen = (row, _Kinks.of(self.margins(row) - self._slack, self._discount))
        return self._seen[1]

    def _all_margins(self) -> npt.NDArray[np.float64]:
        """m_g(h) of the rows that `_load` has, shape (rows, H + 1)."""
        envelope = self._envelope if len(self._envelope) == 1 else self._envelope[self._barrier_of]
        margins: npt.NDArray[np.float64] = envelope - self._load
        return margins

    def _min_margins(self) -> list[float]:
        least: list[float] = np.minimum.reduce(self._all_margins(), axis=1).tolist()
        return least

    def overflow(self, row: int, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """sum_h gamma^h max(0, w - m_g(h)) of each sum, in token-steps."""
        over = np.maximum(0.0, sums[:, None] - self.margins(row))
        result: npt.NDArray[np.float64] = over @ self._discount
        return result

    def overflow_everywhere(self, w: float) -> npt.NDArray[np.float64]:
        """The same of one w on every worker, shape (G,); 0 on those that `only` has left out."""
        result = np.zeros(len(self.workers))
        result[self._rows] = np.maximum(0.0, w - self._all_margins()) @ self._discount
        return result

    def add(self, row: int, tokens: int, sequences: int) -> bool:
        self._seen = None
        at = self._at[row]
        load = self._load[at]
        load += self._steps if sequences == 1 else sequences * self._steps
        load += tokens
        envelope = self._envelope[self._barrier[row]]
        least = float(np.minimum.reduce(envelope - load))
        if least >= 0:
            self._min_margin[at] = least
            return False
        np.maximum(envelope, load, out=envelope)
        self._min_margin = self._min_margins()
        return True

    def _beta_of(self, row: int) -> float:
        return self._beta if self._beta is not None else float(self._size[self._barrier[row]])


class _Kinks(NamedTuple):
    """One worker's penalty sum_h gamma^h max(0, w - m_g(h)) as the piecewise linear function of w that it is.

    `margins`: the m_g(h) ascending; `slopes[k]`: its slope above margins[k], the sum of the first k + 1 gamma^h;
    `offsets[k]`: the sum of their gamma^h m_g(h). So a score costs one bisection, not H + 1 terms.
    """

    margins: list[float]
    slopes: list[float]
    offsets: list[float]

    @staticmethod
    def of(margins: npt.NDArray[np.float64], discount: npt.NDArray[np.float64]) -> "_Kinks":
        order = margins.argsort(kind="stable")
        ascending, weights = margins.take(order), discount.take(order)
        slopes, offsets = np.add.accumulate(weights), np.add.accumulate(weights * ascending)
        return _Kinks(ascending.tolist(), slopes.tolist(), offsets.tolist())

    def overflow(self, w: float) -> float:
        k = bisect_left(self.margins, w) - 1
        return self.slopes[k] * w - self.offsets[k] if k >= 0 else 0.0


@functools.cache
def discounts(horizon: int, gamma: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """h and gamma^h, h = 0..H, not to be changed."""
    steps = np.arange(horizon + 1, dtype=np.float64)
    return steps, gamma**steps


def projected_loads(workers: Sequence[Worker], horizon: int) -> npt.NDArray[np.float64]:
    """L_g(h), KV tokens, shape (G, H + 1): what runs now, grown by h tokens a sequence, less what is gone by step h."""
    steps = np.arange(horizon + 1, dtype=np.float64)
    tokens = np.array([worker.kv_tokens for worker in workers], dtype=np.float64)
    running = np.array([worker.slots_used for worker in workers], dtype=np.float64)
    load: npt.NDArray[np.float64] = tokens[:, None] + running[:, None] * steps
    counts = [len(worker.departures) for worker in workers]
    if horizon and any(counts):
        gone = itertools.chain.from_iterable([worker.departures for worker in workers])
        flat = np.fromiter(itertools.chain.from_iterable(gone), np.int64, 3 * sum(counts)).reshape(-1, 3)
        row_starts = np.repeat(np.arange(0, load.size, horizon + 1), counts)
        within = flat[:, 0] <= horizon
        at = (row_starts + flat[:, 0])[within]
        sequences, kv_tokens = flat[within, 1], flat[within, 2]
        left_tokens = np.bincount(at, kv_tokens, load.size).reshape(load.shape)
        left_running = np.bincount(at, sequences, load.size).reshape(load.shape)
        load -= left_tokens.cumsum(axis=1) + left_running.cumsum(axis=1) * steps
    return load
