"""Judging: metrics of known predictors, no peeking, and the permutation tests."""

import numpy as np
import pytest

from predictors.evaluate import Constant, HeldOut, evaluate
from predictors.features import replay
from predictors.oracle import Oracle
from predictors.permutation import permuted_brier, signal_test
from predictors.protocol import Arrival, NotEnoughData, Outcome
from predictors.survival import EmpiricalSurvival
from predictors.train import default_windows, fit_split, references, train_and_judge

from .conftest import CONFIG, two_kinds


@pytest.fixture(scope="module")
def held(traffic, traffic_features):
    return HeldOut.of(traffic, traffic_features, 700, (1, 24, 96))


def test_the_oracle_is_perfect(held, traffic):
    made = evaluate("oracle", Oracle({o.arrival.request_id: o.output_tokens for o in traffic}), held)
    assert (made.overall.brier, made.overall.ece, made.overall.roc_auc) == (0.0, 0.0, 1.0)
    assert made.overall.conditional_mae_tokens == 0.0
    assert made.total_at_arrival.pinball_tokens == 0.0
    assert set(made.by_age) == {"0", "1-64", "65-256", "257-1024"}


def test_the_order_of_merit_on_traffic_that_the_template_tells(held, traffic, fitted):
    made = {n: evaluate(n, p, held) for n, p in references(traffic, 700).items()}
    made["lightgbm"] = evaluate("lightgbm", fitted, held)
    brier = {n: e.overall.brier for n, e in made.items()}
    assert brier["oracle"] < brier["lightgbm"] < brier["survival"] < brier["constant"]
    assert made["lightgbm"].overall.ece < 0.05
    assert "memorised, client" not in made  # nothing names a client here


def test_a_learning_predictor_sees_only_what_had_ended():
    """Requests last 1,000 s and arrive each second: at each question nothing has ended, so survival stays
    empty.
    """
    outcomes = [Outcome(Arrival(f"r{i}", float(i), 10), 30, i + 1_000.0) for i in range(50)]
    held = HeldOut.of(outcomes, replay(outcomes), 10, (24,))
    made = evaluate("survival", EmpiricalSurvival(prior_weight=0.0), held)
    # ages 0 (30 left) and 16 (14 left), p = 0 for both
    assert made.overall.brier == pytest.approx(0.5)


def test_a_model_is_not_fitted_on_lengths_unknown_at_the_split():
    outcomes = [Outcome(Arrival(f"r{i}", float(i), 10), 30, 1e6) for i in range(1_000)]
    with pytest.raises(NotEnoughData, match="had ended"):
        fit_split(outcomes, replay(outcomes), 800, CONFIG)


def test_constant(traffic, traffic_features):
    constant = Constant([Outcome(Arrival("r", 0.0, 1), n, 1.0) for n in (16, 32)])
    made = constant.predict(traffic_features[:2], np.array([0, 400]), 16, with_total=True)
    # rows: 16 left, 32 left, 16 left
    assert made.p_finish == pytest.approx([2 / 3, 2 / 3])
    assert made.mean_remaining_tokens == pytest.approx([16, 16])
    assert made.total.mean_tokens.tolist() == [24.0, 24.0]
    with pytest.raises(ValueError, match="at least one finished"):
        Constant([])


@pytest.mark.parametrize("informative", [True, False])
def test_signal_is_found_where_it_is(informative):
    outcomes = two_kinds(600, seed=6, informative=informative)
    made = signal_test(outcomes[200:], replay(outcomes)[200:], shifts=199)
    assert made.found == informative


def test_permuting_features_costs_a_model_that_uses_them(held, fitted):
    own, permuted = permuted_brier(fitted.predict_rows, held, rounds=5)
    assert own < 0.8 * permuted


def test_windows_of_a_report():
    from predictors.protocol import WindowRange

    assert default_windows(WindowRange(1, 96)) == (1, 8, 24, 48, 96)
    assert default_windows(WindowRange(4, 30)) == (4, 8, 24, 30)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_split_must_leave_both_parts(traffic, share):
    with pytest.raises(ValueError, match="between 0 and 1"):
        train_and_judge(traffic, CONFIG, share)


def test_too_few_requests_to_split():
    with pytest.raises(NotEnoughData, match="cannot be split"):
        train_and_judge([], CONFIG)
