"""Sums over waiting requests, against sums over the requests themselves."""

import random

from policies.request.terms import Terms
from policies.state.views import Request
from policies.state.waiting import NOTHING, Backlog, Waiting


def request(i: int, priority: int = 0, predicted: float | None = None) -> Request:
    return Request(f"r{i}", 0.0, 10 * i, 5, 1 + i % 2, Terms(priority=priority), predicted_tokens=predicted)


def test_sums_are_of_what_is_at_least_as_urgent() -> None:
    waiting = Waiting()
    for i, priority in ((1, -1), (2, 0), (3, 0), (4, 1)):
        waiting.count(request(i, priority), +1)
    assert waiting.until(-2) == NOTHING
    assert waiting.until(-1) == Backlog(1, 10, 2)
    assert waiting.until(0) == Backlog(3, 60, 5)
    assert waiting.until(9) == Backlog(4, 100, 6)


def test_one_that_is_left_out_or_gone_is_in_no_sum() -> None:
    waiting, one, two = Waiting(), request(1, predicted=7.0), request(2)
    waiting.count(one, +1)
    waiting.count(two, +1)
    assert waiting.until(0) == Backlog(2, 30, 3, 2, 14.0)
    assert waiting.until(0).without(one) == Backlog(1, 20, 1)
    waiting.count(one, -1)
    waiting.count(two, -1)
    assert waiting.until(0) == NOTHING


def test_any_order_of_coming_and_going_leaves_the_sums_of_what_is_there() -> None:
    rng, waiting, there = random.Random(5), Waiting(), dict[int, Request]()
    for step in range(2000):
        if there and rng.random() < 0.5:
            waiting.count(there.pop(rng.choice(sorted(there))), -1)
        else:
            there[step] = request(step, rng.randrange(-2, 3), rng.choice([None, 4.0, 0.5]))
            waiting.count(there[step], +1)
        priority = rng.randrange(-3, 4)
        found = [r for r in there.values() if r.terms.priority <= priority]
        sums = waiting.until(priority)
        assert sums.prompts == len(found) and sums.sequences == sum(r.slots for r in found)
        assert sums.prompt_tokens == sum(r.prompt_tokens for r in found)
        # halves and fours are exact
        assert sums.output_tokens == sum(r.slots * (r.predicted_tokens or 0.0) for r in found)
