"""A calibration maps raw log odds to a probability. Which map is used is decided on held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from predictors.protocol import BoolArray, FloatArray, IntArray, PredictorError

_LOGIT_LIMIT = 1e-4


def logit(p: FloatArray) -> FloatArray:
    """Returns the log odds of `p`, which is first clipped to [1e-4, 1 - 1e-4]."""
    q = np.clip(p, _LOGIT_LIMIT, 1.0 - _LOGIT_LIMIT)
    return np.log(q / (1.0 - q))


def sigmoid(z: FloatArray) -> FloatArray:
    """Returns the inverse of `logit`; `z` is clipped to [-40, 40] so that nothing overflows."""
    return 1.0 / (1.0 + np.exp(-np.clip(z, -40.0, 40.0)))


@dataclass(frozen=True, slots=True)
class Calibration:
    """A map from raw log odds z to the probability p.

    Kind "identity" is sigmoid(z). Kind "platt" is the sigmoid of a linear form in (1, z, log H, z log H) with the
    four coefficients `a`. Kind "isotonic" interpolates sigmoid(z) between the points `a` -> `b`.
    """

    kind: str
    a: tuple[float, ...] = ()
    b: tuple[float, ...] = ()

    def apply(self, z: FloatArray, windows: IntArray) -> FloatArray:
        """Returns the calibrated p (n,) of raw log odds z (n,) and windows (n,)."""
        if self.kind == "identity":
            return sigmoid(z)
        if self.kind == "isotonic":
            return np.asarray(np.interp(sigmoid(z), self.a, self.b))
        if self.kind == "platt":
            return sigmoid(platt_inputs(z, windows) @ np.asarray(self.a))
        raise PredictorError(f"calibration kind {self.kind!r} is none of identity, platt, isotonic")


def platt_inputs(z: FloatArray, windows: IntArray) -> FloatArray:
    """Returns the columns 1, z, log H, z log H of Platt's linear form, (n, 4)."""
    log_h = np.log(windows)
    return np.column_stack((np.ones_like(z), z, log_h, z * log_h))


def choose_calibration(
    z: FloatArray, windows: IntArray, label: BoolArray, block: IntArray, min_gain: float
) -> Calibration:
    """Chooses the identity, unless Platt's map or the isotonic one has a log loss that is lower by `min_gain` on blocks
    on which it was not fitted.
    """
    makers: dict[str, Callable[..., Calibration]] = {"platt": _platt, "isotonic": _isotonic}
    best, best_loss = Calibration("identity"), log_loss(sigmoid(z), label)
    least = best_loss * (1.0 - min_gain)
    for make in makers.values():
        p = np.empty_like(z)
        for b in np.unique(block):
            out = block == b
            if label[~out].all() or not label[~out].any():
                break
            p[out] = make(z[~out], windows[~out], label[~out]).apply(z[out], windows[out])
        else:
            loss = log_loss(p, label)
            if loss < min(least, best_loss):
                best, best_loss = make(z, windows, label), loss
    return best


def _platt(z: FloatArray, windows: IntArray, label: BoolArray) -> Calibration:
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=1.0, fit_intercept=False, max_iter=200).fit(platt_inputs(z, windows), label)
    return Calibration("platt", tuple(float(w) for w in fitted.coef_[0]))


def _isotonic(z: FloatArray, windows: IntArray, label: BoolArray) -> Calibration:
    from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(y_min=1e-4, y_max=1.0 - 1e-4, out_of_bounds="clip").fit(sigmoid(z), label)
    return Calibration("isotonic", tuple(fitted.X_thresholds_.tolist()), tuple(fitted.y_thresholds_.tolist()))


def log_loss(p: FloatArray, label: BoolArray) -> float:
    """Returns the mean cross-entropy of the labels; `p` is clipped to [1e-6, 1 - 1e-6]."""
    q = np.clip(p, 1e-6, 1.0 - 1e-6)
    return float(-np.mean(np.where(label, np.log(q), np.log(1.0 - q))))
