"""Makes configuration dataclasses from the mappings of a file: types are checked, unknown keys refused by name."""

import dataclasses
from collections.abc import Mapping
from types import GenericAlias
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")
"""The types of pydantic's problems with a key that does not exist, of a dataclass and of a model."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key and the allowed values."""


def from_options(kind: type[Any], options: Mapping[str, Any], where: str) -> Any:
    """A `kind`, which is a dataclass, with `options` as its fields. Raises ConfigError, also for an unknown key of a
    dataclass inside it; `where` names the mapping.
    """
    allowed = sorted(f.name for f in dataclasses.fields(kind) if f.init)
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: no such option; allowed are {', '.join(allowed)}")
    # pydantic ignores unknown keys of a dataclass unless its config forbids them; a tuple around it takes the config
    around: Any = GenericAlias(tuple, (kind,))
    adapter: TypeAdapter[Any] = TypeAdapter(around, config=ConfigDict(extra="forbid"))
    try:
        return adapter.validate_python((dict(options),))[0]
    except ValidationError as error:
        problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
        raise ConfigError("\n".join(problem_line(problem, where) for problem in problems)) from None


def problem_line(problem: Any, where: str = "") -> str:
    """Returns one of pydantic's problems as a line for the operator: path, message, the beginning of the input."""
    path = ".".join(str(part) for part in ((where,) if where else ()) + tuple(problem["loc"]))
    message = "no such option" if problem["type"] in UNKNOWN_KEY else problem["msg"]
    given = problem.get("input")
    # a rule over several keys says itself what is wrong, and among the others there may be secrets
    whole = problem["type"] == "value_error" and isinstance(given, Mapping)
    return f"  {path or 'config'}: {message}" + ("" if whole else f" (got {str(given)[:80]})")
