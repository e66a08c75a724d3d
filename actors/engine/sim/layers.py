"""The clock of an engine whose step is a chain of layer groups, with flows between them (MFS 3.1).

    group j    waits until its member lets it begin    `before_group`: the KV that its prompts reuse (stage 1)
               computes for step_s / groups
               waits until its member lets it end      `after_group`: the collective among the nodes (stage 2)

The waits lengthen the step. Without them its groups follow each other on the absolute schedule of every step clock.
"""

import time
from collections.abc import Callable
from typing import Protocol, cast

from actors.engine.sim.clock import MAX_EARLY_S, MAX_LAG_S, StepClock, Stepper


class LayerStepper(Stepper, Protocol):
    """The one member that a layer clock drives. No method raises; each `go_on` is called once, or never by a member
    that has stopped.
    """

    def before_group(self, group: int, go_on: Callable[[], None]) -> None:
        """Calls `go_on`, at once or later, when layer group `group` (from 0) may compute."""

    def after_group(self, group: int, go_on: Callable[[], None]) -> None:
        """Calls `go_on`, at once or later, when the group after the computed one may begin."""


class LayerClock(StepClock):
    """Drives one member, whose steps have `groups` groups of layers. `step_end_s` is the end of the present step if
    nothing is waited for.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self._groups = groups
        self._share_s = 0.0
        # the schedule: the present group begins here, or ends here once it computes
        self._at_s = 0.0

    def _begin(self, start_s: float) -> None:
        seconds = self._member.begin_step()
        if seconds is None:
            self.ticking = False
            return
        self._share_s, self._at_s = seconds / self._groups, start_s
        self.step_began_s, self.step_end_s = start_s, start_s + seconds
        self._before(0)

    @property
    def _member(self) -> LayerStepper:
        (member,) = self._members
        return cast(LayerStepper, member)

    def _before(self, group: int) -> None:
        self._wait(lambda go_on: self._member.before_group(group, go_on), lambda: self._compute(group))

    def _compute(self, group: int) -> None:
        self.step_end_s = self._at_s + self._share_s * (self._groups - group)
        self._at_s += self._share_s
        self._loop.call_later(self._at_s - time.monotonic(), self._computed, group)

    def _computed(self, group: int) -> None:
        early_s = self._at_s - time.monotonic()
        if early_s > MAX_EARLY_S:
            self._loop.call_later(max(early_s, 1e-3), self._computed, group)
            return
        self._wait(lambda go_on: self._member.after_group(group, go_on), lambda: self._ended(group))

    def _ended(self, group: int) -> None:
        if group + 1 < self._groups:
            self._before(group + 1)
            return
        self._member.end_step()
        self._begin(self._at_s)

    def _wait(self, ask: Callable[[Callable[[], None]], None], then: Callable[[], None]) -> None:
        """Goes on with `then` when the member lets it. A wait moves the schedule, as a stalled loop does."""
        asked = True

        def go_on() -> None:
            now_s = time.monotonic()
            if not asked or now_s - self._at_s > MAX_LAG_S:
                self._at_s = max(self._at_s, now_s)
            then()

        ask(go_on)
        asked = False
