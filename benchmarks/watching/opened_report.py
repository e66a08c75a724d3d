"""The figures of `benchmarks.watching.opened`, computed from its samples."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments.base import Row, aimed
from benchmarks.live.stats import line_through, percentile
from benchmarks.plots import Series, figure, lines, save

HISTORY_S = 900.0
"""Seconds of history that the page keeps (`keep` of its feed)."""
MOST_GROWTH_KB_A_MINUTE = 10.0
"""Aim: growth of the page's heap once its history is full. ASSUMPTION: some 15 MB a day, which nobody notices."""
MOST_UPDATE_MS = 50.0
"""Aim: CPU time of the page's main thread for one update, the mean between two samples."""


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a result."""
    samples: Sequence[Mapping[str, Any]] = whole["samples"]
    view = whole["config"]["view"]
    yield Row(f"{view}: the page was open", None, samples[-1]["at_s"] / 60, "min")
    full = [one for one in samples if one["at_s"] > HISTORY_S]
    for part, name in ((samples, "whole time"), (full, "history full")):
        yield from _slopes(part, f"{view}, {name}", judged=part is full)
    yield Row(f"{view}: heap after the first sample", None, samples[0]["heap_bytes"] / 1e6, "MB")
    yield Row(f"{view}: heap at the end", None, samples[-1]["heap_bytes"] / 1e6, "MB")
    took_ms = [one["update_ms"] for one in samples if one["update_ms"] is not None]
    yield Row(f"{view}: main thread, CPU an update, median", None, percentile(took_ms, 0.5), "ms")
    yield Row(
        f"{view}: main thread, CPU an update, greatest",
        None,
        max(took_ms),
        "ms",
        aim=f"at most {MOST_UPDATE_MS:g}",
        met=max(took_ms) <= MOST_UPDATE_MS,
    )
    engines = whole["config"]["prefill"] + whole["config"]["decode"]
    most = max(one["rss_bytes"] for one in samples) / 1e6
    yield Row(f"{engines} engines: memory of the dashboard (RSS), greatest", None, most, "MB")
    share = 100 * percentile([one["share"] for one in samples], 0.5)
    yield Row(f"{engines} engines: CPU of the dashboard, of one core, median", None, share, "%")
    wrong = len(whole["said"]) + len(whole["foreign"])
    yield Row(f"{view}: messages of the console, and requests elsewhere", None, wrong, aim="0", met=not wrong)


def _slopes(samples: Sequence[Mapping[str, Any]], name: str, judged: bool) -> Iterator[Row]:
    minutes = [one["at_s"] / 60.0 for one in samples]
    heap = line_through([(at, one["heap_bytes"] / 1e3) for at, one in zip(minutes, samples, strict=True)])
    nodes = line_through([(at, one["nodes"]) for at, one in zip(minutes, samples, strict=True)])
    taken = [(one["at_s"] / 60.0, one["update_ms"]) for one in samples if one["update_ms"] is not None]
    took = line_through(taken)
    if heap is not None:
        row = Row(f"{name}: growth of the heap", None, heap.slope, "kB/min", heap.half_width)
        most = MOST_GROWTH_KB_A_MINUTE
        yield aimed(row, f"at most {most:g}", most=most) if judged else row
    if nodes is not None:
        yield Row(f"{name}: growth of DOM nodes", None, nodes.slope, "/min", nodes.half_width)
    if took is not None:
        yield Row(
            f"{name}: growth of the main thread's time of an update",
            None,
            took.slope,
            "ms/min",
            took.half_width,
        )


def draw(whole: Mapping[str, Any], folder: Path) -> None:
    """Writes a plot of heap, nodes and main thread over the minutes."""
    samples = whole["samples"]
    made, axes = figure(columns=3)
    minutes = [one["at_s"] / 60 for one in samples]
    taken = [one for one in samples if one["update_ms"] is not None]
    figures = (
        (minutes, [one["heap_bytes"] / 1e6 for one in samples], "MB", "JavaScript heap after a collection"),
        (minutes, [one["nodes"] for one in samples], "nodes", "DOM nodes"),
        (
            [one["at_s"] / 60 for one in taken],
            [one["update_ms"] for one in taken],
            "ms of CPU",
            "Main thread, an update",
        ),
    )
    for axis, (x, y, unit, title) in zip(axes, figures, strict=True):
        lines(axis, {"": Series(x, y)}, "minutes", unit, title)
        axis.set_ylim(bottom=0)
    save(folder, "opened", made)
