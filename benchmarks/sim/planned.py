"""A scaling policy that knows its plans beforehand: for tests by hand, and for plans of one who knows the load."""

from dataclasses import dataclass, field
from typing import ClassVar

from policies.scaling.base import Counts, Limits, Plan, Step
from policies.scaling.moves import moves
from policies.scaling.observation import Observation


@dataclass(frozen=True, slots=True)
class Planned:
    """Wants what its timetable says. `timetable` has rows (from s, serving engines, warm engines) in order of time."""

    timetable: tuple[tuple[float, Counts, int], ...]
    limits: Limits = field(default_factory=Limits)
    name: ClassVar[str] = "planned"

    def __post_init__(self) -> None:
        times = [row[0] for row in self.timetable]
        if not times or times[0] > 0.0 or times != sorted(times):
            raise ValueError(f"planned: the timetable's times are {times}: begin at 0 and go on in order")

    def initial(self) -> None:
        return None

    def step(self, seen: Observation, state: None) -> Step:
        """Returns the plan of the last row that has begun."""
        _, serving, warm = [row for row in self.timetable if row[0] <= seen.now_s][-1]
        return Step(Plan(serving, warm, moves(seen, serving, warm)), None, ("as planned",))
