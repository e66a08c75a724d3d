"""The memory of the dashboard: series of one value a second, and heat strips of ten minutes for each engine."""

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

KEEP = 900
"""Values of each series: 15 minutes at one a second."""
BINS = 60
BIN_S = 10.0
"""A heat strip has `BINS` bins of `BIN_S` seconds."""

Value = float | None


class Rings:
    """Series by name over the same times, the newest `keep` of them. A series without a value at a time has None.

    A series has 8 bytes for each time, all of them from its beginning on.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._t = self._empty()
        self._series: dict[str, array[float]] = {}
        self._last: dict[str, int] = {}
        self._added = 0

    def _empty(self) -> "array[float]":
        """Returns a column without values; the one of the n-th time stands at n modulo `keep`."""
        return array("d", [math.nan]) * self._keep

    def add(self, at: float, values: Mapping[str, Value]) -> None:
        """Adds the values of one time. A series that has had none for the whole ring is forgotten."""
        for name in [name for name in values if name not in self._series]:
            self._series[name] = self._empty()
        place = self._added % self._keep
        self._t[place] = at
        self._added += 1
        for name, series in self._series.items():
            value = values.get(name)
            series[place] = math.nan if value is None else value
            if name in values:
                self._last[name] = self._added
        for name in [name for name, last in self._last.items() if self._added - last >= self._keep]:
            del self._series[name], self._last[name]

    def shown(self) -> dict[str, list[Value]]:
        """Returns the times as `t` and all series by name, oldest first."""
        times: list[Value] = list(self._in_order(self._t))
        return {"t": times, **{name: self._values(series) for name, series in self._series.items()}}

    def _in_order(self, column: "array[float]") -> "array[float]":
        """Returns what a column has of the times that are kept, oldest first."""
        if self._added <= self._keep:
            return column[: self._added]
        place = self._added % self._keep
        return column[place:] + column[:place]

    def _values(self, column: "array[float]") -> list[Value]:
        return [None if math.isnan(value) else value for value in self._in_order(column)]


class HeatStrips:
    """Means of two shares (0..1) of each engine, in bins of `BIN_S`: slots in use, and KV in use."""

    def __init__(self) -> None:
        self._bin: int | None = None
        # by engine: the shares of slots, then those of KV, each at the place of its bin's number modulo BINS
        self._means: dict[str, array[float]] = {}
        self._open: dict[str, tuple[int, float, float]] = {}

    def add(self, at: float, shares: Mapping[str, tuple[float, float]]) -> None:
        """Adds the present shares of all engines; those that are not among them are forgotten."""
        number = int(at // BIN_S)
        if self._bin is not None and number > self._bin:
            self._close(number)
        self._bin = number if self._bin is None else max(self._bin, number)
        for engine in self._means.keys() - shares.keys():
            del self._means[engine]
            self._open.pop(engine, None)
        for engine, (slots, kv) in shares.items():
            if engine not in self._means:
                self._means[engine] = array("f", [math.nan] * (2 * BINS))
            n, slots_sum, kv_sum = self._open.get(engine, (0, 0.0, 0.0))
            self._open[engine] = n + 1, slots_sum + slots, kv_sum + kv

    def _close(self, number: int) -> None:
        """Writes the means of the bin that has ended, and clears those between it and the one with this number."""
        assert self._bin is not None
        place = self._bin % BINS
        skipped = [step % BINS for step in range(self._bin + 1, min(number, self._bin + BINS + 1))]
        for engine, means in self._means.items():
            n, slots, kv = self._open.get(engine, (0, 0.0, 0.0))
            means[place], means[BINS + place] = (slots / n, kv / n) if n else (math.nan, math.nan)
            for other in skipped:
                means[other] = means[BINS + other] = math.nan
        self._open.clear()

    def shown(self, engines: Iterable[str]) -> dict[str, Any]:
        """Returns the ends of the bins as `t`, and for each known one of `engines` its shares, the oldest bin first.
        The last bin is the one before the present one.
        """
        last = 0 if self._bin is None else self._bin
        numbers = range(last - BINS, last)
        found = {}
        for engine in engines:
            means = self._means.get(engine)
            if means is not None:
                found[engine] = {
                    "running": [_known(means[number % BINS]) for number in numbers],
                    "kv": [_known(means[BINS + number % BINS]) for number in numbers],
                }
        return {"t": [(number + 1) * BIN_S for number in numbers], "engines": found}


def _known(value: float) -> Value:
    return None if math.isnan(value) else round(value, 4)


def quantile(ordered: list[float], share: float) -> Value:
    """Returns the value below which this share of `ordered` values lies, between neighbours by a line; None of none."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
