"""A forecast source whose quality is a dial, and a judge that measures the quality of any source while it is used.

`Dial` knows the true lengths, adds noise, and answers with the probability that follows from what is left. It is
calibrated by construction: a bad dial is unsure rather than wrong. For a request with R tokens to come, a window of H
and y = 1 if R <= H, else 0:

    p    logit p = logit q + d z - d^2 / 2,   z = d y + n,   d = sqrt(2) * (standard normal quantile of the AUC)
    mu   m + r^2 (min(R, H) - m) + r sqrt(1 - r^2) s n',   r = 2 AUC - 1,   cut to 1..H
    total length, in logarithms, by the formula of mu without the cut; its mean is that of a lognormal

    q, m, s   of past requests at all their ages: the share that ends within H, and the mean and deviation of what
              those have left; for the total the mean and deviation of the logarithms of their lengths
    n, n'     standard normal numbers, drawn once for each request and quantity: a predictor errs about a request, and
              errs again when it is asked again

z of the two classes is normal with equal deviations and means d apart, so the ROC curve has the area AUC. At 0.5 the
answer is q for every request, which is worse than survival, because survival knows the age. At 1 it is the oracle.

A run asks at other ages than those of the formula, and of few requests, so the area differs from the dial. `Judge`
therefore notes what a predictor answers to each refresh and what became of it.

ASSUMPTION: n and n' do not depend on the age or on one another, and r = 2 AUC - 1 ties the three quantities to one
dial. Not claimed: the errors of any real predictor, which come in groups of like requests.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logit, ndtri

from predictors import metrics
from predictors.oracle import Oracle
from predictors.protocol import (
    ANY_WINDOW,
    QUANTILE_LEVELS,
    Features,
    FloatArray,
    IntArray,
    Outcome,
    Prediction,
    Predictor,
    TotalLength,
    WindowRange,
    check_batch,
)
from predictors.samples import walk

STRIDE_TOKENS = 16
"""Distance of the ages at which past requests are looked at; routers ask about a request this often."""
MAX_ROWS = 200_000


@dataclass(frozen=True, slots=True)
class Past:
    """Statistics of requests in general: the tokens `left` (n,) that past ones had to come at all their ages, and the
    mean and the deviation of the logarithms of their lengths.
    """

    left: IntArray
    log_mean: float
    log_sd: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Past:
        """Returns what `outcomes` say of requests in general. Raises ValueError where there are none."""
        if not outcomes:
            raise ValueError("the past has no requests: a dial needs some to know how often requests end")
        logs = np.log([max(1, o.output_tokens) for o in outcomes])
        left = walk(outcomes, STRIDE_TOKENS, MAX_ROWS, seed=0).remaining
        return cls(left, float(logs.mean()), float(logs.std()))

    def window(self, window_tokens: int) -> tuple[float, float, float]:
        """Returns (q, m, s) of the module docstring for a window."""
        inside = self.left[self.left <= window_tokens]
        # A half of a row on either side keeps q from 0 and 1.
        q = (inside.size + 0.5) / (self.left.size + 1.0)
        if not inside.size:
            return q, window_tokens / 2.0, 0.0
        return q, float(inside.mean()), float(inside.std())


class Dial:
    """A predictor that knows the lengths as well as a chosen AUC says (see the module)."""

    name = "dial"
    windows: WindowRange = ANY_WINDOW

    def __init__(self, lengths_tokens: Mapping[str, int], past: Past, auc: float, seed: int) -> None:
        """`lengths_tokens` maps a request id to its total output tokens; a simulator may add to it later.

        Raises ValueError for an AUC outside 0.5..1.
        """
        if not 0.5 <= auc <= 1.0:
            raise ValueError(f"an AUC of {auc}: give 0.5 (knows nothing) to 1 (the oracle)")
        self._oracle, self._past, self._auc, self._seed = Oracle(lengths_tokens), past, auc, seed
        self._shift = math.sqrt(2.0) * float(ndtri(auc))
        self._known = 2.0 * auc - 1.0
        self._windows: dict[int, tuple[float, float, float]] = {}
        self._noises: dict[str, FloatArray] = {}

    def observe(self, outcome: Outcome) -> None:
        """Forgets the request's noise; the dial learns nothing."""
        self._noises.pop(outcome.arrival.request_id, None)

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`. A row is invalid where the oracle's is."""
        true = self._oracle.predict(features, ages, window_tokens, with_total=True)
        assert true.total is not None
        if self._auc == 1.0:
            return true if with_total else Prediction(true.p_finish, true.mean_remaining_tokens, true.valid)
        if window_tokens not in self._windows:
            self._windows[window_tokens] = self._past.window(window_tokens)
        share, mean, deviation = self._windows[window_tokens]
        noise = np.array([self._noise(f.arrival.request_id) for f in features]).reshape(-1, 3)
        z = self._shift * true.p_finish + noise[:, 0]
        p = expit(logit(share) + self._shift * z - self._shift**2 / 2.0)
        # The oracle answers H where the request does not end within the window.
        mu = self._estimate(true.mean_remaining_tokens, mean, deviation, noise[:, 1])
        total = self._total(true.total, noise[:, 2], ages) if with_total else None
        return Prediction(p, np.clip(mu, 1.0, window_tokens), true.valid, total)

    def _noise(self, request_id: str) -> FloatArray:
        """Returns the request's three standard normal numbers, which depend on the seed and the id alone."""
        if request_id not in self._noises:
            rng = np.random.default_rng((self._seed, zlib.crc32(request_id.encode())))
            self._noises[request_id] = rng.standard_normal(3)
        return self._noises[request_id]

    def _estimate(self, truth: FloatArray, mean: float, deviation: float, noise: FloatArray) -> FloatArray:
        """Returns the mean of a normal quantity given a signal whose correlation with the truth is r."""
        r = self._known
        return mean + r * r * (truth - mean) + r * math.sqrt(1.0 - r * r) * deviation * noise

    def _total(self, true: TotalLength, noise: FloatArray, ages: IntArray) -> TotalLength:
        past, rest = self._past, self._past.log_sd * math.sqrt(1.0 - self._known**2)
        log = self._estimate(np.log(true.mean_tokens), past.log_mean, past.log_sd, noise)
        least = np.asarray(ages) + 1.0
        quantiles = np.exp(log[:, None] + rest * ndtri(np.array(QUANTILE_LEVELS))[None, :])
        return TotalLength(
            np.maximum(np.exp(log + rest * rest / 2.0), least), np.maximum(quantiles, least[:, None])
        )


class Judge:
    """A predictor that passes another's answers on, and notes those to refreshes and what was true then.

    The answers at arrival, which include the total length, are not noted: no policy reads their p. Nor are those about
    requests that arrived before `since_s`, in seconds on the clock of their arrivals.
    """

    def __init__(
        self, judged: Predictor, lengths_tokens: Mapping[str, int], since_s: float = -math.inf
    ) -> None:
        self._judged, self._lengths, self._since_s = judged, lengths_tokens, since_s
        self.name, self.windows = judged.name, judged.windows
        self._p: list[FloatArray] = []
        self._mu: list[FloatArray] = []
        self._left: list[IntArray] = []
        self._window: list[int] = []

    def observe(self, outcome: Outcome) -> None:
        """Lets the judged predictor learn from a request that has ended."""
        self._judged.observe(outcome)

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`; the answer is the judged predictor's."""
        made = self._judged.predict(features, ages, window_tokens, with_total)
        if not with_total and len(features):
            total = [self._lengths.get(f.arrival.request_id, 0) for f in features]
            left = np.array(total, dtype=np.int64) - check_batch(features, ages)
            # A request whose last token is on its way has none to come; nobody can be right about it.
            kept = (left > 0) & np.array([f.arrival.arrival_s >= self._since_s for f in features])
            self._p.append(made.p_finish[kept])
            self._mu.append(made.mean_remaining_tokens[kept])
            self._left.append(left[kept])
            self._window.append(window_tokens)
        return made

    def scores(self, gate: float) -> dict[str, float | None]:
        """Returns AUC, Brier score and conditional MAE (tokens) of all refreshes, their number, the share whose p
        passes `gate`, and the share of those that do end within the window. A score is None where it is not defined.
        """
        if not self._p:
            return {"auc": None, "brier": None, "mae_tokens": None, "refreshes": 0.0,
                    "gate_share": None, "gate_right": None}  # fmt: skip
        p, mu, left = np.concatenate(self._p), np.concatenate(self._mu), np.concatenate(self._left)
        sizes = [len(rows) for rows in self._p]
        ends = left <= np.repeat(self._window, sizes)
        passed = p >= gate
        return {
            "auc": metrics.roc_auc(p, ends),
            "brier": metrics.brier(p, ends),
            "mae_tokens": metrics.conditional_mae(mu, left, ends),
            "refreshes": float(p.size),
            "gate_share": float(passed.mean()) if p.size else None,
            "gate_right": float(ends[passed].mean()) if passed.any() else None,
        }
