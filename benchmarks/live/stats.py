"""Arithmetic of the reports: percentiles, summaries and differences."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit


@dataclass(frozen=True, slots=True)
class Summary:
    """The mean and quantiles of `n` values in one unit."""

    n: int
    mean: float
    p50: float
    p95: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line by least squares. `half_width` is half of the 95 % interval of its slope.

    Not claimed: that the values are independent of one another. Where they are not, the interval is too narrow.
    """

    slope: float
    half_width: float
    at_zero: float


def line_through(points: Sequence[tuple[float, float]]) -> Line | None:
    """Returns the line through (x, value), or None for fewer than three points."""
    n = len(points)
    if n < 3:
        return None
    places, values = [x for x, _ in points], [value for _, value in points]
    line = statistics.linear_regression(places, values)
    left = math.fsum((y - line.slope * x - line.intercept) ** 2 for x, y in points)
    middle = statistics.fmean(places)
    error = math.sqrt(left / (n - 2) / math.fsum((x - middle) ** 2 for x in places))
    return Line(line.slope, float(stdtrit(n - 2, 0.975)) * error, line.intercept)


def percentile(values: Sequence[float], q: float) -> float:
    """Returns the q-quantile (q in 0..1) by linear interpolation between ranks. Raises ValueError without values."""
    if not values:
        raise ValueError("no values: nothing was measured")
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"a quantile lies between 0 and 1, not at {q}")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(values: Sequence[float], scale: float = 1.0) -> Summary | None:
    """Returns the summary of `values` times `scale` (1e3 turns seconds into milliseconds), or None without values."""
    if not values:
        return None
    scaled = [value * scale for value in values]
    return Summary(
        n=len(scaled),
        mean=math.fsum(scaled) / len(scaled),
        p50=percentile(scaled, 0.5),
        p95=percentile(scaled, 0.95),
        p99=percentile(scaled, 0.99),
        worst=max(scaled),
    )


def differences(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Returns `after` - `before` by key.

    A key missing in `before` counts as 0 there; a key missing in `after` is left out.
    """
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def per(values: Mapping[str, float], count: float, scale: float = 1.0) -> dict[str, float]:
    """Returns each value x scale / count. Raises ValueError for a count of 0 or less, where nothing was served."""
    if count <= 0:
        raise ValueError(f"cannot divide by {count}: nothing was served")
    return {key: value * scale / count for key, value in values.items()}
