"""Reads and writes timing profiles, YAML files that each describe one kind of engine. Their keys are:

source: where the values come from (text)
values: the fields of `TimingProfile` except `source`
assumptions: field -> why its value is a guess (may be empty)
fit: the errors that remained after a fit to measurements (`benchmarks.live.calibrate` writes them; free form)
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import yaml

from policies.engine_model.timing import TimingProfile

FOLDER = Path(__file__).parent
FIELDS = tuple(f.name for f in dataclasses.fields(TimingProfile) if f.name != "source")


class ProfileError(ValueError):
    """The error of a profile file that cannot be used; the message names the file and the key."""


def names() -> list[str]:
    """Returns the names of the profiles that this package contains."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(profile: str | Path) -> TimingProfile:
    """Returns the profile in the file `profile`, or without a suffix the shipped one of that name.

    Raises ProfileError.
    """
    path = Path(profile) if Path(profile).suffix else FOLDER / f"{profile}.yaml"
    if not path.is_file():
        raise ProfileError(
            f"profile {profile}: no such file; shipped are {', '.join(names())}, or give a path"
        )
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ProfileError(f"{path}: not YAML: {error}") from error
    return _parse(path, data)


def dump(path: Path, profile: TimingProfile, assumptions: dict[str, str], fit: dict[str, Any]) -> None:
    """Writes a profile with its assumptions and the errors of its fit to the file `path`."""
    values = {name: getattr(profile, name) for name in FIELDS}
    data = {"source": profile.source, "values": values, "assumptions": assumptions, "fit": fit}
    path.write_text(yaml.safe_dump(data, sort_keys=False, width=100))


def _parse(path: Path, data: Any) -> TimingProfile:
    if not isinstance(data, dict) or not isinstance(data.get("values"), dict):
        raise ProfileError(f"{path}: must be a mapping with `source` and `values`")
    unknown = sorted(set(data) - {"source", "values", "assumptions", "fit"})
    if unknown:
        raise ProfileError(f"{path}: unknown key {unknown[0]!r}; known are source, values, assumptions, fit")
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
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ProfileError(f"{path}: values.{name} is {value!r}: must be a finite number")
    values = values | {"kv_bytes_per_token": int(values["kv_bytes_per_token"])}
    try:
        return TimingProfile(source=" ".join(source.split()), **values)
    except ValueError as error:
        raise ProfileError(f"{path}: {error}") from error
