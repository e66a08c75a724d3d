"""CLA*'s weights (NetKV VI-A): a 10 x 10 grid in [0.1, 2.0]^2 at 80 % load, on a slice before every measured window.

The chosen weights have the least mean TTFT of the slice, with one run for each point. `netkv_common.TUNED` keeps the
paper's weights, (1, 1): docs/results.md has the grid's best beside them, and one run does not tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.netkv_common import TUNED, named, run_one

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV's CLA*: its two weights by grid search on a slice of their own"
SEEDS = (1, 1)
PAPER = {"chatbot": (1.0, 1.0), "rag": (1.0, 1.0), "long": (1.5, 0.7)}  # (w_cache, w_load), VI-A


def variants(quick: bool) -> list[Variant]:
    grid = [round(w, 4) for w in np.linspace(0.1, 2.0, 3 if quick else 10).tolist()]
    return [
        named(workload, "CLA*", f"{cache:g} {load:g}", weights=[cache, load], load=0.8, tuning=True)
        for workload in (("rag",) if quick else PAPER)
        for cache in grid
        for load in grid
    ]


def best(results: Results, workload: str) -> tuple[str, tuple[float, float]]:
    """Returns (variant, weights) with the least mean TTFT; of equal ones it is the first of the grid."""
    names = results.where(workload=workload)
    name = min(names, key=lambda n: results.mean(n, "ttft_mean_s"))
    cache, load = results.variants[name]["weights"]
    return name, (cache, load)


def compare(results: Results) -> list[Row]:
    rows = []
    for workload, paper in PAPER.items():
        if not results.where(workload=workload):
            continue
        name, weights = best(results, workload)
        times = [results.mean(n, "ttft_mean_s") for n in results.where(workload=workload)]
        for what, theirs, ours in zip(("cache", "load"), paper, weights, strict=True):
            rows.append(Row(f"{workload}: best {what} weight", theirs, ours))
        rows += [
            Row(f"{workload}: TTFT with them", None, 1e3 * results.mean(name, "ttft_mean_s"), "ms"),
            Row(f"{workload}: TTFT with the worst", None, 1e3 * max(times), "ms"),
        ]
        if workload in TUNED:
            used = TUNED[workload]
            rows.append(Row(f"{workload}: load / cache weight in use", None, used[1] / used[0]))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    return {}
