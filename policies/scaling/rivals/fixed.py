"""A fixed fleet: what a deployment without an autoscaler has. `None` keeps the counts of the first step."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from policies.routing.params import Whole, check
from policies.scaling.base import Counts, Limits, Plan, Step
from policies.scaling.moves import moves
from policies.scaling.observation import Observation
from policies.scaling.rivals.counting import first


@dataclass(frozen=True, slots=True)
class FixedState:
    """The counts of the fixed fleet, None before the first step."""

    wanted: Counts | None = None


@dataclass(frozen=True, slots=True)
class Fixed:
    """Keeps the numbers of engines."""

    limits: Limits = field(default_factory=Limits)
    prefill: Annotated[int, Whole(0)] | None = None
    decode: Annotated[int, Whole(0)] | None = None
    colocated: Annotated[int, Whole(0)] | None = None
    name: ClassVar[str] = "fixed"

    def __post_init__(self) -> None:
        check(self)

    def initial(self) -> FixedState:
        return FixedState()

    def step(self, seen: Observation, state: FixedState) -> Step:
        now = first(seen, self.limits, state.wanted)
        given = (self.prefill, self.decode, self.colocated)
        wanted = Counts(*(own if number is None else number for number, own in zip(given, now, strict=True)))
        wanted, warm = self.limits.kept(wanted, self.limits.warm_min)
        plan = Plan(wanted, warm, moves(seen, wanted, warm))
        return Step(plan, FixedState(wanted), ("fixed",))
