"""The ranges of parameters are declared in the annotations of a dataclass's fields and checked when it is made.

Policies declare their parameters in this way, and so do the configurations of dispatcher, router and ingress.

    horizon: Annotated[int, Whole(0, 4096, "steps")] = 48
    \"\"\"Decode steps that the lookahead covers.\"\"\"
    beta: Annotated[float, Number(low=0.0)] | None = None
    \"\"\"Weight of an overflow; None: the number of workers.\"\"\"

    def __post_init__(self) -> None:
        check(self)

A bool needs no range. docs/policies.md shows the default, the unit, the range and the string below each field.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints


class BadParameter(ValueError):
    """A parameter is out of range or of the wrong type. The message says what is allowed."""


class Range(Protocol):
    """The values that a parameter may have. `str` of a range completes the sentence "it must be ..."."""

    @property
    def unit(self) -> str: ...

    def allows(self, value: object) -> bool: ...


@dataclass(frozen=True, slots=True)
class Number:
    """A number with low <= value <= high and, if given, value > above. It is finite; `endless` allows infinity, too."""

    low: float = -math.inf
    high: float = math.inf
    above: float | None = None
    unit: str = ""
    endless: bool = False

    def allows(self, value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if not math.isfinite(value):
            return self.endless and value == math.inf
        return self.low <= value <= self.high and (self.above is None or value > self.above)

    def __str__(self) -> str:
        # typing treats Annotated[float, Number(0)] and Annotated[float, Number(0.0)] as one, so both must print
        # alike.
        lower = f">= {_short(self.low)}" if self.low > -math.inf else ""
        lower = f"> {_short(self.above)}" if self.above is not None else lower
        upper = f"<= {_short(self.high)}" if self.high < math.inf else ""
        number = f"a number {' and '.join(part for part in (lower, upper) if part) or 'finite'}"
        return f"{number} or infinity" if self.endless else number


def _short(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number with low <= value and, if given, value <= high."""

    low: int
    high: int | None = None
    unit: str = ""

    def allows(self, value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return self.low <= value and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        return f"a whole number {f'>= {self.low}' if self.high is None else f'{self.low}..{self.high}'}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A string that is one of several names."""

    names: tuple[str, ...]
    unit: str = ""

    def allows(self, value: object) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


@dataclass(frozen=True, slots=True)
class Flag:
    """The value True or False."""

    unit: str = ""

    def allows(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


def need(policy: str, name: str, value: object, allowed: Range) -> None:
    """Raises BadParameter, which names policy, parameter and range, if the value is not allowed."""
    if not allowed.allows(value):
        raise BadParameter(f"policy {policy}: {name} is {value!r}: it must be {allowed}")


def check(parameters: Any, who: str | None = None) -> None:
    """Checks the fields of a dataclass against their declared ranges. Raises BadParameter for the first value that
    is not allowed.

    The message begins with `who`, or by default with the policy's name.
    """
    for name, (allowed, optional) in ranges(parameters.__class__).items():
        value = getattr(parameters, name)
        if not (optional and value is None) and not allowed.allows(value):
            who = who or f"policy {parameters.name}"
            raise BadParameter(f"{who}: {name} is {value!r}: it must be {allowed}")


@cache
def ranges(kind: type) -> dict[str, tuple[Range, bool]]:
    """Returns the declared range of each field of a class by the field's name, and whether None is allowed as well."""
    found: dict[str, tuple[Range, bool]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if hint is bool:
            found[name] = (Flag(), False)
            continue
        members = (hint,) if get_origin(hint) is Annotated else get_args(hint)
        for member in members:
            if get_origin(member) is Annotated:
                found[name] = (get_args(member)[1], type(None) in members)
    return found


def read_endless(kind: type, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a dataclass as read from JSON, which has no infinity: journals and the admin API spell
    it "inf", which becomes the number where the declared range allows it.
    """
    known = ranges(kind)

    def read(name: str, value: Any) -> Any:
        endless = name in known and isinstance(known[name][0], Number) and known[name][0].allows(math.inf)
        return math.inf if value == "inf" and endless else value

    return {name: read(name, value) for name, value in params.items()}
