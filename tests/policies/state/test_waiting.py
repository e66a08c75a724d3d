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


def test_sums_are_made_anew_only_when_something_comes_or_goes() -> None:
    waiting = Waiting()
    waiting.count(request(1, -1), +1)
    assert waiting.until(0) == Backlog(1, 10, 2)
    sums = waiting._up_to
    assert waiting.until(-2) == NOTHING and waiting._up_to is sums
    waiting.count(request(3, 0), +1)
    assert waiting.until(0) == Backlog(2, 40, 4)


def test_one_that_is_left_out_or_gone_is_in_no_sum() -> None:
    waiting, one, two = Waiting(), request(1, predicted=7.0), request(2)
    waiting.count(one, +1)
    waiting.count(two, +1)
    assert waiting.until(0) == Backlog(2, 30, 3, 2, 14.0)
    assert waiting.until(0).without(one) == Backlog(1, 20, 1)
    waiting.count(one, -1)
    waiting.count(two, -1)
    assert waiting.until(0) == NOTHING


def test_by_shares_no_more_is_before_a_request_than_its_tenant_has_for_each_unit_of_weight() -> None:
    def of(name: str, tenant: str, weight: float = 1.0, priority: int = 0, tokens: int = 10) -> Request:
        return Request(name, 0.0, tokens, 5, terms=Terms(priority, tenant=tenant, weight=weight))

    waiting, as_they_came = Waiting(by_tenant=True), Waiting()
    urgent = of("u", "b", priority=-1, tokens=7)
    for one in [*(of(f"a{i}", "a") for i in range(20)), urgent]:
        waiting.count(one, +1)
        as_they_came.count(one, +1)
    asked = of("b1", "b", weight=3.0)
    # only the urgent one is before the first request of "b"; in the order of arrival all of "a" are
    assert waiting.before(asked, False) == Backlog(1, 7, 1)
    assert as_they_came.before(asked, False) == Backlog(21, 207, 21)
    for name in ("b1", "b2", "b3", "b4"):
        waiting.count(of(name, "b", weight=3.0), +1)
    # three of its own, and "a" gets a third of what "b" gets: 3 * 4 / 3
    assert waiting.before(of("b4", "b", weight=3.0), True) == Backlog(1 + 4, 7 + 40, 5)
    # its class has no more than 23 others
    last = of("a19", "a")
    assert waiting.before(last, True) == Backlog(24, 237, 24)
    # for a tenant that is alone in its class the order of arrival holds
    for i in range(20):
        waiting.count(of(f"a{i}", "a"), -1)
    assert waiting.before(of("b4", "b", weight=3.0), True) == Backlog(4, 37, 4)


def test_where_classes_share_no_more_of_another_is_before_a_request_than_its_weight_allows() -> None:
    def of(name: str, priority: int, tenant: str = "a", tokens: int = 10) -> Request:
        return Request(name, 0.0, tokens, 5, terms=Terms(priority, tenant=tenant))

    waiting = Waiting(by_tenant=True, class_ratio=4.0)
    for i in range(50):
        waiting.count(of(f"u{i}", -1), +1)
    for i in range(3):
        waiting.count(of(f"l{i}", 1), +1)
    first = of("s0", 0)
    # none of its class is before it; of "interactive" 4 times as much as it is itself, of "batch" a quarter of it, but
    # a whole request
    assert waiting.before(first, False) == Backlog(4 + 1, 40 + 3, 4 + 1)
    for i in range(2):
        waiting.count(of(f"s{i}", 0), +1)
    last = of("s2", 0)
    waiting.count(last, +1)
    # two of its class, 4 * 3 of "interactive", and 3 / 4 of "batch"
    assert waiting.before(last, True) == Backlog(2 + 12 + 1, 20 + 120 + 8, 2 + 12 + 1)
    # "batch": there are no more than 50 of "interactive", where 16 * 4 would be allowed, and 3 of "standard"
    assert waiting.before(of("l3", 1), False) == Backlog(3 + 50 + 3, 30 + 500 + 30, 3 + 50 + 3)
    # of what is expected to come as much counts as is allowed: 64 - 50 of "interactive", and all of "standard"
    coming = {-1: Backlog(0, 1000, 100), 0: Backlog(0, 7, 2), 1: Backlog(0, 999, 99), 2: Backlog(0, 1, 1)}
    found = waiting.before(of("l3", 1), False, coming)
    assert (found.prompt_tokens, found.sequences) == (30 + 640 + 37 + 1, 3 + 64 + 5 + 1)
    # another tenant's share counts first: one of "b" is behind as many of "a", and what these let pass
    assert waiting.before(of("b", 0, "b"), False) == Backlog(4 + 1, 40 + 3, 4 + 1)
    # without a ratio all that is more urgent is before it, and nothing else
    strict = Waiting(by_tenant=True)
    for i in range(50):
        strict.count(of(f"u{i}", -1), +1)
    strict.count(of("l0", 1), +1)
    assert strict.before(first, False, coming) == Backlog(50, 500, 50)


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
        ledger = state._ledger
        lives = ledger.live.values()
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
        assert ledger.queued.objectives == sum(r.terms.has_objective for r in queued)
        assert ledger.without_slot.objectives == sum(r.terms.has_objective for r in waits)
        assert state.objectives_wait == any(r.terms.has_objective for r in [*queued, *waits])
    assert counted > 100
