"""NetKV on whole traces with warm caches, in place of its windows of 15 s.

The traces are RAG as in experiment 1, and the unchanged conversation trace with the prefixes that its hash_ids share,
both at 6.09 requests/s. There is one run of each, so there is no interval.

With caches filled over the whole trace both policies have more hits and move less, CLA* more so, and NetKV's gain is
smaller than in windows (11.8 % in the paper's). On the conversation trace NetKV gives up hits for the nearer tier,
because a conversation's prefix is on one worker only. docs/results.md has the gains and the hits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.netkv_common import milliseconds, named, reduction, run_one, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV on whole traces: RAG and Mooncake conversation with its own prefixes, at 100 % load"
SEEDS = (1, 1)
PAPER = {"RR": -18.9, "CLA*": -11.8}  # Table II, RAG, windows of 15 s
SHOWN = ("RR", "CLA*", "NetKV-Topo-Only", "NetKV-Full")


def variants(quick: bool) -> list[Variant]:
    workloads = ("rag",) if quick else ("rag", "conversation")
    schedulers = ("CLA*", "NetKV-Full") if quick else SHOWN
    return [named(workload, s, whole=True) for workload in workloads for s in schedulers]


def compare(results: Results) -> list[Row]:
    rows = []
    for workload in ("rag", "conversation"):
        for base, theirs in PAPER.items():
            if f"{workload} {base}" in results.runs:
                paper = theirs if workload == "rag" else None
                names = f"{workload} {base}", f"{workload} NetKV-Full"
                rows.append(reduction(results, f"{workload}, NetKV-Full vs {base}", *names, paper))
        for name in results.where(workload=workload):
            rows += [
                milliseconds(results, f"{name}: TTFT", name, "ttft_mean_s", None),
                milliseconds(results, f"{name}: transfer", name, "transfer_mean_s", None),
                share(results, f"{name}: prompt tokens hit", name, "decode_hit_share", None),
            ]
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    return {}
