"""`fit_lgbm` fits the LightGBM realisation (`lgbm.py`).

The training span is cut into contiguous blocks of time. Each block is held out once. Each booster gets the number
of trees with the least held-out loss, *zero included*; a gain that some block does not confirm is ignored. The
calibration is chosen on the held-out log odds, again leaving out one block at a time. The boosters are then fitted
on all blocks.

Blocks are used because requests near in time resemble each other, so a random split overestimates the gain. A
single last block would tie the number of trees and the calibration to one state of the traffic; that was worse on
two of four traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from predictors.boost import Boosted, Booster, BoostSpec, Task, boost, confirmed, gains
from predictors.calibration import choose_calibration, log_loss
from predictors.design import Design, Rung, group_window
from predictors.features import (
    CLOCK_FEATURES,
    FEATURE_NAMES,
    SCALAR_FEATURES,
    SKETCH_SCOPES,
    TIME_FEATURES,
    stack,
)
from predictors.lgbm import LgbmModel, LgbmPredictor
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

DEFAULT_WINDOWS = WindowRange(1, 96)  # Windows that policies sweep.
_SECONDS_PER_DAY = 86_400.0
_PROBE_TREES = 15
# Weights that take the survival curve's own mean, because three quantiles miss the mean of a heavy tail.
_SURVIVALS_MEAN = (0.0,) * len(QUANTILE_LEVELS) + (1.0,)


@dataclass(frozen=True, slots=True)
class LgbmConfig:
    """The parameters of a fit. The defaults keep a fit on 20,000 requests well below a minute on two cores."""

    windows: WindowRange = DEFAULT_WINDOWS
    stride_tokens: int = 16
    max_rows: int = 150_000
    blocks: int = 4
    max_features: int = 24
    max_trees: int = 32
    leaves: int = 31
    learning_rate: float = 0.18
    regressor_max_trees: int = 16
    regressor_leaves: int = 8
    regressor_min_rows: int = 2_000
    regressor_learning_rate: float = 0.12
    quantile_max_trees: int = 12
    quantile_learning_rate: float = 0.3
    min_rows_per_leaf: int = 300
    shrinks: tuple[float, ...] = (2.0, 8.0, 32.0)
    min_gain: float = 0.002
    regressor_min_gain: float = 0.0005
    quantile_min_gain: float = 0.01
    calibration_min_gain: float = 0.01
    min_requests: int = 500
    prior_weight: float = 1.0
    threads: int = 1
    seed: int = 0


def fit_lgbm(
    outcomes: Sequence[Outcome],
    features: Sequence[Features],
    config: LgbmConfig,
    progress: Callable[[str], None] = lambda _: None,
) -> LgbmPredictor:
    """Fits a model on `outcomes`, which are in order of arrival, and their `features` (made by `features.replay`).

    Raises NotEnoughData if there are fewer than `min_requests` uncensored requests, or if all training rows have
    the same label.
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
    fit.keep_best(rows, windows, label)
    progress(f"features kept: {', '.join(fit.design.names)}")
    classifier = fit.classifier(rows, windows, label)
    progress(f"classifier: {_size(classifier.booster)} trees")
    calibration = choose_calibration(
        classifier.held_out, windows, label, blocks[rows.request], config.calibration_min_gain
    )
    progress(f"calibration: {calibration.kind}")
    regressor = fit.regressor(regression_rows(outcomes, config)).booster
    progress(f"regressor: {_size(regressor)} trees")
    quantiles, weights = fit.quantiles(rows)
    progress(f"quantiles: {[_size(q) for q in quantiles]} trees")
    return LgbmPredictor(
        LgbmModel(fit.design, config.windows, classifier.booster, regressor, quantiles, weights, calibration)
    )


def training_rows(outcomes: Sequence[Outcome], config: LgbmConfig) -> Walk:
    """Returns the age points to train on, at most 64 a request on average, because those of one request are much
    alike. If there are few points, the stride is halved (down to a quarter). If there are still few, each point is
    repeated up to eight times, so that it gets several windows; that steadies the fit at no cost.
    """
    most = min(config.max_rows, 64 * len(outcomes))
    stride = config.stride_tokens
    rows = walk(outcomes, stride, most, config.seed)
    while len(rows) < most // 4 and stride > max(1, config.stride_tokens // 4):
        stride //= 2
        rows = walk(outcomes, stride, most, config.seed)
    return _repeat(rows, min(8, most // max(1, len(rows))))


def regression_rows(outcomes: Sequence[Outcome], config: LgbmConfig) -> Walk:
    """Returns the age points near the end of each request, each repeated four times to get four windows."""
    stride = max(1, config.stride_tokens // 4)
    most = min(config.max_rows, 64 * len(outcomes))
    return _repeat(walk_tails(outcomes, stride, config.windows.high, most // 4, config.seed), 4)


def _repeat(rows: Walk, copies: int) -> Walk:
    if copies < 2:
        return rows
    return Walk(
        np.repeat(rows.request, copies), np.repeat(rows.ages, copies), np.repeat(rows.remaining, copies)
    )


def usable_features(values: FeatureArray, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Returns the scalar features with at least two distinct values and 100 known rows. The time of day is used
    only if the data spans two days.
    """
    span_s = outcomes[-1].arrival.arrival_s - outcomes[0].arrival.arrival_s
    left_out = CLOCK_FEATURES | (TIME_FEATURES if span_s < 2 * _SECONDS_PER_DAY else frozenset())
    used = []
    for column, name in enumerate(SCALAR_FEATURES):
        there = values[:, column][np.isfinite(values[:, column])]
        if name not in left_out and there.size >= 100 and there.min() < there.max():
            used.append(name)
    return tuple(used)


def usable_sketches(values: FeatureArray) -> tuple[str, ...]:
    """Returns the scopes for which at least 100 requests carry a sketch."""
    return tuple(s for s in SKETCH_SCOPES if (values[:, FEATURE_NAMES.index(f"{s}_weight")] > 0).sum() >= 100)


def _size(booster: Booster | None) -> int:
    return 0 if booster is None else booster.num_trees()


class _Fit:
    """The data of one fit and the steps of fitting on it."""

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
        # The rows of a held-out block start from a curve that was fitted without that block.
        self._designs = [
            Design.of(names, sketches, (), self.curve(blocks != b)) for b in range(config.blocks)
        ]
        self.design = Design.of(names, sketches, (), self.curve(np.ones_like(censored)))

    def curve(self, requests: BoolArray) -> SurvivalCurve:
        """Returns the survival curve of the chosen requests, with the weak prior at weight `prior_weight`."""
        prior, weights = weak_prior(self._config.prior_weight)
        chosen = self._lengths[requests]
        return SurvivalCurve.fit(
            np.concatenate((chosen, prior)),
            np.concatenate((np.ones_like(chosen), weights)),
            np.concatenate((self._censored[requests], np.zeros(prior.size, dtype=bool))),
        )

    def choose_ladder(self, rows: Walk, windows: IntArray, label: BoolArray) -> tuple[Rung, ...]:
        """Chooses the rungs of the ladder greedily, from broad to narrow. A scope enters, with the best weight of
        `shrinks`, if the log loss falls by `min_gain` on the whole and falls in every block. Sketches use only
        earlier requests, so only the survival curve has to be held out.
        """
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
                    [log_loss(q[block == b], label[block == b]) for q in (p, *(t[0][0] for t in tried))]
                    for b in np.unique(block)
                ]
            )
            best = confirmed(losses, np.bincount(block)[np.unique(block)], self._config.min_gain)
            if best:
                (p, mu), shrink = tried[best - 1]
                ladder.append(Rung(scope, shrink))
        # A sketch that was not confirmed is dropped, because it would cost time in every call.
        heard, rungs = tuple(r.scope for r in ladder), tuple(ladder)
        self._designs = [replace(d, sketches=heard, ladder=rungs) for d in self._designs]
        self.design = replace(self.design, sketches=heard, ladder=rungs)
        return rungs

    def spec(self, objective: str, **changes: Any) -> BoostSpec:
        """Returns the classifier's booster settings, with `changes` applied."""
        c = self._config
        base = BoostSpec(
            objective,
            c.max_trees,
            c.learning_rate,
            c.leaves,
            c.min_rows_per_leaf,
            c.min_gain,
            c.threads,
            c.seed,
        )
        return replace(base, **changes)

    def _boost(self, spec: BoostSpec, make: Callable[[Design], Task]) -> Boosted:
        return boost(spec, [partial(make, d) for d in self._designs], partial(make, self.design))

    def keep_best(self, rows: Walk, windows: IntArray, label: BoolArray) -> None:
        """Keeps only the `max_features` features from which a first, small booster gains most, because each column
        costs time in every call.
        """
        found = gains(self.spec("binary"), self._stage_one(rows, windows, label, self.design), _PROBE_TREES)
        ranked = np.argsort(-found[: self.design.columns.size], kind="stable")[: self._config.max_features]
        names = [self.design.names[i] for i in np.sort(ranked) if found[i] > 0.0]
        self._designs = [d.narrowed(names) for d in self._designs]
        self.design = self.design.narrowed(names)

    def _stage_one(self, rows: Walk, windows: IntArray, label: BoolArray, design: Design) -> Task:
        start = design.at_window(self._values[rows.request], rows.ages, windows)
        return Task(start.inputs, label.astype(np.float64), start.z, self._blocks[rows.request])

    def classifier(self, rows: Walk, windows: IntArray, label: BoolArray) -> Boosted:
        """Fits stage 1. Its scores are log odds."""
        return self._boost(self.spec("binary"), partial(self._stage_one, rows, windows, label))

    def regressor(self, rows: Walk) -> Boosted:
        """Fits stage 2 on the rows that finish within their window. Its scores are shares of the window. H = 1 is
        left out, because its only possible answer is 1.
        """
        c = self._config
        windows = draw_windows(len(rows), c.windows.low, c.windows.high, c.seed + 3)
        keep = rows.finishes(windows) & (windows > 1)
        request, ages, w = rows.request[keep], rows.ages[keep], windows[keep]

        def task(design: Design) -> Task:
            start = design.at_window(self._values[request], ages, w)
            target = (rows.remaining[keep] - start.mu) / w
            return Task(start.inputs, target, np.zeros(ages.size), self._blocks[request])

        spec = self.spec(
            "l2",
            max_trees=c.regressor_max_trees,
            learning_rate=c.regressor_learning_rate,
            leaves=c.regressor_leaves,
            min_rows_per_leaf=c.regressor_min_rows,
            min_gain=c.regressor_min_gain,
        )
        return self._boost(spec, task)

    def quantiles(self, rows: Walk) -> tuple[tuple[Booster | None, ...], tuple[float, ...]]:
        """Fits a booster per quantile level and the weights that combine the quantiles into a mean. About half of
        the rows have age 0, because the router asks for the total length at arrival.
        """
        c = self._config
        picked = np.random.default_rng(c.seed + 2).permutation(len(rows))[: self._lengths.size]
        first = np.flatnonzero(~self._censored & (self._lengths > 0))
        request = np.concatenate((rows.request[picked], first))
        ages = np.concatenate((rows.ages[picked], np.zeros_like(first)))
        left = np.concatenate((rows.remaining[picked], self._lengths[first].astype(np.int64)))
        values, block = self._values[request], self._blocks[request]

        def task(column: int, design: Design) -> Task:
            base = design.curve.total(ages).quantiles_tokens[:, column] - ages
            return Task(design.at_age(values, ages), np.log(left), np.log(np.maximum(base, 1.0)), block)

        made = [
            self._boost(
                self.spec(
                    "quantile",
                    alpha=level,
                    max_trees=c.quantile_max_trees,
                    learning_rate=c.quantile_learning_rate,
                    min_gain=c.quantile_min_gain,
                ),
                partial(task, column),
            )
            for column, level in enumerate(QUANTILE_LEVELS)
        ]
        boosters = tuple(m.booster for m in made)
        if not any(boosters):
            return boosters, _SURVIVALS_MEAN
        from sklearn.linear_model import LinearRegression

        held_out = np.exp(np.clip(np.column_stack([m.held_out for m in made]), 0.0, 20.0))
        mean = LinearRegression(positive=True, fit_intercept=False).fit(np.sort(held_out, axis=1), left)
        return boosters, (*(float(w) for w in mean.coef_), 0.0)
