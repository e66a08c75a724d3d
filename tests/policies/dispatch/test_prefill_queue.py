"""The queue before prefill from both of its ends, against a plain list."""

import random

from policies.dispatch.prefill_queue import PrefillQueue
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
