"""Reads the aims of an experiment from a file that is written before it runs, and compares its rows with them.

`benchmarks/aims/stated/EXPERIMENT.json` has the text of an aim by a pattern of row names (`fnmatch`); a person writes
it, and commits it with the experiment. `python -m benchmarks run` reads it before the first run and puts its digest
into the results file (`Stored.aims`). `benchmarks.check` finds results whose digest is not that of the file in the
commit of their runs, and rows whose aims are not those of the file. So nobody can change an aim after having seen what
became of it. An experiment without such a file can run; its results then have no digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.checkout import ROOT
from benchmarks.experiments.base import ExperimentError, Row

FOLDER = "benchmarks/aims/stated"
"""The folder of the files, relative to the checkout."""


def stated(name: str, root: Path = ROOT) -> Mapping[str, str] | None:
    """Returns the aims of the experiment `name` by patterns of row names, or None where no file states them.

    Raises ExperimentError for a file that is no JSON object of texts.
    """
    path = root / FOLDER / f"{name}.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ExperimentError(f"{path} is no JSON: {error}") from error
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(aim, str) and aim for aim in found.values())
    ):
        raise ExperimentError(f"{path}: give one object with the text of an aim by each pattern of row names")
    return found


def digest(name: str, root: Path = ROOT) -> str:
    """Returns the digest of the stated aims of an experiment in the checkout at `root`; "" where there are none.

    The order of the patterns and the layout of the file do not count.
    """
    found = stated(name, root)
    if found is None:
        return ""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def differences(name: str, rows: Sequence[Row], reduced: bool = False, root: Path = ROOT) -> Iterator[str]:
    """Yields a sentence for each difference between the stated aims and the aims of the rows, nothing where no file
    states any. `reduced` says that the rows are of a reduced size, which may lack some.
    """
    aims = stated(name, root)
    if aims is None:
        return
    unused = dict(aims)
    for row in rows:
        patterns = [pattern for pattern in aims if fnmatchcase(row.name, pattern)]
        if {aims[pattern] for pattern in patterns} != ({row.aim} if row.aim else set()):
            said = " and ".join(repr(aims[pattern]) for pattern in patterns) or "none"
            has = f"the aim {row.aim!r}" if row.aim else "no aim"
            yield f"{row.name!r} has {has}, and {FOLDER}/{name}.json states {said} for it"
        for pattern in patterns:
            unused.pop(pattern, None)
    if not reduced:
        for pattern, aim in unused.items():
            yield f"{FOLDER}/{name}.json states {aim!r} for {pattern!r}, which no row matches"
