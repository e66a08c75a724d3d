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

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from policies.state.views import Worker


class Loads(Protocol):
    """What the two stages need to know of the loads; rows are indices into `workers`."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    def group_size(self, row: int) -> int:
        """G: workers of the row's barrier."""
        ...

    def min_margin(self, row: int) -> float:
        """min_h m_g(h), tokens: what the worker takes without touching the envelope."""
        ...

    def peak(self, row: int) -> float:
        """The w, tokens, at which the score is largest; infinite if it never falls."""
        ...

    def scores(self, row: int, sums: Sequence[int]) -> list[float]:
        """F of each sum w."""
        ...

    def add(self, row: int, tokens: int, sequences: int) -> bool:
        """Books an admission of w = `tokens`; True if the envelope moved, so that other margins grew."""
        ...


class FlatLoads:
    """H = 0: F(S, g) = alpha w - beta max(0, w - m_g); alpha 1 and beta G is BR-0."""

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
        return moved


class HorizonLoads:
    """H >= 0 with discount gamma. `beta` None stands for G of the row's barrier."""

    def __init__(
        self, workers: Sequence[Worker], horizon: int, gamma: float, alpha: float, beta: float | None
    ) -> None:
        self.workers = workers
        self._steps = np.arange(horizon + 1, dtype=np.float64)
        self._discount = gamma**self._steps
        self._gain = alpha * float(self._discount.sum())
        self._beta = beta
        self._load = projected_loads(workers, horizon)
        names = sorted({worker.barrier for worker in workers})
        self._barrier = [names.index(worker.barrier) for worker in workers]
        rows = [[row for row, b in enumerate(self._barrier) if b == i] for i in range(len(names))]
        self._size = [len(members) for members in rows]
        self._envelope = np.stack([self._load[members].max(axis=0) for members in rows])
        self._min_margin = (self._envelope[self._barrier] - self._load).min(axis=1).tolist()
        self._seen: tuple[int, npt.NDArray[np.float64]] | None = None  # the row asked last, and its margins

    def group_size(self, row: int) -> int:
        return self._size[self._barrier[row]]

    def min_margin(self, row: int) -> float:
        return float(self._min_margin[row])

    def margins(self, row: int) -> npt.NDArray[np.float64]:
        """m_g(h), tokens, shape (H + 1,)."""
        if self._seen is None or self._seen[0] != row:
            self._seen = (row, self._envelope[self._barrier[row]] - self._load[row])
        return self._seen[1]

    def peak(self, row: int) -> float:
        """The first margin, ascending, at which the penalty's slope reaches the gain's (F_H is concave in w)."""
        margins, beta = self.margins(row), self._beta_of(row)
        least = int(margins.argmin())
        if beta * self._discount[least] >= self._gain:  # the first kink alone turns the slope: no sort
            return float(margins[least])
        order = margins.argsort(kind="stable")
        slopes = beta * self._discount[order].cumsum()
        k = int(slopes.searchsorted(self._gain))
        return float(margins[order[k]]) if k < len(order) else float("inf")

    def scores(self, row: int, sums: Sequence[int]) -> list[float]:
        if max(sums) <= self._min_margin[row]:
            return [self._gain * total for total in sums]
        w = np.asarray(sums, dtype=np.float64)
        scores: list[float] = (self._gain * w - self._beta_of(row) * self.overflow(row, w)).tolist()
        return scores

    def overflow(self, row: int, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """sum_h gamma^h max(0, w - m_g(h)) of each sum, in token-steps."""
        over = np.maximum(0.0, sums[:, None] - self.margins(row))
        result: npt.NDArray[np.float64] = over @ self._discount
        return result

    def overflow_everywhere(self, w: float) -> npt.NDArray[np.float64]:
        """The same of one w on every worker, shape (G,)."""
        margins = self._envelope[self._barrier] - self._load
        result: npt.NDArray[np.float64] = np.maximum(0.0, w - margins) @ self._discount
        return result

    def add(self, row: int, tokens: int, sequences: int) -> bool:
        self._seen = None
        load, barrier = self._load[row], self._barrier[row]
        load += tokens + sequences * self._steps
        envelope = self._envelope[barrier]
        moved = bool((load > envelope).any())
        if moved:
            np.maximum(envelope, load, out=envelope)
            self._min_margin = (self._envelope[self._barrier] - self._load).min(axis=1).tolist()
        else:
            self._min_margin[row] = float((envelope - load).min())
        return moved

    def _beta_of(self, row: int) -> float:
        return self._beta if self._beta is not None else float(self._size[self._barrier[row]])


def projected_loads(workers: Sequence[Worker], horizon: int) -> npt.NDArray[np.float64]:
    """L_g(h), KV tokens, shape (G, H + 1): what runs now, grown by h tokens a sequence, less what is gone by step h."""
    steps = np.arange(horizon + 1, dtype=np.float64)
    tokens = np.array([worker.kv_tokens for worker in workers], dtype=np.float64)
    running = np.array([worker.slots_used for worker in workers], dtype=np.float64)
    gone = [
        (row, d.step, d.kv_tokens, d.sequences)
        for row, worker in enumerate(workers)
        for d in worker.departures
        if d.step <= horizon
    ]
    load: npt.NDArray[np.float64] = tokens[:, None] + running[:, None] * steps
    if gone:
        row_of, step, kv_tokens, sequences = np.array(gone, dtype=np.int64).T
        left_tokens, left_running = np.zeros_like(load), np.zeros_like(load)
        np.add.at(left_tokens, (row_of, step), kv_tokens)
        np.add.at(left_running, (row_of, step), sequences)
        load -= left_tokens.cumsum(axis=1) + left_running.cumsum(axis=1) * steps
    return load
