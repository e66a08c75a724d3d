"""Survival against closed forms, Kaplan-Meier by hand, and the cold start."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.features import FeatureTracker
from predictors.protocol import Arrival, FinishReason, Outcome
from predictors.survival import EmpiricalSurvival, SurvivalCurve, weak_prior


def outcome(tokens, reason=FinishReason.STOP, **facts):
    return Outcome(Arrival("r", 0.0, 10, **facts), tokens, 1.0, reason)


def ask(predictor, ages, window, **facts):
    one = FeatureTracker().arrive(Arrival("r", 0.0, 10, **facts))
    return predictor.predict([one] * len(ages), np.array(ages), window, with_total=True)


def test_uniform_lengths():
    """T uniform on 1..100: p = min(H, 100 - a) / (100 - a), mu = (min(H, 100 - a) + 1) / 2."""
    made = ask(
        EmpiricalSurvival.fit([outcome(t) for t in range(1, 101)], prior_weight=0.0), [0, 50, 90, 99], 20
    )
    assert made.p_finish == pytest.approx([0.2, 0.4, 1.0, 1.0])
    assert made.mean_remaining_tokens == pytest.approx([10.5, 10.5, 5.5, 1.0])
    assert made.valid.all()
    # given T > 50, T is uniform on 51..100
    assert made.total.mean_tokens[1] == pytest.approx(75.5)
    assert made.total.quantiles_tokens[1] == pytest.approx([55, 75, 95])


def test_exponential_lengths_are_memoryless():
    """P(finish within H) = 1 - exp(-H / 100), at any age."""
    lengths = np.ceil(-100.0 * np.log(1.0 - (np.arange(200_000) + 0.5) / 200_000))
    p, mu, _ = SurvivalCurve.fit(lengths).window(np.array([0, 50, 200]), np.array([30, 30, 30]))
    assert p == pytest.approx([1 - np.exp(-0.3)] * 3, abs=2e-3)
    # mean of a geometric law cut at 30: the same at every age
    assert mu == pytest.approx([mu[0]] * 3, abs=0.1)
    assert 14.0 < mu[0] < 15.5


def test_kaplan_meier_by_hand():
    """Lengths 1, 2+, 3, 4 ("+" is cancelled): S falls by 1/4 at 1, by 1/2 of the rest at 3, to 0 at 4."""
    seen = [outcome(1), outcome(2, FinishReason.CANCELLED), outcome(3), outcome(4)]
    curve = EmpiricalSurvival.fit(seen, prior_weight=0.0).curve
    p, mu, _ = curve.window(np.array([0, 0, 0, 2]), np.array([1, 3, 4, 1]))
    assert p == pytest.approx([0.25, 0.625, 1.0, 0.5])
    # within 3: (1 * 0.25 + 3 * 0.375) / 0.625
    assert mu == pytest.approx([1.0, 2.2, 2.875, 1.0])


def test_leaving_cancelled_requests_out_would_bias():
    """Half of the requests are cancelled at 10 of 100 tokens: the survivors' chance to pass 50 stays 1."""
    seen = [outcome(100)] * 50 + [outcome(10, FinishReason.CANCELLED)] * 50
    made = ask(EmpiricalSurvival.fit(seen, prior_weight=0.0), [0], 50)
    assert made.p_finish == pytest.approx([0.0])


def test_no_knowledge_no_answer():
    made = ask(EmpiricalSurvival.fit([], prior_weight=0.0), [0, 10], 8)
    assert not made.valid.any()
    assert made.p_finish.tolist() == [0.0, 0.0]
    assert made.mean_remaining_tokens.tolist() == [8.0, 8.0]
    assert made.total.mean_tokens.tolist() == [1.0, 11.0]


def test_beyond_the_longest_length_it_abstains():
    made = ask(EmpiricalSurvival.fit([outcome(5)] * 3, prior_weight=0.0), [4, 5], 8)
    assert made.valid.tolist() == [True, False]


def test_the_weak_prior_yields_to_data():
    """8 pseudo-observations answer a cold start; 1,000 requests of 40 tokens outweigh them."""
    cold, warm = EmpiricalSurvival(), EmpiricalSurvival()
    for _ in range(1_000):
        warm.observe(outcome(40))
    assert ask(cold, [0], 48).valid.all()
    assert 0.05 < ask(cold, [0], 48).p_finish[0] < 0.5
    assert ask(warm, [0], 48).p_finish[0] > 0.98
    assert weak_prior(8.0)[1].sum() == pytest.approx(8.0)


def test_it_forgets_what_is_older_than_its_capacity():
    predictor = EmpiricalSurvival(capacity=50, prior_weight=0.0)
    for tokens in [500] * 50 + [20] * 50:
        predictor.observe(outcome(tokens))
    assert ask(predictor, [0], 20).p_finish == pytest.approx([1.0])


def test_a_frozen_one_learns_nothing():
    predictor = EmpiricalSurvival.fit([outcome(10)], prior_weight=0.0)
    predictor.observe(outcome(1_000))
    assert ask(predictor, [0], 10).p_finish == pytest.approx([1.0])


def test_constant_lengths():
    made = ask(EmpiricalSurvival.fit([outcome(30)] * 9, prior_weight=0.0), [0, 20, 29], 10)
    assert made.p_finish == pytest.approx([0.0, 1.0, 1.0])
    assert made.mean_remaining_tokens == pytest.approx([10.0, 10.0, 1.0])


def test_max_tokens_is_certain():
    """16 tokens left of max_tokens and H = 24: it ends for sure. Uniform 1..100 at age 4: p(16) = 16/96,
    mu(16) = 8.5, so mu' = 8.5 / 6 + 16 * 5 / 6 = 14.75."""
    predictor = EmpiricalSurvival.fit([outcome(t) for t in range(1, 101)], prior_weight=0.0)
    made = ask(predictor, [4, 4], 24, max_tokens=20)
    assert made.p_finish.tolist() == [1.0, 1.0]
    assert made.mean_remaining_tokens == pytest.approx([14.75, 14.75])
    assert made.total.quantiles_tokens.max() == 20.0
    assert ask(predictor, [4], 15, max_tokens=20).p_finish[0] == pytest.approx(15 / 96)


@pytest.mark.parametrize("bad", [[-1.0], [float("nan")], [float("inf")]])
def test_bad_lengths_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        SurvivalCurve.fit(np.array(bad))


@pytest.mark.parametrize("ages", [[1, 2], [-1]])
def test_bad_ages_are_refused(ages):
    one = FeatureTracker().arrive(Arrival("r", 0.0, 1))
    with pytest.raises(ValueError, match="age"):
        EmpiricalSurvival().predict([one], np.array(ages), 8)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(0, 320), st.integers(1, 96))
def test_equals_counting(lengths, age, window):
    """Without censoring both stages are plain counts and means."""
    p, mu, valid = SurvivalCurve.fit(np.array(lengths, dtype=float)).window(
        np.array([age]), np.array([window])
    )
    alive = [t for t in lengths if t > age]
    ends = [t - age for t in alive if t <= age + window]
    assert valid[0] == bool(alive)
    assert p[0] == pytest.approx(len(ends) / len(alive) if alive else 0.0, abs=1e-9)
    assert mu[0] == pytest.approx(sum(ends) / len(ends) if ends else window, abs=1e-6)
