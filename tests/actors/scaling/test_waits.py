"""How long engines are awaited, with clocks written out: arrivals, deaths at the start, and times without a router."""

from actors.scaling.waits import START_LIMIT_S, Waits


def test_an_engine_is_overdue_from_the_limit_on_until_the_router_knows_it() -> None:
    waits = Waits(10.0)
    # awaited from 100 on, looked at every 4 s: 0, 4, 8, 12
    for now_s, overdue in ((100.0, set()), (104.0, set()), (108.0, set()), (112.0, {"d-a"})):
        assert waits.look({"d": ["d-a"]}, set(), now_s) == overdue
    assert waits.look({"d": []}, {"d-a"}, 116.0) == set()
    # lost by the router, it is awaited anew
    assert waits.look({"d": ["d-a"]}, set(), 120.0) == set()


def test_a_replica_that_is_made_in_the_place_of_a_dead_one_has_its_wait() -> None:
    waits, found = Waits(10.0), []
    # each replica dies before it has been awaited for 10 s; between two Serve has none
    for second, engine in enumerate(("d-pending0", "d-a", "d-a", "d-pending0", "d-b", "d-b")):
        found.append(waits.look({"d": [engine], "p": []}, set(), 3.0 * second))
    # awaited for 0, 3, 6, 9, 12 s
    assert found[:4] == [set()] * 4
    assert found[4:] == [{"d-b"}, {"d-b"}]


def test_the_longest_wait_is_taken_over_first_and_none_of_an_engine_that_came_or_of_another_group() -> None:
    waits = Waits(10.0)
    waits.look({"d": ["d-a"], "p": ["p-a"]}, set(), 0.0)
    waits.look({"d": ["d-a", "d-b"], "p": ["p-a"]}, set(), 4.0)
    # at 8 s both of d are gone, awaited for 8 and 4 s, and one is new; at 12 s that one is overdue
    assert waits.look({"d": ["d-c"], "p": []}, {"p-a"}, 8.0) == set()
    assert waits.look({"d": ["d-c"], "p": ["p-b"]}, {"p-a"}, 12.0) == {"d-c"}
    # p-a came after 8 s, so p-b, new at 12 s, is overdue at 22 s and not before
    assert waits.look({"d": [], "p": ["p-b"]}, {"p-a"}, 17.0) == set()
    assert waits.look({"d": [], "p": ["p-b"]}, {"p-a"}, 21.0) == set()
    assert waits.look({"d": [], "p": ["p-b"]}, {"p-a"}, 22.0) == {"p-b"}


def test_time_without_a_router_counts_for_five_seconds_and_a_clock_that_goes_back_for_nothing() -> None:
    waits = Waits(10.0)
    waits.look({"d": ["d-a"]}, set(), 100.0)
    assert waits.look({"d": ["d-a"]}, set(), 1000.0) == set()
    assert waits.look({"d": ["d-a"]}, set(), 900.0) == set()
    assert waits.look({"d": ["d-a"]}, set(), 904.0) == set()
    # 5 + 0 + 4 + 1 s
    assert waits.look({"d": ["d-a"]}, set(), 905.0) == {"d-a"}


def test_the_limit_follows_from_the_longest_start_unless_one_is_configured() -> None:
    waits, configured = Waits(), Waits(30.0)
    assert waits.limit_s == START_LIMIT_S == 600.0
    for seconds in (20.0, 400.0, 90.0):
        waits.started(seconds)
        configured.started(seconds)
    # twice 400
    assert waits.limit_s == 800.0
    assert configured.limit_s == 30.0
