"""Fits a timing profile to measured times (`policies.engine_model.timing` has the formulas).

    prefill    TTFT     = prefill_base_s + prefill_per_token_s * prompt_tokens
    decode     a step   = decode_base_s + decode_per_seq_s * n + decode_per_kv_token_s * KV tokens

The fit minimises the squares of the relative errors with no coefficient below 0. For this, every subset of the
coefficients is fitted (there are seven at most), and the best one without a negative coefficient is taken.
`benchmarks.live.calibrate` makes the measurements.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sim import profiles
from policies.engine_model.timing import TimingProfile
from predictors.protocol import FloatArray


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """A measured prefill. `ttft_s` is the time from the request's start to its first token, on an idle server."""

    prompt_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """A measured decode. While `sequences` ran, a step took `step_s` on average and they held `kv_tokens` in total."""

    sequences: float
    kv_tokens: float
    step_s: float


class CalibrationError(ValueError):
    """The error of measurements that do not suffice for a fit; the message says what is missing."""


def fit(
    like: TimingProfile, source: str, prefills: Sequence[PrefillTime], decodes: Sequence[DecodeTime]
) -> tuple[TimingProfile, dict[str, Any]]:
    """Fits the five coefficients of prefill and decode to the measurements.

    Returns (the profile `like` with these coefficients, the remaining errors and the measurements). Raises
    CalibrationError.
    """
    if len({p.prompt_tokens for p in prefills}) < 2:
        raise CalibrationError("prefill: measure at least two prompt lengths")
    if len({(d.sequences, d.kv_tokens) for d in decodes}) < 3:
        raise CalibrationError("decode: measure at least three pairs of concurrency and KV tokens")
    ttft = np.array([p.ttft_s for p in prefills])
    prompts = np.array([[1.0, p.prompt_tokens] for p in prefills])
    base_s, per_token_s = nonnegative_fit(prompts, ttft)
    steps = np.array([d.step_s for d in decodes])
    batches = np.array([[1.0, d.sequences, d.kv_tokens] for d in decodes])
    step_base_s, per_seq_s, per_kv_s = nonnegative_fit(batches, steps)
    profile = replace(
        like,
        source=source,
        prefill_base_s=base_s,
        prefill_per_token_s=per_token_s,
        decode_base_s=step_base_s,
        decode_per_seq_s=per_seq_s,
        decode_per_kv_token_s=per_kv_s,
    )
    left = {
        "prefill": _residuals(prompts @ np.array([base_s, per_token_s]), ttft),
        "decode": _residuals(batches @ np.array([step_base_s, per_seq_s, per_kv_s]), steps),
        "measured": {
            "prefill_tokens_and_ttft_s": [[p.prompt_tokens, p.ttft_s] for p in prefills],
            "decode_sequences_kv_tokens_step_s": [[d.sequences, d.kv_tokens, d.step_s] for d in decodes],
        },
    }
    return profile, left


def write_profile(
    out: Path,
    like: str | Path,
    measured_by: str,
    prefills: Sequence[PrefillTime],
    decodes: Sequence[DecodeTime],
) -> None:
    """Fits a profile and writes it with its residuals to `out`.

    KV size and transfer times cannot be seen over HTTP, so they are copied from the profile `like`. Raises
    CalibrationError or ProfileError.
    """
    other = profiles.load(like)
    source = f"measured by {measured_by}; KV size and transfer as in: {other.source}"
    profile, left = fit(other, source, prefills, decodes)
    kept = ("kv_bytes_per_token", "transfer_bandwidth_bytes_per_s", "transfer_latency_s")
    profiles.dump(out, profile, dict.fromkeys(kept, "not seen over HTTP; from --like"), left)


def nonnegative_fit(design: FloatArray, measured: FloatArray) -> list[float]:
    """Returns the k coefficients >= 0 for which `design` times them has the least squared relative error.

    `design` is (n, k) with k <= 3; `measured` is (n,), all above 0. Raises CalibrationError where one is not.
    """
    if not (np.isfinite(measured).all() and (measured > 0).all()):
        raise CalibrationError("a measured time is not above 0 s")
    scaled = design / measured[:, None]
    columns = range(design.shape[1])
    best: tuple[float, list[float]] | None = None
    for size in range(1, design.shape[1] + 1):
        for kept in itertools.combinations(columns, size):
            found, *_ = np.linalg.lstsq(scaled[:, kept], np.ones(len(measured)), rcond=None)
            if (found < 0).any():
                continue
            error = float(((scaled[:, kept] @ found - 1) ** 2).sum())
            if best is None or error < best[0] - 1e-15:
                best = (error, [float(found[kept.index(c)]) if c in kept else 0.0 for c in columns])
    # A single column of positive numbers always fits.
    assert best is not None
    return best[1]


def _residuals(fitted: FloatArray, measured: FloatArray) -> dict[str, float]:
    """Returns the root mean square and the greatest magnitude of the fit's relative errors, in per cent."""
    relative = 100 * (fitted / measured - 1)
    return {
        "rms_percent": round(float(np.sqrt((relative**2).mean())), 3),
        "worst_percent": round(float(np.abs(relative).max()), 3),
    }
