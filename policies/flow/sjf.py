"""Shortest job first: the flow with the fewest bytes left goes first, whatever its stage or deadline (pFabric).

key = bytes left
"""

from dataclasses import dataclass
from typing import ClassVar

from policies.flow.base import FlowState, Place, Ports
from policies.routing.params import check


@dataclass(frozen=True, slots=True)
class SJF:
    """Serves the flow that has the fewest bytes left."""

    paper: ClassVar[str] = "Alizadeh et al. 2013 (pFabric); MFS 6.1 (baseline)"
    formula: ClassVar[str] = "least bytes_left goes first"
    turns: ClassVar[bool] = False
    name: str = "sjf"

    def __post_init__(self) -> None:
        check(self)

    def place(self, state: FlowState, ports: Ports, now_s: float) -> Place:
        """Returns the one level of all flows, in the order of their bytes left."""
        return Place(1, (float(state.left),))
