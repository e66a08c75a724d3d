"""Karuna: deadline flows get the least rate that keeps their deadline, all others go by shortest job (SIGCOMM 2016).

    level 1: explicit deadlines that can be kept, at rate = bytes to permit / time left; key = (deadline)
    level 2: all other flows, key = (bytes left)

A flow that is late or cannot be in time any more (MLU > 1) is one of level 2. The least rate leaves bandwidth unused
where nobody else wants it, as in the paper ("conservatively allocates near-minimal rates and fails to exploit
available bandwidth", MFS 6.3): this is the one policy here that does not conserve work.

Deviation: Karuna's rate is a congestion window of DCTCP. Here a permit is followed by a pause of its size / rate.
Not claimed: Karuna's third class, flows of unknown size.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from policies.flow.base import FlowState, Place, Ports
from policies.routing.params import check


@dataclass(frozen=True, slots=True)
class Karuna:
    """Gives deadline flows the least rate that is in time, and the rest to the shortest job."""

    paper: ClassVar[str] = "Chen et al. 2016 (Karuna); MFS 6.1 (baseline)"
    formula: ClassVar[str] = (
        "explicit deadlines: rate = bytes_left / time_left; others: least bytes_left goes first"
    )
    turns: ClassVar[bool] = True
    name: str = "karuna"

    def __post_init__(self) -> None:
        check(self)

    def place(self, state: FlowState, ports: Ports, now_s: float) -> Place:
        """Returns level 1 with the least rate, or level 2 for a flow without a deadline that it can keep."""
        if state.due_at is not None and state.due_at > now_s:
            last = state.due_at - state.left / ports.rate(state.flow.source, state.flow.target)
            if now_s <= last:
                rate = max(state.waiting, 1) / (state.due_at - now_s)
                return Place(1, (state.due_at,), math.nextafter(last, math.inf), rate)
        return Place(2, (float(state.left),))
