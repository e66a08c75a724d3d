"""The terms of the requests in a workload's file: class, priority, and whose request it is.

A line of a file in Mooncake's format may have the keys of `TERMS` beside those of the published traces, as the files of
`sluice simulate --from-live` do. A key that is missing has the default of `WorkloadRequest`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.workloads.record import WorkloadError, WorkloadRequest
from predictors.traces import open_text, trace_format

MOST_CHARS = 512
"""Most characters of the name of a class or of a client."""
MOST_PRIORITY = 2**31


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_CHARS


def _is_priority(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST_PRIORITY


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


TERMS: dict[str, tuple[Callable[[object], bool], str]] = {
    "request_class": (_is_name, "a name"),
    "priority": (_is_priority, "a whole number"),
    "client": (_is_name, "a name"),
    "weight": (_is_weight, "a number above 0"),
}
"""The keys, which are fields of `WorkloadRequest`, with a check of their values and what these must be."""

_MARKS = tuple(f'"{name}"' for name in TERMS)


def with_terms(requests: Iterable[WorkloadRequest], path: Path) -> list[WorkloadRequest]:
    """Returns the requests, which were read from the file at `path`, with the terms that its lines have.

    Raises WorkloadError with file and line for a value that is none.
    """
    told = dict(_terms(path))
    return [replace(one, **told.get(one.request_id, {})) for one in requests]


def _terms(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the id of each request that has terms of its own, and these."""
    if trace_format(path) != "mooncake":
        return
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not any(mark in line for mark in _MARKS):
                continue
            row = json.loads(line)
            found = {name: row[name] for name in TERMS if name in row}
            for name, value in found.items():
                check, wanted = TERMS[name]
                if not check(value):
                    raise WorkloadError(f"{path}:{number}: {name} must be {wanted}, not {str(value)[:80]!r}")
            yield f"{path.name}:{number}", found
