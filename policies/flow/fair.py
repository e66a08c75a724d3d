"""Fair sharing: every flow gets an equal share of its ports, whatever its stage or deadline.

    key = start tag of start-time fair queueing: the port's virtual time at submission + bytes permitted since

Over permits it is a round robin by bytes; over an ideal network all flows have one level and share it max-min fairly.
"""

from dataclasses import dataclass
from typing import ClassVar

from policies.flow.base import FlowState, Place, Ports
from policies.routing.params import check


@dataclass(frozen=True, slots=True)
class Fair:
    """Shares each port equally among its flows, as TCP does (MFS's baseline FS)."""

    paper: ClassVar[str] = "MFS 6.1 (baseline)"
    formula: ClassVar[str] = "least bytes served since arrival goes first"
    turns: ClassVar[bool] = True
    name: str = "fair"

    def __post_init__(self) -> None:
        check(self)

    def place(self, state: FlowState, ports: Ports, now_s: float) -> Place:
        """Returns the one level of all flows, in the order of least service."""
        return Place(1, (state.turn,), shares=True)
