"""MFS: defer flows and promote them as laxity shrinks, over all stages of a prefill (MFS 4).

    level = RMLQ's (`policies.flow.rmlq`): MLU for explicit deadlines, relative layer index for implicit ones
    order within P_2 .. P_K:  stages 1 and 2 before stage 3
                              stages 1 and 2: least RLI, then the batch's rank by RED, then submission
                              stage 3: least latest start = due - bytes left / B(1-rho), then submission
    P_1 holds explicit deadlines only, by least latest start
    scavenger: first come, first served

Deviation: within a level MFS leaves stage 3 in the order of arrival; here the flow whose latest start comes first goes
first, which is least laxity within the level. A stage 3 flow that has no deadline waits at P_K and is not promoted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

from policies.flow.base import FlowState, Place, Ports, Stage
from policies.flow.rmlq import explicit, implicit, thresholds
from policies.routing.params import Number, Whole, check

SWEPT: Final[Mapping[str, float | int]] = {"scale": 4.0, "levels": 2}
"""Parameters with which MFS is shipped: Q_1 = 1 and two levels, so that transfers go by latest start behind collectives
until one needs its whole port. `benchmarks.experiments.mfs_thresholds` proposes them by a rule that was written before
it ran; the paper's own values are the defaults of `MFS`.
"""


@dataclass(frozen=True, slots=True)
class MFS:
    """Defers each flow to the latest safe moment and promotes it as its laxity shrinks, with collectives first, prefix
    reuse by need, and P2D transfers by their deadlines.
    """

    paper: ClassVar[str] = "MFS 4.2-4.5"
    formula: ClassVar[str] = "MLU = bytes_left / (time_left * B * (1 - rho)); P_i where MLU >= U * E^-i"
    turns: ClassVar[bool] = False
    levels: Annotated[int, Whole(2, 64, "levels")] = 8
    """K, the number of levels above the scavenger."""
    scale: Annotated[float, Number(above=0.0)] = 0.5
    """U of the thresholds Q_i = U E^-i (MFS 4.3: 0.5)."""
    base: Annotated[float, Number(above=1.0)] = 4.0
    """E of the thresholds Q_i = U E^-i (MFS 4.3: 4)."""
    infeasible_above: Annotated[float, Number(low=1.0)] = 1.0
    """MLU above which a flow cannot be in time and goes to the scavenger; above 1 where the bandwidth is uncertain."""
    name: str = "mfs"
    _queue: tuple[float, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "_queue", thresholds(self.levels, self.scale, self.base))

    def place(self, state: FlowState, ports: Ports, now_s: float) -> Place:
        """Returns the flow's level by RMLQ and its order within the level."""
        flow = state.flow
        if flow.stage is not Stage.P2D or state.due_at is None:
            level, until_s = implicit(state, self.levels)
            if flow.stage is Stage.P2D and level <= self.levels:
                return Place(self.levels, (1.0, state.submitted_at, 0.0))
            key = (0.0, float(state.rli), state.red)
        else:
            rate = ports.rate(flow.source, flow.target)
            level, until_s = explicit(state, state.due_at, rate, self._queue, self.infeasible_above, now_s)
            key = (1.0, state.due_at - state.left / rate, 0.0)
        if level > self.levels:
            key = (0.0, state.submitted_at, 0.0)
        return Place(level, key, until_s)
