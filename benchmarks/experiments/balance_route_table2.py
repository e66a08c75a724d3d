"""BalanceRoute Table 2: the same cluster with G = 4, 8 and 16 decode workers, BR-H with the oracle as in the paper.

The load per worker is constant: requests come at `OVERLOAD` times what G balanced workers serve, and the pool grows
with G. The paper's throughput at G = 16 is limited by its prefill (five nodes for twice the decode workers). Here
prefill is never a limit, so only ratios at equal G can be compared. The trace is Table 1's `recurring-long`.

`br_h` is the paper's own rule, tuned (its beta is twice G), `br_h_printed` has the paper's gamma and beta, and
`br_h_pool` is the other reading (`balance_route_tuning`). `ours` aims at the mean load
instead of the heaviest of G workers, so that its imbalance need not grow with G; its beta is 3 for every G.
`ours_leased` is the same with leases of 30 s that are renewed for 600 s at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import plots as look
from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments.balance_route_table1 import (
    BY_TPOT,
    LEASED,
    NAMES,
    RAW,
    SAME,
    figures,
    in_paper,
    rejected,
)
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "BalanceRoute Table 2: routers behind a barrier of 4, 8 and 16 decode workers; synthetic long contexts"
)
SEEDS = (4, 1)
ALSO_STORED = ("pool_mean_s",)
WORKERS = (4, 8, 16)
CASE = "recurring-long"
METHODS = (
    *cluster.BASELINES,
    "br_0",
    "br_0_pool",
    "br_h oracle",
    f"{cluster.PRINTED} oracle",
    "br_h_pool oracle",
    "ours oracle",
    LEASED,
)

# The paper's figures: imbalance in tokens, TPOT P95 in ms, throughput in tok/s.
PAPER = {
    4: {
        "random": (80_118, 66.30, 364.7),
        "round_robin": (68_108, 65.27, 365.7),
        "power_of_two": (64_012, 65.40, 366.4),
        "join_shortest_queue": (75_326, 66.45, 365.4),
        "br_0": (9_711, 63.19, 407.1),
        "br_h oracle": (6_576, 62.52, 415.3),
    },
    8: {
        "random": (438_225, 85.15, 810.5),
        "round_robin": (254_798, 83.16, 846.7),
        "power_of_two": (262_940, 84.01, 836.3),
        "join_shortest_queue": (215_110, 83.20, 842.8),
        "br_0": (51_927, 79.32, 942.5),
        "br_h oracle": (23_577, 78.04, 1_028.9),
    },
    16: {
        "random": (638_062, 77.80, 923.6),
        "round_robin": (616_089, 77.91, 925.3),
        "power_of_two": (688_283, 77.46, 927.3),
        "join_shortest_queue": (675_607, 77.40, 926.6),
        "br_0": (215_170, 74.92, 1_117.8),
        "br_h oracle": (117_067, 72.04, 1_247.4),
    },
}


def variants(quick: bool) -> list[Variant]:
    methods = ("join_shortest_queue", "br_0", "br_h oracle", "ours oracle") if quick else METHODS
    return [
        Variant(f"{workers}/{method}", cluster.config_of(CASE, method, workers, quick))
        for workers in WORKERS
        for method in methods
    ]


def run_one(config: Config, seed: int) -> Metrics:
    return cluster.run_one(config, seed)


def compare(results: Results) -> list[Row]:
    rows = []
    for workers in WORKERS:
        for method in METHODS:
            variant = f"{workers}/{method}"
            if variant not in results.variants:
                continue
            rows += figures(results, variant, f"G = {workers}, {method}", PAPER[workers][in_paper(method)])
        rows += rejected(results, f"{workers}/{LEASED}", f"G = {workers}, {LEASED}")
        run = [m for m in METHODS if m not in cluster.BASELINES and f"{workers}/{m}" in results.variants]
        shown = [
            m for m in (RAW, SAME, BY_TPOT) if all(results.measured(f"{workers}/{one}", m) for one in run)
        ]
        gains = [(method, metric) for method in run for metric in shown]
        rows += [_gain(results, workers, method, metric) for method, metric in gains]
    return rows


def _gain(results: Results, workers: int, method: str, metric: str) -> Row:
    """Returns a row with the gain in throughput over the best baseline that was run."""
    run = [m for m in cluster.BASELINES if f"{workers}/{m}" in results.variants]
    best = max(results.mean(f"{workers}/{m}", metric) for m in run)
    ours = 100.0 * (results.mean(f"{workers}/{method}", metric) / best - 1.0)
    table = PAPER[workers]
    theirs = 100.0 * (table[in_paper(method)][2] / max(table[m][2] for m in cluster.BASELINES) - 1.0)
    return Row(f"G = {workers}: {NAMES[metric]} of {method} over the best baseline", theirs, ours, "%")


def plots(results: Results) -> dict[str, Figure]:
    made, axes = look.figure(columns=2)
    methods = [m for m in METHODS if f"8/{m}" in results.variants]
    for panel, metric, label in (
        (axes[0], "imbalance_tokens", "mean of max - min, KV tokens"),
        (axes[1], SAME, "output tokens/s at the same load"),
    ):
        lines = {}
        for method in methods:
            seen = [results.spread(f"{workers}/{method}", metric) for workers in WORKERS]
            quiet = method in ("random", "round_robin", "power_of_two")
            lines[method] = look.Series(WORKERS, [s.mean for s in seen], [s.half_width for s in seen], quiet)
        look.lines(panel, lines, "decode workers G", label, log_x=True)
    return {"balance_route_table2": made}
