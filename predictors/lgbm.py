"""The learned realisation (BalanceRoute C.2.1): LightGBM on top of survival.

Survival knows age and window. A *ladder* of the request's groups (client, template, ...; their lengths as sketched at its
arrival) sharpens it by memorisation's formula, as far as held-out data confirms. The trees learn what is left:

    stage 1:  logit p = calibrate(logit p_ladder(a, H) + trees(x, a, H))              (log loss)
    stage 2:  mu = mu_ladder(a, H) + H * trees(x, a, H)                               (squared error, rows that finish)
    total:    log(q - a) = log(q_survival(a) - a) + trees(x, a)   per level           (pinball loss)
              mean - a = weights . (quantiles - a, mean_survival(a) - a)               (least squares, weights >= 0)

So a model without rungs and trees *is* survival, and no more of them are kept than held-out time confirms (`lgbm_fit.py`).
H is an input: one model covers a range of windows. Summaries of lengths enter less the age, as that is what is left.

Deviation from the paper: its learned pair has no survival term. It is a plain pair of boosted trees on the same inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from predictors.caps import apply_caps, cap_total, row_windows
from predictors.features import FEATURE_NAMES, LENGTH_FEATURES, SKETCH_SCOPES, stack
from predictors.protocol import (
    QUANTILE_LEVELS,
    BoolArray,
    FeatureArray,
    Features,
    FloatArray,
    IntArray,
    Outcome,
    Prediction,
    PredictorError,
    TotalLength,
    WindowRange,
    check_batch,
)
from predictors.sketch import KNOTS, blend
from predictors.sketch import window as sketch_window
from predictors.survival import SurvivalCurve

_LOGIT_LIMIT = 1e-4
# Weight of survival in the groups' own input columns, requests; the trees weigh them further.
_COLUMN_SHRINK = 4.0


class Booster(Protocol):
    """What is used of `lightgbm.Booster`."""

    def predict(self, data: npt.NDArray[Any], **kwargs: Any) -> Any: ...

    def model_to_string(self) -> str: ...


def logit(p: FloatArray) -> FloatArray:
    """log odds, p kept away from 0 and 1."""
    q = np.clip(p, _LOGIT_LIMIT, 1.0 - _LOGIT_LIMIT)
    return np.log(q / (1.0 - q))


def sigmoid(z: FloatArray) -> FloatArray:
    """The inverse of `logit`, without overflow."""
    return 1.0 / (1.0 + np.exp(-np.clip(z, -40.0, 40.0)))


@dataclass(frozen=True, slots=True)
class Calibration:
    """The map from raw log odds to p.

    kind "identity": sigmoid(z). "platt": sigmoid of a linear form in (1, z, log H, z log H), whose four numbers are `a`.
    "isotonic": sigmoid(z) interpolated between the points `a` -> `b`.
    """

    kind: str
    a: tuple[float, ...] = ()
    b: tuple[float, ...] = ()

    def apply(self, z: FloatArray, windows: IntArray) -> FloatArray:
        """p (n,) for raw log odds z (n,) and windows (n,)."""
        if self.kind == "identity":
            return sigmoid(z)
        if self.kind == "isotonic":
            return np.asarray(np.interp(sigmoid(z), self.a, self.b))
        if self.kind == "platt":
            return sigmoid(platt_inputs(z, windows) @ np.asarray(self.a))
        raise PredictorError(f"calibration kind {self.kind!r} is none of identity, platt, isotonic")


def platt_inputs(z: FloatArray, windows: IntArray) -> FloatArray:
    """(n, 4): 1, z, log H, z log H."""
    log_h = np.log(windows)
    return np.column_stack((np.ones_like(z), z, log_h, z * log_h))


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: the group whose sketch is heard, and the weight of the broader answer in requests."""

    scope: str
    shrink: float


@dataclass(frozen=True, slots=True, eq=False)
class WindowInputs:
    """What stage 1 and 2 start from: the trees' inputs (n, width), and the ladder's log odds, mu and validity (n,)."""

    inputs: FeatureArray
    z: FloatArray
    mu: FloatArray
    valid: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Design:
    """How features become the trees' inputs: scalar columns (some less the age), sketches, and the ladder below the trees."""

    columns: IntArray
    less_age: FloatArray  # 1.0 or 0.0 per column
    sketches: tuple[str, ...]
    ladder: tuple[Rung, ...]
    curve: SurvivalCurve

    @classmethod
    def of(
        cls, names: Sequence[str], sketches: Sequence[str], ladder: Sequence[Rung], curve: SurvivalCurve
    ) -> Design:
        """The design of the named features. Raises PredictorError for a name that is not one."""
        unknown = [n for n in names if n not in FEATURE_NAMES]
        unknown += [s for s in (*sketches, *(r.scope for r in ladder)) if s not in SKETCH_SCOPES]
        if unknown:
            raise PredictorError(f"unknown features {unknown}: the model is of another version; fit it again")
        return cls(
            columns=np.array([FEATURE_NAMES.index(n) for n in names], dtype=np.int64),
            less_age=np.array([1.0 if n in LENGTH_FEATURES else 0.0 for n in names]),
            sketches=tuple(sketches),
            ladder=tuple(ladder),
            curve=curve,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The scalar features used, in order."""
        return tuple(FEATURE_NAMES[i] for i in self.columns)

    def at_age(self, values: FeatureArray, ages: IntArray) -> FeatureArray:
        """Inputs without a window, float32 (n, columns + 1)."""
        made = np.empty((ages.size, self.columns.size + 1), dtype=np.float32)
        made[:, :-1] = values[:, self.columns]
        made[:, :-1] -= ages[:, None] * self.less_age
        made[:, -1] = ages
        return made

    def at_window(self, values: FeatureArray, ages: IntArray, windows: IntArray) -> WindowInputs:
        """Inputs for rows of their own windows (n,)."""
        p, mu, valid = self.curve.window(ages, windows)
        groups = {s: group_window(s, values, ages, windows) for s in self.sketches}
        extra = [ages, windows, logit(p)]
        for group in groups.values():
            group_p, group_mu = blend(p, mu, group, _COLUMN_SHRINK)
            extra += [logit(group_p), group_mu / windows]
        for rung in self.ladder:
            p, mu = blend(p, mu, groups[rung.scope], rung.shrink)
            valid = valid | (groups[rung.scope][0] > 0)
        z = logit(p)
        extra += [z, mu / windows]
        made = np.empty((ages.size, self.columns.size + len(extra)), dtype=np.float32)
        made[:, : self.columns.size] = values[:, self.columns]
        made[:, : self.columns.size] -= ages[:, None] * self.less_age
        for offset, column in enumerate(extra):
            made[:, self.columns.size + offset] = column
        return WindowInputs(made, z, mu, valid)


def group_window(
    scope: str, values: FeatureArray, ages: IntArray, windows: IntArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """`sketch.window` of the scope's columns of `values` (n, len(FEATURE_NAMES))."""
    first = FEATURE_NAMES.index(f"{scope}_weight")
    counts = values[:, first].astype(np.float64)
    return sketch_window(values[:, first + 1 : first + 1 + KNOTS], counts, ages, windows)


@dataclass(frozen=True, slots=True, eq=False)
class LgbmModel:
    """All that a fit yields. A booster is None where held-out data confirmed no tree."""

    design: Design
    windows: WindowRange
    classifier: Booster | None
    regressor: Booster | None
    quantiles: tuple[Booster | None, ...]
    mean_weights: tuple[float, ...]
    calibration: Calibration


class LgbmPredictor:
    """The LightGBM realisation. It learns by being fitted anew, not from `observe`."""

    name = "lightgbm"

    def __init__(self, model: LgbmModel) -> None:
        self._model = model
        self.windows = model.windows

    @property
    def model(self) -> LgbmModel:
        """The fitted parts."""
        return self._model

    def observe(self, outcome: Outcome) -> None:
        """Nothing: refits are separate (`promote.py`)."""

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`. Cost: one pass of each booster over the batch, on one thread."""
        self.windows.require(window_tokens, self.name)
        ages = check_batch(features, ages)
        windows, capped = row_windows(features, ages, window_tokens)
        # A cap may lie below the fitted range; the smallest fitted window is the nearest answer there is.
        asked = np.maximum(windows, self.windows.low)
        values = stack(features)
        prediction = self.predict_rows(values, ages, asked)
        total = cap_total(self.total_rows(values, ages), features) if with_total else None
        whole = Prediction(
            prediction.p_finish,
            np.minimum(prediction.mean_remaining_tokens, windows),
            prediction.valid,
            total,
        )
        return apply_caps(whole, windows, capped)

    def predict_rows(self, values: FeatureArray, ages: IntArray, windows: IntArray) -> Prediction:
        """Both stages for rows of their own windows (n,), without regard to max_tokens. For evaluation and `predict`."""
        m = self._model
        start = m.design.at_window(values, ages, windows)
        z, mu = start.z, start.mu
        if m.classifier is not None and ages.size:
            z = z + run(m.classifier, start.inputs)
        if m.regressor is not None and ages.size:
            mu = mu + windows * run(m.regressor, start.inputs)
        return Prediction(m.calibration.apply(z, windows), np.clip(mu, 1.0, windows), start.valid)

    def total_rows(self, values: FeatureArray, ages: IntArray) -> TotalLength:
        """Mean and quantiles of the total length, ascending in level."""
        m = self._model
        base = m.design.curve.total(ages)
        left = np.maximum(base.quantiles_tokens - ages[:, None], 1.0)
        if ages.size:
            inputs = m.design.at_age(values, ages)
            for column, booster in enumerate(m.quantiles):
                if booster is not None:
                    left[:, column] *= np.exp(np.clip(run(booster, inputs), -10.0, 10.0))
        left = np.maximum(np.sort(left, axis=1), 1.0)
        anchors = np.column_stack((left, base.mean_tokens - ages))
        mean = np.maximum(anchors @ np.asarray(m.mean_weights), 1.0)
        return TotalLength(ages + mean, ages[:, None] + left, QUANTILE_LEVELS)


def run(booster: Booster, inputs: FeatureArray) -> FloatArray:
    """The trees' raw sum (n,), on one thread: the caller's cores belong to engines."""
    return np.asarray(booster.predict(inputs, raw_score=True, num_threads=1), dtype=np.float64)


def to_payload(model: LgbmModel) -> dict[str, Any]:
    """The model as JSON-able data."""
    c = model.design.curve

    def text(booster: Booster | None) -> str | None:
        return None if booster is None else booster.model_to_string()

    return {
        "features": list(model.design.names),
        "sketches": list(model.design.sketches),
        "ladder": [[r.scope, r.shrink] for r in model.design.ladder],
        "curve": {
            "times": c.times.tolist(),
            "mass": c.mass.tolist(),
            "moment": c.moment.tolist(),
            "alive": c.alive.tolist(),
            "at_risk": c.at_risk.tolist(),
            "weight": c.weight,
        },
        "windows": [model.windows.low, model.windows.high],
        "classifier": text(model.classifier),
        "regressor": text(model.regressor),
        "quantiles": [text(q) for q in model.quantiles],
        "mean_weights": list(model.mean_weights),
        "calibration": [model.calibration.kind, list(model.calibration.a), list(model.calibration.b)],
    }


def from_payload(payload: Mapping[str, Any]) -> LgbmModel:
    """The inverse of `to_payload`. Imports lightgbm. Raises KeyError, TypeError, ValueError on anything else."""
    import lightgbm

    def booster(text: str | None) -> Booster | None:
        if text is None:
            return None
        made: Booster = lightgbm.Booster(model_str=text, params={"num_threads": 1})
        return made

    c = payload["curve"]
    arrays = {k: np.array(c[k], dtype=np.float64) for k in ("times", "mass", "moment", "alive", "at_risk")}
    kind, a, b = payload["calibration"]
    return LgbmModel(
        design=Design.of(
            payload["features"],
            payload["sketches"],
            [Rung(scope, float(shrink)) for scope, shrink in payload["ladder"]],
            SurvivalCurve(weight=float(c["weight"]), **arrays),
        ),
        windows=WindowRange(*payload["windows"]),
        classifier=booster(payload["classifier"]),
        regressor=booster(payload["regressor"]),
        quantiles=tuple(booster(q) for q in payload["quantiles"]),
        mean_weights=tuple(float(w) for w in payload["mean_weights"]),
        calibration=Calibration(kind, tuple(a), tuple(b)),
    )
