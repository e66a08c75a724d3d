"""Arithmetic of the reports: percentiles, summaries and differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """The mean and quantiles of `n` values in one unit."""

    n: int
    mean: float
    p50: float
    p95: float
    worst: float


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
