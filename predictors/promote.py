"""A refit fits a new model on the outcome log and decides whether it replaces the model in use.

`refit` takes picklable arguments, and the router runs it in a separate process of low priority, so that it does not
slow serving. It fits on the older part of the outcome log and judges the new model and the one in use on the newest
part. The new model has seen none of that part. The one in use may have, which can only favour it. The new model is
promoted only if it wins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from predictors.evaluate import Evaluation, HeldOut, evaluate
from predictors.features import replay
from predictors.lgbm_fit import LgbmConfig
from predictors.memorise import COLD, Memorised
from predictors.outcomes import read_log
from predictors.protocol import NotEnoughData, Outcome, Predictor
from predictors.store import SUFFIX, ModelRefused, load_current, promote, prune, save
from predictors.train import default_windows, fit_split, metadata_of


@dataclass(frozen=True, slots=True)
class PromotionRules:
    """The rules by which a new model may replace the one in use, judged on recent held-out data."""

    min_brier_gain: float = 0.002  # relative
    max_mae_loss: float = 0.01  # relative
    max_ece: float = 0.02
    min_held_out_requests: int = 100


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to promote a model, and the reason as a text with numbers."""

    promote: bool
    reason: str


def decide(rules: PromotionRules, held_out_requests: int, current: Evaluation, new: Evaluation) -> Decision:
    """Decides whether `new` replaces `current`. The new calibration error may exceed `max_ece` only if it is no
    larger than the current model's.
    """
    if held_out_requests < rules.min_held_out_requests:
        return Decision(False, f"{held_out_requests} held-out requests are too few to judge by")
    old_brier, new_brier = current.overall.brier, new.overall.brier
    if old_brier is None or new_brier is None:
        return Decision(False, "no age point to judge by")
    gain = f"Brier {new_brier:.5f} against {old_brier:.5f}"
    if not new_brier <= old_brier * (1.0 - rules.min_brier_gain):
        return Decision(False, f"{gain}: not better by {rules.min_brier_gain:.1%}")
    old_mae, new_mae = current.overall.conditional_mae_tokens, new.overall.conditional_mae_tokens
    if old_mae is not None and new_mae is not None and new_mae > old_mae * (1.0 + rules.max_mae_loss):
        return Decision(False, f"{gain}, but conditional MAE {new_mae:.2f} against {old_mae:.2f} tokens")
    old_ece, new_ece = current.overall.ece, new.overall.ece
    if new_ece is not None and old_ece is not None and new_ece > max(rules.max_ece, old_ece):
        return Decision(False, f"{gain}, but calibration error {new_ece:.4f} above {rules.max_ece}")
    return Decision(True, gain)


@dataclass(frozen=True, slots=True)
class RefitJob:
    """The arguments of one refit: the folders of the outcome log and of the models, and how much of the log to use."""

    log_folder: Path
    model_folder: Path
    config: LgbmConfig = field(default_factory=LgbmConfig)
    rules: PromotionRules = PromotionRules()
    newest_requests: int = 20_000
    held_out_share: float = 0.2
    keep_models: int = 3
    niceness: int = 10


@dataclass(frozen=True, slots=True)
class RefitResult:
    """The result of a refit: the version fitted (None if there was not enough data), whether it was promoted, and
    why.
    """

    version: str | None
    promoted: bool
    reason: str
    requests: int
    damaged_lines: int


def refit(job: RefitJob) -> RefitResult:
    """Fits, judges and saves a model, and promotes it if it wins. Run it in a separate process, because it lowers
    the process's priority.

    Raises ModelRefused for a damaged pointer, FileNotFoundError if there is no log, OSError if the disk
    refuses.
    """
    if job.niceness and hasattr(os, "nice"):
        os.nice(job.niceness)
    contents = read_log(job.log_folder, newest=job.newest_requests)
    outcomes = sorted(contents.outcomes, key=lambda o: o.arrival.arrival_s)
    damaged = len(contents.damage)
    try:
        return _refit(job, outcomes, damaged)
    except NotEnoughData as error:
        return RefitResult(None, False, str(error), len(outcomes), damaged)


def _refit(job: RefitJob, outcomes: Sequence[Outcome], damaged: int) -> RefitResult:
    if len(outcomes) < 2:
        raise NotEnoughData(f"{len(outcomes)} outcomes in the log are too few to fit on")
    features = replay(outcomes)
    first = max(1, int(len(outcomes) * (1.0 - job.held_out_share)))
    model = fit_split(outcomes, features, first, job.config)
    held = HeldOut.of(
        outcomes, features, first, default_windows(job.config.windows), job.config.stride_tokens
    )
    new = evaluate("new", model, held)
    serving, note = _in_use(job.model_folder)
    current = evaluate("current", serving, held)
    decision = decide(job.rules, len(outcomes) - first, current, new)
    metadata = metadata_of(
        model.model, outcomes[:first], f"outcome log, {len(outcomes)} requests", job.config, [current, new]
    )
    if not (job.model_folder / f"{metadata.version}{SUFFIX}").exists():
        save(job.model_folder, model.model, metadata)
    if decision.promote:
        promote(job.model_folder, metadata.version)
    prune(job.model_folder, job.keep_models)
    return RefitResult(metadata.version, decision.promote, decision.reason + note, len(outcomes), damaged)


def _in_use(folder: Path) -> tuple[Predictor, str]:
    """Returns the predictor that a new model has to beat, and a note for the reason. It is the promoted model, or
    memorised survival if there is none or it cannot be loaded.
    """
    try:
        loaded = load_current(folder)
    except ModelRefused as error:
        return Memorised(COLD), f" (the current model was refused: {error})"
    return (Memorised(COLD), "") if loaded is None else (loaded[0], "")
