"""Sums over waiting requests, against sums over the requests themselves."""

import random

import pytest

from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.request.stage import Stage
from policies.request.terms import Terms
from policies.routing.base import PolicyError
from policies.routing.simple.random_choice import RandomChoice
from policies.state import events as ev
from policies.state.views import Request
from policies.state.waiting import NOTHING, Backlog, Waiting
from tests.policies.random_events import Life


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


@pytest.mark.parametrize("seed", range(4))
def test_the_ledger_counts_what_is_queued_and_what_waits_for_a_slot(seed: int) -> None:
    life = Life(random.Random(seed))
    dispatcher = Dispatcher(DispatchConfig(max_queue=8, queue_timeout_s=2.0), RandomChoice(), RandomChoice())
    for event in life.start():
        dispatcher.handle(event)
    counted = 0
    for _ in range(600):
        event = life.next_event()
        try:
            life.saw(tuple(dispatcher.handle(event)))
        except PolicyError as error:
            life.saw(error.decided)
        except (ev.StaleEvent, ValueError):
            continue
        state = dispatcher.state
        lives = state._ledger.live.values()
        queued = [live.request for live in lives if live.stage is Stage.QUEUED]
        waits = [
            live.request
            for live in lives
            if live.stage is Stage.POOLED or (live.stage is Stage.PREFILLING and not live.colocated)
        ]
        for found, requests in ((ledger.queued.until(9), queued), (ledger.without_slot.until(9), waits)):
            assert found.prompts == len(requests) and found.sequences == sum(r.slots for r in requests)
            assert found.prompt_tokens == sum(r.prompt_tokens for r in requests)
            counted += found.prompts
    assert counted > 100
