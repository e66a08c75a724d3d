"""Service rates from totals of work, worked by hand."""

import pytest

from policies.admission.rates import HALF_LIFE_S, Line, Rate, Rates
from policies.state.standing import Work
from policies.state.views import Role


def test_a_rate_is_seconds_over_work_and_old_work_fades() -> None:
    rate = Rate()
    assert rate.value is None
    rate.add(2.0, 1000.0, 0.5)
    assert rate.value == 0.002
    # half of 2 s and 1,000, and 4 s for 500 more
    rate.add(4.0, 500.0, 0.5)
    assert rate.value == 5.0 / 1000.0
    rate.add(0.0, 0.0, 0.5)
    assert rate.value == 5.0 / 1000.0 and rate.work == 1000.0  # idle: nothing fades


def test_a_line_goes_through_its_points_and_never_falls() -> None:
    line = Line()
    assert line.at(3.0) is None
    for x in (2.0, 4.0, 6.0):
        line.add(x, 0.02 + 0.001 * x, 1.0, 1.0)
    assert line.slope == pytest.approx(0.001) and line.at(10.0) == pytest.approx(0.03)
    falling = Line()
    for x in (2.0, 4.0):
        falling.add(x, 1.0 / x, 1.0, 1.0)
    assert falling.slope == 0.0 and falling.at(100.0) == pytest.approx(0.375)
    close = Line()
    for x in (2.0, 2.1):
        close.add(x, x, 1.0, 1.0)
    assert close.slope == 0.0  # the points lie too close together


def test_a_line_that_would_reach_zero_falls_in_proportion_and_stays_above_it() -> None:
    steep = Line()
    for x, y in ((4.0, 0.010), (8.0, 0.030)):
        steep.add(x, y, 1.0, 1.0)
    # y = 0.005 * x - 0.01 is 0 at 2; the mean of the points is (6, 0.02)
    assert [steep.at(x) for x in (0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 8.0)] == pytest.approx(
        [0.02 / 6, 0.02 / 6, 0.02 / 6, 0.04 / 6, 0.06 / 6, 0.02, 0.03]
    )
    rising = Line()
    for x in (2.0, 4.0):
        rising.add(x, 0.001 + 0.005 * x, 1.0, 1.0)
    assert rising.at(0.0) == pytest.approx(0.001)


def test_rates_come_from_the_differences_between_looks() -> None:
    rates = Rates()
    rates.look(
        {"p": (Role.PREFILL, Work(prompt_s=5.0, prompt_tokens=9999)), "d": (Role.DECODE, Work())}, 10.0
    )
    assert rates.workers == {}
    # p was busy for 1 s and computed 500 tokens; d decoded 4 sequences for 1 s at 40 tokens a second
    done = Work(decoding_s=4.0, generated_tokens=160, start_s=0.5, starts=2, first_s=0.06, firsts=2.0)
    rates.look(
        {"p": (Role.PREFILL, Work(prompt_s=6.0, prompt_tokens=10_499)), "d": (Role.DECODE, done)}, 11.0
    )
    assert rates.workers["p"].prompt_token.value == 0.002
    decode = rates.workers["d"]
    assert (decode.token.value, decode.start.value, decode.first.value) == (0.025, 0.25, 0.03)
    assert rates.lines[Role.DECODE].at(4.0) == 0.025 and Role.PREFILL not in rates.lines


def test_workers_that_go_are_forgotten_and_those_that_come_back_begin_again() -> None:
    rates = Rates()
    for at_s, tokens in ((0.0, 0), (1.0, 100)):
        rates.look({"d": (Role.DECODE, Work(decoding_s=at_s, generated_tokens=tokens))}, at_s)
    assert rates.workers["d"].token.value == 0.01
    # it came back between two looks: its totals are smaller than before
    rates.look({"d": (Role.DECODE, Work(decoding_s=0.1, generated_tokens=1))}, 2.0)
    assert rates.workers["d"].token.value == 0.01
    rates.look({}, 3.0)
    assert rates.workers == {}


def test_a_half_life_halves_what_was_measured() -> None:
    rates = Rates()
    works = (Work(), Work(prompt_s=1.0, prompt_tokens=100), Work(prompt_s=2.0, prompt_tokens=100))
    for at_s, work in zip((0.0, 1.0, 1.0 + HALF_LIFE_S), works, strict=True):
        rates.look({"p": (Role.PREFILL, work)}, at_s)
    # half of (1 s, 100 tokens) is left, and 1 s without a token came
    assert rates.workers["p"].prompt_token.value == 1.5 / 50.0
