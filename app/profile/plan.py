"""The plan of the heatmap profiler: the grid, its points in order, and the requests of a point. Nothing here does I/O.

A point is one cell of the heatmap at one request rate. Rates and request counts are per engine, so that groups of
unequal size get equal load for their hardware: two engines get twice the rate and twice the requests of one.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["colocated", "disaggregated"]
MODES: tuple[Mode, Mode] = ("colocated", "disaggregated")

# ASSUMPTION: a prompt token takes a tenth of an output token's time. It decides only the order of
# points and the estimate of the time left.
_PREFILL_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes of the grid, ascending and positive.

    They are prompt tokens, decode/prefill ratios, and requests per second and engine. Raises ValueError naming the
    wrong axis.
    """

    prefill_tokens: tuple[int, ...]
    ratios: tuple[float, ...]
    rates_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        axes: tuple[tuple[str, Sequence[float]], ...] = (
            ("prefill-tokens", self.prefill_tokens),
            ("ratios", self.ratios),
            ("rates", self.rates_per_s),
        )
        for name, axis in axes:
            ascending = list(axis) == sorted(set(axis))
            if not axis or not ascending or not all(0 < v < math.inf for v in axis):
                raise ValueError(f"{name} {list(axis)}: give ascending numbers above 0, for example 128,512")


@dataclass(frozen=True, slots=True)
class Point:
    """One cell of the heatmap at one rate, which is in requests per second and engine."""

    prefill_tokens: int
    ratio: float
    rate_per_s: float

    @property
    def decode_tokens(self) -> int:
        """Tokens that each request generates; at least one."""
        return max(1, round(self.prefill_tokens * self.ratio))

    @property
    def weight(self) -> float:
        """Guess of the time of one request, in units of the time of one output token."""
        return _PREFILL_WEIGHT * self.prefill_tokens + self.decode_tokens


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a point: when it is sent (s after the point's start), its prompt, and its exact output length."""

    at_s: float
    prompt: list[int]
    max_tokens: int


def points(grid: Grid, context_tokens: int) -> tuple[list[Point], list[Point]]:
    """Returns (points to measure, points that do not fit the context).

    Both lists go from short requests to long ones, so that a run that is cut short has measured many points. All rates
    of a cell follow one another.
    """
    cells = [Point(p, r, grid.rates_per_s[0]) for p in grid.prefill_tokens for r in grid.ratios]
    cells.sort(key=lambda cell: (cell.weight, cell.prefill_tokens))
    ordered = [Point(c.prefill_tokens, c.ratio, rate) for c in cells for rate in grid.rates_per_s]
    fits = [p for p in ordered if p.prefill_tokens + p.decode_tokens <= context_tokens]
    return fits, [p for p in ordered if p not in fits]


def requests_of(
    point: Point, mode: Mode, engines: int, per_engine: int, seed: int, run: str, vocabulary: int
) -> list[Planned]:
    """Returns the requests of a point: Poisson arrivals from `seed` alone, and random prompts that share no prefix.

    Both modes get the same arrivals if they have the same number of engines. `run` changes the prompts, so that a
    second run does not find prompts of the first one in the prefix caches.
    """
    where = f"{seed}/{point.prefill_tokens}/{point.ratio}/{point.rate_per_s}"
    arrivals = random.Random(where)
    tokens = random.Random(f"{where}/{mode}/{run}")
    first = min(256, vocabulary // 2)  # small ids are often special tokens
    planned, at_s = [], 0.0
    for _ in range(per_engine * engines):
        prompt = tokens.choices(range(first, vocabulary), k=point.prefill_tokens)
        planned.append(Planned(at_s, prompt, point.decode_tokens))
        at_s += arrivals.expovariate(point.rate_per_s * engines)
    return planned
