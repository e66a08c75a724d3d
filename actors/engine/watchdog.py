"""The watchdog beside an engine's core, which tells a core that has stopped from one that is slow.

A core gives signs of life: a finished step, an output, a report of its scheduler, or the answer to a ping. The engine
pings a core that has given no sign for a while, so an idle core proves itself as well, and a busy one answers between
two steps. A core without a sign for `stall_s` is stalled: its work goes elsewhere and it gets no new work. The first
sign makes it ready again. A core that stays silent for `replace_after` times as long is lost, for good, because its
owner then ends it.

How long a healthy core may be silent depends on its longest steps:

    stall_s = max(least_s, STEP_FACTOR x longest step of the last minutes but for the OUTLIERS longest)

A process that is stopped for less than a stall makes one step long. If that step counted, the next stop would be
noticed only after five times as long. The first steps of a core may compile or warm up. They have a limit of their own,
and do not count among the longest.

Time is the time for which the process that watches ran (`Watchdog.lived`). A process that was stopped has not waited
for its core, whose signs may lie unread in the socket.
"""

from bisect import insort
from dataclasses import dataclass
from typing import Literal

Condition = Literal["ready", "stalled", "lost"]
"""The condition of a core: it lives, it is stalled, or it has been silent beyond the limit of a lost core."""

STEP_FACTOR = 5.0
"""Allowed silence in units of the longest step that counts. ASSUMPTION: steps of one engine differ by their batch,
which the token budget bounds, and by neighbours on the same cores; the longest of ten minutes is not exceeded five
times."""

OUTLIERS = 2
"""Longest steps that do not count. ASSUMPTION: a batch that makes a step long comes more than twice in ten minutes, and
a core or a machine that stands still for a moment does not."""

FIRST_STEPS = 20
"""Steps of a young core that may compile. ASSUMPTION: each kernel of a model has run once after this many steps."""

FIRST_STEPS_S = 120.0
"""Least allowed silence of a young core, in seconds. ASSUMPTION: no single compilation takes longer; vLLM captures its
CUDA graphs, which does, before an engine is ready."""

MEMORY_S = 600.0
"""Seconds after which a longest step is forgotten, at the earliest; at the latest it is twice as long."""

TICK_S = 0.25
"""Seconds between two looks at the watchdog. A sign is late by one look at most."""

LATEST_TICK_S = 2 * TICK_S
"""Most seconds that one look can add to a silence. A longer gap shows that the process which watches did not run."""

PING_S = 2.0
"""Seconds of silence after which a core is pinged. ASSUMPTION: one small message in two seconds costs nothing."""


@dataclass(frozen=True, slots=True)
class StallLimits:
    """The limits of a watchdog: the least silence in seconds that counts as a stall, the multiple of a stall's limit
    after which the core is lost, and the least silence of a core in its first steps.
    """

    least_s: float
    replace_after: float = 3.0
    first_steps_s: float = FIRST_STEPS_S

    def __post_init__(self) -> None:
        if not self.least_s > 0:
            raise ValueError(f"stall limits: least_s must be above 0, got {self.least_s}")
        if not self.replace_after > 1:
            raise ValueError(f"stall limits: replace_after must be above 1, got {self.replace_after}")


class Watchdog:
    """The watch over one core: `lived` passes the time, `sign` and `step` report signs of life. Without a clock."""

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._silence_s = 0.0
        self._steps = 0
        # The longest steps of this period and of the one before, ascending.
        self._longest_s: list[float] = []
        self._longest_before_s: list[float] = []
        self._memory_s = 0.0
        self._lost = False
        self._was_stalled = False
        self.stalls = 0

    @property
    def silence_s(self) -> float:
        """Seconds since the last sign of life, as the process that watches lived them."""
        return self._silence_s

    @property
    def stall_s(self) -> float:
        """Seconds of silence after which the core counts as stalled."""
        least_s = max(self._limits.least_s, self._limits.first_steps_s if self._steps < FIRST_STEPS else 0.0)
        longest_s = sorted(self._longest_s + self._longest_before_s)
        return max(least_s, STEP_FACTOR * longest_s[-1 - OUTLIERS]) if len(longest_s) > OUTLIERS else least_s

    @property
    def condition(self) -> Condition:
        """The core's condition at present."""
        if self._lost:
            return "lost"
        return "stalled" if self._was_stalled else "ready"

    def lived(self, elapsed_s: float) -> Condition:
        """Adds the time since the last call, and returns the core's condition. A gap longer than `LATEST_TICK_S` counts
        as that much only.
        """
        elapsed_s = min(elapsed_s, LATEST_TICK_S)
        self._silence_s += elapsed_s
        self._memory_s += elapsed_s
        if self._memory_s > MEMORY_S:
            self._memory_s, self._longest_before_s, self._longest_s = 0.0, self._longest_s, []
        stall_s = self.stall_s
        if self._silence_s > stall_s and not self._was_stalled:
            self._was_stalled = True
            self.stalls += 1
        self._lost |= self._silence_s > stall_s * self._limits.replace_after
        return self.condition

    def sign(self) -> None:
        """Takes a sign of life that is no step: an answer to a ping, or an output between two steps."""
        self._silence_s = 0.0
        self._was_stalled = False

    def step(self) -> None:
        """Takes a finished step, which lasted no longer than the silence before it. The silence of a stall is no
        step.
        """
        if not self._was_stalled and self._steps >= FIRST_STEPS:
            insort(self._longest_s, self._silence_s)
            del self._longest_s[: -1 - OUTLIERS]
        self._steps += 1
        self.sign()
