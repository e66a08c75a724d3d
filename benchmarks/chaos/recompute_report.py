"""The figures of `benchmarks.chaos.recompute`: straight lines of seconds over tokens."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.experiments.base import Row
from benchmarks.live.stats import Line, line_through
from benchmarks.plots import Series, figure, lines, save

AFTER_A_KILL = "pause of a stream after its decode engine was killed"
UNDISTURBED = "time to the first token of a fresh prompt, undisturbed"


def fitted(whole: Mapping[str, Any]) -> dict[str, Line]:
    """Returns the line of seconds over tokens after a kill, and that of undisturbed prompts. Raises ValueError for
    fewer than three streams.
    """
    found = {
        AFTER_A_KILL: line_through([(one["tokens"], one["gap_s"]) for one in whole["killed"]]),
        UNDISTURBED: line_through([(one["tokens"], one["ttft_s"]) for one in whole["undisturbed"]]),
    }
    if None in found.values():
        raise ValueError("a line takes three streams at least: ask for more --tokens or --repeats")
    return {name: line for name, line in found.items() if line is not None}


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a result."""
    yield Row("streams whose decode engine was killed", None, float(len(whole["killed"])))
    broken = sum(not one["whole"] for one in whole["killed"])
    yield Row("of them not whole", None, float(broken), aim="0", met=not broken)
    for name, line in fitted(whole).items():
        yield Row(f"{name}: a token", None, 1e3 * line.slope, "ms", 1e3 * line.half_width)
        yield Row(f"{name}: without any token", None, line.at_zero, "s")
    yield Row(f"{AFTER_A_KILL}: longest", None, max(one["gap_s"] for one in whole["killed"]), "s")


def draw(whole: Mapping[str, Any], folder: Path) -> None:
    """Writes a plot of all pauses and times to the first token over tokens."""
    made, (axes,) = figure(width=6.4)
    series = {}
    for name, key, value in (("after a kill", "killed", "gap_s"), ("undisturbed", "undisturbed", "ttft_s")):
        points = sorted((one["tokens"], one[value]) for one in whole[key])
        series[name] = Series([x for x, _ in points], [y for _, y in points])
    title = "A stream's pause after a kill, and the TTFT of a prompt of its length"
    lines(axes, series, "tokens that are computed", "s", title)
    axes.set_ylim(bottom=0)
    save(folder, "recompute", made)
