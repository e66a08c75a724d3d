"""Walking requests at age points."""

import numpy as np
import pytest

from predictors.protocol import Arrival, FinishReason, Outcome
from predictors.samples import draw_windows, walk, walk_tails


def outcome(tokens, reason=FinishReason.STOP):
    return Outcome(Arrival("r", 0.0, 1), tokens, 1.0, reason)


def rows(made):
    return list(zip(made.request.tolist(), made.ages.tolist(), made.remaining.tolist(), strict=True))


def test_every_age_point_while_running():
    """16 tokens end at age 16, so their only point is 0; 17 also have 16; cancelled and empty ones have none."""
    outcomes = [outcome(16), outcome(17), outcome(40, FinishReason.CANCELLED), outcome(0), outcome(33)]
    assert rows(walk(outcomes, 16, 100, 0)) == [
        (0, 0, 16),
        (1, 0, 17),
        (1, 16, 1),
        (4, 0, 33),
        (4, 16, 17),
        (4, 32, 1),
    ]


def test_a_sample_is_part_of_the_walk_and_repeats():
    outcomes = [outcome(t) for t in range(1, 200)]
    whole, part = rows(walk(outcomes, 4, 10**6, 0)), rows(walk(outcomes, 4, 300, 7))
    assert len(part) == 300
    assert set(part) < set(whole)
    assert part == rows(walk(outcomes, 4, 300, 7))
    assert part != rows(walk(outcomes, 4, 300, 8))


def test_tails_are_the_walk_near_its_end():
    outcomes = [outcome(t) for t in (1, 7, 50, 123)] + [outcome(80, FinishReason.ERROR)]
    expected = sorted(r for r in rows(walk(outcomes, 4, 10**6, 0)) if r[2] <= 24)
    assert sorted(rows(walk_tails(outcomes, 4, 24, 10**6, 0))) == expected


def test_labels_and_windows():
    made = walk([outcome(20)], 16, 10, 0)
    assert made.finishes(4).tolist() == [False, True]
    drawn = draw_windows(20_000, 1, 96, 0)
    assert (drawn.min(), drawn.max()) == (1, 96)
    assert 0.35 < np.mean(drawn <= 8) < 0.6  # log-uniform: log 9 / log 97 = 0.48


@pytest.mark.parametrize(("stride", "most"), [(0, 1), (1, 0)])
def test_nonsense_is_refused(stride, most):
    with pytest.raises(ValueError, match="at least 1"):
        walk([outcome(1)], stride, most, 0)
