"""`boost` trains one booster and chooses its number of trees (possibly zero) on held-out blocks of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from predictors.calibration import log_loss, sigmoid
from predictors.protocol import BoolArray, FeatureArray, FloatArray, IntArray


class Booster(Protocol):
    """The methods of `lightgbm.Booster` that the predictors use."""

    def predict(self, data: npt.NDArray[Any], **kwargs: Any) -> Any: ...

    def model_to_string(self) -> str: ...

    def num_trees(self) -> int: ...

    def feature_importance(self, importance_type: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class BoostSpec:
    """The settings of one booster. `min_gain` is the least relative reduction of the held-out loss for which trees
    are kept. `alpha` is the level of a quantile objective.
    """

    objective: str  # binary, l2 or quantile
    max_trees: int
    learning_rate: float
    leaves: int
    min_rows_per_leaf: int
    min_gain: float
    threads: int
    seed: int
    alpha: float = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Training rows. `inputs` is (n, width). The others are (n,): the target, the score from which the trees start,
    and the row's block of time.
    """

    inputs: FeatureArray
    target: FloatArray
    start: FloatArray
    block: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Boosted:
    """The result of `boost`. `booster` is None if held-out data confirmed no tree. `held_out` (n,) has each row's
    score by the booster that was trained without the row's block.
    """

    booster: Booster | None
    held_out: FloatArray


def confirmed(losses: FloatArray, sizes: IntArray, min_gain: float) -> int:
    """Returns the best column of `losses` (blocks, choices), of which column 0 is the choice that changes nothing.

    The best column has the least mean loss, where `sizes` (rows a block) weigh the blocks. It is accepted only if
    it lowers the mean loss by `min_gain` (relative) and the loss of every single block; otherwise the result is 0.
    A gain on some blocks alone is luck, or is lost when the traffic drifts.
    """
    if losses.size == 0:
        return 0
    mean = sizes @ losses / sizes.sum()
    best = int(np.argmin(mean))
    everywhere = bool((losses[:, best] < losses[:, 0]).all())
    return best if everywhere and mean[best] <= mean[0] * (1.0 - min_gain) else 0


def boost(spec: BoostSpec, folds: Sequence[Callable[[], Task]], whole: Callable[[], Task]) -> Boosted:
    """Fits a booster to the rows of `whole`. Fold b makes the same rows with start scores that were computed
    without block b. A booster is trained on the other blocks of that fold and judged on block b; the judgements
    together choose the number of trees.
    """
    held: list[tuple[BoolArray, Task, Booster]] = []
    losses: list[FloatArray] = []
    for b, make in enumerate(folds):
        task = make()
        out = task.block == b
        if not out.any() or out.all():
            continue
        booster, curve = _train(spec, task, ~out, out, spec.max_trees)
        held.append((out, task, booster))
        losses.append(curve)
    trees = confirmed(np.array(losses), np.array([int(out.sum()) for out, _, _ in held]), spec.min_gain)
    everything = whole()
    scores = everything.start.copy()
    for out, task, booster in held:
        scores[out] = task.start[out]
        if trees:
            scores[out] += booster.predict(
                task.inputs[out], raw_score=True, num_iteration=trees, num_threads=1
            )
    if trees == 0:
        return Boosted(None, scores)
    final, _ = _train(spec, everything, np.ones(scores.size, dtype=bool), None, trees)
    return Boosted(final, scores)


def gains(spec: BoostSpec, task: Task, trees: int) -> FloatArray:
    """Returns by how much each input column (width,) lowers the training loss of a booster of `trees` trees."""
    booster, _ = _train(spec, task, np.ones(task.target.size, dtype=bool), None, trees)
    return np.asarray(booster.feature_importance("gain"), dtype=np.float64)


def _train(
    spec: BoostSpec, task: Task, use: BoolArray, check: BoolArray | None, trees: int
) -> tuple[Booster, FloatArray]:
    """Returns a booster trained on the rows `use`, and its loss on the rows `check` after 0, 1, ... trees (zeros if
    `check` is None).
    """
    import lightgbm

    params: dict[str, Any] = {
        "objective": spec.objective,
        "metric": "binary_logloss" if spec.objective == "binary" else spec.objective,
        "alpha": spec.alpha,
        "boost_from_average": False,
        "num_leaves": spec.leaves,
        "learning_rate": spec.learning_rate,
        "min_data_in_leaf": min(spec.min_rows_per_leaf, max(20, int(use.sum()) // 50)),
        "feature_fraction": 0.6,
        "bagging_fraction": 0.7,
        "bagging_freq": 1,
        "lambda_l2": 10.0,
        "max_bin": 127,
        "num_threads": spec.threads,
        "seed": spec.seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }
    data = lightgbm.Dataset(task.inputs[use], task.target[use], init_score=task.start[use])
    if check is None:
        made: Booster = lightgbm.train(params, data, trees)
        return made, np.zeros(trees + 1)
    held = lightgbm.Dataset(
        task.inputs[check], task.target[check], init_score=task.start[check], reference=data
    )
    record: dict[str, Any] = {}
    made = lightgbm.train(
        params, data, trees, valid_sets=[held], callbacks=[lightgbm.record_evaluation(record)]
    )
    after = next(iter(next(iter(record.values())).values()))
    # Boosting ends early when no split is useful. The loss then stays constant for the remaining trees.
    curve = [_start_loss(spec, task.target[check], task.start[check]), *after]
    return made, np.array(curve + [curve[-1]] * (trees + 1 - len(curve)))


def _start_loss(spec: BoostSpec, target: FloatArray, start: FloatArray) -> float:
    """Returns the loss of the start scores alone (zero trees), in the metric that LightGBM records."""
    if spec.objective == "binary":
        return log_loss(sigmoid(start), target > 0.5)
    error = target - start
    if spec.objective == "l2":
        return float(np.mean(error**2))
    return float(np.mean(np.maximum(spec.alpha * error, (spec.alpha - 1.0) * error)))
