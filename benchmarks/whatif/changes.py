"""Builds variants of a base configuration, by setting, adding to or multiplying the values at dotted paths.

In a path, an engine group is addressed by its name.
"""

from __future__ import annotations

import copy
from typing import Any

from benchmarks.whatif.config import Base, Question, Variant, WhatIfError, validated

# The mappings to which a variant may add new keys.
_FREE = {"params", "dispatch", "link_gbit_per_s"}


def variants_of(question: Question) -> dict[str, Base]:
    """Returns `base` and every variant by name. Raises a WhatIfError that names the variant and the path."""
    whole = question.model_dump(exclude={"what_if"})
    made: dict[str, Base] = {"base": validated(Base, whole, "base")}
    for variant in question.what_if:
        made[variant.name] = validated(Base, changed(whole, variant), f"what_if {variant.name!r}")
    return made


def changed(whole: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """Returns a copy of the configuration `whole` with the variant's changes. Raises WhatIfError."""
    made = copy.deepcopy(whole)
    where = f"what_if {variant.name!r}"
    for path, value in variant.set.items():
        node, key = _place(made, path, where)
        node[key] = value
    for path, step in variant.add.items():
        node, key = _place(made, path, where)
        node[key] = _kept(node.get(key), _number(node.get(key), path, where) + step)
    for path, factor in variant.scale.items():
        node, key = _place(made, path, where)
        node[key] = _kept(node.get(key), _number(node.get(key), path, where) * factor)
    return made


def _place(whole: dict[str, Any], path: str, where: str) -> tuple[dict[str, Any], str]:
    """Returns the mapping and the key to which the dotted `path` leads. Raises WhatIfError where there is none."""
    parts = path.split(".")
    node: Any = whole
    for depth, part in enumerate(parts[:-1]):
        node = _step(node, part, ".".join(parts[: depth + 1]), where)
    last = parts[-1]
    if isinstance(node, dict) and (last in node or (len(parts) > 1 and parts[-2] in _FREE)):
        return node, last
    raise WhatIfError(f"{where}: {path}: no such key{_alternatives(node)}")


def _step(node: Any, part: str, so_far: str, where: str) -> Any:
    if isinstance(node, dict) and part in node:
        if node[part] is None:
            raise WhatIfError(f"{where}: {so_far} has no value in the base, so nothing in it can be changed")
        return node[part]
    if isinstance(node, list | tuple):
        for item in node:
            if isinstance(item, dict) and item.get("name") == part:
                return item
    raise WhatIfError(f"{where}: {so_far}: no such key{_alternatives(node)}")


def _alternatives(node: Any) -> str:
    if isinstance(node, dict):
        return f"; there are {', '.join(node)}"
    if isinstance(node, list | tuple):
        return f"; there are {', '.join(str(i.get('name')) for i in node if isinstance(i, dict))}"
    return ""


def _number(value: Any, path: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WhatIfError(f"{where}: {path} is {value!r} in the base, not a number; use `set`")
    return value


def _kept(old: Any, new: float) -> Any:
    """Returns `new`, as an int where `old` is a count and `new` is whole. Validation refuses a fractional count."""
    return int(new) if isinstance(old, int) and float(new).is_integer() else new
