"""Reads and writes profiles of starts: YAML files that each describe one way in which an engine starts. Their keys are:

source: where the values come from (text)
values: the five fields of `StartSteps`
assumptions: field -> why its value is a guess (may be empty)

`sluice scale --json` and GET /sluice/admin/scale show the steps of a running application (`start_steps`), which have
the same names.
"""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from benchmarks.sim.profiles import ProfileError
from policies.scaling.starts import StartSteps

__all__ = ["FIELDS", "FOLDER", "StartSteps", "dump", "load", "names"]

FOLDER = Path(__file__).parent
FIELDS = tuple(field.name for field in dataclasses.fields(StartSteps))


def names() -> list[str]:
    """Returns the names of the start profiles that this package contains."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(profile: str | Path) -> StartSteps:
    """Returns the steps in the file `profile`, or without a suffix the shipped ones of that name.

    Raises ProfileError.
    """
    path = Path(profile) if Path(profile).suffix else FOLDER / f"{profile}.yaml"
    if not path.is_file():
        raise ProfileError(
            f"start profile {profile}: no such file; shipped are {', '.join(names())}, or give a path"
        )
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ProfileError(f"{path}: not YAML: {error}") from error
    return _parse(path, data)


def dump(path: Path, steps: StartSteps, source: str, assumptions: dict[str, str] | None = None) -> None:
    """Writes the steps of a start, with their source and what of them is a guess, to the file `path`."""
    data = {"source": source, "values": dataclasses.asdict(steps), "assumptions": assumptions or {}}
    path.write_text(yaml.safe_dump(data, sort_keys=False, width=100))


def _parse(path: Path, data: Any) -> StartSteps:
    if not isinstance(data, dict) or not isinstance(data.get("values"), dict):
        raise ProfileError(f"{path}: must be a mapping with `source` and `values`")
    unknown = sorted(set(data) - {"source", "values", "assumptions"})
    if unknown:
        raise ProfileError(f"{path}: unknown key {unknown[0]!r}; known are source, values, assumptions")
    values, source = data["values"], data.get("source")
    if not isinstance(source, str) or not source.strip():
        raise ProfileError(f"{path}: `source` must say where the values come from")
    missing, extra = sorted(set(FIELDS) - set(values)), sorted(set(values) - set(FIELDS))
    if missing or extra:
        raise ProfileError(f"{path}: values lack {missing or 'nothing'} and must not have {extra or 'more'}")
    for name in sorted(data.get("assumptions") or {}):
        if name not in FIELDS:
            raise ProfileError(f"{path}: assumptions name {name!r}, which is no value")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ProfileError(f"{path}: values.{name} is {value!r}: must be a number")
    try:
        return StartSteps(**values)
    except ValueError as error:
        raise ProfileError(f"{path}: {error}") from error
