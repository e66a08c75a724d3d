"""The cumulative sum of late requests: by hand, against chance, and how soon it finds what goes on."""

import random

import pytest

from policies.scaling.lateness import PROVEN, Lateness

ALLOWED = 0.01


def after(lates: list[int], judged: int) -> Lateness:
    """Returns the evidence after a window of `judged` requests for each number of late ones."""
    found = Lateness("chat")
    for late in lates:
        found = found.after(late, judged, ALLOWED)
    return found


def test_two_windows_by_hand() -> None:
    """1 in 100 is allowed and 2 in 100 shall be found, so 100 requests take 1 / ln 2 = 1.443 from the sum."""
    assert after([3], 100).surplus == pytest.approx(3.0 - 1.4427, abs=1e-4)
    two = after([3, 2], 100)
    assert two.surplus == pytest.approx(5.0 - 2.8854, abs=1e-4)
    assert (two.late, two.judged, two.share) == (5, 200, 0.025)
    # the sum is 0 again, and what follows stands for itself
    assert after([3, 2, 0, 0, 0, 2], 100) == after([2], 100)


def test_lateness_is_proven_at_odds_of_a_million_to_one() -> None:
    """With surplus S the counts are 2^S times as likely if twice as many are late as may be: ln(1e6) / ln 2 = 19.93."""
    assert pytest.approx(19.93, abs=0.01) == PROVEN
    assert not after([21], 100).proven
    assert after([22], 100).proven


def test_what_is_allowed_is_not_proven_and_three_times_as_much_is_soon() -> None:
    """A year of windows with five requests each, of which 1 % are late, proves nothing. With 3 % late, 100 requests add
    3 - 1.44 to the sum, so about 1,300 prove it.
    """
    rng, found = random.Random(0), Lateness("chat")

    def drawn(share: float) -> int:
        return sum(rng.random() < share for _ in range(5))

    for _ in range(50_000):
        found = found.after(drawn(0.7 * ALLOWED), 5, ALLOWED)
        assert not found.proven
    windows = 0
    while not found.proven:
        found, windows = found.after(drawn(3.0 * ALLOWED), 5, ALLOWED), windows + 1
    assert 50 < windows < 600


def test_nothing_late_is_allowed_where_all_shall_be_in_time() -> None:
    assert Lateness("chat").after(0, 1_000_000, 0.0) == Lateness("chat")
    assert Lateness("chat").after(20, 1_000_000, 0.0).proven
