"""The bounds of the engine groups, which an administrator may change while the application runs.

    {"decode": {"min": 1, "max": 4, "warm": 1, "warm_max": 2}}

    min, max    the replicas of a group, warm ones among them
    warm        replicas that wait warm beside those that serve; warm_max: most that the policy may keep so

What is not named stays. The configuration (`engines[].scaling`) has the same keys and rules: min <= max and
warm <= warm_max <= max - min. Nothing here does I/O.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actors.scaling.fleet import Group

KEYS = ("min", "max", "warm", "warm_max")
MOST = 4096
"""Largest bound."""


class BadScale(ValueError):
    """An administrator's order cannot be carried out; the message says what is allowed."""


def bounds_of(group: Group) -> dict[str, int]:
    """Returns the bounds of a group by their keys."""
    return {"min": group.least, "max": group.most, "warm": group.warm, "warm_max": group.warm_most}


def bounded(groups: Mapping[str, Group], asked: Mapping[str, Any]) -> dict[str, Group]:
    """Returns the groups with the bounds that are asked for, by group and key. Raises BadScale for what no
    configuration could have, with the key and the values that it may have.
    """
    made = dict(groups)
    for name, own in asked.items():
        if name not in groups:
            raise BadScale(f"there is no group {name!r}; there are {', '.join(groups)}")
        if not isinstance(own, Mapping) or not own:
            raise BadScale(f"bounds of {name} must be an object with one of {', '.join(KEYS)}")
        for key, number in own.items():
            if key not in KEYS:
                raise BadScale(f"{name}.{key} is not known; there are {', '.join(KEYS)}")
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MOST:
                raise BadScale(f"{name}.{key} is {number!r}: it must be a whole number 0..{MOST}")
        made[name] = _checked(name, groups[name], own)
    return made


def _checked(name: str, group: Group, asked: Mapping[str, int]) -> Group:
    least, most = asked.get("min", group.least), asked.get("max", group.most)
    warm = asked.get("warm", group.warm)
    warm_most = asked.get("warm_max", max(warm, group.warm_most) if "warm" in asked else group.warm_most)
    why = excluded(name, least, most, warm, warm_most)
    if why is not None:
        raise BadScale(why)
    begun = group.deployed - group.first
    return replace(group, least=least, most=most, warm=warm, warm_max=warm_most, first_warm=begun)


def excluded(where: str, least: int, most: int, warm: int, warm_most: int) -> str | None:
    """Returns which of these bounds another one excludes, behind the name `where` of the group, with the values that it
    may have; None if they go together.
    """
    if most < max(1, least):
        return f"{where}.max is {most}: it must be {max(1, least)}..{MOST}, at least min"
    if warm > most - least:
        return f"{where}.warm is {warm}: it must be 0..{most - least}, at most max less min"
    if not warm <= warm_most <= most - least:
        return (
            f"{where}.warm_max is {warm_most}: it must be {warm}..{most - least}, from warm to max less min"
        )
    return None
