"""A design makes the inputs of the boosted trees, and the answer that the trees correct, which comes from a ladder
of groups of requests (`lgbm.py` has the formulas).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from predictors.calibration import logit
from predictors.features import FEATURE_NAMES, LENGTH_FEATURES, SKETCH_SCOPES
from predictors.protocol import BoolArray, FeatureArray, FloatArray, IntArray, PredictorError
from predictors.sketch import KNOTS, blend
from predictors.sketch import window as sketch_window
from predictors.survival import SurvivalCurve

# ASSUMPTION: weight, in requests, of the survival curve in the input columns of the groups. The trees can weigh these
# columns further.
_COLUMN_SHRINK = 4.0


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: `scope` names the group whose sketch corrects the broader answer, and `shrink` is the
    weight of that broader answer in requests.
    """

    scope: str
    shrink: float


@dataclass(frozen=True, slots=True, eq=False)
class WindowInputs:
    """Inputs of stages 1 and 2. `inputs` (n, width) are the trees' columns. The others (n,) are the ladder's
    prediction: log odds `z`, mean `mu`, and whether it is valid.
    """

    inputs: FeatureArray
    z: FloatArray
    mu: FloatArray
    valid: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Design:
    """A design says how features become the trees' inputs. It names the scalar columns (lengths have the age
    subtracted), the groups whose sketches are used, and the ladder whose answer the trees correct.
    """

    columns: IntArray
    # 1.0 for a column whose value has the age subtracted, else 0.0.
    less_age: FeatureArray
    sketches: tuple[str, ...]
    ladder: tuple[Rung, ...]
    curve: SurvivalCurve

    @classmethod
    def of(
        cls, names: Sequence[str], sketches: Sequence[str], ladder: Sequence[Rung], curve: SurvivalCurve
    ) -> Design:
        """Returns the design of the named features. Raises PredictorError for an unknown feature or scope."""
        unknown = [n for n in names if n not in FEATURE_NAMES]
        unknown += [s for s in (*sketches, *(r.scope for r in ladder)) if s not in SKETCH_SCOPES]
        if unknown:
            raise PredictorError(f"unknown features {unknown}: the model is of another version; fit it again")
        return cls(
            columns=np.array([FEATURE_NAMES.index(n) for n in names], dtype=np.int64),
            less_age=np.array([1.0 if n in LENGTH_FEATURES else 0.0 for n in names], dtype=np.float32),
            sketches=tuple(sketches),
            ladder=tuple(ladder),
            curve=curve,
        )

    def narrowed(self, names: Sequence[str]) -> Design:
        """Returns this design with only the scalar features `names`."""
        return Design.of(names, self.sketches, self.ladder, self.curve)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scalar features in use, in the order of the columns."""
        return tuple(FEATURE_NAMES[i] for i in self.columns)

    def at_age(self, values: FeatureArray, ages: IntArray) -> FeatureArray:
        """Returns the trees' inputs for total lengths, which have no window: the scalar columns and the age,
        float32 (n, columns + 1).
        """
        made = np.empty((ages.size, self.columns.size + 1), dtype=np.float32)
        self._scalars(values, ages, made[:, :-1])
        made[:, -1] = ages
        return made

    def _scalars(self, values: FeatureArray, ages: IntArray, into: FeatureArray) -> None:
        into[:] = np.take(values, self.columns, axis=1)
        into -= np.multiply.outer(ages.astype(np.float32), self.less_age)

    def at_window(self, values: FeatureArray, ages: IntArray, windows: IntArray) -> WindowInputs:
        """Returns the inputs of stages 1 and 2 for rows with a window each: `values` (n, len(FEATURE_NAMES)),
        `ages` (n,) and `windows` (n,).
        """
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
        self._scalars(values, ages, made[:, : self.columns.size])
        made[:, self.columns.size :] = np.array(extra).T
        return WindowInputs(made, z, mu, valid)


def group_window(
    scope: str, values: FeatureArray, ages: IntArray, windows: IntArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Applies `sketch.window` to the scope's columns of `values` (n, len(FEATURE_NAMES)) and returns its three
    arrays (n,).
    """
    first = FEATURE_NAMES.index(f"{scope}_weight")
    counts = values[:, first].astype(np.float64)
    return sketch_window(values[:, first + 1 : first + 1 + KNOTS], counts, ages, windows)
