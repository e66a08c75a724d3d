"""The layer clock: groups follow one another, wait for their member, and keep the schedule where nothing waits."""

import asyncio
from collections.abc import Callable

from actors.engine.sim.layers import LayerClock
from tests.actors.engine.rig import until


class Chain:
    """Takes `steps` of the given seconds; notes what happens, and keeps what `held` names until it is let go."""

    def __init__(self, *steps: float, held: tuple[str, ...] = ()) -> None:
        self.steps, self.held = list(steps), set(held)
        self.log: list[str] = []
        self.waiting: dict[str, Callable[[], None]] = {}

    def begin_step(self) -> float | None:
        if not self.steps:
            return None
        self.log.append("+")
        return self.steps.pop(0)

    def end_step(self) -> None:
        self.log.append("-")

    def before_group(self, group: int, go_on: Callable[[], None]) -> None:
        self._at(f"<{group}", go_on)

    def after_group(self, group: int, go_on: Callable[[], None]) -> None:
        self._at(f"{group}>", go_on)

    def _at(self, name: str, go_on: Callable[[], None]) -> None:
        self.log.append(name)
        if name in self.held:
            self.waiting[name] = go_on
        else:
            go_on()


async def test_each_group_is_begun_computed_and_ended_before_the_next() -> None:
    chain, clock = Chain(0.004, 0.004), LayerClock(2)
    clock.join(chain)
    began_s = asyncio.get_running_loop().time()
    clock.kick()
    await until(lambda: not clock.ticking, "rest")
    assert chain.log == ["+", "<0", "0>", "<1", "1>", "-"] * 2
    # no wait is longer than a step, so the groups keep to their schedule
    assert asyncio.get_running_loop().time() - began_s >= 0.0079


async def test_a_group_that_waits_holds_up_what_follows_and_lengthens_the_step() -> None:
    chain, clock = Chain(0.02, held=("<1", "1>")), LayerClock(2)
    clock.join(chain)
    clock.kick()
    await until(lambda: "<1" in chain.waiting, "the second group waits")
    await asyncio.sleep(0.05)
    assert chain.log == ["+", "<0", "0>", "<1"] and clock.ticking
    let_go_s = asyncio.get_running_loop().time()
    chain.waiting["<1"]()
    await until(lambda: "1>" in chain.waiting, "the second group ends")
    # it computes its half of the step from when it was let go
    assert asyncio.get_running_loop().time() - let_go_s >= 0.0098
    assert "-" not in chain.log
    chain.waiting["1>"]()
    assert chain.log[-2:] == ["1>", "-"]
    assert not clock.ticking
