"""The watchdog: hand-worked silences, young cores, what a sign of life changes, and what a stopped watcher sees."""

import pytest

from actors.engine.watchdog import (
    FIRST_STEPS,
    FIRST_STEPS_S,
    LATEST_TICK_S,
    MEMORY_S,
    OUTLIERS,
    STEP_FACTOR,
    TICK_S,
    StallLimits,
    Watchdog,
)


def live(dog: Watchdog, seconds: float) -> str:
    """`seconds` on a loop that ticks on time; the last condition."""
    condition = "ready"
    for _ in range(round(seconds / TICK_S)):
        condition = dog.lived(TICK_S)
    return condition


def grown_up(least_s: float = 10.0, replace_after: float = 3.0) -> Watchdog:
    """A watchdog whose core has made its first steps, each faster than a tick."""
    dog = Watchdog(StallLimits(least_s, replace_after))
    for _ in range(FIRST_STEPS):
        dog.step()
    return dog


def test_silence_stalls_and_longer_silence_is_the_end() -> None:
    """10 s are no stall, one tick more is; 30 s = 3 x 10 s are not the end, one tick more is."""
    dog = grown_up()
    assert live(dog, 10.0) == "ready"
    assert live(dog, TICK_S) == "stalled"
    assert live(dog, 30.0 - 10.0 - TICK_S) == "stalled"
    assert live(dog, TICK_S) == "lost"
    assert dog.stalls == 1


@pytest.mark.parametrize("sign", [Watchdog.sign, Watchdog.step])
def test_a_sign_of_life_ends_a_stall(sign: object) -> None:
    dog = grown_up()
    live(dog, 12.0)
    assert dog.condition == "stalled"
    sign(dog)  # type: ignore[operator]
    assert dog.condition == "ready"
    assert live(dog, 10.0) == "ready"
    assert live(dog, TICK_S) == "stalled"
    assert dog.stalls == 2


def test_a_lost_core_stays_lost() -> None:
    """The engine has begun to end such a core, so a late sign must not bring work back."""
    dog = grown_up()
    assert live(dog, 31.0) == "lost"
    dog.step()
    assert dog.condition == "lost"
    assert dog.lived(TICK_S) == "lost"


def test_answers_to_pings_keep_an_idle_core_ready() -> None:
    dog = grown_up()
    for _ in range(100):
        assert live(dog, 5.0) == "ready"
        dog.sign()


def steps(dog: Watchdog, *seconds: float) -> None:
    """Finished steps of these lengths, with nothing between them."""
    for one in seconds:
        live(dog, one)
        dog.step()


def test_the_limit_follows_the_longest_steps() -> None:
    """Three steps of 8 s and more: 5 x 8 s = 40 s of silence are allowed, although the least limit is 10 s."""
    dog = grown_up()
    steps(dog, 9.0, 1.0, 8.0, 3.0, 8.5, 2.0)
    assert dog.stall_s == STEP_FACTOR * 8.0
    assert live(dog, 40.0) == "ready"
    assert live(dog, TICK_S) == "stalled"


def test_short_stops_do_not_hide_a_long_one() -> None:
    """A core that was stopped for 9 s, which is no stall yet, twice: the next stop is noticed after 10 s, not 45 s."""
    dog = grown_up()
    steps(dog, *[0.5] * 50, *[9.0] * OUTLIERS, *[0.5] * 50)
    assert dog.stall_s == 10.0
    assert live(dog, 10.0) == "ready"
    assert live(dog, TICK_S) == "stalled"


def test_the_silence_of_a_stall_is_no_step() -> None:
    """A core that stood still for 25 s and goes on has shown no step of 25 s."""
    dog = grown_up()
    live(dog, 25.0)
    dog.step()
    assert (dog.condition, dog.stall_s) == ("ready", 10.0)


def test_a_longest_step_is_forgotten_after_two_periods() -> None:
    dog = grown_up()
    steps(dog, 8.0, 8.0, 8.0)
    for _ in range(round(2 * MEMORY_S) + 2):
        assert dog.stall_s in (40.0, 10.0)
        live(dog, 1.0)
        dog.sign()
    assert dog.stall_s == 10.0


def test_first_steps_may_compile_and_do_not_count() -> None:
    dog = Watchdog(StallLimits(10.0))
    assert live(dog, FIRST_STEPS_S) == "ready"
    for _ in range(FIRST_STEPS):
        live(dog, 60.0)
        dog.step()
    assert dog.stall_s == 10.0


def test_a_young_core_that_is_silent_for_too_long_is_stalled() -> None:
    dog = Watchdog(StallLimits(10.0))
    assert live(dog, FIRST_STEPS_S + TICK_S) == "stalled"


def test_time_in_which_the_watcher_was_stopped_does_not_count() -> None:
    """The watcher is stopped for a minute, twenty times: each counts as one late tick, 20 x 0.5 s = 10 s in all."""
    dog = grown_up()
    for _ in range(20):
        assert dog.lived(60.0) == "ready"
    assert dog.silence_s == 20 * LATEST_TICK_S
    assert dog.lived(60.0) == "stalled"


@pytest.mark.parametrize("limits", [(0.0, 3.0), (-1.0, 3.0), (float("nan"), 3.0), (10.0, 1.0)])
def test_impossible_limits_are_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="stall limits"):
        StallLimits(*limits)
