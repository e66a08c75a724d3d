"""Memorisation by hand, its fall-back, and its bounds."""

import numpy as np
import pytest

from predictors.features import FeatureTracker
from predictors.memorise import CLIENT, COLD, PROMPT, TEMPLATE, Level, Memorised
from predictors.oracle import Oracle
from predictors.protocol import Arrival, FinishReason, Outcome
from predictors.survival import EmpiricalSurvival


def outcome(tokens, reason=FinishReason.STOP, **keys):
    return Outcome(Arrival("r", 0.0, 10, **keys), tokens, 1.0, reason)


def ask(predictor, age, window, **keys):
    one = FeatureTracker().arrive(Arrival("r", 0.0, 10, **keys))
    made = predictor.predict([one], np.array([age]), window, with_total=True)
    return made.p_finish[0], made.mean_remaining_tokens[0], made


def uniform():
    """Survival of lengths 1..100, frozen."""
    return EmpiricalSurvival.fit([outcome(t) for t in range(1, 101)], prior_weight=0.0)


def test_the_blend_by_hand():
    """Two lengths, 12 and 80, of one prompt; shrink 1; age 0, H = 20. Below: p = 0.2, mu = 10.5.
    p' = (1 + 0.2) / (2 + 1); mu' = (12 + 0.2 * 10.5) / 1.2."""
    predictor = Memorised((PROMPT,), uniform())
    for tokens in (12, 80):
        predictor.observe(outcome(tokens, prompt_key="k"))
    p, mu, _ = ask(predictor, 0, 20, prompt_key="k")
    assert p == pytest.approx(0.4)
    assert mu == pytest.approx(14.1 / 1.2)


def test_an_unknown_key_and_no_key_are_survival_exactly():
    predictor = Memorised((TEMPLATE, PROMPT), uniform())
    predictor.observe(outcome(12, prompt_key="k", template_key="t"))
    for keys in ({}, {"prompt_key": "other", "template_key": "another"}):
        p, mu, _ = ask(predictor, 0, 20, **keys)
        assert (p, mu) == pytest.approx((0.2, 10.5))


def test_past_all_its_lengths_a_key_says_nothing():
    predictor = Memorised((PROMPT,), uniform())
    predictor.observe(outcome(12, prompt_key="k"))
    assert ask(predictor, 50, 20, prompt_key="k")[0] == pytest.approx(0.4)


def test_a_frequent_prompt_speaks_for_itself():
    predictor = Memorised((TEMPLATE, PROMPT), uniform())
    for _ in range(60):
        predictor.observe(outcome(33, prompt_key="k", template_key="t"))
    p, mu, made = ask(predictor, 20, 24, prompt_key="k", template_key="t")
    assert p > 0.98
    assert mu == pytest.approx(13.0, abs=0.1)
    assert made.total.quantiles_tokens[0] == pytest.approx([33, 33, 33], abs=2)


def test_cancelled_lengths_are_not_memorised():
    predictor = Memorised((PROMPT,), uniform())
    predictor.observe(outcome(5, FinishReason.CANCELLED, prompt_key="k"))
    assert predictor.keys_held() == 0


def test_memory_is_bounded_in_keys_and_lengths():
    level = Level("prompt", lambda a: a.prompt_key, lengths=3, shrink=1.0)
    predictor = Memorised((level,), uniform(), keys=2)
    for key in ("a", "b", "a", "c"):  # b is the least recently seen
        predictor.observe(outcome(10, prompt_key=key))
    assert predictor.keys_held() == 2
    assert ask(predictor, 0, 20, prompt_key="b")[0] == pytest.approx(0.2)
    for tokens in (90, 90, 90):
        predictor.observe(outcome(tokens, prompt_key="a"))
    assert ask(predictor, 0, 20, prompt_key="a")[0] == pytest.approx((0 + 0.2) / 4)


def test_an_empty_ladder_is_refused():
    with pytest.raises(ValueError, match="at least one level"):
        Memorised(())


def test_client_level_uses_the_client():
    predictor = Memorised((CLIENT,), uniform())
    for _ in range(100):
        predictor.observe(outcome(10, client="fast"))
    assert ask(predictor, 0, 20, client="fast")[0] > 0.9


def test_the_oracle_knows():
    oracle = Oracle({"r": 30})
    assert ask(oracle, 0, 30)[:2] == (1.0, 30.0)
    p, mu, made = ask(oracle, 0, 29)
    assert (p, mu) == (0.0, 29.0)
    assert made.total.mean_tokens[0] == 30.0
    assert not ask(oracle, 30, 8)[2].valid[0]
    assert not Oracle({}).predict([FeatureTracker().arrive(Arrival("r", 0.0, 1))], np.array([0]), 8).valid[0]


def cold_mean(predictor, **keys):
    return ask(predictor, 0, 20, **keys)[2].total.mean_tokens[0]


@pytest.mark.parametrize("keys", [{}, {"template_key": "the system prompt of all"}])
def test_a_router_without_a_model_tells_clients_apart(keys):
    """Clients are told apart also where all send one template, which alone would mix them."""
    predictor = Memorised(COLD)
    for _ in range(100):
        predictor.observe(outcome(10, client="short", **keys))
        predictor.observe(outcome(90, client="long", **keys))
    assert cold_mean(predictor, client="short", **keys) == pytest.approx(10, abs=8)
    assert cold_mean(predictor, client="long", **keys) == pytest.approx(90, abs=8)
    # one group; the survival curve's tail is prior knowledge
    assert 30 < cold_mean(predictor, **keys) < 75


def test_a_new_template_of_a_known_client_is_that_clients():
    predictor = Memorised(COLD)
    for _ in range(100):
        predictor.observe(outcome(10, client="short", template_key="a"))
        predictor.observe(outcome(90, client="long", template_key="b"))
    assert cold_mean(predictor, client="short", template_key="new") == pytest.approx(10, abs=8)


def test_without_clients_a_router_answers_by_exact_match():
    both = Memorised(COLD), Memorised()
    for predictor in both:
        for tokens in (12, 80, 33):
            predictor.observe(outcome(tokens, prompt_key="k", template_key="t"))
    one, other = (ask(predictor, 5, 20, prompt_key="k", template_key="t")[:2] for predictor in both)
    assert one == other
