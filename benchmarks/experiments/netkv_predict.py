"""NetKV's Tables III to VI predicted by a simulator that was fitted on Table II alone (`netkv_fit`).

The setup is the one that `netkv_fit` names, on windows that it has not seen. (All windows are of one trace: requests
behind a window that keep its load up may be another one's.) Nothing was fitted on what is compared
here: mean TTFT by prompt length (Table III), down the ladder (Table IV without RAG, which is nearly Table II's), at the
corners of Figure 1, by sharing (Figure 3) and by cluster size (Table V), and the tiers of Table VI. Every row is aimed
as in the experiments that were fitted on all tables, so the two can be compared: what those meet and these miss, the
fit has met.

Of the workloads, chatbot's rate is RAG's and the long contexts' by prompt tokens (`netkv_common`); Table II says
nothing of either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import netkv_common as common
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.netkv_common import LADDER, named, reduction
from benchmarks.experiments.netkv_context import TABLE_3
from benchmarks.experiments.netkv_fit import IN_USE, PREFILL, SETUPS, WINDOWS
from benchmarks.experiments.netkv_ladder import TABLE_4
from benchmarks.experiments.netkv_prefix import PAPER as FIGURE_3
from benchmarks.experiments.netkv_scale import TABLE_5
from benchmarks.experiments.netkv_topology import CORNERS
from benchmarks.experiments.netkv_topology import PAPER as FIGURE_1

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV's Tables III to VI and Figures 1 and 3, predicted by a simulator fitted on Table II alone"
SEEDS = (10, 1)
RR, CA, CLA, FULL = "RR", "CA", "CLA*", "NetKV-Full"
# No p_share of 0.7, which is Table II's.
SHARES = (0.0, 0.3, 0.5, 0.9)
SIZES = (128, 256)
# Table VI: per cent of transfers in the pod
TABLE_6 = {CLA: 32.0, FULL: 68.9}
POINTS_6 = 5.0


def variants(quick: bool) -> list[Variant]:
    made = [_variant("rag", s, "100%") for s in (CLA, FULL)]
    lengths = (1024, 16384) if quick else tuple(TABLE_3)
    made += [_variant("rag", s, str(n), prompt_tokens=n) for n in lengths for s in (RR, CLA, FULL)]
    # Without background NetKV-Full's runs are those of NetKV-Static.
    made += [
        _variant(workload, s, "100%")
        for workload in ("chatbot", "long")[: 1 if quick else 2]
        for s in LADDER
        if s != FULL
    ]
    if quick:
        return made
    made += [
        _variant(workload, s, _corner(*cell), oversubscription=cell[0], background=cell[1])
        for workload in FIGURE_1
        for cell in CORNERS
        for s in (CLA, FULL)
    ]
    made += [_variant("rag", s, f"p{p:g}", p_share=p) for p in SHARES for s in (CA, CLA, FULL)]
    return made + [_variant("rag", s, f"{gpus} GPUs", gpus=gpus) for gpus in SIZES for s in (CLA, FULL)]


def _corner(ratio: float, share: float) -> str:
    return f"{ratio:g}:1 {share:.0%}"


def _variant(workload: str, scheduler: str, label: str, **options: Any) -> Variant:
    fitted = {"prefill": list(PREFILL), "windows": WINDOWS, **SETUPS[IN_USE]}
    return named(workload, scheduler, label, **{**fitted, **options})


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates one of the odd windows."""
    return common.run_one(config, 2 * seed + 1)


def compare(results: Results) -> list[Row]:
    rows = [
        reduction(results, what, f"{at} {base}", f"{at} {ours}", paper)
        for what, at, base, ours, paper in _predicted()
        if f"{at} {base}" in results.runs
    ]
    rows += [_in_pod(results, scheduler, theirs) for scheduler, theirs in TABLE_6.items()]
    met = [row.met is True for row in rows]
    missed = [row.met is False for row in rows]
    return [
        Row("predictions within their aims", None, float(sum(met)), note=f"of {len(rows)}, with {IN_USE}"),
        Row("predictions surely outside", None, float(sum(missed)), note=f"of {len(rows)}"),
        *rows,
    ]


def _predicted() -> Iterator[tuple[str, str, str, str, float]]:
    """Yields (name of the row, cell, scheduler that is the base, scheduler, the paper's change in per cent)."""
    for tokens, changes in TABLE_3.items():
        for base, paper in zip((RR, CLA), changes, strict=True):
            yield f"Table III, {tokens} tokens, NetKV-Full vs {base}", f"rag {tokens}", base, FULL, paper
    for workload in ("chatbot", "long"):
        first, *rest = TABLE_4[workload]
        for scheduler, theirs in zip(LADDER[1:], rest, strict=True):
            paper = round(100.0 * (theirs / first - 1.0), 1)
            if scheduler != FULL:
                what = f"Table IV, {workload}, {scheduler} vs CLA*"
                yield what, f"{workload} 100%", CLA, scheduler, paper
    for workload, papers in FIGURE_1.items():
        for cell, paper in zip(CORNERS, papers, strict=True):
            at = f"{workload} {_corner(*cell)}"
            yield f"Figure 1, {at}, NetKV-Full vs CLA*", at, CLA, FULL, paper
    for p in SHARES:
        for base in (CA, CLA):
            yield f"Figure 3, p_share {p:g}, NetKV-Full vs {base}", f"rag p{p:g}", base, FULL, FIGURE_3
    for gpus in SIZES:
        yield f"Table V, {gpus} GPUs, NetKV-Full vs CLA*", f"rag {gpus} GPUs", CLA, FULL, TABLE_5[gpus][0]


def _in_pod(results: Results, scheduler: str, paper: float) -> Row:
    """Returns a row with the share of transfers in the pod, by Table VI."""
    found = results.spread(f"rag 100% {scheduler}", "tier_share/2")
    half = None if found.half_width is None else 100.0 * found.half_width
    row = Row(f"Table VI, {scheduler}: transfers in the pod", paper, 100.0 * found.mean, "%", half)
    return aimed(row, f"within {POINTS_6:g} points", least=paper - POINTS_6, most=paper + POINTS_6)


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    made, [axes] = look.figure()
    lengths = [tokens for tokens in TABLE_3 if f"rag {tokens} {RR}" in results.runs]
    series = {}
    for at, base in enumerate((RR, CLA)):
        found = [
            results.reduction_percent(f"rag {n} {base}", f"rag {n} {FULL}", "ttft_mean_s") for n in lengths
        ]
        series[f"vs {base}"] = look.Series(lengths, [mean for mean, _ in found], [half for _, half in found])
        paper = [-TABLE_3[n][at] for n in lengths]
        series[f"vs {base}, paper"] = look.Series(lengths, paper, quiet=True)
    look.lines(axes, series, "prompt tokens", "mean TTFT shorter by, %", log_x=True)
    return {"netkv_predict": made}
