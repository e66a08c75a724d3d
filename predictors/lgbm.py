"""The learned realisation (BalanceRoute C.2.1) corrects the survival curve by boosted trees of LightGBM.

The survival curve predicts from age and window alone. A *ladder* corrects its answer by the lengths of the
request's groups (client, template, ...), as sketched when the request arrived; each rung applies the formula of
`memorise.py`. The trees then learn the error that remains:

    stage 1:  logit p = calibrate(logit p_ladder(a, H) + trees(x, a, H))              (log loss)
    stage 2:  mu = mu_ladder(a, H) + H * trees(x, a, H)                               (squared error, rows that finish)
    total:    log(q - a) = log(q_survival(a) - a) + trees(x, a)   per level           (pinball loss)
              mean - a = weights . (quantiles - a, mean_survival(a) - a)               (least squares, weights >= 0)

A model without rungs and trees equals the survival curve; fitting keeps only those that improve the prediction of
held-out data (`lgbm_fit.py`). H is an input of the trees, so one model covers a range of windows. Features that
summarise lengths enter with the age subtracted, because the remaining tokens are what is predicted.

Deviation from the paper: its learned pair has no survival term. It is a plain pair of boosted trees on the
same inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictors.boost import Booster
from predictors.calibration import Calibration
from predictors.caps import apply_caps, cap_total, row_windows
from predictors.design import Design, Rung
from predictors.features import stack
from predictors.protocol import (
    QUANTILE_LEVELS,
    FeatureArray,
    Features,
    FloatArray,
    IntArray,
    Outcome,
    Prediction,
    TotalLength,
    WindowRange,
    check_batch,
)
from predictors.survival import SurvivalCurve


@dataclass(frozen=True, slots=True, eq=False)
class LgbmModel:
    """A fitted model. A booster is None if no tree improved the prediction of held-out data."""

    design: Design
    windows: WindowRange
    classifier: Booster | None
    regressor: Booster | None
    quantiles: tuple[Booster | None, ...]
    mean_weights: tuple[float, ...]
    calibration: Calibration


class LgbmPredictor:
    """The LightGBM realisation of `Predictor`. It learns only when it is fitted again, not from `observe`."""

    name = "lightgbm"

    def __init__(self, model: LgbmModel) -> None:
        self._model = model
        self.windows = model.windows

    @property
    def model(self) -> LgbmModel:
        """The fitted model that this predictor uses."""
        return self._model

    def observe(self, outcome: Outcome) -> None:
        """Does nothing: a new model is fitted separately and then takes this one's place (`promote.py`)."""

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`. It takes one pass of each booster over the batch, on one thread."""
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
        """Returns stages 1 and 2 for rows with a window each, all (n,), ignoring max_tokens. `predict` and the
        evaluation call it.
        """
        m = self._model
        start = m.design.at_window(values, ages, windows)
        z, mu = start.z, start.mu
        if m.classifier is not None and ages.size:
            z = z + run(m.classifier, start.inputs)
        if m.regressor is not None and ages.size:
            mu = mu + windows * run(m.regressor, start.inputs)
        return Prediction(m.calibration.apply(z, windows), np.clip(mu, 1.0, windows), start.valid)

    def total_rows(self, values: FeatureArray, ages: IntArray) -> TotalLength:
        """Returns the mean (n,) and the quantiles (n, levels) of each row's total length in tokens. The quantiles
        ascend with their level.
        """
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
    """Returns the raw sum of the booster's trees for each row (n,). It uses one thread, because the other cores
    belong to engines.
    """
    return np.asarray(booster.predict(inputs, raw_score=True, num_threads=1), dtype=np.float64)


def to_payload(model: LgbmModel) -> dict[str, Any]:
    """Returns the model as data that `json` can write."""
    c = model.design.curve

    def text(booster: Booster | None) -> str | None:
        return None if booster is None else booster.model_to_string()

    return {
        "features": list(model.design.names),
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
    """Returns the model of which `to_payload` made `payload`. Imports lightgbm. Raises KeyError, TypeError,
    ValueError or PredictorError for other data.
    """
    import lightgbm

    def booster(text: str | None) -> Booster | None:
        if text is None:
            return None
        made: Booster = lightgbm.Booster(model_str=text)
        return made

    c = payload["curve"]
    arrays = {k: np.array(c[k], dtype=np.float64) for k in ("times", "mass", "moment", "alive", "at_risk")}
    kind, a, b = payload["calibration"]
    return LgbmModel(
        design=Design.of(
            payload["features"],
            [scope for scope, _ in payload["ladder"]],
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
