"""BR-H as the paper prints it, nothing added, by its source of forecasts: what do they add to the plain rule?

`br_h` is "br_h_printed" of `balance_route_cluster`: H = 48, gamma = 0.9, beta = G, singles of the window, no ageing, no
extras. It runs without forecasts, with survival, with exact match (or survival given the client, where the trace has
clients and no recurring prompts), with LightGBM and with the oracle, beside BR-0 and JSQ on the same requests. The
paper's text has lost W; `balance_route_tuning` found it for BR-0 and BR-H alike, on other requests and seeds. On
`recurring-long` the pool is also a quarter and twice as large, because its size is an assumption of ours; there only
the sources run that say what forecasts add: none, LightGBM and the oracle.

The paper's central claim is an order: BR-0, survival, exact match, oracle (Table 1). So the aims are the paper's own
ratios, imbalance of BR-0 over that of BR-H with each source, rounded down to two digits, at the pool of Table 1. Our
own aim is that LightGBM, which is what a router deploys, keeps 95 % of what the oracle adds to BR-H without forecasts.
It is open where the oracle adds nothing: a rule that ignores its forecasts would keep all of nothing. BR-H without
forecasts is not BR-0 by its rule: it still sees that fuller batches grow faster, and weighs an overflow by H steps.
Where no forecast passes the gate its runs are those without any.

Throughput stands in three forms beside each other, as in `balance_route_table1`: as measured, at the same load, and by
the profile that was derived from the paper's TPOT. The paper's gain over JSQ is compared with each.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from benchmarks import plots as look
from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments.balance_route_table1 import BY_TPOT, NAMES, PAPER, RAW, SAME, figures
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.seeds import ratio, spread
from benchmarks.workloads.catalog import available

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "BalanceRoute, the paper's plain BR-H by its source of forecasts: none, survival, exact match, LightGBM, oracle;"
    " stand-ins for the paper's traces, of which recurring-long is synthetic"
)
SEEDS = (5, 1)
SEEDS_FROM = 310
WORKERS = 8
JSQ, BR_0, NONE, DEPLOYED, ORACLE = (
    "join_shortest_queue", "br_0", "no forecasts", "lightgbm", "oracle",
)  # fmt: skip
IMBALANCE = "imbalance_tokens"
SOURCES = {
    "recurring-long": ("survival", "exact_match", DEPLOYED, ORACLE),
    "reasoning-long": ("survival", "client", DEPLOYED, ORACLE),
    "azure2024": ("survival", DEPLOYED, ORACLE),
}
"""The sources of forecasts by case. Where nothing recurs exact match is survival, and is not run again."""
SOURCES_BY_POOL = (DEPLOYED, ORACLE)
"""The sources of the further pools, of which the paper has no figures."""
POOLS = (4.0, 32.0)
"""Further sizes of the pool, in prompts for each worker."""
POOLED = "recurring-long"
LEAST_KEPT = 95.0


def variants(quick: bool) -> list[Variant]:
    cells: list[tuple[str, float | None]] = [
        (case, None) for case in SOURCES if available(cluster.CASES[case].workload)
    ]
    cells = cells[:1] if quick else [*cells, *((POOLED, pool) for pool in POOLS)]
    return [
        Variant(f"{_cell(case, pool)}/{method}", _config(case, pool, method, quick))
        for case, pool in cells
        for method in (JSQ, BR_0, *(f"br_h {source}" for source in (NONE, *_sources(case, pool))))
    ]


def _sources(case: str, pool: float | None) -> tuple[str, ...]:
    return SOURCES[case] if pool is None else SOURCES_BY_POOL


def _cell(case: str, pool: float | None) -> str:
    return case if pool is None else f"{case}, pool {pool:g}"


def _config(case: str, pool: float | None, method: str, quick: bool) -> dict[str, Any]:
    rule, _, source = method.partition(" ")
    named = f"{cluster.PRINTED} {ORACLE if source == NONE else source}" if rule == "br_h" else method
    config = cluster.config_of(case, named, WORKERS, quick)
    if source == NONE:
        config["predictor"] = None
    if pool is not None:
        config["pool"] = pool
    sizes = {"warmup_steps": 1_000, "steps": 2_000} if quick else {}
    return config | sizes | {"cell": _cell(case, pool), "method": method}


def run_one(config: Config, seed: int) -> Metrics:
    return cluster.run_one(config, seed)


def compare(results: Results) -> list[Row]:
    cells: dict[str, list[str]] = {}
    for config in results.variants.values():
        cells.setdefault(config["cell"], []).append(config["method"])
    rows = []
    for cell, methods in cells.items():
        # Of other pools the paper has no figures.
        table = PAPER.get(cell, {})
        for method in methods:
            rows += figures(results, f"{cell}/{method}", f"{cell}, {method}", table.get(method))
    for cell, methods in cells.items():
        table = PAPER.get(cell, {})
        forms = [method for method in methods if method.startswith("br_h")]
        rows += [_over(results, cell, BR_0, method, table) for method in forms]
        rows += [_adds(results, cell, method) for method in forms if method != f"br_h {NONE}"]
        rows.append(_kept(results, cell))
        better = (BR_0, *forms)
        rows += [
            _gain(results, cell, method, metric, table)
            for method in better
            for metric in (RAW, SAME, BY_TPOT)
        ]
    return rows


def _over(results: Results, cell: str, base: str, method: str, table: Any) -> Row:
    """Returns a row with the imbalance of BR-0 over a method's, whose aim is the paper's ratio where it has one."""
    over, half = results.ratio(f"{cell}/{base}", f"{cell}/{method}", IMBALANCE)
    paper = table[base][0] / table[method][0] if method in table else None
    row = Row(f"{cell}: imbalance of BR-0 over {method}", paper, over, "x", half)
    if paper is None:
        return row
    least = math.floor(100.0 * paper) / 100.0
    return aimed(row, f">= {least:.2f}", least=least)


def _adds(results: Results, cell: str, method: str) -> Row:
    """Returns a row with what forecasts take off the imbalance of the same rule without them."""
    less, half = results.reduction_percent(f"{cell}/br_h {NONE}", f"{cell}/{method}", IMBALANCE)
    return Row(f"{cell}: imbalance of {method} below that without forecasts", None, less, "%", half)


def _kept(results: Results, cell: str) -> Row:
    """Returns a row with the share of what the oracle adds that LightGBM keeps; None where the oracle does not add."""
    base = results.values(f"{cell}/br_h {NONE}", IMBALANCE)
    kept, whole = (
        [a - b for a, b in zip(base, results.values(f"{cell}/br_h {source}", IMBALANCE), strict=True)]
        for source in (DEPLOYED, ORACLE)
    )
    low = spread(whole).low
    share, half = ratio(kept, whole) if low is not None and low > 0.0 else (None, None)
    row = Row(
        f"{cell}: share of what the oracle adds to the balance that {DEPLOYED} keeps",
        None,
        None if share is None else 100.0 * share,
        "%",
        None if half is None else 100.0 * half,
        note="" if share is not None else "the oracle does not add",
    )
    return aimed(row, f">= {LEAST_KEPT:g}", least=LEAST_KEPT)


def _gain(results: Results, cell: str, method: str, metric: str, table: Any) -> Row:
    """Returns a row with the gain in one of the throughputs over JSQ."""
    over, half = results.ratio(f"{cell}/{method}", f"{cell}/{JSQ}", metric)
    theirs = 100.0 * (table[method][2] / table[JSQ][2] - 1.0) if method in table else None
    wide = None if half is None else 100.0 * half
    return Row(f"{cell}: {NAMES[metric]} of {method} over JSQ's", theirs, 100.0 * (over - 1.0), "%", wide)


def plots(results: Results) -> dict[str, Figure]:
    cells: dict[str, list[str]] = {}
    for config in results.variants.values():
        cells.setdefault(config["cell"], []).append(config["method"])
    made, axes = look.figure(columns=2, rows=len(cells), width=4.6, height=2.6)
    for i, (cell, methods) in enumerate(cells.items()):
        for panel, metric, label in (
            (axes[2 * i], IMBALANCE, "mean of max - min, KV tokens"),
            (axes[2 * i + 1], SAME, "output tokens/s at the same load"),
        ):
            seen = {m: results.spread(f"{cell}/{m}", metric) for m in methods}
            look.bars(panel, {m: (s.mean, s.half_width) for m, s in seen.items()}, label, cell)
    return {"balance_route_plain": made}
