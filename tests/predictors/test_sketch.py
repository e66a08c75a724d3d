"""A group's sketch is its survival curve, nearly."""

import numpy as np
import pytest

from predictors.sketch import KNOTS, blend, knots, window


def ask(lengths, age, horizon, count=None):
    sketch = np.array([knots(sorted(lengths))], dtype=np.float32)
    made = window(sketch, np.array([float(count or len(lengths))]), np.array([age]), np.array([horizon]))
    return tuple(float(v[0]) for v in made)


def test_uniform_lengths():
    """0, 10, ..., 160 are the knots themselves: beyond 40 lie 3/4, within 40 more a quarter, mean remainder
    20.
    """
    alive, inside, remainders = ask(range(0, 161, 10), 40, 40, count=100)
    assert (alive, inside) == pytest.approx((75.0, 25.0))
    assert remainders / inside == pytest.approx(20.0)


def test_a_jump_at_a_common_length():
    """All lengths 50: alive until 49, done at 50."""
    assert ask([50] * 9, 49, 1) == pytest.approx((9.0, 9.0, 9.0))
    assert ask([50] * 9, 50, 10) == pytest.approx((0.0, 0.0, 0.0))
    assert ask([50] * 9, 10, 39) == pytest.approx((9.0, 0.0, 0.0))


def test_against_counting():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1_000, 5_000)
    for age, horizon in ((0, 100), (300, 50), (900, 200)):
        alive, inside, remainders = ask(lengths, age, horizon)
        there = lengths[(lengths > age) & (lengths <= age + horizon)]
        assert alive == pytest.approx((lengths > age).sum(), abs=60)
        assert inside == pytest.approx(there.size, abs=60)
        assert remainders / inside == pytest.approx((there - age).mean(), rel=0.05)


def test_absent_groups_have_nothing_and_change_nothing():
    sketch = np.array([[np.nan] * KNOTS, knots([5, 9])], dtype=np.float32)
    made = window(sketch, np.array([0.0, 2.0]), np.array([0, 0]), np.array([6, 6]))
    assert [v[0] for v in made] == [0.0, 0.0, 0.0]
    assert made[0][1] == 2.0
    p, mu = blend(np.array([0.3, 0.3]), np.array([4.0, 4.0]), made, 2.0)
    assert (p[0], mu[0]) == pytest.approx((0.3, 4.0))
    assert p[1] > 0.3
