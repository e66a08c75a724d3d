"""The queue before prefill from both of its ends, against a plain list."""

import math
import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.dispatch.prefill_queue import PrefillQueue
from policies.fairness.shares import Shares
from policies.fairness.vtc import VirtualTokenCounter
from policies.request.terms import Terms
from policies.state.views import Request


def request(name: str, priority: int = 0) -> Request:
    return Request(name, 0.0, 10, 10, terms=Terms(priority=priority))


def test_the_newest_is_of_its_own_priority_and_not_set_aside() -> None:
    queue = PrefillQueue()
    made = {name: request(name, priority) for name, priority in (("a", 0), ("b", 0), ("c", 1))}
    for one in made.values():
        queue.push(one)
    assert queue.newest(0) is made["b"] and queue.newest(1) is made["c"] and queue.newest(-1) is None
    queue.set_aside(made["b"])
    assert queue.newest(0) is made["a"]
    queue.call_back()
    queue.remove("b")
    assert queue.newest(0) is made["a"]
    # one that comes again is the last
    queue.push(made["b"])
    queue.push(made["a"])
    assert queue.newest(0) is made["a"] and queue.head() is made["b"]


def test_any_history_keeps_head_newest_and_order() -> None:
    rng, queue, there = random.Random(3), PrefillQueue(), list[Request]()
    for step in range(3000):
        roll = rng.random()
        if there and roll < 0.5:
            gone = there.pop(rng.randrange(len(there)))
            queue.remove(gone.attempt_id)
        else:
            # now and then one that waits already comes again, as the last of another priority
            name = rng.choice(there).attempt_id if there and roll < 0.55 else f"r{step}"
            there = [one for one in there if one.attempt_id != name]
            one = request(name, rng.randrange(3))
            there.append(one)
            queue.push(one)
        for priority in range(3):
            of = [one for one in there if one.terms.priority == priority]
            assert queue.newest(priority) is (of[-1] if of else None)
        assert queue.head() is min(there, key=lambda one: one.terms.priority, default=None)
        assert len(queue) == len(there) == len(queue.waiting())


def of(name: str, tenant: str, priority: int, slots: int, prompt: int, weight: float = 1.0) -> Request:
    return Request(name, 0.0, prompt, 10, slots, Terms(priority, tenant=tenant, weight=weight))


def test_what_has_to_go_for_one_that_comes_is_served_after_it_and_enough() -> None:
    queue = PrefillQueue()
    for name, priority, slots, prompt in (("a", 0, 1, 10), ("b", 1, 2, 40), ("c", 1, 1, 30), ("d", 2, 1, 5)):
        queue.push(of(name, "", priority, slots, prompt))
    assert (queue.sequences, queue.prompt_tokens) == (5, 85)
    came = of("e", "", 0, 3, 60)
    queue.push(came)
    # 8 sequences and 145 tokens wait. For 6 sequences "d" and "c" go; for 100 tokens 45 have to: also "b"
    assert queue.beyond(6, 145, came) == ["d", "c"]
    assert queue.beyond(8, 100, came) == ["d", "c", "b"]
    assert queue.beyond(8, 145, came) == []
    # larger than the bound by itself
    assert queue.beyond(2, 145, came) == queue.beyond(8, 59, came) == ["e"]
    queue.remove("e")
    # "a" is served before it, and with "a" it would have 7 sequences or 105 tokens: nothing that goes makes room for it
    for slots, prompt, sequences, tokens in ((6, 1, 6, 145), (1, 95, 8, 100)):
        large = of("e", "", 0, slots, prompt)
        queue.push(large)
        assert queue.beyond(sequences, tokens, large) == ["e"]
    # no more has to go than it brings, where the bound has become smaller meanwhile
    small = of("e", "", 0, 1, 1)
    queue.push(small)
    assert queue.beyond(2, 145, small) == ["d"]
    for name in "abcd":
        queue.remove(name)
    queue.push(came)
    # one that waits alone may be of any size
    assert (queue.sequences, queue.prompt_tokens) == (3, 60)
    assert queue.beyond(1, 1, came) == []


def test_one_that_stays_is_passed_over_and_drives_out_the_newest_of_the_others() -> None:
    queue = PrefillQueue()
    for name, priority in (("a", 0), ("b", 1), ("c", 1)):
        queue.push(of(name, "", priority, 1, 10))
    came = of("d", "", 0, 1, 10)
    queue.push(came)
    for limits in ((3, math.inf), (10**9, 30)):
        assert queue.beyond(*limits, came) == ["c"]
        assert queue.beyond(*limits, came, lambda one: one.attempt_id == "c") == ["b"]
        # nobody that is served after it has to go
        assert queue.beyond(*limits, came, lambda one: one.attempt_id in "bc") == ["d"]
        # one that stays itself drives out "a", which is served before it
        assert queue.beyond(*limits, came, lambda one: one.attempt_id in "bcd") == ["a"]
        assert queue.beyond(*limits, came, lambda one: True) == []
    # no more has to go than it brings, where the bound has become smaller meanwhile
    assert queue.beyond(1, math.inf, came, lambda one: one.attempt_id == "d") == ["c"]
    queue.push(of("e", "", 0, 9, 10))
    large = queue.find("e")
    assert large is not None and queue.beyond(8, math.inf, large, lambda one: one is large) == []


def test_one_that_stays_takes_no_place_of_a_tenant_that_has_less() -> None:
    queue = PrefillQueue(VirtualTokenCounter(), Shares())
    fill(queue, {("b", 0): 2, ("a", 0): 3})
    came = of("a-1", "a", 0, 1, 10)
    queue.push(came, 1.0)
    assert queue.beyond(5, math.inf, came, lambda one: one is came) == ["a0-2"]


def fill(
    queue: PrefillQueue, held: dict[tuple[str, int], int], weights: dict[str, float] | None = None
) -> None:
    """Has one sequence of 10 tokens wait for each of these numbers of a tenant in a class."""
    for (tenant, priority), count in held.items():
        for i in range(count):
            name = f"{tenant}{priority}-{i}"
            queue.push(of(name, tenant, priority, 1, 10, (weights or {}).get(tenant, 1.0)), 1.0)


@pytest.mark.parametrize("class_ratio", [None, 1.0])
@pytest.mark.parametrize(
    ("held", "weights", "most", "expected"),
    [
        # 4 of "b" wait, 2 of "a" with the one that comes: the more urgent class takes a place
        ({("b", 0): 4, ("a", -1): 1}, {}, 5, "b0-3"),
        # 3 against 3, and then 3 against 4: "a" has as much as it may have
        ({("b", 0): 3, ("a", -1): 2}, {}, 5, "b0-2"),
        ({("b", 0): 3, ("a", -1): 3}, {}, 6, "a-1"),
        # its own of a less urgent class goes before what came
        ({("b", 1): 2, ("a", 1): 1, ("a", -1): 3}, {}, 6, "a1-0"),
        # by weight 4 / 2 of "b" are less than 3 of "a"
        ({("b", 0): 4, ("a", -1): 2}, {"b": 2.0}, 6, "a-1"),
        # "c" has too little, "b" enough
        ({("c", 1): 1, ("b", 0): 3, ("a", -1): 2}, {}, 6, "b0-2"),
    ],
)  # fmt: skip
def test_a_more_urgent_class_drives_others_out_only_to_an_equal_share(
    class_ratio: float | None,
    held: dict[tuple[str, int], int],
    weights: dict[str, float],
    most: int,
    expected: str,
) -> None:
    queue = PrefillQueue(VirtualTokenCounter(class_ratio=class_ratio), Shares(class_ratio=class_ratio))
    fill(queue, held, weights)
    came = of("a-1", "a", -1, 1, 10)
    queue.push(came, 1.0)
    limits = ((most, math.inf), (10**9, 10 * most))
    for sequences, tokens in limits if class_ratio is None else ():
        assert queue.beyond(sequences, tokens, came) == [expected]
    # where classes share, another one may be the last, and the shares of places hold as well
    for sequences, tokens in limits:
        [gone] = queue.beyond(sequences, tokens, came)
        assert gone[0] == expected[0]


def test_a_flood_of_the_most_urgent_class_takes_no_more_than_its_share_of_the_places() -> None:
    queue = PrefillQueue(VirtualTokenCounter(), Shares())
    fill(queue, {(tenant, 0): 10 for tenant in "bcde"})
    for i in range(1000):
        came = of(f"flood{i}", "a", -1, 1, 1)
        queue.push(came, 1.0)
        for gone in queue.beyond(40, math.inf, came):
            queue.remove(gone)
    assert Counter(one.terms.tenant for one in queue.waiting()) == dict.fromkeys("abcde", 8)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), class_ratio=st.sampled_from([None, 1.0, 4.0]), shared=st.booleans())
def test_what_has_to_go_is_the_end_of_the_order_in_which_the_queue_serves(
    seed: int, class_ratio: float | None, shared: bool
) -> None:
    rng = random.Random(seed)
    policy, shares = VirtualTokenCounter(class_ratio=class_ratio), Shares(class_ratio=class_ratio)
    queue = PrefillQueue(policy, shares) if shared else PrefillQueue()
    came = of("", "", 0, 1, 1)
    costs: dict[str, float] = {}
    weights = {tenant: rng.choice([0.5, 1.0, 3.0]) for tenant in "abc"}
    for i in range(30):
        tenant = rng.choice("aaabc")
        came = of(
            f"r{i}", tenant, rng.randrange(-1, 2), rng.randrange(1, 4), rng.randrange(1, 99), weights[tenant]
        )
        costs[came.attempt_id] = 0.1 + rng.random()
        queue.push(came, costs[came.attempt_id])
    found = queue.beyond(40, 1000, came)
    waiting = {one.attempt_id: one for one in queue.waiting()}
    order = []
    while (head := queue.head()) is not None:
        order.append(head.attempt_id)
        terms = head.terms
        queue.remove(head.attempt_id)
        if shared:
            queue.charge(terms.priority, terms.tenant, costs[head.attempt_id] / terms.weight, terms.weight)
    over = sum(one.slots for one in waiting.values()) - 40
    tokens = sum(one.prompt_tokens for one in waiting.values()) - 1000
    if over <= 0 and tokens <= 0:
        assert found == []
        return
    assert len(order) == 30 and found
    if found != [came.attempt_id]:
        gone = [waiting[name] for name in found]
        assert sum(one.slots for one in gone) >= min(over, came.slots)
        assert sum(one.prompt_tokens for one in gone) >= min(tokens, came.prompt_tokens)
        assert came.attempt_id not in found
        if not shared:
            assert found == order[::-1][: len(found)]
        # nobody else lost more than what it had beyond the share of the tenant of what came
        kept = [one for name, one in waiting.items() if name not in found]

        def held(tenant: str, of_all: Iterable[Request]) -> float:
            return sum(one.slots for one in of_all if one.terms.tenant == tenant) / weights[tenant]

        if shared and over > 0 >= tokens:
            own = held(came.terms.tenant, kept)
            for one in gone:
                tenant = one.terms.tenant
                assert (
                    tenant == came.terms.tenant
                    or held(tenant, kept) + one.slots / weights[tenant] >= own - 1e-9
                )
        # within its line each goes before those that came earlier
        for line in {(one.terms.priority, one.terms.tenant) for one in gone}:
            mine = [name for name, one in waiting.items() if (one.terms.priority, one.terms.tenant) == line]
            lost = [name for name in found if name in mine]
            assert lost == mine[::-1][: len(lost)]
