"""The memory of requests that have killed engines: how long one is refused, and when it is forgotten."""

import pytest

from policies.request.killers import (
    FIRST_REFUSAL_S,
    LONGEST_REFUSAL_S,
    REMEMBERED_S,
    Fingerprint,
    Killers,
    Suspicion,
)
from policies.request.stage import Task

ONE, OTHER = Fingerprint(5, b"one"), Fingerprint(5, b"other")


def test_a_request_that_has_killed_nothing_is_unknown() -> None:
    killers = Killers()
    assert killers.suspicion(ONE, 0.0) is None
    assert not killers.has_length(5)


@pytest.mark.parametrize("kills", [0.5, 1.0, 1.5])
def test_the_next_send_begins_with_the_deaths_before(kills: float) -> None:
    killers = Killers()
    assert killers.blame(ONE, kills, "decode", 10.0) == 0.0
    assert killers.has_length(5) and not killers.has_length(6)
    assert killers.suspicion(ONE, 11.0) == Suspicion(kills, "decode", 0.0)
    assert killers.suspicion(OTHER, 11.0) is None


def test_two_deaths_refuse_a_request_and_each_further_one_does_so_for_twice_as_long() -> None:
    killers, now_s, told = Killers(), 100.0, []
    for _ in range(8):
        refusal_s = killers.blame(ONE, 2.0, "prefill", now_s)
        told.append(refusal_s)
        assert killers.suspicion(ONE, now_s + 1.0) == Suspicion(1.0, "prefill", refusal_s - 1.0)
        now_s += refusal_s
        # one engine may try it, and one death is enough
        assert killers.suspicion(ONE, now_s) == Suspicion(1.0, "prefill", 0.0)
    assert told == [FIRST_REFUSAL_S * 2**n for n in range(6)] + [LONGEST_REFUSAL_S] * 2


def test_copies_that_were_under_way_make_a_refusal_no_longer() -> None:
    killers = Killers()
    assert killers.blame(ONE, 2.0, "decode", 0.0) == FIRST_REFUSAL_S
    assert killers.blame(ONE, 2.0, "decode", 10.0) == FIRST_REFUSAL_S - 10.0
    assert killers.blame(ONE, 1.0, "prefill", 20.0) == FIRST_REFUSAL_S - 20.0
    assert killers.suspicion(ONE, 20.0) == Suspicion(1.0, "decode", FIRST_REFUSAL_S - 20.0)


@pytest.mark.parametrize(("task", "kills"), [("decode", 1.0), ("prefill", 0.5)])
def test_deaths_under_copies_do_not_add_up_and_those_of_another_task_begin_anew(
    task: Task, kills: float
) -> None:
    killers = Killers()
    killers.blame(ONE, 1.0, "decode", 0.0)
    killers.blame(ONE, 0.5, task, 1.0)
    assert killers.suspicion(ONE, 2.0) == Suspicion(kills, task, 0.0)


def test_a_request_that_came_through_is_forgotten() -> None:
    killers = Killers()
    killers.blame(ONE, 2.0, "decode", 0.0)
    killers.blame(OTHER, 2.0, "decode", 0.0)
    killers.clear(ONE)
    killers.clear(ONE)
    assert killers.suspicion(ONE, 1.0) is None
    assert killers.suspicion(OTHER, 1.0) is not None
    assert killers.has_length(5)
    killers.clear(OTHER)
    assert not killers.has_length(5)


@pytest.mark.parametrize(("kills", "until_s"), [(1.0, 0.0), (2.0, FIRST_REFUSAL_S)])
def test_an_old_request_is_forgotten(kills: float, until_s: float) -> None:
    killers = Killers()
    killers.blame(ONE, kills, "decode", 0.0)
    assert killers.suspicion(ONE, until_s + REMEMBERED_S) is not None
    assert killers.suspicion(ONE, until_s + REMEMBERED_S + 1.0) is None
    assert len(killers) == 0
    # what is never sent again goes with the next death
    killers.blame(ONE, kills, "decode", 0.0)
    killers.blame(OTHER, 1.0, "decode", until_s + REMEMBERED_S + 1.0)
    assert len(killers) == 1


def test_the_memory_is_bounded() -> None:
    killers = Killers(most=3)
    for n in range(10):
        killers.blame(Fingerprint(n, b""), 1.0, "decode", float(n))
        assert len(killers) == min(3, n + 1)
    assert [n for n in range(10) if killers.has_length(n)] == [7, 8, 9]
