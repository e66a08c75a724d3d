"""Makes configuration dataclasses from the mappings of a file: types are checked, unknown keys refused by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key and the allowed values."""


def from_options(kind: type[Any], options: Mapping[str, Any], where: str) -> Any:
    """A `kind`, which is a dataclass, with `options` as its fields. Raises ConfigError; `where` names the mapping."""
    allowed = sorted(f.name for f in dataclasses.fields(kind) if f.init)
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: no such option; allowed are {', '.join(allowed)}")
    try:
        return TypeAdapter(kind).validate_python(dict(options))
    except ValidationError as error:
        raise ConfigError("\n".join(problem_line(problem, where) for problem in error.errors())) from None


def problem_line(problem: Any, where: str = "") -> str:
    """One of pydantic's problems as a line for the operator: path, message, the beginning of the input."""
    path = ".".join(str(part) for part in ((where,) if where else ()) + tuple(problem["loc"]))
    return f"  {path or 'config'}: {problem['msg']} (got {str(problem.get('input'))[:80]})"
