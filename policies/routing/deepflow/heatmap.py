"""The PD heatmap (DeepFlow 5.3) holds the advantage of a disaggregated worker over a colocated one, by the shape of
the request.

    cell[i][j] = JCT_colocated / JCT_disaggregated - 1 at prefill length P_i and ratio R_j = decode / prefill length,
                 summed over the request rates that were measured                     (5.3.2: element-wise addition)

A request's cell is the nearest one in both logarithms, because lengths and ratios span decades. The profiler writes
this dataclass to a file as plain data; `app` reads the file and gives policies the value.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.routing.params import BadParameter


@dataclass(frozen=True, slots=True)
class Heatmap:
    """The map has finite `cells[i][j]` over two ascending positive axes, `prefill_tokens` and `ratios`. `rates` is
    the number of request rates that were summed.

    Raises BadParameter, which names the error, for anything else.
    """

    prefill_tokens: tuple[float, ...]
    ratios: tuple[float, ...]
    cells: tuple[tuple[float, ...], ...]
    rates: int = 1

    def __post_init__(self) -> None:
        for name, axis in (("prefill_tokens", self.prefill_tokens), ("ratios", self.ratios)):
            if not axis or list(axis) != sorted(set(axis)) or not (axis[0] > 0 and math.isfinite(axis[-1])):
                raise BadParameter(f"heatmap: {name} is {list(axis)}: it must be ascending numbers above 0")
        rows, columns = len(self.prefill_tokens), len(self.ratios)
        if len(self.cells) != rows or any(len(row) != columns for row in self.cells):
            raise BadParameter(
                f"heatmap: cells must be {rows} rows (prefill_tokens) of {columns} numbers (ratios)"
            )
        for i, row in enumerate(self.cells):
            for j, cell in enumerate(row):
                if not math.isfinite(cell):
                    raise BadParameter(f"heatmap: cells[{i}][{j}] is {cell}: measure it again")
        if self.rates < 1:
            raise BadParameter(f"heatmap: rates is {self.rates}: it must be >= 1")

    def mean_cell(self, prefill_tokens: float, decode_tokens: float) -> float:
        """Returns the cell of a request divided by the number of rates, which again is a JCT ratio minus 1."""
        prefill_tokens = max(1.0, prefill_tokens)
        row = _nearest(self.prefill_tokens, prefill_tokens)
        column = _nearest(self.ratios, max(1e-9, decode_tokens / prefill_tokens))
        return self.cells[row][column] / self.rates


def combine(maps: Sequence[Heatmap]) -> Heatmap:
    """Returns the element-wise sum of maps with equal axes. Raises BadParameter if the axes differ or there is no
    map.
    """
    if not maps or any(
        (m.prefill_tokens, m.ratios) != (maps[0].prefill_tokens, maps[0].ratios) for m in maps
    ):
        raise BadParameter("heatmap: give at least one map, all with the same prefill_tokens and ratios")
    cells = tuple(
        tuple(sum(column) for column in zip(*rows, strict=True))
        for rows in zip(*(m.cells for m in maps), strict=True)
    )
    return Heatmap(maps[0].prefill_tokens, maps[0].ratios, cells, sum(m.rates for m in maps))


def heatmap_from(data: Mapping[str, Any] | Heatmap) -> Heatmap:
    """Returns the heatmap for plain data (a parsed file). Raises BadParameter for a missing or unknown key or a
    value that is not allowed.
    """
    if isinstance(data, Heatmap):
        return data
    if not isinstance(data, Mapping):
        raise BadParameter(f"heatmap: {data!r} is no table with prefill_tokens, ratios and cells")
    known = {"prefill_tokens", "ratios", "cells", "rates"}
    wrong = sorted(set(data) - known) or sorted({"prefill_tokens", "ratios", "cells"} - set(data))
    if wrong:
        raise BadParameter(f"heatmap: {wrong[0]!r} is missing or unknown; keys: {', '.join(sorted(known))}")
    try:
        prefill_tokens = tuple(float(value) for value in data["prefill_tokens"])
        ratios = tuple(float(value) for value in data["ratios"])
        cells = tuple(tuple(float(cell) for cell in row) for row in data["cells"])
        rates = int(data.get("rates", 1))
    except (TypeError, ValueError) as error:
        raise BadParameter(
            f"heatmap: prefill_tokens, ratios, cells and rates must be numbers: {error}"
        ) from None
    return Heatmap(prefill_tokens, ratios, cells, rates)


def _nearest(axis: Sequence[float], value: float) -> int:
    """Returns the index of the axis value that is nearest to `value` by ratio."""
    i = bisect_left(axis, value)
    if i == 0:
        return 0
    if i == len(axis):
        return i - 1
    return i if axis[i] / value < value / axis[i - 1] else i - 1
