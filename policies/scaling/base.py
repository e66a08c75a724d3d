"""The contract of a scaling policy, its limits, and what a plan is.

    step(observation, state) -> Step(plan, state, reasons)

A plan has the wanted number of serving engines of each role, the wanted number of warm ones, and the moves of single
engines towards them. Plans are level-triggered: each is made from what is, so a move that was lost is planned again.
`Limits.kept` holds the bounds for every policy, and nothing else changes a policy's counts.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

from policies.routing.params import BadParameter, Whole, check
from policies.scaling.observation import Duty, Observation
from policies.state.views import Role


class Way(StrEnum):
    """The ways in which one engine changes, from the cheapest to the dearest way of adding capacity, then those that
    take it away.
    """

    SWITCH = "switch"
    ACTIVATE = "activate"
    START = "start"
    DEACTIVATE = "deactivate"
    STOP = "stop"


class Move(NamedTuple):
    """One engine's change. `engine` is empty for a start; `role` is the role that it gets or leaves."""

    way: Way
    engine: str
    role: Role


class Counts(NamedTuple):
    """Numbers of engines by role."""

    prefill: int
    decode: int
    colocated: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.colocated

    def of(self, role: Role) -> int:
        """Returns the number for one role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.COLOCATED: self.colocated}[role]

    def plus(self, role: Role, change: int) -> "Counts":
        """Returns the counts with one role's number changed."""
        return self._replace(**{role.value: self.of(role) + change})


@dataclass(frozen=True, slots=True)
class Plan:
    """The wanted engines: `serving` by role, `warm` ones beside them, and the moves to make now."""

    serving: Counts
    warm: int
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that no policy may pass.

    Raises BadParameter for bounds that exclude each other, or under which nothing could decode.
    """

    prefill_min: Annotated[int, Whole(0)] = 1
    prefill_max: Annotated[int, Whole(0)] = 64
    decode_min: Annotated[int, Whole(0)] = 1
    decode_max: Annotated[int, Whole(0)] = 64
    colocated_min: Annotated[int, Whole(0)] = 0
    colocated_max: Annotated[int, Whole(0)] = 0
    warm_min: Annotated[int, Whole(0)] = 0
    warm_max: Annotated[int, Whole(0)] = 0
    budget: Annotated[int, Whole(1)] = 128
    """Most engines that may exist: serving, warm and starting."""
    step: Annotated[int, Whole(1)] = 64
    """Most serving engines that one step may add, take away or switch."""
    name: ClassVar[str] = "limits"

    def __post_init__(self) -> None:
        check(self)
        for what in ("prefill", "decode", "colocated", "warm"):
            low, high = getattr(self, f"{what}_min"), getattr(self, f"{what}_max")
            if low > high:
                raise BadParameter(
                    f"limits: {what}_min is {low}, above {what}_max {high}: lower one or raise the other"
                )
        if self.least.total + self.warm_min > self.budget:
            raise BadParameter(
                f"limits: the least numbers sum to {self.least.total + self.warm_min}, above the budget of"
                f" {self.budget}: raise the budget"
            )
        if not self.decode_max and not self.colocated_max:
            raise BadParameter(
                "limits: decode_max and colocated_max are 0, so nothing would decode: raise one"
            )
        if not self.prefill_max and not self.colocated_max:
            raise BadParameter(
                "limits: prefill_max and colocated_max are 0, so nothing would prefill: raise one"
            )

    @property
    def least(self) -> Counts:
        return Counts(self.prefill_min, self.decode_min, self.colocated_min)

    @property
    def most(self) -> Counts:
        return Counts(self.prefill_max, self.decode_max, self.colocated_max)

    def kept(self, wanted: Counts, warm: int) -> tuple[Counts, int]:
        """Returns the nearest counts within the bounds and the budget.

        Where the budget is short, warm engines go first; then each role gives in proportion to what it has above its
        minimum, the largest rest first.
        """
        serving = Counts(
            *(max(low, min(high, n)) for n, low, high in zip(wanted, self.least, self.most, strict=True))
        )
        warm = max(self.warm_min, min(self.warm_max, warm))
        over = serving.total + warm - self.budget
        if over > 0:
            given = min(over, warm - self.warm_min)
            warm, over = warm - given, over - given
        if over > 0:
            above = [n - low for n, low in zip(serving, self.least, strict=True)]
            shares = [over * n / sum(above) for n in above]
            taken = [int(share) for share in shares]
            rest = sorted(range(3), key=lambda i: (taken[i] - shares[i], i))
            for i in rest[: over - sum(taken)]:
                taken[i] += 1
            serving = Counts(*(n - t for n, t in zip(serving, taken, strict=True)))
        return serving, warm


class Step(NamedTuple):
    """A policy's decision: the plan, the state for the next step, and reasons that show formula and numbers."""

    plan: Plan
    state: Any
    reasons: tuple[str, ...]


class ScalingPolicy(Protocol):
    """A frozen dataclass of parameters. `initial` is the state before the first step; a state is frozen, too."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    def initial(self) -> Any: ...

    def step(self, seen: Observation, state: Any) -> Step: ...


def serving_now(seen: Observation) -> Counts:
    """Returns the numbers of active engines by role."""
    counts = Counts(0, 0, 0)
    by_role = {Role.PREFILL: 0, Role.DECODE: 0, Role.COLOCATED: 0}
    for engine in seen.engines:
        if engine.duty is Duty.ACTIVE:
            by_role[engine.role] += 1
    return counts._replace(
        prefill=by_role[Role.PREFILL], decode=by_role[Role.DECODE], colocated=by_role[Role.COLOCATED]
    )


def stepped(now: Counts, wanted: Counts, most: int) -> Counts:
    """Returns `wanted`, or as far towards it from `now` as `most` changes of single engines go.

    A role that loses an engine while another gains one is one change. These switches come first, then what is left of
    gains or losses, the role with the most to gain or lose first.
    """
    gains = _units([w - n for n, w in zip(now, wanted, strict=True)])
    losses = _units([n - w for n, w in zip(now, wanted, strict=True)])
    counts = list(now)
    for role in gains[:most]:
        counts[role] += 1
    for role in losses[:most]:
        counts[role] -= 1
    return Counts(*counts)


def _units(changes: list[int]) -> list[int]:
    """Returns the index of a role once for each engine that it gains, always the role with the most left to gain."""
    left, units = [max(0, change) for change in changes], []
    for _ in range(sum(left)):
        role = max(range(len(left)), key=lambda i: (left[i], -i))
        left[role] -= 1
        units.append(role)
    return units
