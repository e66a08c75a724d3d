"""Tests of the alarms of the open requests."""

import math
import random

from app.ingress.alarms import LOOK_S, Alarms
from policies.request.life import Life
from tests.policies.request.recorder import Recorder


class Woken(Recorder):
    """A life whose alarm is set by the test."""

    def alarm(self, alarms: Alarms, at_s: float) -> None:
        self.wake_at_s = at_s
        alarms.set(self, at_s)


def test_an_alarm_comes_once_and_at_most_a_slot_late() -> None:
    alarms, life = Alarms(0.1), Woken()
    life.alarm(alarms, 10.05)
    assert alarms.due(10.0) == []
    assert alarms.due(10.04) == []
    assert alarms.due(10.15) == [life]
    assert alarms.due(11.0) == []
    assert len(alarms) == 0


def test_another_time_takes_the_place_of_the_first_and_infinity_ends_it() -> None:
    alarms, life, other = Alarms(0.1), Woken(), Woken()
    life.alarm(alarms, 10.0)
    other.alarm(alarms, 10.0)
    life.alarm(alarms, 20.0)
    assert alarms.due(15.0) == [other]
    life.alarm(alarms, math.inf)
    assert len(alarms) == 0
    assert alarms.due(1e6) == []


def test_a_time_that_has_passed_is_due_at_the_next_sweep() -> None:
    alarms, life = Alarms(0.1), Woken()
    assert alarms.due(100.0) == []
    life.alarm(alarms, 50.0)
    assert alarms.due(100.1) == [life]


def test_no_alarm_is_lost_or_early_whatever_the_times() -> None:
    rng = random.Random(1)
    alarms, now_s = Alarms(0.1), 1000.0
    lives = [Woken() for _ in range(200)]
    due: dict[Life, float] = {}
    for _ in range(3000):
        life = rng.choice(lives)
        at_s = rng.choice(
            [
                math.inf,
                now_s + rng.random() * 3,
                now_s + rng.randrange(30) / 10,
                now_s + rng.random() * 4 * LOOK_S,
            ]
        )
        life.alarm(alarms, at_s)
        due[life] = at_s
        now_s += rng.random() * 0.05
        for woken in alarms.due(now_s):
            assert due.pop(woken) <= now_s
        assert all(at_s > now_s - 0.2 for at_s in due.values())
    assert len(alarms) == sum(at_s < math.inf for at_s in due.values())
