"""The contract every length and termination predictor keeps (BalanceRoute, appendix C.1).

At age a (tokens generated so far), for a request that still runs, and for a window of H tokens:

    p  = P(total - a <= H | total > a)              -> Prediction.p_finish
    mu = E[total - a | a < total <= a + H]          -> Prediction.mean_remaining_tokens

H belongs to the call: one fitted predictor serves a range of windows and refuses every other one. The
composite of both and what a request carries between two calls are in `forecast.py`; nothing here decides or
keeps time.
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
    """Base of every error that a predictor raises on purpose."""


class WindowNotCovered(PredictorError):
    """The caller's window H lies outside the range that the predictor was fitted for."""


class NotEnoughData(PredictorError):
    """A fit was asked for on data that cannot carry it (empty, one class, too few requests)."""


class FinishReason(StrEnum):
    """Why a request left its worker. CANCELLED and ERROR leave the length *censored*: it was at least that
    long.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling and stop parameters of a request. None means that the source does not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_strings: int | None = None
    choices: int | None = None
    structured_output: bool | None = None


@dataclass(frozen=True, slots=True)
class TextSignals:
    """Cheap signals of the prompt's text; see `text.py`. The text itself is not kept."""

    chars: int
    last_turn_chars: int
    question_marks: int
    code_marks: int
    list_marks: int
    requested_words: int | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """Facts about a request that are known when it arrives. None means that the source lacks it; nothing is ever
    made up.

    `arrival_s` is seconds on any one clock; `wall_clock_s` is Unix time (UTC) where the source has it.
    `prompt_key` and `template_key` name the whole normalised prompt and its head (`text.py`), `client` the
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
    """The features of one request, taken once at its arrival: `values` is float32 (len(FEATURE_NAMES),), NaN
    = absent.
    """

    arrival: Arrival
    values: FeatureArray


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: `output_tokens` were generated, the last at `finish_s` (the clock of `arrival_s`)."""

    arrival: Arrival
    output_tokens: int
    finish_s: float
    reason: FinishReason = FinishReason.STOP

    @property
    def censored(self) -> bool:
        """True if the request would have gone on: its length is only a lower bound."""
        return self.reason in (FinishReason.CANCELLED, FinishReason.ERROR)


@dataclass(frozen=True, slots=True)
class WindowRange:
    """The windows H (tokens, both ends included) that a predictor answers for."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"window range {self.low}..{self.high}: need 1 <= low <= high")

    def require(self, window_tokens: int, who: str) -> None:
        """Raises WindowNotCovered unless low <= window_tokens <= high."""
        if not self.low <= window_tokens <= self.high:
            raise WindowNotCovered(
                f"predictor {who!r} covers windows {self.low}..{self.high}, not H={window_tokens}; "
                f"choose H in that range or fit again with --windows that contains it (H = 0 needs no forecast)"
            )


ANY_WINDOW = WindowRange(1, 1 << 40)


@dataclass(frozen=True, slots=True, eq=False)
class TotalLength:
    """Expected total output length (n,) and its quantiles (n, len(levels)), tokens, given that the request
    still runs.
    """

    mean_tokens: FloatArray
    quantiles_tokens: FloatArray
    levels: tuple[float, ...] = QUANTILE_LEVELS


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A batch of answers, arrays of shape (n,).

    Where `valid` is False the predictor abstains (p_finish is 0 and mean_remaining_tokens is H there): the
    state machine takes that as *stays*. `total` is there if it was asked for.
    """

    p_finish: FloatArray
    mean_remaining_tokens: FloatArray
    valid: BoolArray
    total: TotalLength | None = None


@runtime_checkable
class Predictor(Protocol):
    """A predictor as policies and shells know it. Calls are batched; `observe` may adapt it, `predict`
    never does.
    """

    @property
    def name(self) -> str:
        """The realisation's name, as it appears in metrics and reports."""
        ...

    @property
    def windows(self) -> WindowRange:
        """The windows H it answers for."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Takes in one finished request."""
        ...

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """Predicts for request i at age ages[i] (tokens generated so far, >= 0, still running).

        `with_total` also asks for the total length: the admission path needs it, the refresh path does not.
        Raises WindowNotCovered for a window outside `windows`, ValueError for arrays that do not fit
        together.
        """
        ...


def check_batch(features: Sequence[Features], ages: IntArray) -> IntArray:
    """The ages as int64 (n,). Raises ValueError on a length mismatch or a negative age."""
    array = np.asarray(ages, dtype=np.int64)
    if array.shape != (len(features),):
        raise ValueError(f"{len(features)} feature rows but ages of shape {array.shape}")
    if array.size and array.min() < 0:
        raise ValueError(f"age {int(array.min())} is negative")
    return array
