"""Earliest deadline first: explicit deadlines before implicit ones, which share fairly (MFS 3.2, Fig. 7b).

    level 1: explicit deadlines, key = (deadline)
    level 2: implicit deadlines, fair sharing

MFS: EDF "over-prioritizes Stage 3 due to explicit deadlines and degenerates into Fair Sharing when deadlines are
implicit".
"""

from dataclasses import dataclass
from typing import ClassVar

from policies.flow.base import FlowState, Place, Ports
from policies.routing.params import check


@dataclass(frozen=True, slots=True)
class EDF:
    """Serves the explicit deadline that comes first; flows without one share what is left."""

    paper: ClassVar[str] = "MFS 3.2, 6.1 (baseline)"
    formula: ClassVar[str] = "least explicit deadline goes first; implicit ones share fairly behind"
    turns: ClassVar[bool] = True
    name: str = "edf"

    def __post_init__(self) -> None:
        check(self)

    def place(self, state: FlowState, ports: Ports, now_s: float) -> Place:
        """Returns the level of explicit deadlines, in their order, or the level of implicit ones."""
        if state.due_at is not None:
            return Place(1, (state.due_at,))
        return Place(2, (state.turn,), shares=True)
