"""Drift means that the lengths of the traffic differ from those that a model was fitted on, or that its predictions
are no longer calibrated.

Lengths are compared by the PSI over the reference's deciles (by the usual rule below 0.1 is quiet and above 0.25 is
drift) and by the Kolmogorov-Smirnov distance with its critical value. Calibration is judged by the mean |predicted
- observed| over bins of recent predictions. The code has no clock and no files, and its memory is bounded.
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
# ASSUMPTION: 2.5 times the calibration error up to which a new model is accepted (PromotionRules.max_ece).
CALIBRATION_DRIFT = 0.05


def psi(reference: FloatArray, recent: FloatArray, bins: int = 10) -> float:
    """Returns the population stability index of `recent` against `reference`, over the reference's quantile bins.

    Each bin gets half a count more, so that an empty bin does not make the index infinite. Raises ValueError if
    either is empty.
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
    """Returns the largest difference between the two empirical distribution functions. Raises ValueError if either
    is empty.
    """
    if not reference.size or not recent.size:
        raise ValueError("the KS distance needs at least one length on both sides")
    points = np.concatenate((reference, recent))
    a = np.searchsorted(np.sort(reference), points, side="right") / reference.size
    b = np.searchsorted(np.sort(recent), points, side="right") / recent.size
    return float(np.abs(a - b).max())


def ks_critical(n: int, m: int, level: float = 0.001) -> float:
    """Returns the distance that samples of n and m values from one distribution exceed with probability `level`
    (Smirnov's asymptotic formula).
    """
    return math.sqrt(-0.5 * math.log(level / 2.0)) * math.sqrt((n + m) / (n * m))


@dataclass(frozen=True, slots=True)
class DriftReport:
    """The findings of a drift watch. `psi`, `ks` and `ks_critical` are None until enough lengths have come,
    `calibration_error` until enough predictions are resolved.
    """

    lengths: int
    psi: float | None
    ks: float | None
    ks_critical: float | None
    resolved: int
    calibration_error: float | None
    reasons: tuple[str, ...]

    @property
    def drifted(self) -> bool:
        """True if there is a reason to fit a new model."""
        return bool(self.reasons)


class DriftWatch:
    """A watch that compares the last `window` lengths with a fixed reference, and judges the calibration of the
    last 4 * `window` resolved predictions.
    """

    def __init__(self, reference: Sequence[int], window: int = 1_000, least: int = 200) -> None:
        """`least` is the number of lengths, or of resolved predictions, below which the report says nothing about
        them.
        """
        if not reference:
            raise ValueError("a drift watch needs the lengths that the model was fitted on")
        self._reference = np.array(reference, dtype=np.float64)
        self._lengths: deque[int] = deque(maxlen=window)
        self._resolved: deque[tuple[float, bool]] = deque(maxlen=4 * window)
        self._least = least

    def length(self, output_tokens: int) -> None:
        """Records a request that ended by itself after `output_tokens` tokens."""
        self._lengths.append(output_tokens)

    def resolved(self, p_finish: float, finished: bool) -> None:
        """Records a prediction and whether its request did finish within the window."""
        self._resolved.append((p_finish, finished))

    def report(self) -> DriftReport:
        """Returns the findings on the lengths and predictions recorded so far."""
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
