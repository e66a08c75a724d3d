"""Fitting the LightGBM realisation (`lgbm.py`).

The training span is cut into contiguous blocks of time. Each block is held out once; the number of trees of each booster is
the one with the least held-out loss, *zero included*; a gain that not every block confirms counts as none. The held-out
log odds of all blocks choose the calibration the same way (leave one block out again). The boosters are then fitted on everything.

Why blocks: requests near in time resemble each other, so a random split would promise too much; and a single last block
is one mood of the traffic, which both the number of trees and the calibration then follow (it did: worse on two of four traces).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from predictors.features import (
    CLOCK_FEATURES,
    FEATURE_NAMES,
    SCALAR_FEATURES,
    SKETCH_SCOPES,
    TIME_FEATURES,
    stack,
)
from predictors.lgbm import (
    Booster,
    Calibration,
    Design,
    LgbmModel,
    LgbmPredictor,
    Rung,
    group_window,
    platt_inputs,
    sigmoid,
)
from predictors.protocol import (
    QUANTILE_LEVELS,
    BoolArray,
    FeatureArray,
    Features,
    FloatArray,
    IntArray,
    NotEnoughData,
    Outcome,
    WindowRange,
)
from predictors.samples import Walk, draw_windows, walk, walk_tails
from predictors.sketch import blend
from predictors.survival import SurvivalCurve, weak_prior

_SECONDS_PER_DAY = 86_400.0
# Three quantiles alone miss the mean of a heavy tail; survival's own mean does not.
_SURVIVALS_MEAN = (0.0,) * len(QUANTILE_LEVELS) + (1.0,)


@dataclass(frozen=True, slots=True)
class LgbmConfig:
    """Parameters of a fit. Sizes keep 20,000 requests well below a minute on two cores."""

    windows: WindowRange = WindowRange(1, 96)
    stride_tokens: int = 16
    max_rows: int = 200_000
    blocks: int = 4
    max_trees: int = 60
    leaves: int = 31
    learning_rate: float = 0.1
    regressor_max_trees: int = 40
    regressor_leaves: int = 8
    regressor_min_rows: int = 2_000
    regressor_learning_rate: float = 0.05
    quantile_max_trees: int = 30
    quantile_learning_rate: float = 0.2
    min_rows_per_leaf: int = 300
    shrinks: tuple[float, ...] = (2.0, 8.0, 32.0)
    min_gain: float = 0.002
    regressor_min_gain: float = 0.0005
    calibration_min_gain: float = 0.01
    min_requests: int = 500
    prior_weight: float = 1.0
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """One booster's training rows: inputs, target, the survival score it starts from, and each row's block."""

    inputs: FeatureArray
    target: FloatArray
    start: FloatArray
    block: IntArray


def fit_lgbm(
    outcomes: Sequence[Outcome],
    features: Sequence[Features],
    config: LgbmConfig,
    progress: Callable[[str], None] = lambda _: None,
) -> LgbmPredictor:
    """Fits on `outcomes` in order of arrival, `features` theirs (`features.replay`).

    Raises NotEnoughData when there are fewer than `min_requests` uncensored requests, or when at every age and
    window all of them finish, or none.
    """
    values = stack(features)
    lengths = np.array([o.output_tokens for o in outcomes], dtype=np.float64)
    censored = np.array([o.censored for o in outcomes], dtype=bool)
    ended = int((~censored & (lengths > 0)).sum()) if lengths.size else 0
    if ended < config.min_requests:
        raise NotEnoughData(
            f"{ended} finished requests are too few to fit on ({config.min_requests} needed); serve by survival "
            f"until more have been logged"
        )
    names = usable_features(values, outcomes)
    rows = training_rows(outcomes, config)
    blocks = np.arange(len(outcomes)) * config.blocks // len(outcomes)
    fit = _Fit(config, names, usable_sketches(values), values, lengths, censored, blocks)
    windows = draw_windows(len(rows), config.windows.low, config.windows.high, config.seed + 1)
    label = rows.finishes(windows)
    if label.all() or not label.any():
        raise NotEnoughData(
            "every age point has the same answer (all finish, or none does, within the windows "
            f"{config.windows.low}..{config.windows.high}): nothing to learn; serve by survival"
        )
    progress(f"{len(outcomes)} requests, {len(rows)} age points, {len(names)} features")
    ladder = fit.choose_ladder(rows, windows, label)
    progress(f"ladder: {', '.join(f'{r.scope} (shrink {r.shrink:g})' for r in ladder) or 'survival alone'}")
    classifier, oof = fit.classifier(rows, windows, label)
    progress(f"classifier: {_size(classifier)} trees")
    calibration = choose_calibration(oof, windows, label, blocks[rows.request], config.calibration_min_gain)
    progress(f"calibration: {calibration.kind}")
    regressor = fit.regressor(regression_rows(outcomes, config))
    progress(f"regressor: {_size(regressor)} trees")
    quantiles, weights = fit.quantiles(rows)
    progress(f"quantiles: {[_size(q) for q in quantiles]} trees")
    return LgbmPredictor(
        LgbmModel(fit.design, config.windows, classifier, regressor, quantiles, weights, calibration)
    )


def training_rows(outcomes: Sequence[Outcome], config: LgbmConfig) -> Walk:
    """The age points to train on: where outputs are short the stride is halved (down to a quarter), and where there are still
    few points each one is asked about several windows (up to eight), as that costs nothing and steadies the fit."""
    stride = config.stride_tokens
    rows = walk(outcomes, stride, config.max_rows, config.seed)
    while len(rows) < config.max_rows // 4 and stride > max(1, config.stride_tokens // 4):
        stride //= 2
        rows = walk(outcomes, stride, config.max_rows, config.seed)
    copies = min(8, config.max_rows // max(1, len(rows)))
    if copies < 2:
        return rows
    return Walk(
        np.repeat(rows.request, copies), np.repeat(rows.ages, copies), np.repeat(rows.remaining, copies)
    )


def regression_rows(outcomes: Sequence[Outcome], config: LgbmConfig) -> Walk:
    """The age points near the end, each asked about four windows."""
    stride = max(1, config.stride_tokens // 4)
    rows = walk_tails(outcomes, stride, config.windows.high, config.max_rows // 4, config.seed)
    return Walk(np.repeat(rows.request, 4), np.repeat(rows.ages, 4), np.repeat(rows.remaining, 4))


def usable_features(values: FeatureArray, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Scalar features with at least two values and 100 rows; the time of day only if the data spans two days."""
    span_s = outcomes[-1].arrival.arrival_s - outcomes[0].arrival.arrival_s
    left_out = CLOCK_FEATURES | (TIME_FEATURES if span_s < 2 * _SECONDS_PER_DAY else frozenset())
    used = []
    for column, name in enumerate(SCALAR_FEATURES):
        there = values[:, column][np.isfinite(values[:, column])]
        if name not in left_out and there.size >= 100 and there.min() < there.max():
            used.append(name)
    return tuple(used)


def usable_sketches(values: FeatureArray) -> tuple[str, ...]:
    """The scopes of which at least 100 requests carry a sketch."""
    return tuple(s for s in SKETCH_SCOPES if (values[:, FEATURE_NAMES.index(f"{s}_weight")] > 0).sum() >= 100)


def confirmed_trees(losses: FloatArray, sizes: IntArray, min_gain: float) -> int:
    """The number of trees with the least mean loss, from the blocks' losses after 0, 1, ... trees (blocks, trees + 1) and
    their rows (blocks,). 0 unless that gains `min_gain` (relative) on the whole and something in every single block: a
    gain in some moods of the traffic only is luck, or will be drift."""
    if losses.size == 0:
        return 0
    mean = sizes @ losses / sizes.sum()
    best = int(np.argmin(mean))
    everywhere = bool((losses[:, best] < losses[:, 0]).all())
    return best if everywhere and mean[best] <= mean[0] * (1.0 - min_gain) else 0


def choose_calibration(
    z: FloatArray, windows: IntArray, label: BoolArray, block: IntArray, min_gain: float
) -> Calibration:
    """Identity, unless Platt or isotonic has a log loss lower by `min_gain` on blocks that it was not fitted on."""
    makers: dict[str, Callable[..., Calibration]] = {"platt": _platt, "isotonic": _isotonic}
    best, best_loss = Calibration("identity"), _log_loss(sigmoid(z), label)
    least = best_loss * (1.0 - min_gain)
    for make in makers.values():
        p = np.empty_like(z)
        for b in np.unique(block):
            out = block == b
            if label[~out].all() or not label[~out].any():
                break
            p[out] = make(z[~out], windows[~out], label[~out]).apply(z[out], windows[out])
        else:
            loss = _log_loss(p, label)
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


def _log_loss(p: FloatArray, label: BoolArray) -> float:
    q = np.clip(p, 1e-6, 1.0 - 1e-6)
    return float(-np.mean(np.where(label, np.log(q), np.log(1.0 - q))))


def _size(booster: Booster | None) -> int:
    return 0 if booster is None else int(booster.num_trees())  # type: ignore[attr-defined]


class _Fit:
    """The data of one fit, and the four tasks on it."""

    def __init__(
        self,
        config: LgbmConfig,
        names: tuple[str, ...],
        sketches: tuple[str, ...],
        values: FeatureArray,
        lengths: FloatArray,
        censored: BoolArray,
        blocks: IntArray,
    ) -> None:
        self._config = config
        self._names = names
        self._values = values
        self._lengths = lengths
        self._censored = censored
        self._blocks = blocks
        # Every block's rows start from a curve that has not seen the block.
        self._designs = [
            Design.of(names, sketches, (), self.curve(blocks != b)) for b in range(config.blocks)
        ]
        self.design = Design.of(names, sketches, (), self.curve(np.ones_like(censored)))

    def curve(self, requests: BoolArray) -> SurvivalCurve:
        """Survival of the chosen requests, with a trace of the weak prior."""
        prior, weights = weak_prior(self._config.prior_weight)
        chosen = self._lengths[requests]
        return SurvivalCurve.fit(
            np.concatenate((chosen, prior)),
            np.concatenate((np.ones_like(chosen), weights)),
            np.concatenate((self._censored[requests], np.zeros(prior.size, dtype=bool))),
        )

    def choose_ladder(self, rows: Walk, windows: IntArray, label: BoolArray) -> tuple[Rung, ...]:
        """Greedily, broad to narrow: a group enters, with the best of three weights, if the log loss falls by `min_gain` and in
        every block. Sketches are causal, so only the curve below has to be held out."""
        block = self._blocks[rows.request]
        p, mu = np.empty(len(rows)), np.empty(len(rows))
        for b, design in enumerate(self._designs):
            out = block == b
            p[out], mu[out], _ = design.curve.window(rows.ages[out], windows[out])
        ladder: list[Rung] = []
        for scope in self.design.sketches:
            group = group_window(scope, self._values[rows.request], rows.ages, windows)
            tried = [(blend(p, mu, group, shrink), shrink) for shrink in self._config.shrinks]
            losses = np.array(
                [
                    [_log_loss(q[block == b], label[block == b]) for q in (p, *(t[0][0] for t in tried))]
                    for b in np.unique(block)
                ]
            )
            best = confirmed_trees(losses, np.bincount(block)[np.unique(block)], self._config.min_gain)
            if best:
                (p, mu), shrink = tried[best - 1]
                ladder.append(Rung(scope, shrink))
        self._designs = [replace(d, ladder=tuple(ladder)) for d in self._designs]
        self.design = replace(self.design, ladder=tuple(ladder))
        return tuple(ladder)

    def classifier(
        self, rows: Walk, windows: IntArray, label: BoolArray
    ) -> tuple[Booster | None, FloatArray]:
        """The booster of stage 1, and the held-out log odds of all rows."""

        def task(design: Design) -> _Task:
            start = design.at_window(self._values[rows.request], rows.ages, windows)
            return _Task(start.inputs, label.astype(np.float64), start.z, self._blocks[rows.request])

        params = {"objective": "binary", "metric": "binary_logloss"}
        return self._boost(
            task, params, self._config.max_trees, self._config.learning_rate, self._config.min_gain
        )

    def regressor(self, rows: Walk) -> Booster | None:
        """The booster of stage 2, on the rows that finish. H = 1 has one answer only and is left out."""
        windows = draw_windows(
            len(rows), self._config.windows.low, self._config.windows.high, self._config.seed + 3
        )
        keep = rows.finishes(windows) & (windows > 1)
        request, ages, w = rows.request[keep], rows.ages[keep], windows[keep]

        def task(design: Design) -> _Task:
            start = design.at_window(self._values[request], ages, w)
            target = (rows.remaining[keep] - start.mu) / w
            return _Task(start.inputs, target, np.zeros(ages.size), self._blocks[request])

        params: dict[str, Any] = {"objective": "l2", "metric": "l2", "boost_from_average": False}
        params.update(
            num_leaves=self._config.regressor_leaves, min_data_in_leaf=self._config.regressor_min_rows
        )
        return self._boost(
            task,
            params,
            self._config.regressor_max_trees,
            self._config.regressor_learning_rate,
            self._config.regressor_min_gain,
        )[0]

    def quantiles(self, rows: Walk) -> tuple[tuple[Booster | None, ...], tuple[float, ...]]:
        """A booster per level, and the weights that make a mean of the quantiles. Half of the rows are of age 0, where the
        router asks for the total."""
        picked = np.random.default_rng(self._config.seed + 2).permutation(len(rows))[: self._lengths.size]
        first = np.flatnonzero(~self._censored & (self._lengths > 0))
        request = np.concatenate((rows.request[picked], first))
        ages = np.concatenate((rows.ages[picked], np.zeros_like(first)))
        left = np.concatenate((rows.remaining[picked], self._lengths[first].astype(np.int64)))
        log_left, values, block = np.log(left), self._values[request], self._blocks[request]
        boosters, held_out = [], np.empty((left.size, len(QUANTILE_LEVELS)))
        for column, level in enumerate(QUANTILE_LEVELS):

            def task(design: Design, column: int = column) -> _Task:
                base = design.curve.total(ages).quantiles_tokens[:, column] - ages
                return _Task(design.at_age(values, ages), log_left, np.log(np.maximum(base, 1.0)), block)

            params = {
                "objective": "quantile",
                "metric": "quantile",
                "alpha": level,
                "boost_from_average": False,
            }
            booster, log_quantile = self._boost(
                task,
                params,
                self._config.quantile_max_trees,
                self._config.quantile_learning_rate,
                self._config.min_gain,
            )
            boosters.append(booster)
            held_out[:, column] = np.exp(np.clip(log_quantile, 0.0, 20.0))
        if not any(boosters):
            return tuple(boosters), _SURVIVALS_MEAN
        from sklearn.linear_model import LinearRegression

        mean = LinearRegression(positive=True, fit_intercept=False).fit(np.sort(held_out, axis=1), left)
        return tuple(boosters), (*(float(w) for w in mean.coef_), 0.0)

    def _boost(
        self,
        make: Callable[[Design], _Task],
        params: dict[str, Any],
        max_trees: int,
        rate: float,
        min_gain: float,
    ) -> tuple[Booster | None, FloatArray]:
        """The booster with the number of trees that held-out blocks confirm, and the held-out scores (start + trees)."""
        folds: list[tuple[BoolArray, _Task, Booster | None]] = []
        losses: list[FloatArray] = []
        sizes: list[int] = []
        for b, design in enumerate(self._designs):
            task = make(design)
            out = task.block == b
            if not out.any() or out.all():
                continue
            booster, curve = self._train(task, ~out, out, params, max_trees, rate)
            folds.append((out, task, booster))
            losses.append(curve)
            sizes.append(int(out.sum()))
        trees = confirmed_trees(np.array(losses), np.array(sizes), min_gain)
        whole = make(self.design)
        scores = whole.start.copy()
        for out, task, held in folds:
            scores[out] = task.start[out]
            if trees and held is not None:
                scores[out] += held.predict(
                    task.inputs[out], raw_score=True, num_iteration=trees, num_threads=1
                )
        if trees == 0:
            return None, scores
        everything = np.ones(whole.target.size, dtype=bool)
        booster, _ = self._train(whole, everything, None, params, trees, rate)
        return booster, scores

    def _train(
        self,
        task: _Task,
        use: BoolArray,
        check: BoolArray | None,
        params: dict[str, Any],
        trees: int,
        rate: float,
    ) -> tuple[Booster, FloatArray]:
        """A booster, and its loss on `check` after 0, 1, ... trees."""
        import lightgbm

        c = self._config
        full = {
            "num_leaves": c.leaves,
            "learning_rate": rate,
            "min_data_in_leaf": min(c.min_rows_per_leaf, max(20, int(use.sum()) // 50)),
            "feature_fraction": 0.6,
            "bagging_fraction": 0.7,
            "bagging_freq": 1,
            "lambda_l2": 10.0,
            "max_bin": 127,
            "num_threads": c.threads,
            "seed": c.seed,
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
            **params,
        }
        data = lightgbm.Dataset(task.inputs[use], task.target[use], init_score=task.start[use])
        if check is None:
            made: Booster = lightgbm.train(full, data, trees)
            return made, np.zeros(trees + 1)
        held = lightgbm.Dataset(
            task.inputs[check], task.target[check], init_score=task.start[check], reference=data
        )
        record: dict[str, Any] = {}
        made = lightgbm.train(
            full, data, trees, valid_sets=[held], callbacks=[lightgbm.record_evaluation(record)]
        )
        after = next(iter(next(iter(record.values())).values()))
        before = _start_loss(params, task.target[check], task.start[check])
        # Boosting may end early for want of a useful split: the loss then stays what it was.
        curve = [before, *after]
        return made, np.array(curve + [curve[-1]] * (trees + 1 - len(curve)))


def _start_loss(params: dict[str, Any], target: FloatArray, start: FloatArray) -> float:
    """The loss of zero trees, in the metric that LightGBM records."""
    if params["objective"] == "binary":
        return _log_loss(sigmoid(start), target > 0.5)
    error = target - start
    if params["objective"] == "l2":
        return float(np.mean(error**2))
    alpha = params["alpha"]
    return float(np.mean(np.maximum(alpha * error, (alpha - 1.0) * error)))
