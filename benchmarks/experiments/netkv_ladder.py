"""NetKV experiment 6 (VI-H, Table IV): what each part of NetKV adds to CLA*, and what own transfers should count for.

docs/results.md has our figures beside the paper's. The paper's for Static and Full are -11.9 and -12.1 % (RAG), -5.2
and -5.4 (chatbot), and -13.6 and -13.5 by Table IV's times for long context, of which it prints -12.1 as the mean's
change. Full equals Static: without background there is no congestion to tell.

Topo-Only gains more than Static here, in the paper less (-5 to -11 %). `netkv_contention` has the cause in figures, and
forms of the count that are learnt. B_eff = B / (1 + n) says that a second own
transfer halves the first one's share of its tier. Where each flow draws one of 8 NICs and 16 uplinks two rarely meet,
bursts or not, and a transfer sent to the slower tier instead takes twice as long for certain. With one fixed NIC an
instance (the rows "one NIC") they do meet. The paper does not print its links. What they would have to do: with all of
RAG in the pod its Topo-Only moves 10.2K tokens in 650 ms (1,627 less 977), which alone take 534, or 440 with CLA*'s
hits: 1.2 to 1.5 times alone, where its RR takes 1.1 to 1.2 times (993 ms; 891 alone, 855 with hits). So in the pod
there must be a link that transfers meet on and round robin's do not, such as the four receivers' own.

Chatbot's prompts move in a fraction of a second, so that only bursts make transfers meet. What is left to the paper's
-5: Table IV's 629 ms less a prefill of 177 ms + 76 us a token and a transfer of 87.4 us a token (1/3 in the pod, alone,
nothing hit) are 2.8K tokens, of which NetKV's 595 ms leave 75 us a token: 14 % less, where its RAG's fall by 26 % (835
to 620 ms), over the same tiers at the same rate.

NetKV-Uplinks is ours: n is divided by the tier's uplinks, which are the flows of its bandwidth that fit at once
(`Topology.tier_uplinks`: 16 and 32 on tiers 2 and 3; 2 and 4 with one NIC). It needs no choice between Topo-Only and
Full. An operator should tell the uplinks (`uplinks` in the router's network file).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant, aimed
from benchmarks.experiments.netkv_common import (
    LADDER,
    WINDOWS,
    milliseconds,
    named,
    reduction,
    run_one,
    share,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV experiment 6: CLA*, + static tiers, + own transfers, + congestion, at 100 % load"
SEEDS = (WINDOWS, 2)
# Table IV: mean TTFT in ms down the ladder
TABLE_4 = {
    "chatbot": (629, 598, 596, 595),
    "rag": (1812, 1627, 1596, 1592),
    "long": (7121, 6326, 6150, 6160),
}
OURS = "NetKV-Uplinks"
LOADS = (2.0, 2.5)  # besides 1, for RAG
# Variants in which an instance sends by one NIC of its server.
FIXED = "one NIC"
FIXED_LOADS = (1.0, 2.5)


def variants(quick: bool) -> list[Variant]:
    shown = (*LADDER, OURS)
    made = [
        named(workload, scheduler, "100%", load=1.0, windows=WINDOWS)
        for workload in (("rag",) if quick else TABLE_4)
        for scheduler in shown
    ]
    made += [
        named("rag", s, f"{load:.0%}", load=load, windows=WINDOWS) for load in LOADS[quick:] for s in shown
    ]
    return made + [
        named("rag", s, f"{load:.0%}", FIXED, load=load, fixed_nic=True, windows=WINDOWS)
        for load in FIXED_LOADS
        for s in shown
    ]


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
    return rows + _uplinks(results)


def _uplinks(results: Results) -> list[Row]:
    """Returns rows for RAG on both fabrics, with the count of own transfers, without it, and with it per uplink."""
    rows = []
    for name in results.where(scheduler=OURS):
        at = name.removesuffix(f" {OURS}")
        if at not in [f"{workload} 100%" for workload in TABLE_4]:
            for scheduler in LADDER[1:]:
                what = f"{at}, {scheduler} vs CLA*"
                rows.append(reduction(results, what, f"{at} CLA*", f"{at} {scheduler}", None))
        rows.append(reduction(results, f"{at}, {OURS} vs CLA*", f"{at} CLA*", name, None))
        rivals = {s: results.mean(f"{at} {s}", "ttft_mean_s") for s in ("NetKV-Topo-Only", "NetKV-Full")}
        for base in rivals:
            rows.append(reduction(results, f"{at}, {OURS} vs {base}", f"{at} {base}", name, None))
        better = min(rivals, key=lambda base: rivals[base])
        what = f"{at}, {OURS} vs the better of Topo-Only and Full"
        row = reduction(results, what, f"{at} {better}", name, None, better)
        rows.append(aimed(row, "within 1 %, or better", most=1.0))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    workloads = [w for w in TABLE_4 if f"{w} 100% CLA*" in results.runs]
    made, axes = look.figure(columns=len(workloads))
    for at, workload in zip(axes, workloads, strict=True):
        found = {s: results.spread(f"{workload} 100% {s}", "ttft_mean_s") for s in (*LADDER, OURS)}
        look.bars(at, {s: (f.mean, f.half_width) for s, f in found.items()}, "mean TTFT, s", workload)
    return {"netkv_ladder": made}
