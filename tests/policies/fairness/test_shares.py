"""The counters of tenants: who is first, how newcomers are lifted, what is charged, and what is forgotten."""

import random

from policies.fairness.ranking import Ranking
from policies.fairness.shares import Shares
from policies.request.classes import class_weight


def test_a_ranking_is_a_sorted_list_whatever_happens_to_it() -> None:
    rng, ranking, there = random.Random(2), Ranking(), dict[str, tuple[float, int]]()
    for step in range(4000):
        name = f"t{rng.randrange(30)}"
        if rng.random() < 0.3:
            ranking.discard(name)
            there.pop(name, None)
        else:
            there[name] = float(rng.randrange(20)), step
            ranking.set(name, there[name][0])
        # of equal keys the one that was set first
        order = sorted(there, key=there.__getitem__)
        assert ranking.first() == (order[0] if order else None)
        most = rng.randrange(8)
        assert ranking.firsts(most) == order[:most] and len(ranking) == len(there)
        assert all(ranking[one] == there[one][0] for one in order)
    # outdated entries do not pile up
    assert len(ranking._heap) <= 16 + 4 * 30 + 1


def test_the_least_counter_is_first_and_charges_move_it() -> None:
    shares = Shares()
    for tenant in ("a", "b", "c"):
        shares.enter(0, tenant)
    assert shares.in_turn(0, 9) == ["a", "b", "c"] and shares.crowded == 1
    shares.charge(0, "a", 10.0)
    shares.charge(0, "b", 5.0)
    assert shares.in_turn(0, 9) == ["c", "b", "a"] and shares.first(0) == "c"
    # what was charged too much comes back
    shares.charge(0, "a", -7.0)
    assert (shares.counter(0, "a"), shares.in_turn(0, 2)) == (3.0, ["c", "a"])


def test_one_that_waited_before_keeps_its_credit_and_a_newcomer_has_none() -> None:
    shares = Shares(credit=100.0)
    shares.enter(0, "a")
    shares.enter(0, "b")
    shares.leave(0, "b")
    shares.charge(0, "a", 60.0)
    # it is 60 behind, and all of that is left
    shares.enter(0, "b")
    assert shares.counter(0, "b") == 0.0
    shares.leave(0, "b")
    shares.charge(0, "a", 500.0)
    # 560 behind, of which 100 are left
    shares.enter(0, "b")
    assert shares.counter(0, "b") == 460.0 and shares.first(0) == "b"
    shares.charge(0, "b", 140.0)
    shares.enter(0, "new")
    assert shares.counter(0, "new") == 560.0
    # one that is ahead is not lowered
    shares.leave(0, "b")
    shares.enter(0, "b")
    assert shares.counter(0, "b") == 600.0


def test_a_newcomer_is_lifted_to_the_least_that_wait_and_never_lowered() -> None:
    shares = Shares()
    shares.enter(0, "a")
    shares.charge(0, "a", 100.0)
    shares.enter(0, "new")
    assert shares.counter(0, "new") == 100.0
    shares.charge(0, "new", 30.0)
    shares.charge(0, "a", 500.0)
    # it waits no more, others get on, and it comes back with no credit for that time
    shares.leave(0, "new")
    shares.enter(0, "b")
    assert shares.counter(0, "b") == 600.0
    shares.enter(0, "new")
    assert shares.counter(0, "new") == 600.0
    # one that had more than its share keeps its debt
    shares.charge(0, "new", 50.0)
    shares.leave(0, "new")
    shares.enter(0, "new")
    assert shares.counter(0, "new") == 650.0


def test_where_nobody_waits_a_newcomer_begins_where_the_last_one_left() -> None:
    shares = Shares()
    shares.enter(0, "a")
    shares.charge(0, "a", 40.0)
    shares.leave(0, "a")
    # the last request of "a" is settled after it has left
    shares.charge(0, "a", 2.0)
    shares.enter(0, "b")
    assert shares.counter(0, "b") == 42.0
    assert shares.crowded == 0


def test_classes_have_counters_of_their_own() -> None:
    shares = Shares()
    for priority in (0, 1):
        shares.enter(priority, "a")
        shares.enter(priority, "b")
    shares.charge(1, "a", 9.0)
    assert (shares.first(0), shares.first(1), shares.first(2)) == ("a", "b", None)
    assert shares.priorities() == [0, 1] and shares.waiting == 4 and shares.crowded == 2


def test_idle_tenants_are_forgotten_the_longest_idle_first() -> None:
    shares = Shares(most_idle=3)
    for i in range(50):
        shares.enter(i % 2, f"t{i}")
        shares.charge(i % 2, f"t{i}", 5.0)
        shares.leave(i % 2, f"t{i}")
        assert shares.remembered <= 3
    # a charge for one that was forgotten changes nothing
    shares.charge(0, "t0", 1e6)
    assert shares.counter(0, "t0") == 0.0
    # 25 tenants came one after another, each where the one before had left
    assert shares.counter(1, "t49") == 125.0
    # a class whose tenants are all forgotten is forgotten, too
    for i in range(4):
        shares.enter(7 + i, "x")
        shares.leave(7 + i, "x")
    assert sorted(shares._classes) == [8, 9, 10]


def test_classes_have_counters_by_a_ratio_while_tenants_wait_in_them() -> None:
    shares = Shares(credit=50.0, class_ratio=4.0)
    shares.enter(0, "a")
    shares.enter(0, "b")
    assert (shares.classes, shares.shared, shares.first_class()) == (1, True, 0)
    shares.leave(0, "b")
    assert not shares.shared
    shares.enter(1, "a")
    assert (shares.classes, shares.shared, shares.priorities()) == (2, True, [0, 1])
    shares.charge_class(0, 100.0)
    # a quarter of the weight
    shares.charge_class(1, 20.0)
    assert (shares.class_counter(0), shares.class_counter(1)) == (100.0, 80.0)
    assert (shares.first_class(), shares.class_end(1, 10.0)) == (1, 120.0)
    # a class leaves with its last tenant, is charged as well then, and keeps its credit when it comes back
    shares.leave(1, "a")
    shares.charge_class(1, 1.0)
    shares.charge_class(0, 900.0)
    assert (shares.classes, shares.class_counter(1)) == (1, 84.0)
    shares.enter(1, "c")
    assert shares.class_counter(1) == 950.0
    # the counters of tenants are not those of classes
    assert shares.counter(1, "c") == shares.counter(0, "a") == 0.0


def test_without_a_ratio_classes_have_none_and_come_by_their_urgency() -> None:
    shares = Shares()
    for priority in (1, -1, 0):
        shares.enter(priority, "a")
        shares.charge_class(priority, 100.0)
    assert (shares.weighted, shares.shared, shares.classes, shares.class_counter(0)) == (False, False, 0, 0.0)
    assert shares.priorities() == [-1, 0, 1]


def test_weights_of_classes_far_away_are_numbers() -> None:
    assert [class_weight(priority, 4.0) for priority in (-1, 0, 1, 2)] == [4.0, 1.0, 0.25, 0.0625]
    assert class_weight(-1000, 1000.0) == class_weight(-40, 1000.0) == 1e120
    assert 0.0 < class_weight(1000, 1000.0) == class_weight(41, 1000.0)
