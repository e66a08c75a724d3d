"""Metrics by hand and against scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, mean_pinball_loss, roc_auc_score

from predictors import metrics

P = np.array([0.1, 0.4, 0.4, 0.8, 0.9])
Y = np.array([False, False, True, True, False])


def test_against_scikit_learn():
    rng = np.random.default_rng(0)
    p = np.round(rng.random(500), 2)  # with ties
    y = rng.random(500) < p
    assert metrics.roc_auc(p, y) == pytest.approx(roc_auc_score(y, p))
    assert metrics.brier(p, y) == pytest.approx(brier_score_loss(y, p))
    q, actual = rng.random((500, 3)), rng.random(500)
    expected = np.mean([mean_pinball_loss(actual, q[:, i], alpha=a) for i, a in enumerate((0.1, 0.5, 0.9))])
    assert metrics.pinball(q, actual, (0.1, 0.5, 0.9)) == pytest.approx(expected)


def test_by_hand():
    # positives 0.4, 0.8 against negatives 0.1, 0.4, 0.9: wins 1 + .5 + 0 and 1 + 1 + 0 of 6
    assert metrics.roc_auc(P, Y) == pytest.approx(3.5 / 6)
    # two bins: [0, .5) holds 3 rows, mean .3, observed 1/3; [.5, 1] holds 2, mean .85, observed .5
    assert metrics.expected_calibration_error(P, Y, bins=2) == pytest.approx(
        (3 * (1 / 3 - 0.3) + 2 * 0.35) / 5
    )
    assert [r.rows for r in metrics.reliability(P, Y, bins=2)] == [3, 2]
    assert metrics.conditional_mae(np.array([1.0, 5.0]), np.array([3, 9]), np.array([True, False])) == 2.0


def test_the_share_of_chance_in_the_calibration_error():
    """Calibrated labels show about what chance gives; it falls as 1 / sqrt(rows)."""
    rng = np.random.default_rng(1)
    p = rng.random(4_000)
    floor = metrics.ece_by_chance(p)
    assert metrics.expected_calibration_error(p, rng.random(4_000) < p) == pytest.approx(floor, rel=0.5)
    assert metrics.ece_by_chance(p[:250]) == pytest.approx(4 * floor, rel=0.4)
    assert metrics.ece_by_chance(p[:0]) is None


def test_what_is_undefined_is_none():
    none = np.zeros(0)
    assert metrics.roc_auc(P, np.ones(5, dtype=bool)) is None
    assert metrics.brier(none, none.astype(bool)) is None
    assert metrics.expected_calibration_error(none, none.astype(bool)) is None
    assert metrics.conditional_mae(P, Y.astype(np.int64), np.zeros(5, dtype=bool)) is None
    assert metrics.pinball(np.zeros((0, 3)), none, (0.1, 0.5, 0.9)) is None


def test_p_of_one_falls_into_the_last_bin():
    assert metrics.reliability(np.array([1.0]), np.array([True]), bins=10)[0].predicted == 1.0
