"""The figures of `benchmarks.watching.walk`, computed from its steps."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.experiments.base import Row


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a result."""
    steps = whole["steps"]
    views = [step for step in steps if step["name"].startswith("view ")]
    yield Row("views opened", None, len(views))
    yield _none("steps that failed", sum(bool(step["wrong"]) for step in steps))
    yield _none("serious findings of axe-core", len(whole["findings"]))
    wrong = len(whole["said"]) + len(whole["foreign"])
    yield _none("messages of the console, and requests elsewhere", wrong)
    for step in steps:
        summary = step.get("summary")
        if summary is not None:
            yield Row(f"{step['name']}: requests", None, summary["requests"])
            yield _none(f"{step['name']}: requests that failed", summary["failed"])
        if "bytes" in step:
            yield Row(f"{step['name']}: size", None, step["bytes"] / 1e3, "kB")


def _none(name: str, count: int) -> Row:
    return Row(name, None, count, aim="0", met=count == 0)
