"""The step clock: ranks behind a barrier step together, and rest together."""

import asyncio

from actors.engine.sim.clock import StepClock
from tests.actors.engine.rig import until


class Rank:
    """Takes `steps` of the given seconds; notes when each began and ended, in steps of the clock."""

    def __init__(self, name: str, log: list[str], *steps: float) -> None:
        self.name, self.log, self.steps = name, log, list(steps)

    def begin_step(self) -> float | None:
        if not self.steps:
            return None
        self.log.append(f"{self.name}+")
        return self.steps.pop(0)

    def end_step(self) -> None:
        self.log.append(f"{self.name}-")


async def test_a_step_ends_for_all_when_the_slowest_rank_is_done() -> None:
    log: list[str] = []
    clock = StepClock()
    for rank in (Rank("a", log, 0.001, 0.001), Rank("b", log, 0.03), Rank("c", log)):
        clock.join(rank)
    started_s = asyncio.get_running_loop().time()
    clock.kick()
    await until(lambda: not clock.ticking, "rest")
    assert log == ["a+", "b+", "a-", "b-", "a+", "a-"]
    assert asyncio.get_running_loop().time() - started_s >= 0.03  # a's own steps take 2 ms


async def test_work_that_arrives_during_a_step_waits_for_its_end() -> None:
    log: list[str] = []
    clock = StepClock()
    late = Rank("b", log)
    for rank in (Rank("a", log, 0.05, 0.001), late):
        clock.join(rank)
    clock.kick()
    await until(lambda: log, "the first step")
    late.steps.append(0.001)
    clock.kick()
    await until(lambda: not clock.ticking, "rest")
    assert log == ["a+", "a-", "a+", "b+", "a-", "b-"]


async def test_a_clock_at_rest_starts_again() -> None:
    log: list[str] = []
    clock, rank = StepClock(), Rank("a", log, 0.001)
    clock.join(rank)
    clock.kick()
    await until(lambda: not clock.ticking, "rest")
    rank.steps.append(0.001)
    clock.kick()
    await until(lambda: not clock.ticking, "rest")
    assert log == ["a+", "a-"] * 2
