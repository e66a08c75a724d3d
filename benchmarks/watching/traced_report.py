"""The figures of `benchmarks.watching.traced`, computed from what each request's trace says."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.experiments.base import Row
from benchmarks.live.stats import percentile
from benchmarks.plots import Series, figure, lines, save

MOST_DIFFERENCE_MS = 2.0
"""Aim: most milliseconds between the time of any request and the sum of the times in its trace."""


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a result."""
    yield Row(f"requests that were traced, of {whole['requests']}", None, float(whole["traced"]))
    yield Row("engines killed meanwhile", None, float(sum(whole["killed"].values())))
    yield Row("attempts that ended with an engine and went on elsewhere", None, float(whole["going_on"]))
    yield Row("requests that failed", None, float(sum(whole["failed"].values())))
    tasks, spans = (sum(whole[name].values()) for name in ("tasks", "spans"))
    yield Row("tasks in the router's journal", None, float(tasks))
    yield Row("spans of tasks", None, float(spans))
    wrong = len(whole["differences"])
    yield Row("attempts whose spans are not their tasks", None, float(wrong), aim="0", met=wrong == 0)
    orphans = sum(whole["orphans"].values())
    yield Row("spans without their parent", None, float(orphans), aim="0", met=orphans == 0)
    missing = [abs(row[1]) for row in whole["rows"]]
    name = "time of a request that its trace does not account for"
    yield Row(f"{name}: p95", None, percentile(missing, 0.95), "ms")
    yield Row(
        f"{name}: greatest",
        None,
        max(missing),
        "ms",
        aim=f"at most {MOST_DIFFERENCE_MS:g}",
        met=max(missing) <= MOST_DIFFERENCE_MS,
    )
    beyond = [row[2] for row in whole["rows"] if row[2] is not None]
    if beyond:
        yield Row("time at the client beyond the whole span: p95", None, percentile(beyond, 0.95), "ms")


def draw(whole: Mapping[str, Any], folder: Path) -> None:
    """Writes a plot of the unaccounted time of all requests, in order of size."""
    made, (axes,) = figure()
    missing = sorted(abs(row[1]) for row in whole["rows"])
    shares = [100.0 * (i + 1) / len(missing) for i in range(len(missing))]
    title = f"{len(missing)} requests, {sum(whole['killed'].values())} engines killed"
    lines(
        axes, {"": Series(missing, shares)}, "ms that the trace does not account for", "% of requests", title
    )
    save(folder, "traced", made)
