"""NetKV experiment 6 (VI-H, Table IV): what each part of NetKV adds to CLA*.

Static and Full agree with the paper; Topo-Only is better than both here (-18 %), worse there (-10 %). Cause: the count
of own transfers, B_eff = B / (1 + n), says that a second transfer halves the first one's share of its tier. In this
fabric it does not, at 100 or 250 %: each flow draws one of 8 NICs and 16 uplinks, two rarely meet, and a transfer sent
to the slower tier instead takes twice as long for certain. The paper does not print its links. With one fixed NIC an
instance the count does pay at 250 % (Static 1,992 ms, Topo-Only 2,147), not at 100 % (1,625; 1,538); with few uplinks
the cluster is overloaded at 200 % (`netkv_common`). So: count own transfers only where they share a link, or let the
oracle learn what a pair gets.

Chatbot gains twice the paper's: its prompts are longer than the paper's must be (`netkv_load`). Full equals Static:
without background there is no congestion to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.netkv_common import LADDER, milliseconds, named, reduction, run_one, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV experiment 6: CLA*, + static tiers, + own transfers, + congestion, at 100 % load"
# Table IV: mean TTFT in ms down the ladder
TABLE_4 = {
    "chatbot": (629, 598, 596, 595),
    "rag": (1812, 1627, 1596, 1592),
    "long": (7121, 6326, 6150, 6160),
}
BUSY = 2.5


def variants(quick: bool) -> list[Variant]:
    made = [
        named(workload, scheduler, "100%", load=1.0)
        for workload in (("rag",) if quick else TABLE_4)
        for scheduler in LADDER
    ]
    return made + [named("rag", scheduler, "250%", load=BUSY) for scheduler in LADDER]


def compare(results: Results) -> list[Row]:
    rows = []
    for workload, paper in TABLE_4.items():
        if f"{workload} 100% CLA*" not in results.runs:
            continue
        for scheduler, theirs in zip(LADDER[1:], paper[1:], strict=True):
            change = round(100.0 * (theirs / paper[0] - 1.0), 1)
            what, at = f"{workload} 100%, {scheduler} vs CLA*", f"{workload} 100%"
            rows.append(reduction(results, what, f"{at} CLA*", f"{at} {scheduler}", change))
        for scheduler, theirs in zip(LADDER, paper, strict=True):
            name = f"{workload} 100% {scheduler}"
            rows.append(milliseconds(results, f"{name}: TTFT", name, "ttft_mean_s", theirs))
            rows.append(share(results, f"{name}: transfers in the pod", name, "tier_share/2", None))
    for scheduler in LADDER[1:]:
        what = f"rag 250%, {scheduler} vs CLA*"
        rows.append(reduction(results, what, "rag 250% CLA*", f"rag 250% {scheduler}", None))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    workloads = [w for w in TABLE_4 if f"{w} 100% CLA*" in results.runs]
    made, axes = look.figure(columns=len(workloads))
    for at, workload in zip(axes, workloads, strict=True):
        found = {s: results.spread(f"{workload} 100% {s}", "ttft_mean_s") for s in LADDER}
        look.bars(at, {s: (f.mean, f.half_width) for s, f in found.items()}, "mean TTFT, s", workload)
    return {"netkv_ladder": made}
