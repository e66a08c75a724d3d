"""A timing profile fitted to the totals that engines report: least squares with forgetting, and a prior.

    busy_s = b_p * prefill_steps + t_p * prefill_tokens
           + b_d * decode_steps + s_d * decode_seqs + k_d * decode_kv_tokens

Each report adds its differences since the last one as a row. The normal matrix forgets by a factor a row, so that a
change of hardware or model is learned. The prior (a profile) weighs a thousandth of `prior_rows` mean rows, and less
once rows have been forgotten. Columns that the traffic never excites keep its values; while there is such a column
(`Fit.whole`), no plan may depend on the profile. No coefficient falls below 0: the minimum is found by coordinate
descent. Not claimed: the quadratic part of attention, which `TimingProfile` lacks as well.
"""

from dataclasses import dataclass, replace

import numpy as np

from policies.engine_model.timing import TimingProfile
from policies.routing.params import BadParameter

COEFFICIENTS = (
    "prefill_base_s",
    "prefill_per_token_s",
    "decode_base_s",
    "decode_per_seq_s",
    "decode_per_kv_token_s",
)
_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Totals:
    """Monotonic totals of one engine. `busy_s` is the time spent in steps; `decode_seqs` and `decode_kv_tokens` are
    sums over the decode steps of the batch size and of its KV tokens.
    """

    busy_s: float = 0.0
    prefill_steps: float = 0.0
    prefill_tokens: float = 0.0
    decode_steps: float = 0.0
    decode_seqs: float = 0.0
    decode_kv_tokens: float = 0.0

    def work(self) -> tuple[float, ...]:
        """Returns the five columns that the coefficients multiply."""
        return (
            self.prefill_steps,
            self.prefill_tokens,
            self.decode_steps,
            self.decode_seqs,
            self.decode_kv_tokens,
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """The sums of a fit: `matrix` (25 numbers, row by row) and `vector` (5), which rows have filled, and the
    `prior`.
    """

    prior: TimingProfile
    matrix: tuple[float, ...] = (0.0,) * 25
    vector: tuple[float, ...] = (0.0,) * 5
    rows: int = 0
    forget: float = 0.999
    prior_rows: float = 1.0

    def added(self, before: Totals, after: Totals) -> "Fit":
        """Returns the fit with the difference of two reports of one engine.

        A difference below 0 (the engine started again) and an idle one leave the fit as it is. Raises BadParameter for
        a total that is not finite.
        """
        row = np.array(after.work()) - np.array(before.work())
        busy_s = after.busy_s - before.busy_s
        if not (np.isfinite(row).all() and np.isfinite(busy_s)):
            raise BadParameter(f"timing fit: totals {after} are not finite; drop this report")
        if row.min() < 0.0 or busy_s <= 0.0 or not row.any():
            return self
        # Each row is an equation in seconds; dividing by its length gives long and short reports the same weight.
        row, target = row / busy_s, 1.0
        matrix = self.forget * np.array(self.matrix).reshape(5, 5) + np.outer(row, row)
        vector = self.forget * np.array(self.vector) + target * row
        return replace(
            self, matrix=tuple(matrix.ravel().tolist()), vector=tuple(vector.tolist()), rows=self.rows + 1
        )

    def plus(self, other: "Fit") -> "Fit":
        """Returns the fit to the rows of both."""
        matrix = (a + b for a, b in zip(self.matrix, other.matrix, strict=True))
        vector = (a + b for a, b in zip(self.vector, other.vector, strict=True))
        return replace(self, matrix=tuple(matrix), vector=tuple(vector), rows=self.rows + other.rows)

    @property
    def whole(self) -> bool:
        """Whether the rows had work of each column, so that no coefficient is the prior's alone."""
        return all(each > 0.0 for each in self.matrix[:: len(COEFFICIENTS) + 1])

    def profile(self) -> TimingProfile:
        """Returns the fitted profile; before the first row it is the prior."""
        if not self.rows:
            return self.prior
        prior = np.array([getattr(self.prior, name) for name in COEFFICIENTS])
        matrix, vector = np.array(self.matrix).reshape(5, 5), np.array(self.vector)
        # In units of the prior's coefficients, a ridge pulls each towards 1 with the weight of `prior_rows` rows.
        unit = np.where(prior > 0.0, prior, 1e-9)
        scaled, right = matrix * np.outer(unit, unit), vector * unit
        ridge = self.prior_rows * max(float(np.trace(scaled)) / self.rows, 1e-12) * 1e-3
        scaled = scaled + ridge * np.eye(5)
        right = right + ridge * np.where(prior > 0.0, 1.0, 0.0)
        x = np.where(prior > 0.0, 1.0, 0.0)
        for _ in range(_ROUNDS):
            for i in range(5):
                x[i] = max(0.0, x[i] + (right[i] - float(scaled[i] @ x)) / scaled[i, i])
        fitted = dict(zip(COEFFICIENTS, (x * unit).tolist(), strict=True))
        try:
            return replace(self.prior, source=f"fitted to {self.rows} reports", **fitted)
        except ValueError:
            # A step of no cost at all is no fit: too few kinds of work have been seen.
            return self.prior
