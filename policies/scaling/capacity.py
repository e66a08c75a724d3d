"""Requests per second that k engines of one role carry within TTFT, TPOT and KV, at the lengths seen.

Prefill, k engines behind one queue, service s = b_p + t_p * p (p: prompt tokens that must be computed):

    P(wait > t) = C exp(-2 k (1 - rho) t / (s (1 + cv^2))),  C = rho ^ (sqrt(2 (k + 1)) - 1)        rate * s / k = rho
    the greatest rho with P(wait > ttft - s - first step) <= 1 - share

C is Sakasegawa's approximation of Erlang's probability of waiting, and the exponent is that of heavy traffic.

Decode, k engines: a batch of n sequences of c = prompt + output / 2 tokens steps in t(n) = b_d + (s_d + k_d c) n.

    n = min((tpot - b_d) / (s_d + k_d c), kv_share * kv_tokens / (prompt + output), slots)
    m + z sqrt(m) = k n (m sequences in the mean; their number varies as that of a Poisson process)
    rate = m / (output * t(n))

Colocated, k engines: prompts take the share rho = rate * s / k of each engine's time, which stretches its decode steps.

    t(n) / (1 - rho) <= tpot,  n = rate * output * t(n) / (k (1 - rho)),  P(wait > ttft - s) as above
    the greatest rate by bisection

Where an objective cannot be met by any number of engines (s > ttft, or b_d > tpot), the engines work at `most_rho` or
with one sequence, and `Table.infeasible` names the objective: more engines would not help.
Not claimed: bursts within a window, prefix hits that depend on the number of engines, transfers.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from policies.engine_model.timing import TimingProfile
from policies.routing.params import BadParameter
from policies.scaling.observation import Capability

FloatArray = npt.NDArray[np.float64]
_HALVINGS = 30
# Lengths and objectives are rounded to steps of 5 %, so that tables are computed once and do not jitter.
_STEP = math.log(1.05)
# ASSUMPTION: a step of an engine takes at least this long.
_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Demand:
    """The mean request and its objectives: `prompt_tokens` that must be computed, `context_tokens` with those that are
    cached, `output_tokens`; `prompt_cv` is the coefficient of variation of the prompts.
    """

    prompt_tokens: float
    context_tokens: float
    output_tokens: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_cv: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "context_tokens", "output_tokens", "prompt_cv"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise BadParameter(f"demand: {name} is {value!r}: it must be a number >= 0")

    def rounded(self) -> "Demand":
        """Returns the demand in steps of 5 %."""
        return Demand(
            _stepped(self.prompt_tokens),
            _stepped(self.context_tokens),
            _stepped(self.output_tokens),
            None if self.ttft_s is None else _stepped(self.ttft_s),
            None if self.tpot_s is None else _stepped(self.tpot_s),
            self.prompt_cv,
        )


def _stepped(value: float) -> float:
    return math.exp(round(math.log(value) / _STEP) * _STEP) if value > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Margins:
    """How near to its limits an engine may work: the share of requests that must meet TTFT, the greatest busy share,
    the share of KV, and the deviations kept free for varying batches.
    """

    share: float = 0.99
    most_rho: float = 0.9
    kv_share: float = 0.9
    deviations: float = 2.0

    def __post_init__(self) -> None:
        if not (0.0 < self.share < 1.0 and 0.0 < self.most_rho < 1.0 and 0.0 < self.kv_share <= 1.0):
            raise BadParameter(f"margins: share, most_rho and kv_share must lie between 0 and 1, not {self}")
        if not 0.0 <= self.deviations <= 10.0:
            raise BadParameter(f"margins: deviations is {self.deviations}: it must be 0..10")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Requests/s of k = 0..n engines of each role, each an array (n + 1,) that never falls.

    `infeasible` names the objectives that no number of engines can meet.
    """

    prefill: FloatArray
    decode: FloatArray
    colocated: FloatArray
    infeasible: tuple[str, ...] = ()

    def fewest(self, rates: FloatArray, per_k: FloatArray) -> npt.NDArray[np.int64]:
        """Returns the fewest engines of one role (`per_k`: its array) that carry each of `rates`; one more than the
        table has where none do.
        """
        return np.searchsorted(per_k, np.maximum(rates, 0.0) - 1e-12, side="left").astype(np.int64)


def table(capability: Capability, demand: Demand, most: int, margins: Margins) -> Table:
    """Returns what 0 to `most` engines of each role carry of the demand, which is rounded before.

    The table of 256 or more engines is computed for the next power of two, so that few differ.
    """
    size = max(256, 1 << max(0, most - 1).bit_length())
    return _table(capability, demand.rounded(), size, margins)


@lru_cache(maxsize=64)
def _table(capability: Capability, demand: Demand, most: int, margins: Margins) -> Table:
    k, every = _knots(most), np.arange(most + 1, dtype=np.float64)
    infeasible = []
    profile = capability.profile
    first_s = (
        profile.decode_base_s
        + profile.decode_per_seq_s
        + profile.decode_per_kv_token_s * demand.context_tokens
    )
    service_s = prompt_s(profile, demand)
    slack_s = math.inf if demand.ttft_s is None else demand.ttft_s - service_s - first_s
    if slack_s <= 0.0:
        infeasible.append("TTFT")
    batch, tpot_ok = _batch(capability, demand, margins)
    colocated_batch, _ = _batch(capability.of_colocated(), demand, margins)
    if not tpot_ok:
        infeasible.append("TPOT")
    per_knot = (
        _prefill(k, service_s, slack_s, demand.prompt_cv, margins),
        _decode(k, batch, profile, demand, margins),
        _colocated(k, colocated_batch, profile, demand, service_s, slack_s, margins),
    )
    prefill, decode, colocated = (_rising(np.interp(every, k, rates)) for rates in per_knot)
    return Table(prefill, decode, colocated, tuple(infeasible))


def prompt_s(profile: TimingProfile, demand: Demand) -> float:
    """Returns the seconds in which an engine computes one prompt, at least `_LEAST_S`. The profile alone gives 0 where
    its base is 0 and caches have all tokens of the prompts.
    """
    return max(_LEAST_S, profile.prefill_base_s + profile.prefill_per_token_s * demand.prompt_tokens)


def _knots(most: int) -> FloatArray:
    """Returns the numbers of engines at which rates are computed: all to 64, then 32 up to `most`.

    Between these the rates are nearly straight, and are interpolated.
    """
    far = np.geomspace(64.0, max(most, 65), 33).round()
    knots: FloatArray = np.unique(np.concatenate([np.arange(65.0), far]))
    return knots[knots <= most] if most < 64 else knots


def _rising(values: FloatArray) -> FloatArray:
    rising: FloatArray = np.maximum.accumulate(values)
    rising[0] = 0.0
    rising.setflags(write=False)
    return rising


def _late(rho: FloatArray, k: FloatArray, service_s: float, slack_s: float, cv: float) -> FloatArray:
    """Returns P(wait > slack_s) for busy shares `rho` (n,) of `k` (n,) engines behind one queue."""
    waits = rho ** (np.sqrt(2.0 * (k + 1.0)) - 1.0)
    decay = 2.0 * k * (1.0 - rho) * slack_s / (service_s * (1.0 + cv * cv))
    late: FloatArray = waits * np.exp(-decay)
    return late


def _prefill(k: FloatArray, service_s: float, slack_s: float, cv: float, margins: Margins) -> FloatArray:
    low, high = np.zeros_like(k), np.full_like(k, margins.most_rho)
    if 0.0 < slack_s < math.inf:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            fits = _late(middle, k, service_s, slack_s, cv) <= 1.0 - margins.share
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    else:
        low = high
    rate: FloatArray = k * low / service_s
    return rate


def _batch(capability: Capability, demand: Demand, margins: Margins) -> tuple[float, bool]:
    """Returns (sequences in a batch at the limits, whether one sequence alone meets TPOT)."""
    profile = capability.profile
    per_seq_s = _per_seq_s(profile, demand)
    whole = demand.context_tokens + demand.output_tokens
    limits = [float(capability.slots), margins.kv_share * capability.kv_tokens / max(whole, 1.0)]
    tpot_ok = True
    if demand.tpot_s is not None:
        room_s = demand.tpot_s - profile.decode_base_s
        tpot_ok = room_s >= per_seq_s
        if per_seq_s > 0.0:
            limits.append(room_s / per_seq_s)
    return max(1.0, min(limits)), tpot_ok


def _per_seq_s(profile: TimingProfile, demand: Demand) -> float:
    context = demand.context_tokens + demand.output_tokens / 2.0
    return profile.decode_per_seq_s + profile.decode_per_kv_token_s * context


def _spread_out(most: FloatArray, deviations: float) -> FloatArray:
    """Returns the mean m of a Poisson number of sequences with m + deviations * sqrt(m) = most."""
    root = (-deviations + np.sqrt(deviations * deviations + 4.0 * most)) / 2.0
    mean: FloatArray = root * root
    return mean


def _decode(
    k: FloatArray, batch: float, profile: TimingProfile, demand: Demand, margins: Margins
) -> FloatArray:
    step_s = profile.decode_base_s + _per_seq_s(profile, demand) * batch
    rate: FloatArray = _spread_out(k * batch, margins.deviations) / (max(demand.output_tokens, 1.0) * step_s)
    return rate


def _colocated(
    k: FloatArray,
    batch: float,
    profile: TimingProfile,
    demand: Demand,
    service_s: float,
    slack_s: float,
    margins: Margins,
) -> FloatArray:
    output = max(demand.output_tokens, 1.0)
    per_seq_s = _per_seq_s(profile, demand)
    mean_batch = _spread_out(k * batch, margins.deviations) / np.maximum(k, 1.0)
    low, high = np.zeros_like(k), np.full_like(k, margins.most_rho)
    for _ in range(_HALVINGS):
        rho = (low + high) / 2.0
        # n = rate * output * (base + per_seq n) / (1 - rho), solved for n; rate = rho / service_s of one engine
        pressure = rho / service_s * output
        rest = 1.0 - rho - pressure * per_seq_s
        n = np.where(rest > 0.0, pressure * profile.decode_base_s / np.where(rest > 0.0, rest, 1.0), np.inf)
        fits = n <= mean_batch
        if demand.tpot_s is not None and demand.tpot_s > profile.decode_base_s + per_seq_s:
            fits &= (profile.decode_base_s + per_seq_s * n) / (1.0 - rho) <= demand.tpot_s
        if 0.0 < slack_s < math.inf:
            fits &= _late(rho, k, service_s, slack_s, demand.prompt_cv) <= 1.0 - margins.share
        low, high = np.where(fits, rho, low), np.where(fits, high, rho)
    rate: FloatArray = k * low / service_s
    return rate
