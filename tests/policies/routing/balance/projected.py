"""Loads of workers for tests: projected, measured and scored by the compiled parts, one call at a time."""

from collections.abc import Sequence

import numpy as np

from policies.routing.balance import kernel, loads
from policies.routing.balance.round import worker_table
from policies.routing.balance.stages import Aim, discounts
from policies.state.views import Worker


class Projected:
    """A group's loads, open to all."""

    def __init__(self, workers: Sequence[Worker], aim: Aim) -> None:
        everywhere = np.ones((1, len(workers)), np.bool_)
        group = worker_table(kernel.ScoredWorker, workers, everywhere, [0.0] * len(workers), aim.horizon)
        group.rows["beta"] = group.sizes if aim.beta is None else aim.beta
        self.aim, self.rows, self.sizes = aim, group.rows, group.sizes
        self.discount = discounts(aim.horizon, aim.gamma)
        steps = len(self.discount)
        self.load, self.envelope = np.empty((len(workers), steps)), np.empty((group.barriers, steps))
        self.kinks, self.order = np.empty((4, steps)), np.empty((2, steps), np.int64)
        loads.project(self.rows, group.departures, self.load, self.order)
        loads.measure(self.rows, self.load, self.envelope)

    def margins(self, row: int) -> list[float]:
        """m_g(h)."""
        return (self.envelope[self.rows["barrier"][row]] - self.load[row]).tolist()  # type: ignore[no-any-return]

    def _look_at(self, row: int) -> None:
        barrier, slack = int(self.rows["barrier"][row]), self.aim.slack_tokens
        loads.find_kinks(self.load, self.envelope, barrier, row, self.discount, slack, self.kinks, self.order)

    def scores(self, row: int, sums: Sequence[int]) -> list[float]:
        """F_H of each sum."""
        self._look_at(row)
        beta = float(self.rows["beta"][row])
        return [kernel.score_of(self.kinks, self.aim.gain, beta, w) for w in sums]

    def peak(self, row: int) -> float:
        """The w of the largest score."""
        self._look_at(row)
        return kernel.peak_of(self.kinks, self.aim.gain, float(self.rows["beta"][row]))

    def add(self, row: int, tokens: int, sequences: int) -> None:
        """Books an admission."""
        loads.book(self.rows, self.load, self.envelope, row, tokens, sequences, 0)
