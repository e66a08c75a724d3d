"""Parts that the rivals share: a wanted number a role, held where nothing was reported, within the limits."""

from collections.abc import Callable
from dataclasses import dataclass

from policies.scaling.base import Counts, Limits, Plan, Step, serving_now, stepped
from policies.scaling.moves import moves
from policies.scaling.observation import Observation
from policies.state.views import Role


def bound(
    seen: Observation, limits: Limits, before: Counts, wanted: Counts, state: object, reasons: tuple[str, ...]
) -> Step:
    """Returns the step from the counts `before` towards `wanted`, within the limits, with `limits.warm_min` warm
    ones.
    """
    serving, warm = limits.kept(stepped(before, wanted, limits.step), limits.warm_min)
    return Step(Plan(serving, warm, moves(seen, serving, warm)), state, reasons)


def first(seen: Observation, limits: Limits, wanted: Counts | None) -> Counts:
    """Returns the wanted counts, which at a policy's first step are the present ones within the limits."""
    return wanted if wanted is not None else limits.kept(serving_now(seen), 0)[0]


def by_role(counts: Counts, change: Callable[[Role, int], int]) -> Counts:
    """Returns the counts after `change(role, number)` of each role."""
    return Counts(
        change(Role.PREFILL, counts.prefill),
        change(Role.DECODE, counts.decode),
        change(Role.COLOCATED, counts.colocated),
    )


@dataclass(frozen=True, slots=True)
class Sustained:
    """How long a wish has lasted: its direction (1: more, -1: fewer, 0: none) since `since_s`."""

    direction: int = 0
    since_s: float = 0.0

    def seen(self, direction: int, now_s: float) -> "Sustained":
        """Returns the wish after one more look, which begins anew when the direction changes."""
        return self if direction == self.direction else Sustained(direction, now_s)

    def lasted(self, direction: int, now_s: float, delay_s: float) -> bool:
        """Returns whether the wish for `direction` has lasted for `delay_s` seconds."""
        return self.direction == direction and now_s - self.since_s >= delay_s
