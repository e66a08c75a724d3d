"""The slowdown of own transfers: the fit on tables that can be reckoned by hand, what is counted, what is forgotten."""

import pytest

from policies.network import contention
from policies.network.contention import (
    FORGET_S,
    FORMS,
    PRIOR,
    ContentionEstimator,
    Curve,
    InFlight,
    fit,
    fit_shared,
)


def test_a_curve_adds_each_count() -> None:
    # 1.5 + 0.25 * 2 + 0.1 * 3
    assert Curve(1.5, (0.25, 0.1)).slowdown((2, 3)) == pytest.approx(2.3)


def test_a_few_transfers_are_held_near_alone_and_many_decide() -> None:
    # only the level: the mean of n slowdowns of 3 and PRIOR = 8 of 1, (8 * 3 + 8) / 16 = 2
    assert fit([(0,)] * 8, [3.0] * 8) == Curve(pytest.approx(2.0), (0.0,), 8)
    assert fit([(0,)] * 80_000, [3.0] * 80_000).level == pytest.approx(3.0, abs=1e-3)


def test_the_slope_of_many_transfers_is_the_true_one() -> None:
    # y = 1.3 + 0.1 n, n of 0 to 4
    counts = [(n % 5,) for n in range(5_000)]
    found = fit(counts, [1.3 + 0.1 * n for (n,) in counts])
    assert found.level == pytest.approx(1.3, abs=0.01)
    assert found.slopes[0] == pytest.approx(0.1, abs=0.01)


def test_the_slopes_of_both_ends_are_told_apart() -> None:
    counts = [(n % 4, n // 4 % 3) for n in range(6_000)]
    found = fit(counts, [1.0 + 0.5 * out + 0.2 * into for out, into in counts])
    assert found.slopes == (pytest.approx(0.5, abs=0.01), pytest.approx(0.2, abs=0.01))


def test_no_transfer_makes_another_faster() -> None:
    # slowdowns that fall with the count: the slope is 0 and not below, the level is not below 1
    found = fit([(0,), (4,)] * 50, [2.0, 1.0] * 50)
    assert found.slopes == (0.0,)
    assert found.level == pytest.approx((150 + PRIOR) / (100 + PRIOR))
    assert fit([(0,)] * 9, [0.1] * 9) == Curve(1.0, (0.0,), 9)


def test_a_shared_level_is_that_of_all_tiers_and_slopes_are_each_tier_s() -> None:
    # y = 1.4 + 0.2 n on tier 2 and 1.4 + 0.05 n on tier 3, with n of 0 to 4
    counts = [(n % 5,) for n in range(5_000)]
    found = fit_shared(
        {tier: (counts, [1.4 + slope * n for (n,) in counts]) for tier, slope in ((2, 0.2), (3, 0.05))}
    )
    assert [found[tier].level for tier in (2, 3)] == [pytest.approx(1.4, abs=0.01)] * 2
    assert [*found[2].slopes, *found[3].slopes] == [
        pytest.approx(0.2, abs=0.01),
        pytest.approx(0.05, abs=0.01),
    ]
    assert found[2].transfers == found[3].transfers == 5_000


def test_a_jam_of_others_on_the_tier_in_use_does_not_make_another_look_faster() -> None:
    """Eight transfers alone take twice their time: the level is (8 * 2 + 8) / 16. One on tier 3 takes as long alone:
    (9 * 2 + 8) / 17, where its own level would be (2 + 8) / 9.
    """
    jammed = ([(0,)] * 8, [2.0] * 8)
    assert fit_shared({2: jammed}) == {2: Curve(pytest.approx(1.5), (0.0,), 8)}
    both = fit_shared({2: jammed, 3: ([(0,)], [2.0])})
    assert both[3] == Curve(pytest.approx(26 / 17), (0.0,), 1) and both[2].level == both[3].level
    assert fit([(0,)], [2.0]).level == pytest.approx(10 / 9)
    assert fit_shared({}) == {}


def test_each_form_has_its_own_counts() -> None:
    flying = InFlight()
    flying.add("p1", "d1", 2, 3)
    flying.add("p1", "d2", 3, 1)
    flying.add("p2", "d1", 2, 2)
    found = {form: flying.counts(form, "p1", "d1", 2) for form in FORMS}
    assert found == {"own": (3,), "fleet": (5,), "ends": (4, 5), "shared": (5,)}
    assert flying.counts("own", "p3", "d9", 2) == (0,)
    with pytest.raises(ValueError, match="no form 'all'"):
        flying.counts("all", "p1", "d1", 2)


def test_transfers_teach_the_curve_of_their_tier() -> None:
    """Each takes 2 s and 1 s of latency for 1,000 B that take 1 s alone: the slowdown is 2, and nothing else flew."""
    seen = ContentionEstimator()
    for i in range(8):
        seen.begun(f"r{i}", "p", "d", 2, 1_000.0, 1.0)
        seen.ended(f"r{i}", 1_000, 3.0, float(i))
    curves = seen.curves(10.0)
    # (8 * 2 + 8 * 1) / 16
    assert {form: curve[2].level for form, curve in curves.items()} == dict.fromkeys(
        FORMS, pytest.approx(1.5)
    )
    assert [len(curves[form][2].slopes) for form in FORMS] == [1, 1, 2, 1]
    assert all(3 not in curves[form] for form in FORMS)
    assert {curves[form][2].transfers for form in FORMS} == {8}
    # of those that ended at 0 to 7 s, the last five are no older than 60 s
    assert seen.curves(63.0)["own"][2].transfers == 5


def test_counts_are_those_at_the_beginning() -> None:
    seen = ContentionEstimator()
    seen.begun("a", "p", "d", 2, 1_000.0, 0.0)
    seen.begun("b", "p", "d", 2, 1_000.0, 0.0)
    seen.ended("b", 1_000, 2.0, 2.0)
    # one transfer: counts 1, slowdown 2; coordinate descent shares the excess of 1 between level and slope, 1 / (8 + 2)
    curve = seen.curves(2.0)["own"][2]
    assert (curve.level, *curve.slopes) == (pytest.approx(1.1), pytest.approx(0.1))


def test_old_transfers_are_forgotten_and_those_that_moved_nothing_never_count() -> None:
    seen = ContentionEstimator()
    seen.begun("a", "p", "d", 2, 1_000.0, 0.0)
    seen.ended("a", 1_000, 5.0, 5.0)
    assert seen.curves(5.0 + FORGET_S)["own"].keys() == {2}
    assert seen.curves(5.1 + FORGET_S) == {form: {} for form in FORMS}
    seen.begun("b", "p", "d", 2, 1_000.0, 0.0)
    seen.ended("b", 0, 5.0, 100.0)
    seen.ended("unknown", 1_000, 5.0, 100.0)
    assert seen.curves(100.0)["own"] == {}


def test_a_dropped_transfer_is_no_longer_in_flight() -> None:
    seen = ContentionEstimator()
    seen.begun("a", "p", "d", 2, 1_000.0, 0.0)
    seen.dropped("a")
    seen.dropped("a")
    seen.begun("b", "p", "d", 2, 1_000.0, 0.0)
    seen.ended("b", 1_000, 2.0, 2.0)
    # its count is 0, so all of the excess of 1 is the level's: 1 / (8 + 1)
    assert seen.curves(2.0)["own"][2] == Curve(pytest.approx(1 + 1 / 9), (0.0,), 1)


def test_a_slowdown_is_bounded_where_the_caller_says_so() -> None:
    seen = ContentionEstimator(most_slowdown=3.0)
    for i in range(8):
        seen.begun(f"r{i}", "p", "d", 2, 1_000.0, 0.0)
        seen.ended(f"r{i}", 1_000, 1e6, float(i))
    # (8 * 3 + 8 * 1) / 16
    assert seen.curves(10.0)["own"][2].level == pytest.approx(2.0)


def test_memory_is_bounded_if_nothing_is_told_of_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "MOST_OPEN", 3)
    seen = ContentionEstimator()
    for i in range(9):
        seen.begun(f"r{i}", f"p{i}", f"d{i}", 2, 1_000.0, 0.0)
    assert list(seen._open) == ["r6", "r7", "r8"]
    seen.stopped("r7")
    seen.begun("r9", "p9", "d9", 2, 1_000.0, 0.0)  # those that are over go first
    assert (list(seen._open), seen._stopped) == (["r6", "r8", "r9"], {})
    assert (seen._in_flight.by_sender, seen._in_flight.by_tier) == ({"p6": 1, "p8": 1, "p9": 1}, {2: 3})
    for name in list(seen._open):
        seen.dropped(name)
    assert seen._in_flight == InFlight()
