"""Drift: has the traffic, or the truth of the predictions, moved away from what a model was fitted on?

Lengths: PSI over the reference's deciles (below 0.1 is quiet, above 0.25 is drift, by the usual rule), and
the Kolmogorov-Smirnov distance with its critical value. Calibration: mean |predicted - observed| per bin of
recent refreshes. Pure functions and one bounded window; no clock, no files.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from predictors.metrics import expected_calibration_error
from predictors.protocol import FloatArray

PSI_DRIFT = 0.25
CALIBRATION_DRIFT = 0.05  # ASSUMPTION: 2.5 times the error that a fresh model is accepted with


def psi(reference: FloatArray, recent: FloatArray, bins: int = 10) -> float:
    """Population stability index of `recent` against `reference`, over the reference's quantile bins.

    Half a count is added to each bin, so an empty one is not infinite. Raises ValueError if either is empty.
    """
    if not reference.size or not recent.size:
        raise ValueError("PSI needs at least one length on both sides")
    edges = np.unique(np.quantile(reference, np.linspace(0, 1, bins + 1)[1:-1]))

    def shares(values: FloatArray) -> FloatArray:
        counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=edges.size + 1) + 0.5
        return np.asarray(counts / counts.sum())

    expected, actual = shares(reference), shares(recent)
    return float(np.sum((actual - expected) * np.log(actual / expected)))


def ks_distance(reference: FloatArray, recent: FloatArray) -> float:
    """The largest difference of the two empirical distributions. Raises ValueError if either is empty."""
    if not reference.size or not recent.size:
        raise ValueError("the KS distance needs at least one length on both sides")
    points = np.concatenate((reference, recent))
    a = np.searchsorted(np.sort(reference), points, side="right") / reference.size
    b = np.searchsorted(np.sort(recent), points, side="right") / recent.size
    return float(np.abs(a - b).max())


def ks_critical(n: int, m: int, level: float = 0.001) -> float:
    """The distance that equal distributions exceed with probability `level` (asymptotic, Smirnov)."""
    return math.sqrt(-0.5 * math.log(level / 2.0)) * math.sqrt((n + m) / (n * m))


@dataclass(frozen=True, slots=True)
class DriftReport:
    """The state of the watch. `psi`, `ks` and `calibration_error` are None before `ready` data has come."""

    lengths: int
    psi: float | None
    ks: float | None
    ks_critical: float | None
    resolved: int
    calibration_error: float | None
    reasons: tuple[str, ...]

    @property
    def drifted(self) -> bool:
        """True if there is a reason to refit."""
        return bool(self.reasons)


class DriftWatch:
    """Keeps the last `window` lengths and resolved predictions against a fixed reference of lengths."""

    def __init__(self, reference: Sequence[int], window: int = 1_000, least: int = 200) -> None:
        """`least` lengths or resolved predictions are needed before anything is said of them."""
        if not reference:
            raise ValueError("a drift watch needs the lengths that the model was fitted on")
        self._reference = np.array(reference, dtype=np.float64)
        self._lengths: deque[int] = deque(maxlen=window)
        self._resolved: deque[tuple[float, bool]] = deque(maxlen=4 * window)
        self._least = least

    def length(self, output_tokens: int) -> None:
        """Takes note of a request that ended by itself after that many tokens."""
        self._lengths.append(output_tokens)

    def resolved(self, p_finish: float, finished: bool) -> None:
        """Takes note of a prediction whose window has passed, or whose request has ended."""
        self._resolved.append((p_finish, finished))

    def report(self) -> DriftReport:
        """The present state."""
        reasons: list[str] = []
        moved, distance, critical, error = None, None, None, None
        if len(self._lengths) >= self._least:
            recent = np.array(self._lengths, dtype=np.float64)
            moved, distance = psi(self._reference, recent), ks_distance(self._reference, recent)
            critical = ks_critical(self._reference.size, recent.size)
            if moved > PSI_DRIFT and distance > critical:
                reasons.append(f"lengths: PSI {moved:.3f} > {PSI_DRIFT}, KS {distance:.3f} > {critical:.3f}")
        if len(self._resolved) >= self._least:
            p = np.array([r[0] for r in self._resolved])
            error = expected_calibration_error(p, np.array([r[1] for r in self._resolved]), bins=10)
            if error is not None and error > CALIBRATION_DRIFT:
                reasons.append(f"calibration: error {error:.3f} > {CALIBRATION_DRIFT}")
        return DriftReport(
            len(self._lengths), moved, distance, critical, len(self._resolved), error, tuple(reasons)
        )
