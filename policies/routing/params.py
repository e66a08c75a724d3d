"""Checks of a policy's parameters: refused at construction, with the policy, the parameter and the allowed range."""

import math


class BadParameter(ValueError):
    """A policy's parameter is out of range or of the wrong type; the message says what is allowed."""


def number(
    policy: str,
    name: str,
    value: object,
    low: float = -math.inf,
    high: float = math.inf,
    above: float | None = None,
) -> None:
    """A finite number with low <= value <= high and, if given, value > above. Raises BadParameter."""
    lower = f"> {above}" if above is not None else f">= {low}" if low > -math.inf else ""
    upper = f"<= {high}" if high < math.inf else ""
    allowed = " and ".join(part for part in (lower, upper) if part) or "finite"
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low <= value <= high and (above is None or value > above)):  # type: ignore[operator]
        raise BadParameter(f"policy {policy}: {name} is {value!r}: it must be a number {allowed}")


def integer(policy: str, name: str, value: object, low: int, high: int) -> None:
    """A whole number with low <= value <= high. Raises BadParameter."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadParameter(f"policy {policy}: {name} is {value!r}: it must be a whole number {low}..{high}")


def one_of(policy: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    """One of the names. Raises BadParameter listing them."""
    if value not in allowed:
        raise BadParameter(f"policy {policy}: {name} is {value!r}: choose one of {', '.join(allowed)}")


def flag(policy: str, name: str, value: object) -> None:
    """True or False. Raises BadParameter."""
    if not isinstance(value, bool):
        raise BadParameter(f"policy {policy}: {name} is {value!r}: it must be true or false")
