"""NetKV experiment 3 (VI-E, Fig. 1): cross-pod oversubscription and background traffic, NetKV-Full against CLA*.

At 1:1 and 2:1 tiers 2 and 3 are equally fast (`clusters.netkv_config`): NetKV is then neither better nor worse than
CLA* by more than noise, where the paper keeps 3.7 %. At 8:1 with 40 % background we gain 42 %, the paper 16 %. There
NetKV sends 95 % within the pod here, as tier 2 is four times as fast and its paths are far from full; the paper's
transfer (3,063 ms of TTFT less 976) can only be had with about half of them across pods, which no count of own
transfers that we tried explains (four a request, one a flow: 90 %). CLA*, which does not choose by tier, agrees within
12 % (4,059 ms; 3,644). Background is the same share on every link, so it never changes the order of tiers: Full equals
Static.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.netkv_common import named, reduction, run_one

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV experiment 3: oversubscription 1:1 to 8:1 by background 0 to 40 %, at 100 % load"
SEEDS = (3, 2)
RATIOS = (1.0, 2.0, 4.0, 8.0)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4)
CORNERS = ((1.0, 0.0), (8.0, 0.4))
# VI-E: at the two corners, per cent
PAPER = {"chatbot": (-1.3, -11.2), "rag": (-3.7, -15.9), "long": (-4.0, -11.2)}
SHOWN = ("CLA*", "NetKV-Full")


def variants(quick: bool) -> list[Variant]:
    cells = CORNERS if quick else [(ratio, share) for ratio in RATIOS for share in SHARES]
    made = [_variant("rag", s, *cell) for cell in cells for s in SHOWN]
    if not quick:
        made += [_variant(w, s, *cell) for w in ("chatbot", "long") for cell in CORNERS for s in SHOWN]
    return made


def _variant(workload: str, scheduler: str, ratio: float, share: float) -> Variant:
    return named(workload, scheduler, _cell(ratio, share), oversubscription=ratio, background=share)


def _cell(ratio: float, share: float) -> str:
    return f"{ratio:g}:1 {share:.0%}"


def compare(results: Results) -> list[Row]:
    rows = []
    for workload, paper in PAPER.items():
        for cell, theirs in zip(CORNERS, paper, strict=True):
            at = f"{workload} {_cell(*cell)}"
            if f"{at} CLA*" in results.runs:
                what = f"{at}, NetKV-Full vs CLA*"
                rows.append(reduction(results, what, f"{at} CLA*", f"{at} NetKV-Full", theirs))
    worse = [name for name, value in _grid(results).items() if value <= 0]
    wins = len(_grid(results)) - len(worse)
    return [
        *rows,
        Row(
            "rag cells in which NetKV-Full is shorter, of all", 100.0, 100.0 * wins / len(_grid(results)), "%"
        ),
    ]


def _grid(results: Results) -> dict[tuple[float, float], float]:
    """By how many per cent NetKV-Full is shorter, per cell of RAG."""
    found = {}
    for ratio in RATIOS:
        for share in SHARES:
            at = f"rag {_cell(ratio, share)}"
            if f"{at} CLA*" in results.runs:
                found[ratio, share] = results.reduction_percent(
                    f"{at} CLA*", f"{at} NetKV-Full", "ttft_mean_s"
                )[0]
    return found


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    made, [axes] = look.figure()
    grid = _grid(results)
    series = {}
    for share in SHARES:
        ratios = [ratio for ratio in RATIOS if (ratio, share) in grid]
        if ratios:
            series[f"background {share:.0%}"] = look.Series(ratios, [grid[ratio, share] for ratio in ratios])
    look.lines(
        axes, series, "cross-pod oversubscription, to 1", "mean TTFT shorter than CLA* by, %", log_x=True
    )
    return {"netkv_topology": made}
