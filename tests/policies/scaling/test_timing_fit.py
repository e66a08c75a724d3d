"""A profile from engines' totals: exact rows give it back, what was never seen keeps the prior, a restart is
ignored.
"""

import dataclasses
import math
import random

import pytest

from policies.engine_model.timing import TimingProfile
from policies.routing.params import BadParameter
from policies.scaling.timing_fit import COEFFICIENTS, Fit, Totals

TRUE = TimingProfile("true", 0.005, 2e-4, 0.02, 3e-5, 5e-8, 131_072, 1e10, 1e-3)
PRIOR = TimingProfile("prior", 0.01, 1e-4, 0.01, 6e-5, 1e-7, 131_072, 1e10, 1e-3)


def grown(totals: Totals, rng: random.Random, decode: bool = True) -> Totals:
    """Returns totals after one more second or so of the work of TRUE."""
    steps, prompt = rng.randrange(1, 20), rng.randrange(100, 20_000)
    decodes = rng.randrange(1, 60) if decode else 0
    seqs = decodes * rng.randrange(1, 64)
    kv = seqs * rng.randrange(100, 4_000)
    busy_s = steps * TRUE.prefill_base_s + prompt * TRUE.prefill_per_token_s
    busy_s += decodes * TRUE.decode_base_s + seqs * TRUE.decode_per_seq_s + kv * TRUE.decode_per_kv_token_s
    return Totals(
        totals.busy_s + busy_s,
        totals.prefill_steps + steps,
        totals.prefill_tokens + prompt,
        totals.decode_steps + decodes,
        totals.decode_seqs + seqs,
        totals.decode_kv_tokens + kv,
    )


def fitted(rows: int, decode: bool = True) -> TimingProfile:
    rng, fit, totals = random.Random(3), Fit(PRIOR), Totals()
    for _ in range(rows):
        after = grown(totals, rng, decode)
        fit, totals = fit.added(totals, after), after
    return fit.profile()


def test_exact_totals_give_the_profile() -> None:
    profile = fitted(400)
    for name in COEFFICIENTS:
        assert getattr(profile, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
    assert profile.step_s(2_000, 0, 0) == pytest.approx(TRUE.step_s(2_000, 0, 0), rel=0.02)
    assert profile.step_s(0, 32, 64_000) == pytest.approx(TRUE.step_s(0, 32, 64_000), rel=0.02)


def test_work_that_was_never_seen_keeps_the_prior() -> None:
    profile = fitted(200, decode=False)
    assert profile.prefill_per_token_s == pytest.approx(TRUE.prefill_per_token_s, rel=0.05)
    assert profile.decode_base_s == pytest.approx(PRIOR.decode_base_s)
    assert Fit(PRIOR).profile() is PRIOR


def test_restarts_and_idle_reports_teach_nothing() -> None:
    fit, much = Fit(PRIOR), Totals(10.0, 100.0, 1e5, 10.0, 100.0, 1e5)
    assert fit.added(much, Totals(0.1, 1.0, 100.0)) is fit
    assert fit.added(much, much) is fit
    with pytest.raises(BadParameter, match="not finite"):
        fit.added(Totals(), dataclasses.replace(much, busy_s=math.nan))


def test_a_fit_is_whole_once_each_kind_of_work_was_seen() -> None:
    """A prefill engine and a decode engine know a half each, and both together all."""
    prefill = Fit(PRIOR).added(Totals(), Totals(1.0, 4.0, 8_000.0))
    decode = Fit(PRIOR).added(Totals(), Totals(1.0, 0.0, 0.0, 40.0, 400.0, 4e5))
    assert not Fit(PRIOR).whole
    assert not prefill.whole
    assert not decode.whole
    both = prefill.plus(decode)
    assert both.whole
    assert both.rows == 2
    assert both == decode.plus(prefill)
