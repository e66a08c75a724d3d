"""Training splits outcomes by time, fits a model on the first part, judges all predictors on the held-out part, and
makes the model's metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from predictors.evaluate import Constant, Evaluation, HeldOut, evaluate
from predictors.features import replay
from predictors.lgbm import LgbmModel, LgbmPredictor, to_payload
from predictors.lgbm_fit import LgbmConfig, fit_lgbm
from predictors.memorise import CLIENT, EXACT_MATCH, PROMPT_LENGTH, Memorised
from predictors.oracle import Oracle
from predictors.outcomes import read_log
from predictors.permutation import SignalTest, signal_test
from predictors.protocol import Features, NotEnoughData, Outcome, Predictor, WindowRange
from predictors.servegen import load_clients, sample
from predictors.store import Metadata, library_versions
from predictors.survival import EmpiricalSurvival
from predictors.traces import load_trace

Progress = Callable[[str], None]
_SWEEP = (1, 8, 24, 48, 96)


def quiet(_: str) -> None:
    """Ignores a progress message."""


def load_source(path: Path, requests: int, seed: int) -> list[Outcome]:
    """Returns outcomes in order of arrival from a trace file, the folder of an outcome log, or a ServeGen folder or
    archive, of which about `requests` requests are sampled. Raises TraceError.
    """
    if path.is_dir() and any(path.glob("outcomes-*.jsonl")):
        return sorted(read_log(path).outcomes, key=lambda o: o.arrival.arrival_s)
    if path.is_dir() or ".tar" in path.suffixes:
        return sample(load_clients(path), requests, seed)
    return load_trace(path)


def default_windows(windows: WindowRange) -> tuple[int, ...]:
    """Returns the windows that a report shows: the ends of the range, and the swept windows inside it."""
    inside = {w for w in _SWEEP if windows.low <= w <= windows.high}
    return tuple(sorted(inside | {windows.low, windows.high}))


def fit_split(
    outcomes: Sequence[Outcome],
    features: Sequence[Features],
    first_held_out: int,
    config: LgbmConfig,
    progress: Progress = quiet,
) -> LgbmPredictor:
    """Fits a LightGBM model on the requests before index `first_held_out`. Requests that had not ended when that
    one arrived are left out, because their lengths were not known then. Raises NotEnoughData.
    """
    now_s = outcomes[first_held_out].arrival.arrival_s if first_held_out < len(outcomes) else float("inf")
    known = [i for i in range(first_held_out) if outcomes[i].finish_s < now_s]
    if not known:
        raise NotEnoughData("no request had ended before the held-out part begins")
    return fit_lgbm([outcomes[i] for i in known], [features[i] for i in known], config, progress)


def references(outcomes: Sequence[Outcome], first: int) -> dict[str, Predictor]:
    """Returns the predictors that LightGBM is compared with, by name. *survival* and *constant* are fitted on the
    training part and frozen; the others start empty and learn from each outcome as it comes, training part
    included.
    """
    train = outcomes[:first]
    made: dict[str, Predictor] = {
        "constant": Constant(train),
        "survival": EmpiricalSurvival.fit(train),
        "survival, learning": EmpiricalSurvival(capacity=5_000),
        "memorised, prompt": Memorised(EXACT_MATCH),
        "memorised, prompt length": Memorised((PROMPT_LENGTH,)),
        "memorised, client": Memorised((CLIENT,)),
        "oracle": Oracle({o.arrival.request_id: o.output_tokens for o in outcomes}),
    }
    if all(o.arrival.client is None for o in train):
        del made["memorised, client"]
    if all(o.arrival.prompt_key is None for o in train):
        del made["memorised, prompt"]
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A fitted model, the evaluation of each predictor by name, and the signal test, all on the held-out part.
    `signal` is None if fewer than 100 held-out requests finished.
    """

    predictor: LgbmPredictor
    evaluations: dict[str, Evaluation]
    signal: SignalTest | None
    held: HeldOut
    requests: int
    first_held_out: int


def train_and_judge(
    outcomes: Sequence[Outcome], config: LgbmConfig, held_out_share: float = 0.2, progress: Progress = quiet
) -> Judged:
    """Fits on the first part by time and judges every predictor on the rest. Raises NotEnoughData if the data is
    too small.
    """
    if not 0.0 < held_out_share < 1.0:
        raise ValueError(f"held_out_share {held_out_share} must lie between 0 and 1")
    first = int(len(outcomes) * (1.0 - held_out_share))
    if first < 1 or first >= len(outcomes):
        raise NotEnoughData(f"{len(outcomes)} requests cannot be split into a training and a held-out part")
    progress(f"features of {len(outcomes)} requests")
    features = replay(outcomes)
    predictor = fit_split(outcomes, features, first, config, progress)
    held = HeldOut.of(
        outcomes, features, first, default_windows(config.windows), config.stride_tokens, seed=config.seed
    )
    found: dict[str, Evaluation] = {}
    for name, other in references(outcomes, first).items():
        progress(f"judging {name}")
        found[name] = evaluate(name, other, held)
    progress("judging lightgbm")
    found["lightgbm"] = evaluate("lightgbm", predictor, held)
    signal = None
    if sum(not o.censored for o in outcomes[first:]) >= 100:
        signal = signal_test(outcomes[first:], features[first:], seed=config.seed)
    return Judged(predictor, found, signal, held, len(outcomes), first)


def metadata_of(
    model: LgbmModel,
    trained_on: Sequence[Outcome],
    source: str,
    config: LgbmConfig,
    evaluations: Sequence[Evaluation],
) -> Metadata:
    """Returns the metadata of a fitted model. The version contains a digest of the model, so that equal fits have
    equal names.
    """
    digest = hashlib.sha256(json.dumps(to_payload(model)).encode()).hexdigest()[:12]
    return Metadata(
        version=f"lgbm-{len(trained_on)}-{digest}",
        source=source,
        requests=len(trained_on),
        first_arrival_s=trained_on[0].arrival.arrival_s,
        last_arrival_s=trained_on[-1].arrival.arrival_s,
        windows=(model.windows.low, model.windows.high),
        features=(*model.design.names, *(f"{s}_sketch" for s in model.design.sketches)),
        config=asdict(config),
        metrics={e.name: summary(e) for e in evaluations},
        versions=library_versions(),
    )


def summary(evaluation: Evaluation) -> Mapping[str, float | None]:
    """Returns the scores that a stored model's metadata keeps of an evaluation."""
    o, t = evaluation.overall, evaluation.total_at_arrival
    return {
        "roc_auc": o.roc_auc,
        "brier": o.brier,
        "ece": o.ece,
        "conditional_mae_tokens": o.conditional_mae_tokens,
        "pinball_at_arrival_tokens": t.pinball_tokens,
        "total_mae_at_arrival_tokens": t.mean_mae_tokens,
    }
