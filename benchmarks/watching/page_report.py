"""The figures of `tests.dashboard.cost`: what an update of many engines costs a page, by view."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.experiments.base import Row

MOST_UPDATE_MS = 50.0
"""Aim: CPU time of the page's main thread for one update, the mean of all while a view is shown."""


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a result."""
    engines = whole["engines"]
    for view, found in whole["views"].items():
        name = f"{engines} engines, {view}"
        update_ms = found["update_ms"]
        aim, met = f"at most {MOST_UPDATE_MS:g}", update_ms <= MOST_UPDATE_MS
        yield Row(f"{name}: main thread, CPU an update, mean", None, update_ms, "ms", aim=aim, met=met)
        yield Row(f"{name}: main thread, CPU of the longest task", None, found["longest_task_ms"], "ms")
    for what, unit, values in (("heap", "MB", whole["heap_mb"]), ("DOM nodes", "", whole["nodes"])):
        if values:
            name = f"{engines} engines, all views in turn: {what}"
            yield Row(f"{name} after the first turn", None, values[0], unit)
            yield Row(f"{name} at the end", None, values[-1], unit)
    wrong = len(whole["said"]) + len(whole["foreign"])
    yield Row(
        f"{engines} engines: messages of the console, and requests elsewhere",
        None,
        wrong,
        aim="0",
        met=not wrong,
    )
