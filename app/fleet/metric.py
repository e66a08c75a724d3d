"""Metrics before they have values: name, type, help and labels, and the bounds of histograms of durations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.utils import floatToGoString


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, type, unit, help text, labels, and (for a histogram) the upper bounds of its buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def counter(name: str, unit: str, text: str, *labels: str) -> Metric:
    """Returns a metric that only grows."""
    return Metric(name, "counter", unit, text, labels)


def gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    """Returns a metric that goes up and down."""
    return Metric(name, "gauge", unit, text, labels)


LATENCY_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


def seconds(name: str, text: str, buckets: tuple[float, ...] = LATENCY_S, *labels: str) -> Metric:
    """Returns a histogram of durations; `buckets` are upper bounds in seconds."""
    return Metric(name, "histogram", "seconds", text, labels, buckets)


def cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Returns the upper bounds of a histogram's buckets, +Inf last, each with the number of observations up to it, from
    the `counts` of the single buckets.
    """
    total, buckets = 0.0, list[tuple[str, float]]()
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))
    return buckets
