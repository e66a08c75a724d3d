"""The report of Sluice beside others on real engines: figures of every side, ratios paired by round, and a plot."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from benchmarks.experiments.base import Row
from benchmarks.live.versus import ratio_of
from benchmarks.peers.real.rows import (
    CASES,
    CPU,
    IDLE,
    MEMORY,
    ONE_CASES,
    TPOT_P50,
    Case,
    aim,
    aim_one,
)
from benchmarks.peers.real.sides import COLOCATED, RAY, ROUTER, SIDES, SLUICE, VLLM
from benchmarks.peers.report import ratio_table, rounded, row_of
from benchmarks.peers.rows import RATE, TTFT_P50, Aim
from benchmarks.plots import figure, save

WORDS: Mapping[str, str] = {
    RATE: "requests/s",
    TTFT_P50: "TTFT p50",
    TPOT_P50: "TPOT p50",
    CPU: "CPU a token of all processes",
    IDLE: "cores that are busy without load",
    MEMORY: "memory (PSS) of all processes",
}
COMPARED = (RATE, TTFT_P50, TPOT_P50, CPU)
SHOWN_CORES = 0.002
"""The least CPU of a process without load with which it is listed, in cores."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Sluice and others on the same rows.

    `sides` has the name of each side in reports; the first one is Sluice, and the others are its peers. `aim` returns
    the aim of a ratio Sluice / peer by row and measure.
    """

    sides: Mapping[str, str]
    cases: Mapping[str, Case]
    aim: Callable[[Case, str], Aim | None]

    @property
    def ours(self) -> str:
        """The side that is Sluice."""
        return next(iter(self.sides))

    @property
    def peers(self) -> list[str]:
        """The other sides."""
        return list(self.sides)[1:]


def _named(*sides: str) -> dict[str, str]:
    return {side: SIDES[side] for side in sides}


COMPARISONS: Mapping[str, Comparison] = {
    "One prefill and one decode engine": Comparison(_named(SLUICE, ROUTER, RAY), CASES, aim),
    "One engine": Comparison(_named(COLOCATED, VLLM), ONE_CASES, aim_one),
}
"""The comparisons of `python -m benchmarks.peers.real` by their headings, in the order in which they are measured."""


def comparison_of(side: str) -> Comparison:
    """Returns the comparison to which a side belongs."""
    return next(one for one in COMPARISONS.values() if side in one.sides)


def values(whole: Mapping[str, Any], side: str, row: str, measure: str) -> dict[int, float]:
    """Returns a measure of a side in a row by round."""
    return {
        part["round"]: one[measure]
        for part in whole["parts"]
        if part["side"] == side
        for one in part["rows"]
        if one["row"] == row and one.get(measure)
    }


def idle(whole: Mapping[str, Any], side: str) -> dict[str, dict[int, float]]:
    """Returns busy cores and memory in GiB of a side without load, by round in which it was watched."""
    parts = {
        part["round"]: part["idle"] for part in whole["parts"] if part["side"] == side and "idle" in part
    }
    return {
        IDLE: {number: sum(one["idle_cpu"].values()) for number, one in parts.items()},
        MEMORY: {number: one["total"]["pss_bytes"] / 2**30 for number, one in parts.items()},
    }


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the ratios of all comparisons, as far as they were measured."""
    for compared in COMPARISONS.values():
        yield from ratios(whole, compared)


def ratios(whole: Mapping[str, Any], compared: Comparison) -> Iterator[Row]:
    """Yields the ratios of a comparison by row and peer, then those of the sides without load."""
    for case in compared.cases.values():
        for peer in compared.peers:
            for measure in COMPARED:
                base = values(whole, peer, case.name, measure)
                ours = values(whole, compared.ours, case.name, measure)
                name, aim = f"{case.name}: ", compared.aim(case, measure)
                yield from _ratio(name, measure, compared.sides[peer], base, ours, aim)
    own = idle(whole, compared.ours)
    for peer in compared.peers:
        theirs = idle(whole, peer)
        for measure in (IDLE, MEMORY):
            yield from _ratio("", measure, compared.sides[peer], theirs[measure], own[measure], None)


def _ratio(
    name: str,
    measure: str,
    peer: str,
    base: Mapping[int, float],
    ours: Mapping[int, float],
    aim: Aim | None,
) -> Iterator[Row]:
    both = sorted(base.keys() & ours.keys())
    if len(both) < 2:
        return
    one = ratio_of(name, measure, [base[n] for n in both], [ours[n] for n in both])
    yield row_of(
        f"{name}{WORDS[measure]}, Sluice / {peer}",
        one.ratio,
        (one.low, one.high),
        aim,
        note=f"{rounded(one.ours)} / {rounded(one.base)}",
    )


# --------------------------------------------------------------------------------------------------------------- tables


def markdown(whole: Mapping[str, Any]) -> str:
    """Returns the whole report."""
    rounds = whole["config"]["rounds"]
    parts = [
        f"# Sluice and others on real engines, {rounds} rounds in turn",
        "Engines of vLLM with SmolLM2-135M in float32, the same on every side of a comparison. With two engines KV goes"
        " over NIXL. The client runs on the same cores.",
    ]
    for heading, compared in COMPARISONS.items():
        if measured := {part["side"] for part in whole["parts"]} & compared.sides.keys():
            parts += [f"## {heading}: medians of every side", medians(whole, compared)]
            if compared.ours in measured:
                parts += [
                    f"## {heading}: ratios, 95 % intervals, and aims",
                    ratio_table(list(ratios(whole, compared))),
                ]
    return "\n\n".join([*parts, "## Without load: cores by process, medians", _idle(whole)])


def medians(whole: Mapping[str, Any], compared: Comparison) -> str:
    """Returns the figures of every side in every row as a table: medians over the rounds."""
    shown = (RATE, TTFT_P50, "ttft_p99_ms", TPOT_P50, CPU)
    lines = [
        "| row | side | requests/s | TTFT p50, ms | TTFT p99, ms | TPOT p50, ms | CPU a token, ms |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in compared.cases:
        for side, name in compared.sides.items():
            found = [list(values(whole, side, row, measure).values()) for measure in shown]
            if found[0]:
                cells = [rounded(median(one)) if one else "" for one in found]
                lines.append(f"| {row} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _idle(whole: Mapping[str, Any]) -> str:
    lines = ["| side | process | cores |", "|---|---|--:|"]
    for side, name in SIDES.items():
        parts = [part["idle"]["idle_cpu"] for part in whole["parts"] if part["side"] == side]
        if not parts:
            continue
        lines.append(f"| {name} | all | {median(sum(one.values()) for one in parts):.3f} |")
        roles = dict.fromkeys(role for one in parts for role in one)
        spent = {role: median(one.get(role, 0.0) for one in parts) for role in roles}
        lines += [
            f"| {name} | {role} | {cores:.3f} |"
            for role, cores in sorted(spent.items(), key=lambda item: -item[1])
            if cores >= SHOWN_CORES
        ]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------- plot


def draw(whole: Mapping[str, Any], folder: Path, name: str) -> None:
    """Writes a plot of all sides and rows, one panel a measure: medians over the rounds as bars, each round a dot.

    The panels of a comparison that was not measured stay away.
    """
    shown = (
        (RATE, "Requests/s"),
        (TTFT_P50, "TTFT p50, ms"),
        (TPOT_P50, "TPOT p50, ms"),
        (CPU, "CPU a token of all processes, ms"),
    )
    made, axes = figure(columns=len(shown), rows=len(COMPARISONS))
    for number, compared in enumerate(COMPARISONS.values()):
        panels = axes[number * len(shown) : (number + 1) * len(shown)]
        sides = [side for side in compared.sides if values(whole, side, next(iter(compared.cases)), RATE)]
        for panel, (measure, title) in zip(panels, shown, strict=True):
            panel.set_visible(bool(sides))
            _bars(panel, whole, compared.cases, sides, measure)
            panel.set_title(title)
        if sides:
            panels[0].legend(fontsize=8)
    save(folder, name, made)


def _bars(
    panel: Axes, whole: Mapping[str, Any], cases: Mapping[str, Case], sides: Sequence[str], measure: str
) -> None:
    width = 0.8 / max(1, len(sides))
    for at, side in enumerate(sides):
        heights = [list(values(whole, side, row, measure).values()) for row in cases]
        places = [place + (at - (len(sides) - 1) / 2) * width for place in range(len(cases))]
        panel.bar(places, [median(h) if h else 0.0 for h in heights], 0.9 * width, label=SIDES[side])
        for place, own in zip(places, heights, strict=True):
            panel.plot([place] * len(own), own, ".", color="black", markersize=3)
    panel.set_xticks(range(len(cases)), [_short(case) for case in cases.values()], fontsize=8)


def _short(case: Case) -> str:
    return f"c = {case.clients}\n{case.words} + {case.tokens}"
