"""The columns of NetKV's Tables II to VI, and figures of its text, that the other experiments leave out: P99 of TTFT,
SLO attainment, goodput, TBT, and what moves over which tier and link.

Cells and windows are those of `netkv_load`, `netkv_context`, `netkv_ladder`, `netkv_prefix` and `netkv_scale`, which
count the mean TTFT. Their results files keep the measures that their rows read and no others, so these are runs of
their own. RAG at 100 % with p_share 0.7 on 64 GPUs is one cell, which runs once for Tables II, IV, V and VI and for
Figure 3. Of Table V the sizes up to 256 GPUs are here, where the windows of the trace are mostly different requests.
From 512 GPUs on a window is so large a part of the trace that ten of them are far from ten samples, and they would cost
more than all other cells together; `netkv_scale` has their SLO attainment without an aim.

What cannot fail has no aim. By Table III the change of SLO attainment is 0 at 1K to 8K, where any placement is in time,
and at 64K, where the prefill alone is late. The P99s of Table II are rows without an aim, because RAG's tail here is
thinned (`netkv_common`); what NetKV saves of them is aimed at. RAG at 100 % stands in Tables II and IV, whose figures
are aimed at once. Link use has no figures in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant, aimed
from benchmarks.experiments.netkv_common import (
    WINDOWS,
    added,
    lower,
    measured,
    milliseconds,
    named,
    run_one,
    share,
)
from benchmarks.experiments.netkv_scale import SLO_5

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV's other columns: P99 of TTFT, SLO, goodput, TBT and tiers in the cells of Tables II to VI"
SEEDS = (WINDOWS, 1)
RR, CA, CLA, FULL = "RR", "CA", "CLA*", "NetKV-Full"
TTFT, P99, TBT, SLO = "ttft_mean_s", "ttft_p99_s", "tbt_mean_s", "ttft_slo_share"
TABLE_2 = (RR, CLA, FULL)
LOADS = (1.0, 2.0, 2.5)
# VI-C: load -> P99 of TTFT in s
P99_S = {1.0: {RR: 12.3, CLA: 11.2, FULL: 9.3}, 2.5: {RR: 14.5, CLA: 13.6, FULL: 11.1}}
# VI-C: requests/s within the SLO at 200 %
GOODPUT_LOAD, GOODPUT = 2.0, {RR: 10.81, CLA: 11.04, FULL: 11.37}
# Table II: load -> NetKV-Full less CLA* in SLO attainment (points) and TBT (ms)
SLO_2 = {1.0: 2.1, 2.0: 2.7, 2.5: 2.6}
TBT_2 = {1.0: 0.23, 2.0: 0.41, 2.5: 0.45}
# Table III: tokens -> TBT added over CLA* in ms, and change of SLO attainment vs RR and vs CLA* in points
TABLE_3 = {
    1024: (0.22, 0.0, 0.0),
    4096: (0.27, 0.0, 0.0),
    8192: (0.26, 0.0, 0.0),
    16384: (0.17, 20.1, 13.6),
    32768: (0.03, -0.6, -0.6),
    65536: (0.0, 0.0, 0.0),
}
# Lengths at which SLO attainment is not the same whatever the placement.
DECIDED = (16384, 32768)
# Table IV: change of P99 in per cent, of SLO attainment in points, and of TBT in ms, NetKV-Full vs CLA*
TABLE_4 = {"chatbot": (-17.3, 0.5, 0.30), "rag": (-17.5, 2.0, 0.23), "long": (-9.4, 4.8, 0.10)}
# VI-G: change of SLO attainment in points against CA and CLA*, at every p_share
SHARES, SHARE_SLO = (0.0, 0.3, 0.5, 0.7, 0.9), 2.5
# Table V, flow rows: GPUs -> change of SLO attainment in points; `netkv_scale` has the larger sizes
TABLE_5 = {gpus: SLO_5[gpus] for gpus in (64, 128, 256)}
# The cell of RAG at 100 %, whose p_share and size are those of the workload.
PLAIN, PLAIN_SHARE, PLAIN_GPUS = "rag 100%", 0.7, 64
# Table VI: per cent of transfers in the pod and between pods
TABLE_6 = {CLA: (32.0, 68.0), FULL: (68.9, 31.1)}
LINKS = ("nic", "rack", "core")


def variants(quick: bool) -> list[Variant]:
    made = [
        named("rag", scheduler, f"{load:.0%}", load=load, windows=WINDOWS)
        for load in ((1.0,) if quick else LOADS)
        for scheduler in TABLE_2
    ]
    made += [
        named("rag", scheduler, str(tokens), prompt_tokens=tokens, windows=WINDOWS)
        for tokens in ((16384,) if quick else TABLE_3)
        for scheduler in TABLE_2
    ]
    made += [
        named("rag", scheduler, f"p{p:g}", p_share=p, windows=WINDOWS)
        for p in ((0.9,) if quick else SHARES)
        for scheduler in (CA, CLA, FULL)
        if p != PLAIN_SHARE
    ]
    if quick:
        return made
    made.append(named("rag", CA, "100%", load=1.0, windows=WINDOWS))
    made += [
        named(workload, scheduler, "100%", load=1.0, windows=WINDOWS)
        for workload in ("chatbot", "long")
        for scheduler in (CLA, FULL)
    ]
    return made + [
        named("rag", scheduler, f"{gpus} GPUs", gpus=gpus, windows=WINDOWS)
        for gpus in TABLE_5
        for scheduler in (CLA, FULL)
        if gpus != PLAIN_GPUS
    ]


def compare(results: Results) -> list[Row]:
    return [
        *_table_2(results),
        *_table_3(results),
        *_table_4(results),
        *_sharing(results),
        *_table_5(results),
        *_table_6(results),
    ]


def _table_2(results: Results) -> list[Row]:
    rows = []
    for load in LOADS:
        at = f"rag {load:.0%}"
        if f"{at} {RR}" not in results.runs:
            continue
        base, ours = f"{at} {CLA}", f"{at} {FULL}"
        for scheduler, theirs_s in P99_S.get(load, {}).items():
            name = f"{at} {scheduler}"
            rows.append(milliseconds(results, f"{name}: P99 of TTFT", name, P99, 1e3 * theirs_s))
        if load in P99_S:
            theirs = P99_S[load]
            for rival in (RR,) if load == 1.0 else (RR, CLA):
                what = f"{at}, NetKV-Full vs {rival}: P99 of TTFT"
                change = round(100.0 * (theirs[FULL] / theirs[rival] - 1.0), 1)
                rows.append(lower(results, what, f"{at} {rival}", ours, P99, change, 5.0))
        rows.append(
            added(results, f"{at}, NetKV-Full vs CLA*: SLO", base, ours, SLO, SLO_2[load], "points", 1.0)
        )
        rows.append(added(results, f"{at}, NetKV-Full vs CLA*: TBT", base, ours, TBT, TBT_2[load], "ms", 0.1))
        if load == GOODPUT_LOAD:
            rows += _goodput(results, at)
    return rows


def _goodput(results: Results, at: str) -> list[Row]:
    """Returns rows with the requests in time, and what NetKV-Full has more of them."""
    rows = []
    for scheduler, theirs in GOODPUT.items():
        found = results.spread(f"{at} {scheduler}", "goodput_per_s")
        rows.append(Row(f"{at} {scheduler}: goodput", theirs, found.mean, "/s", found.half_width))
    for rival in (RR, CLA):
        ratio, half = results.ratio(f"{at} {FULL}", f"{at} {rival}", "goodput_per_s")
        more = round(100.0 * (GOODPUT[FULL] / GOODPUT[rival] - 1.0), 1)
        half = None if half is None else 100.0 * half
        row = Row(f"{at}, NetKV-Full vs {rival}: goodput", more, 100.0 * (ratio - 1.0), "%", half)
        rows.append(aimed(row, "within 2 points", least=more - 2.0, most=more + 2.0))
    return rows


def _table_3(results: Results) -> list[Row]:
    rows = []
    for tokens, (tbt_ms, vs_rr, vs_cla) in TABLE_3.items():
        at = f"rag {tokens}"
        if f"{at} {RR}" not in results.runs:
            continue
        ours, what = f"{at} {FULL}", f"{tokens} tokens, NetKV-Full vs"
        rows.append(added(results, f"{what} CLA*: TBT", f"{at} {CLA}", ours, TBT, tbt_ms, "ms", 0.1))
        within = 3.0 if tokens in DECIDED else None
        for rival, theirs in ((RR, vs_rr), (CLA, vs_cla)):
            rows.append(
                added(results, f"{what} {rival}: SLO", f"{at} {rival}", ours, SLO, theirs, "points", within)
            )
    return rows


def _table_4(results: Results) -> list[Row]:
    rows = []
    for workload, (p99, slo, tbt_ms) in TABLE_4.items():
        base, ours = (f"{workload} 100% {scheduler}" for scheduler in (CLA, FULL))
        if base not in results.runs:
            continue
        what = f"Table IV, {workload}, NetKV-Full vs CLA*"
        rows.append(lower(results, f"{what}: P99 of TTFT", base, ours, P99, p99, 5.0))
        if workload != "rag":
            rows.append(added(results, f"{what}: SLO", base, ours, SLO, slo, "points", 1.0))
            rows.append(added(results, f"{what}: TBT", base, ours, TBT, tbt_ms, "ms", 0.1))
    return rows


def _sharing(results: Results) -> list[Row]:
    rows = []
    for p in SHARES:
        at = PLAIN if p == PLAIN_SHARE else f"rag p{p:g}"
        if f"{at} {CA}" not in results.runs:
            continue
        for rival in (CA, CLA):
            what = f"p_share {p:g}, NetKV-Full vs {rival}: SLO"
            rows.append(added(results, what, f"{at} {rival}", f"{at} {FULL}", SLO, SHARE_SLO, "points", 1.0))
        # The paper's CA and CLA* decide alike (VI-G).
        rows.append(measured(results, f"p_share {p:g}, CLA* against CA", f"{at} {CA}", f"{at} {CLA}", 0.0))
        for scheduler in (CLA, FULL):
            name = f"{at} {scheduler}"
            what = f"p_share {p:g}, {scheduler}: transfer"
            rows.append(milliseconds(results, what, name, "transfer_mean_s", None))
    return rows


def _table_5(results: Results) -> list[Row]:
    rows = []
    for gpus, theirs in TABLE_5.items():
        at = PLAIN if gpus == PLAIN_GPUS else f"rag {gpus} GPUs"
        base, ours = (f"{at} {scheduler}" for scheduler in (CLA, FULL))
        if base in results.runs:
            what = f"{gpus} GPUs, NetKV-Full vs CLA*: SLO"
            rows.append(added(results, what, base, ours, SLO, theirs, "points", 1.0))
    return rows


def _table_6(results: Results) -> list[Row]:
    """Returns rows with where transfers go, and how much of each class of links they use."""
    rows = []
    for scheduler, theirs in TABLE_6.items():
        name = f"rag 100% {scheduler}"
        for tier, where, paper in ((2, "in the pod", theirs[0]), (3, "between pods", theirs[1])):
            rows.append(share(results, f"{name}: transfers {where}", name, f"tier_share/{tier}", paper))
    for load in LOADS:
        for scheduler in TABLE_2:
            name = f"rag {load:.0%} {scheduler}"
            if name not in results.runs:
                continue
            for tier, where in ((2, "in the pod"), (3, "between pods")):
                moved = results.values(name, f"tier_gbytes/{tier}", 0.0)
                rows.append(Row(f"{name}: moved {where}", None, sum(moved) / len(moved), "GB"))
            for link in LINKS:
                rows.append(share(results, f"{name}: use of {link} links", name, f"link_use/{link}", None))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    loads = [load for load in LOADS if f"rag {load:.0%} {RR}" in results.runs]
    made, axes = look.figure(columns=2)
    for at, (metric, scale, what) in zip(
        axes, ((P99, 1.0, "P99 of TTFT, s"), (SLO, 100.0, "in time, %")), strict=True
    ):
        series = {}
        for scheduler in TABLE_2:
            found = [results.spread(f"rag {load:.0%} {scheduler}", metric) for load in loads]
            series[scheduler] = look.Series([100 * load for load in loads], [scale * f.mean for f in found])
        look.lines(at, series, "load, % of capacity", what)
    return {"netkv_columns": made}
