"""Variants of a base: values set, added to or multiplied at dotted paths. Engine groups are addressed by name."""

from __future__ import annotations

import copy
from typing import Any

from benchmarks.whatif.config import Base, Question, Variant, WhatIfError, validated

_FREE = {"params", "dispatch", "link_gbit_per_s"}  # mappings that may get new keys


def variants_of(question: Question) -> dict[str, Base]:
    """`base` and every what-if, by name. Raises WhatIfError that names the variant and the path."""
    whole = question.model_dump(exclude={"what_if"})
    made: dict[str, Base] = {"base": validated(Base, whole, "base")}
    for variant in question.what_if:
        made[variant.name] = validated(Base, changed(whole, variant), f"what_if {variant.name!r}")
    return made


def changed(whole: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """A copy of `whole` with the variant's changes."""
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
    """The mapping and the key that `path` leads to."""
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
    """A count stays a count where the result is whole (else the check of the result refuses it)."""
    return int(new) if isinstance(old, int) and float(new).is_integer() else new
