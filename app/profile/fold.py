"""Makes a heatmap from measured job completion times (JCT; DeepFlow 5.3), without I/O.

    cell = mean JCT colocated / mean JCT disaggregated - 1     of one rate; rates are added element-wise
    standard error of a cell = (m_c / m_d) sqrt(s_c^2 / (n_c m_c^2) + s_d^2 / (n_d m_d^2))        (delta method)

A cell that lacks a rate gets the mean of its measured rates there ("partial"). A cell without any measured rate gets a
mean of the measured cells, weighted by 1 / distance^2 over the logarithms of both axes ("interpolated"). Such cells are
marked, and do not count as measured. Not claimed: that requests of one batch are independent, which the standard error
supposes.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from app.profile.plan import Grid, Point
from policies.routing.deepflow.heatmap import Heatmap, combine

T = TypeVar("T")
Mark = Literal["measured", "partial", "interpolated"]


@dataclass(frozen=True, slots=True)
class Sample:
    """The completion times of one batch in one mode. `failed` counts requests not answered in full, by reason."""

    engines: int
    requests: int
    jct_mean_s: float
    jct_std_s: float
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all requests were answered; survivors of an overload would make the mode look better than it is."""
        return not self.failed and self.requests > 0 and self.jct_mean_s > 0


@dataclass(frozen=True, slots=True)
class Pair:
    """The samples of both modes at one point."""

    point: Point
    colocated: Sample
    disaggregated: Sample

    @property
    def whole(self) -> bool:
        return self.colocated.whole and self.disaggregated.whole

    @property
    def cell(self) -> float:
        """The value of the heatmap's cell; positive where disaggregated is faster."""
        return self.colocated.jct_mean_s / self.disaggregated.jct_mean_s - 1.0

    @property
    def standard_error(self) -> float:
        """The standard error of `cell`."""
        variance = sum(
            s.jct_std_s**2 / (s.requests * s.jct_mean_s**2) for s in (self.colocated, self.disaggregated)
        )
        return (self.cell + 1.0) * math.sqrt(variance)


@dataclass(frozen=True, slots=True)
class RateMap:
    """The cells of one rate and their standard errors; None stands for a cell that was not measured."""

    rate_per_s: float
    cells: tuple[tuple[float | None, ...], ...]
    standard_errors: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """A heatmap with its origin: `marks[i][j]` says how cell (i, j) was found.

    `heatmap` is None while no cell is measured.
    """

    heatmap: Heatmap | None
    marks: tuple[tuple[Mark, ...], ...]
    rates: tuple[RateMap, ...]

    @property
    def complete(self) -> bool:
        return self.heatmap is not None and all(m == "measured" for row in self.marks for m in row)


def sample(engines: int, jcts_s: Sequence[float], failed: Mapping[str, int]) -> Sample:
    """Returns the mean and the sample standard deviation (0 for one request) of completion times, as a `Sample`."""
    mean_s = statistics.fmean(jcts_s) if jcts_s else 0.0
    std_s = statistics.stdev(jcts_s) if len(jcts_s) > 1 else 0.0
    return Sample(engines, len(jcts_s), mean_s, std_s, dict(failed))


def fold(grid: Grid, pairs: Sequence[Pair]) -> Folded:
    """Returns the heatmap of the grid, made of the pairs that are whole; others count as not measured."""
    found = {pair.point: pair for pair in pairs if pair.whole}

    def at(rate_per_s: float) -> Callable[[int, float], Pair | None]:
        return lambda p, r: found.get(Point(p, r, rate_per_s))

    by_rate = {rate: _table(grid, at(rate)) for rate in grid.rates_per_s}
    maps = tuple(
        RateMap(
            rate,
            tuple(tuple(pair.cell if pair else None for pair in row) for row in table),
            tuple(tuple(pair.standard_error if pair else None for pair in row) for row in table),
        )
        for rate, table in by_rate.items()
    )
    marks = _table(grid, lambda p, r: _mark([at(rate)(p, r) for rate in grid.rates_per_s]))
    return Folded(_combined(grid, maps), marks, maps)


def _table(grid: Grid, value: Callable[[int, float], T]) -> tuple[tuple[T, ...], ...]:
    return tuple(tuple(value(p, r) for r in grid.ratios) for p in grid.prefill_tokens)


def _mark(pairs: Sequence[Pair | None]) -> Mark:
    measured = sum(pair is not None for pair in pairs)
    return "measured" if measured == len(pairs) else "partial" if measured else "interpolated"


def _combined(grid: Grid, maps: Sequence[RateMap]) -> Heatmap | None:
    rows, columns = range(len(grid.prefill_tokens)), range(len(grid.ratios))
    means: dict[tuple[int, int], float] = {}
    for i in rows:
        for j in columns:
            values = [v for m in maps if (v := m.cells[i][j]) is not None]
            if values:
                means[i, j] = statistics.fmean(values)
    if not means:
        return None
    filled = {
        (i, j): means[i, j] if (i, j) in means else _near(grid, means, i, j) for i in rows for j in columns
    }
    axes = (tuple(map(float, grid.prefill_tokens)), grid.ratios)
    return combine(
        [
            Heatmap(*axes, tuple(tuple(_or(m.cells[i][j], filled[i, j]) for j in columns) for i in rows))
            for m in maps
        ]
    )


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _near(grid: Grid, means: Mapping[tuple[int, int], float], row: int, column: int) -> float:
    total = weights = 0.0
    for (i, j), value in means.items():
        across = math.log2(grid.prefill_tokens[i] / grid.prefill_tokens[row])
        along = math.log2(grid.ratios[j] / grid.ratios[column])
        weight = 1.0 / (across**2 + along**2)
        total += weight * value
        weights += weight
    return total / weights
