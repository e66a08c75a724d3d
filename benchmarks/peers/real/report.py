"""The report of Sluice beside others on real engines: figures of every side, ratios paired by round, and a plot."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.experiments.base import Row
from benchmarks.live.versus import ratio_of
from benchmarks.peers.real.rows import CASES, CPU, IDLE, MEMORY, TPOT_P50, Case, aim
from benchmarks.peers.real.sides import SIDES
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


REAL = Comparison(SIDES, CASES, aim)
"""The comparison of `python -m benchmarks.peers.real`."""


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


def rows(whole: Mapping[str, Any], compared: Comparison = REAL) -> Iterator[Row]:
    """Yields the ratios by row and peer, then those of the sides without load."""
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
    return "\n\n".join(
        [
            f"# Sluice, vllm-router and Ray Serve LLM on real engines, {rounds} rounds in turn",
            "One prefill and one decode engine of vLLM on every side, SmolLM2-135M in float32, KV over NIXL; "
            "the client runs on the same cores.",
            "## Medians of every side\n\n" + medians(whole, REAL),
            "## Ratios, 95 % intervals, and aims\n\n" + ratio_table(list(rows(whole))),
            "## Without load: cores by process, medians\n\n" + _idle(whole),
        ]
    )


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
    """Writes a plot of all sides and rows, one panel a measure: medians over the rounds as bars, each round a dot."""
    made, axes = figure(columns=2, rows=2)
    sides = [side for side in SIDES if values(whole, side, next(iter(CASES)), RATE)]
    width = 0.8 / max(1, len(sides))
    for one, measure, title in zip(
        axes,
        (RATE, TTFT_P50, TPOT_P50, CPU),
        ("Requests/s", "TTFT p50, ms", "TPOT p50, ms", "CPU a token of all processes, ms"),
        strict=True,
    ):
        for at, side in enumerate(sides):
            heights = [list(values(whole, side, row, measure).values()) for row in CASES]
            places = [place + (at - (len(sides) - 1) / 2) * width for place in range(len(CASES))]
            one.bar(places, [median(h) if h else 0.0 for h in heights], 0.9 * width, label=SIDES[side])
            for place, own in zip(places, heights, strict=True):
                one.plot([place] * len(own), own, ".", color="black", markersize=3)
        one.set_xticks(range(len(CASES)), [_short(case) for case in CASES.values()], fontsize=8)
        one.set_title(title)
    axes[0].legend(fontsize=8)
    save(folder, name, made)


def _short(case: Case) -> str:
    return f"c = {case.clients}\n{case.words} + {case.tokens}"
