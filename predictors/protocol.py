"""Every length and termination predictor keeps the contract below (BalanceRoute, appendix C.1).

At age a (tokens generated so far), for a request that still runs, and for a window of H tokens:

    p  = P(total - a <= H | total > a)              -> Prediction.p_finish
    mu = E[total - a | a < total <= a + H]          -> Prediction.mean_remaining_tokens

H is an argument of each call. One fitted predictor serves a range of windows and refuses all others. `forecast.py`
combines p and mu into the forecast that a request carries between two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
FeatureArray: TypeAlias = npt.NDArray[np.float32]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

QUANTILE_LEVELS = (0.1, 0.5, 0.9)


class PredictorError(Exception):
    """The base class of every error that a predictor raises on purpose."""


class WindowNotCovered(PredictorError):
    """The caller's window H lies outside the range that the predictor was fitted for."""


class NotEnoughData(PredictorError):
    """The data is not enough for a fit (it is empty, has one class only, or has too few requests)."""


class FinishReason(StrEnum):
    """The reason why a request left its worker. After CANCELLED and ERROR its length is *censored*, which means
    that the full length would have been at least that.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling and stop parameters of a request. None means that the source does not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_strings: int | None = None
    choices: int | None = None
    structured_output: bool | None = None


@dataclass(frozen=True, slots=True)
class TextSignals:
    """Numbers computed cheaply from the prompt's text (`text.py`). The text itself is not kept."""

    chars: int
    last_turn_chars: int
    question_marks: int
    code_marks: int
    list_marks: int
    requested_words: int | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """Facts about a request that are known when it arrives. A fact that the source lacks is None and never
    invented.

    `arrival_s` is in seconds on one clock that all requests share; `wall_clock_s` is Unix time (UTC). `prompt_key`
    and `template_key` are digests of the whole normalised prompt and of its head (`text.py`). `client` is the
    tenant.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    traffic_class: str | None = None
    model: str | None = None
    client: str | None = None
    session: str | None = None
    turn: int | None = None
    prompt_key: str | None = None
    template_key: str | None = None
    wall_clock_s: float | None = None
    text: TextSignals | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The features of one request, computed once at its arrival. `values` is float32 (len(FEATURE_NAMES),), with
    NaN for an absent feature.
    """

    arrival: Arrival
    values: FeatureArray


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request: the number of tokens it generated, the time `finish_s` when it ended (on the clock of
    `arrival_s`), and the reason.
    """

    arrival: Arrival
    output_tokens: int
    finish_s: float
    reason: FinishReason = FinishReason.STOP

    @property
    def censored(self) -> bool:
        """True if the request was stopped early, so that its length is only a lower bound."""
        return self.reason in (FinishReason.CANCELLED, FinishReason.ERROR)


@dataclass(frozen=True, slots=True)
class WindowRange:
    """The range of windows H (tokens, both ends included) that a predictor covers."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"window range {self.low}..{self.high}: need 1 <= low <= high")

    def require(self, window_tokens: int, who: str) -> None:
        """Raises WindowNotCovered unless low <= window_tokens <= high. `who` is the predictor's name for the
        message.
        """
        if not self.low <= window_tokens <= self.high:
            raise WindowNotCovered(
                f"predictor {who!r} covers windows {self.low}..{self.high}, not H={window_tokens}; "
                f"choose H in that range or fit again with --windows that contains it (H = 0 needs no forecast)"
            )


ANY_WINDOW = WindowRange(1, 1 << 40)


@dataclass(frozen=True, slots=True, eq=False)
class TotalLength:
    """The expected total output length (n,) and its quantiles (n, len(levels)), in tokens, given that the request
    still runs.
    """

    mean_tokens: FloatArray
    quantiles_tokens: FloatArray
    levels: tuple[float, ...] = QUANTILE_LEVELS


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A predictor's answers for a batch of n requests, as arrays (n,).

    Where `valid` is False the predictor abstains: p_finish is 0 and mean_remaining_tokens is H. The state machine
    treats that as *stays*. `total` is None unless the caller asked for it.
    """

    p_finish: FloatArray
    mean_remaining_tokens: FloatArray
    valid: BoolArray
    total: TotalLength | None = None


@runtime_checkable
class Predictor(Protocol):
    """The interface of a predictor. Calls are batched. `observe` may change what it predicts later; `predict` never
    does.
    """

    @property
    def name(self) -> str:
        """The name of the kind of predictor, as metrics and reports show it."""
        ...

    @property
    def windows(self) -> WindowRange:
        """The windows H that the predictor covers."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Lets the predictor learn from one request that has ended."""
        ...

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """Predicts for request i at age ages[i] (tokens generated so far, >= 0, still running).

        With `with_total` the answer includes the total length, which is needed at admission but not at a refresh.
        Raises WindowNotCovered for a window outside `windows`, and ValueError for arrays that do not fit together.
        """
        ...


def check_batch(features: Sequence[Features], ages: IntArray) -> IntArray:
    """Returns the ages as int64 (n,). Raises ValueError if there is not one age per request, or an age is negative."""
    array = np.asarray(ages, dtype=np.int64)
    if array.shape != (len(features),):
        raise ValueError(f"{len(features)} feature rows but ages of shape {array.shape}")
    if array.size and array.min() < 0:
        raise ValueError(f"age {int(array.min())} is negative")
    return array
