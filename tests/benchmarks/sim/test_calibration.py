"""The fit finds the coefficients that made the times, keeps them at or above 0, and refuses too little data."""

import dataclasses

import numpy as np
import pytest

from benchmarks.sim.calibration import CalibrationError, DecodeTime, PrefillTime, fit, nonnegative_fit
from policies.engine_model.timing import CPU_SMOLLM2, TICK_1MS

PROMPTS = (32, 128, 512)
BATCHES = [(n, n * kv) for n in (1, 4, 16) for kv in (100.0, 900.0)]


def test_exact_times_give_the_profile_back() -> None:
    prefills = [PrefillTime(p, CPU_SMOLLM2.step_s(p, 0, 0)) for p in PROMPTS]
    decodes = [DecodeTime(n, kv, CPU_SMOLLM2.step_s(0, n, int(kv))) for n, kv in BATCHES]
    profile, left = fit(TICK_1MS, "test", prefills, decodes)
    for f in dataclasses.fields(profile):
        expected = getattr(CPU_SMOLLM2 if f.name.startswith(("prefill", "decode")) else TICK_1MS, f.name)
        if f.name != "source":
            assert getattr(profile, f.name) == pytest.approx(expected, rel=1e-6), f.name
    assert left["prefill"]["worst_percent"] == left["decode"]["worst_percent"] == 0.0


def test_noise_shows_as_residual() -> None:
    decodes = [
        DecodeTime(n, kv, CPU_SMOLLM2.step_s(0, n, int(kv)) * (1.1 if i % 2 else 0.9))
        for i, (n, kv) in enumerate(BATCHES)
    ]
    _, left = fit(TICK_1MS, "test", [PrefillTime(p, 0.1 + 0.001 * p) for p in PROMPTS], decodes)
    assert 3.0 < left["decode"]["rms_percent"] < 12.0


def test_no_coefficient_falls_below_zero() -> None:
    """Times that fall with the length: the slope is 0, not negative."""
    design = np.array([[1.0, 10.0], [1.0, 20.0], [1.0, 30.0]])
    base, slope = nonnegative_fit(design, np.array([1.2, 1.0, 0.9]))
    assert slope == 0.0
    assert 0.9 < base < 1.2


def test_too_little_is_refused() -> None:
    good = [PrefillTime(p, 0.1) for p in PROMPTS]
    with pytest.raises(CalibrationError, match="two prompt lengths"):
        fit(TICK_1MS, "t", good[:1], [])
    with pytest.raises(CalibrationError, match="three pairs"):
        fit(TICK_1MS, "t", good, [DecodeTime(1, 10.0, 0.1)] * 5)
    with pytest.raises(CalibrationError, match="not above 0"):
        fit(
            TICK_1MS,
            "t",
            [PrefillTime(1, 0.0), PrefillTime(2, 1.0)],
            [DecodeTime(n, n, 0.1) for n in (1, 2, 3)],
        )
