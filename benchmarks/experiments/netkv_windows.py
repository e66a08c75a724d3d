"""The effect of the window on NetKV's figures: 20 windows of 20 s, one for each seed, over the whole stand-in trace.

The paper measures one window, trace seconds 60 to 75, with five seeds. They differ by 4 to 33 ms in mean TTFT, so they
cannot have changed its requests. A peak in the paper is the largest value over the loads of that window. Here the
requests and all draws differ between windows, so the spread is that of a single measurement such as the paper's.

docs/results.md has the means over the windows and the share of windows near the paper's figures. Where a mean misses
the paper's figure by more than windows differ, `netkv_load` says what would have to be so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.netkv_common import WITHIN, named, reduction, run_one
from benchmarks.seeds import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV's reductions over many windows of the trace: how much one window decides"
WINDOWS = 20
SEEDS = (WINDOWS, 4)
BASES = ("RR", "CLA*")
# workload, load -> change of mean TTFT by NetKV-Full in per cent vs RR, vs CLA*: Table II, and the peaks of VI-C
PAPER = {
    ("rag", 1.0): (-18.8, -11.8),
    ("rag", 2.0): (-21.2, -14.3),
    ("chatbot", 2.0): (-12.6, -6.8),
    ("long", 0.75): (-23.9, -12.1),
    ("long", 1.0): (-23.9, -12.1),
}


def variants(quick: bool) -> list[Variant]:
    cells = [("long", 1.0)] if quick else list(PAPER)
    return [
        named(workload, scheduler, f"{load:.0%}", load=load, windows=WINDOWS)
        for workload, load in cells
        for scheduler in (*BASES, "NetKV-Full")
    ]


def compare(results: Results) -> list[Row]:
    rows = []
    for (workload, load), paper in PAPER.items():
        at = f"{workload} {load:.0%}"
        if f"{at} NetKV-Full" not in results.runs:
            continue
        found = {base: changes(results, f"{at} {base}", f"{at} NetKV-Full") for base in BASES}
        for base, theirs in zip(BASES, paper, strict=True):
            note = f"one window: {_of_one(found[base])}"
            names = f"{at} {base}", f"{at} NetKV-Full"
            rows.append(reduction(results, f"{at}, NetKV-Full vs {base}, all windows", *names, theirs, note))
        gap = changes(results, f"{at} RR", f"{at} CLA*")
        implied = round(100 * ((1 + paper[0] / 100) / (1 + paper[1] / 100) - 1), 1)
        mean = spread(gap)
        note = f"one window: {_of_one(gap)}"
        what = f"{at}, CLA* vs RR, all windows: mean TTFT"
        rows.append(Row(what, implied, mean.mean, "%", mean.half_width, note=note))
        near = [
            all(abs(found[base][i] - theirs) <= WITHIN for base, theirs in zip(BASES, paper, strict=True))
            for i in range(len(gap))
        ]
        share = 100.0 * sum(near) / len(near)
        rows.append(Row(f"{at}, windows within 3 points of both", None, share, "%"))
    return rows


def changes(results: Results, base: str, ours: str) -> list[float]:
    """Returns the change of the mean TTFT in per cent for each window."""
    pairs = zip(results.values(base, "ttft_mean_s"), results.values(ours, "ttft_mean_s"), strict=True)
    return [100.0 * (b / a - 1.0) for a, b in pairs]


def _of_one(found: list[float]) -> str:
    sd = spread(found).sd
    return f"sd {0.0 if sd is None else sd:.1f}, {min(found):.1f} to {max(found):.1f} %"


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    cells = [cell for cell in PAPER if f"{cell[0]} {cell[1]:.0%} NetKV-Full" in results.runs]
    made, axes = look.figure(columns=len(cells))
    for axis, (workload, load) in zip(axes, cells, strict=True):
        at = f"{workload} {load:.0%}"
        series = {}
        for base, theirs in zip(BASES, PAPER[workload, load], strict=True):
            found = sorted(changes(results, f"{at} {base}", f"{at} NetKV-Full"))
            series[f"vs {base}"] = look.Series(list(range(1, len(found) + 1)), found)
            series[f"vs {base}, paper"] = look.Series([1, len(found)], [theirs, theirs], quiet=True)
        look.lines(axis, series, "windows, by their value", "mean TTFT, %", at)
    return {"netkv_windows": made}
