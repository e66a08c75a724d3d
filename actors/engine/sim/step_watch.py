"""The watch over the steps of a sim engine, which are its core: they may stand still while the process lives.

A step that ends is a sign of life, and so is a step whose end has not come yet. A clock that rests, because there is
nothing to compute, would answer a ping; it does not if a fault is what stops it. Where no fault can, nothing is looked
at until the next step begins, so that looks do not wake an engine without work.
"""

import asyncio
import logging
from collections.abc import Callable

from actors.engine.sim.clock import StepClock
from actors.engine.watchdog import LATEST_TICK_S, TICK_S, StallLimits, Watchdog
from actors.wire.messages import EngineState

log = logging.getLogger(__name__)


class StepWatch:
    """Watches the steps of one engine. `halted` says whether a fault stops them now; None: no fault ever does."""

    def __init__(
        self,
        name: str,
        clock: StepClock,
        limits: StallLimits,
        halted: Callable[[], bool] | None,
        changed: Callable[[], None],
    ) -> None:
        self._name, self._clock, self._halted, self._changed = name, clock, halted, changed
        self._dog = Watchdog(limits)
        self._timer: asyncio.TimerHandle | None = None
        self._rests = False
        self._last_s = 0.0
        # seconds after the last sign of idle steps for which nothing was looked at
        self._unseen_s = TICK_S

    @property
    def state(self) -> EngineState:
        """The state of the engine as far as its steps decide it."""
        condition = self._dog.condition
        return "down" if condition == "lost" else condition

    @property
    def silent_s(self) -> float:
        """Seconds for which the steps have certainly stood still. A sign of idle steps may be a tick old."""
        return max(0.0, self._dog.silence_s - self._unseen_s)

    @property
    def stalls(self) -> int:
        """Number of times that the steps stood still."""
        return self._dog.stalls

    def check(self) -> None:
        """Raises RuntimeError if the steps have stood still until the engine is given up."""
        if self._dog.condition == "lost":
            raise RuntimeError(f"sim engine {self._name} has ended no step for {self._dog.silence_s:.0f} s")

    def step(self) -> None:
        """Takes the end of a step."""
        self._dog.step()

    def start(self) -> None:
        """Begins to watch. Must be called in the event loop."""
        loop = asyncio.get_running_loop()
        self._rests, self._unseen_s = False, TICK_S
        self._last_s = loop.time()
        self._timer = loop.call_later(TICK_S, self._look)

    def begins(self) -> None:
        """Takes the beginning of a step, which ends a rest."""
        if self._rests:
            self.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._rests = False
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now_s, before = loop.time(), self._dog.condition
        condition = self._dog.lived(now_s - self._last_s)
        idle, next_s = not self._clock.ticking, TICK_S
        halted = self._halted is not None and self._halted()
        if not halted and (idle or now_s < self._clock.step_end_s):
            self._dog.sign()
            condition = self._dog.condition
            # a rest is looked at half as often: hardly anything can stop it
            next_s = self._unseen_s = LATEST_TICK_S if idle else TICK_S
        if condition != before:
            log.error("sim engine %s is %s, it was %s", self._name, condition, before)
            self._changed()
        self._last_s = now_s
        self._rests = idle and self._halted is None
        self._timer = None if self._rests else loop.call_later(next_s, self._look)
