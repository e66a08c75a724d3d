"""Tests of the turns in which requests begin that arrive together."""

import asyncio

from app.ingress.http.turns import TURN_S, Turns


class Burst:
    """Requests that take 0.6 turns each to begin, with a clock that only they move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = Turns(lambda: self.now_s)
        self.begun: list[str] = []

    def comes(self, name: str) -> None:
        if self.turns.take():
            self._begin(name)
        else:
            self.turns.wait(lambda: self._begin(name))

    def _begin(self, name: str) -> None:
        self.begun.append(name)
        self.now_s += 0.6 * TURN_S


async def test_requests_that_come_one_by_one_begin_at_once() -> None:
    burst = Burst()
    for number in range(5):
        burst.comes(f"r{number}")
        assert len(burst.begun) == number + 1
        await asyncio.sleep(0)


async def test_a_burst_begins_a_turn_an_iteration_in_the_order_of_its_arrival() -> None:
    burst = Burst()
    for number in range(7):
        burst.comes(f"r{number}")
    seen = [len(burst.begun)]
    while len(burst.begun) < 7:
        await asyncio.sleep(0)
        seen.append(len(burst.begun))
    # the second of an iteration begins at 0.6 turns, a third would at 1.2
    assert seen == [2, 4, 6, 7]
    assert burst.begun == [f"r{number}" for number in range(7)]


async def test_what_comes_later_waits_behind_what_waits() -> None:
    burst = Burst()
    for number in range(5):
        burst.comes(f"r{number}")
    await asyncio.sleep(0)
    assert len(burst.begun) == 4
    burst.comes("late")
    assert len(burst.begun) == 4
    await asyncio.sleep(0)
    assert burst.begun[4:] == ["r4", "late"]


async def test_the_work_of_others_is_done_between_turns() -> None:
    burst, others = Burst(), list[int]()
    loop = asyncio.get_running_loop()

    def other() -> None:
        others.append(len(burst.begun))
        if len(burst.begun) < 6:
            loop.call_soon(other)

    for number in range(6):
        burst.comes(f"r{number}")
    loop.call_soon(other)
    while len(burst.begun) < 6:
        await asyncio.sleep(0)
    assert others[:2] == [4, 6]
