"""The live predictor is the one that a router holds. It uses memorised survival from the first request on, and a
fitted model once there is one.

It has no clock and reads no files except a model that it is to load. Its owner logs outcomes, runs refits
(`promote.py`) in another process, and calls `adopt_promoted` afterwards. A model file that is refused changes
nothing.

One in `sample_every` of the model's answers is remembered until its request ends, and is then given to the drift
watch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from predictors.drift import DriftReport, DriftWatch
from predictors.features import FeatureTracker
from predictors.lgbm import LgbmPredictor
from predictors.memorise import COLD, Memorised
from predictors.protocol import (
    ANY_WINDOW,
    Arrival,
    Features,
    IntArray,
    Outcome,
    Prediction,
    Predictor,
    WindowRange,
)
from predictors.store import SUFFIX, Metadata, ModelRefused, load, read_pointer

_SAMPLED_REQUESTS = 10_000
_SAMPLES_PER_REQUEST = 4


@dataclass(frozen=True, slots=True)
class LiveStats:
    """The counters of a live predictor, for metrics."""

    model_version: str | None
    outcomes: int
    censored: int
    predictions: int
    abstained: int
    refused_models: int
    last_refusal: str | None
    keys_held: int
    samples_pending: int


class LivePredictor:
    """A predictor that answers by the fitted model if that covers the window, and otherwise by memorised survival,
    which learns from every outcome.
    """

    name = "live"
    windows: WindowRange = ANY_WINDOW

    def __init__(
        self, cold: Memorised | None = None, tracker: FeatureTracker | None = None, sample_every: int = 8
    ) -> None:
        """`cold` answers before there is a model and for windows that the model does not cover. One answer in
        `sample_every` is sampled for the drift watch.
        """
        if sample_every < 1:
            raise ValueError(f"sample_every {sample_every} must be at least 1")
        self._cold = cold or Memorised(COLD)
        self._tracker = tracker or FeatureTracker()
        self._sample_every = sample_every
        self._model: Predictor | None = None
        self._metadata: Metadata | None = None
        self._previous: tuple[Predictor | None, Metadata | None] = (None, None)
        self._watch: DriftWatch | None = None
        self._pending: OrderedDict[str, list[tuple[int, int, float]]] = OrderedDict()
        self._outcomes = self._censored = self._predictions = self._abstained = self._refused = 0
        self._last_refusal: str | None = None

    def arrive(self, arrival: Arrival) -> Features:
        """Returns the features of an arriving request. Call this exactly once per request."""
        return self._tracker.arrive(arrival)

    def observe(self, outcome: Outcome) -> None:
        """Updates survival, the feature tracker and the drift watch with a request that has ended."""
        self._outcomes += 1
        self._censored += outcome.censored
        self._cold.observe(outcome)
        self._tracker.finish(outcome)
        samples = self._pending.pop(outcome.arrival.request_id, [])
        if self._watch is not None and not outcome.censored:
            self._watch.length(outcome.output_tokens)
            for age, window, p in samples:
                self._watch.resolved(p, outcome.output_tokens <= age + window)

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`."""
        model: Predictor = self._cold
        if self._model is not None and self._model.windows.low <= window_tokens <= self._model.windows.high:
            model = self._model
        made = model.predict(features, ages, window_tokens, with_total)
        first = -self._predictions % self._sample_every
        self._predictions += len(features)
        self._abstained += int(made.valid.size - made.valid.sum())
        if model is self._model:
            for row in range(first, len(features), self._sample_every):
                if made.valid[row]:
                    sample = (int(ages[row]), window_tokens, float(made.p_finish[row]))
                    self._remember(features[row].arrival.request_id, sample)
        return made

    def adopt(self, model: LgbmPredictor, metadata: Metadata) -> None:
        """Makes `model` answer all later calls, and keeps the previous model for `revert`. Drift is measured
        against the lengths on which the new model was fitted.
        """
        watch = DriftWatch(model.model.design.curve.typical_lengths())
        self._previous = (self._model, self._metadata)
        self._model, self._metadata, self._watch = model, metadata, watch
        self._pending.clear()

    def adopt_promoted(self, folder: Path) -> bool:
        """Loads the folder's promoted model if it is not the one in use. Returns True if it was adopted. A file
        that is refused is counted in `stats` and changes nothing else. Loading may take long: a process that serves
        calls `read_promoted` in a thread instead, and then `adopt` or `refuse`.
        """
        try:
            read = read_promoted(folder, self.model_version)
        except ModelRefused as error:
            self.refuse(error)
            return False
        if read is not None:
            self.adopt(*read)
        return read is not None

    def refuse(self, error: ModelRefused) -> None:
        """Counts a promoted model that could not be loaded; the model in use stays."""
        self._refused += 1
        self._last_refusal = str(error)

    def revert(self) -> bool:
        """Returns to the previous model, or to survival if there was none. Returns False if no model is in use."""
        if self._model is None:
            return False
        self._model, self._metadata = self._previous
        self._previous = (None, None)
        self._watch = None
        self._pending.clear()
        return True

    def drift(self) -> DriftReport | None:
        """Returns the drift watch's report, or None if no model is in use or the last one was reverted."""
        return None if self._watch is None else self._watch.report()

    @property
    def model_version(self) -> str | None:
        """The version of the model in use, or None if none is."""
        return None if self._metadata is None else self._metadata.version

    @property
    def model_windows(self) -> WindowRange | None:
        """The windows for which the model in use answers, or None if none is in use. Memorised survival answers for
        all others.
        """
        return None if self._model is None else self._model.windows

    def stats(self) -> LiveStats:
        """Returns the counters for metrics."""
        return LiveStats(
            model_version=self.model_version,
            outcomes=self._outcomes,
            censored=self._censored,
            predictions=self._predictions,
            abstained=self._abstained,
            refused_models=self._refused,
            last_refusal=self._last_refusal,
            keys_held=self._cold.keys_held() + self._tracker.keys_held(),
            samples_pending=sum(len(s) for s in self._pending.values()),
        )

    def _remember(self, request_id: str, sample: tuple[int, int, float]) -> None:
        kept = self._pending.setdefault(request_id, [])
        if len(kept) < _SAMPLES_PER_REQUEST:
            kept.append(sample)
        if len(self._pending) > _SAMPLED_REQUESTS:
            self._pending.popitem(last=False)


def read_promoted(folder: Path, in_use: str | None) -> tuple[LgbmPredictor, Metadata] | None:
    """Loads the folder's promoted model. Returns None if nothing was promoted or it is the version `in_use`. Raises
    ModelRefused if it cannot be loaded.
    """
    version = read_pointer(folder).current
    if version is None or version == in_use:
        return None
    return load(folder / f"{version}{SUFFIX}")
