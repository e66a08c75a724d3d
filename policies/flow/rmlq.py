"""The reverse multi-level queue: flows begin low and are promoted as their laxity shrinks (MFS 4.2, 4.3, 4.5).

    Q_i = U * E^-i,  i = 1 .. K-1           promotion thresholds on MLU; K levels, P_1 the highest, P_K open below
    explicit deadline:  the level is the least i with MLU >= Q_i, else K
    implicit deadline:  level = min(2 + RLI, K)
    scavenger:          level K + 1, below all others: pruned requests, and flows that cannot be in time (MLU > 1)

MLU rises while a flow waits. So each threshold is crossed at a known time, t_i = due - bytes left / (Q_i * B(1-rho)),
and levels are computed by comparing times: no queue has to be scanned. Levels only rise; the scavenger is the one
exception, and who leaves it enters at the level of its present MLU.

Deviation: MFS lets Q_1 be 0.125 (U = 0.5, E = 4), with which a flow that needs an eighth of the link is at P_1. On the
paper's own Table 1 these thresholds serve 2 of 4 requests and Q_1 = 1 serves all: U, E and K are swept
(`policies.flow.mfs.SWEPT`).
Deviation: MFS prunes by request (Algorithm 1). A single flow with MLU > 1 is scavenged as well, because whatever P_1
spends on it is lost to flows that can still be in time (the black hole of 4.4.2).
"""

import math
from typing import NamedTuple

from policies.flow.base import FlowState


class Standing(NamedTuple):
    """A level and the time at which it next changes if nothing happens to the flow."""

    level: int
    until_s: float


def thresholds(levels: int, scale: float, base: float) -> tuple[float, ...]:
    """Returns Q_1 .. Q_{K-1} for K `levels`, U `scale` and E `base`; they fall geometrically."""
    return tuple(scale * base**-i for i in range(1, levels))


def explicit(
    state: FlowState,
    due_at: float,
    rate: float,
    queue: tuple[float, ...],
    infeasible_above: float,
    now_s: float,
) -> Standing:
    """Returns the level of a flow with an explicit deadline. `queue` is Q_1 .. Q_{K-1}; `rate` is B(1-rho)."""
    levels = len(queue) + 1
    scavenger = levels + 1
    alone_s = state.left / rate
    last = due_at - alone_s / infeasible_above
    if state.pruned or now_s > last:
        return Standing(scavenger, math.inf)
    lowest = levels if state.level is None or state.level == scavenger else state.level
    level = lowest
    for i in range(1, lowest):
        if now_s >= due_at - alone_s / queue[i - 1]:
            level = i
            break
    hopeless = math.nextafter(last, math.inf)
    if level == 1:
        return Standing(1, hopeless)
    return Standing(level, min(hopeless, due_at - alone_s / queue[level - 2]))


def implicit(state: FlowState, levels: int) -> Standing:
    """Returns the level of a flow with an implicit deadline: by its relative layer index, never P_1."""
    if state.pruned:
        return Standing(levels + 1, math.inf)
    level = min(2 + state.rli, levels)
    if state.level is not None and state.level <= levels:
        level = min(level, state.level)
    return Standing(level, math.inf)
