"""Arithmetic of the reports: percentiles, summaries, what one measurement adds to another. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and quantiles of `n` values in one unit."""

    n: int
    mean: float
    p50: float
    p95: float
    worst: float


def percentile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0..1) with linear interpolation between closest ranks. Raises ValueError without values."""
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
    """Summary of `values` times `scale` (1e3: seconds in, milliseconds out); None where there are none."""
    if not values:
        return None
    scaled = [value * scale for value in values]
    return Summary(
        n=len(scaled),
        mean=math.fsum(scaled) / len(scaled),
        p50=percentile(scaled, 0.5),
        p95=percentile(scaled, 0.95),
        worst=max(scaled),
    )


def differences(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """`after` - `before` by key; what is missing in `before` counts from 0, what has gone from `after` is left out."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def per(values: Mapping[str, float], count: float, scale: float = 1.0) -> dict[str, float]:
    """Each value x scale / count. Raises ValueError for a count of 0 or less: nothing was served."""
    if count <= 0:
        raise ValueError(f"cannot divide by {count}: nothing was served")
    return {key: value * scale / count for key, value in values.items()}
