"""BalanceRoute D.6: BR-0 that sends each request on at once (bypass) against BR-0 with its pool.

With the pool a request waits for a free slot, and its KV moves when it has one; the slot is idle meanwhile. With bypass
it goes to a worker as soon as its prompt is computed, and its KV moves while the worker's slots are taken. A worker may
then have `cap` sequences more than slots. The paper calls a controlled comparison of the two future work, and prints no
figure, so all aims are our own. They are its words in D.6, and were written down before the first whole run:

    latency   the mean TTFT of bypass with a cap of 1 is below the pool's, in the cells in which slots are not all taken
    slots     "a tight cap was sufficient to keep slots utilized": in the cells in which the pool is full, as many slots
              run with a cap of 1 as with the widest, within 1 %. (At first it was held against the pool, whose slots
              wait for each transfer, so that it could hardly fail. That row stands beside without an aim.)
    balance   "trades some routing flexibility": in these cells a cap of 1 is still more balanced than JSQ. What it
              costs against the pool has a row without an aim

The cells are those of `forecast_cluster`, by the pressure on the slots and by the length of outputs, with real times of
transfer. The paper does not print its bandwidth; a mean prompt's KV, 3 GB, takes 0.15 s at the profile's 20 GB/s, two
decode steps, and 0.6 s at 5 GB/s. ASSUMPTION: each transfer has that bandwidth to itself, because the paper has several
prefill nodes and prints no links; what early transfers cost each other is not seen. Every engine receives KV ahead of
its slots (`EngineSpec.receive_ahead`), as the paper's do; the live engines of this project do not, so there is no gain
of this kind to be had from them. JSQ sends on at once without a cap, to engines that receive as much ahead.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments import forecast_cluster as cells
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import SimConfig
from policies.state.views import Role

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "BalanceRoute D.6: BR-0 with a pool against BR-0 that bypasses it, by cap and bandwidth; synthetic requests"
SEEDS = (5, 1)
SEEDS_FROM = 320
CELLS = tuple((pool, outputs) for pool in ("dry", "short", "long") for outputs in ("near", "heavy"))
QUICK_CELLS = (("dry", "near"), ("long", "near"))
JSQ, POOL = "JSQ", "pool"
CAPS = (0, 1, 4)
RULES = (JSQ, POOL, *(f"bypass, cap {cap}" for cap in CAPS))
BANDWIDTHS = (20.0, 5.0)
"""GB/s of a transfer."""
TIGHT, WIDEST = "bypass, cap 1", f"bypass, cap {CAPS[-1]}"
# More than ever wait at one engine with a cap.
AHEAD = 64
LEAST_RUNNING = 99.0
IMBALANCE, TTFT, P99, RUNNING, RATE = (
    "imbalance_tokens", "ttft_mean_s", "ttft_p99_s", "running", "throughput_tok_s",
)  # fmt: skip


def variants(quick: bool) -> list[Variant]:
    chosen, bandwidths = (QUICK_CELLS, BANDWIDTHS[1:]) if quick else (CELLS, BANDWIDTHS)
    return [
        Variant(f"{_cell(pool, outputs, gbytes)}, {rule}", _config(pool, outputs, gbytes, rule, quick))
        for pool, outputs in chosen
        for gbytes in bandwidths
        for rule in RULES
        if not quick or rule in (JSQ, POOL, TIGHT, WIDEST)
    ]


def _cell(pool: str, outputs: str, gbytes: float) -> str:
    return f"{pool} {outputs}, {gbytes:g} GB/s"


def _config(pool: str, outputs: str, gbytes: float, rule: str, quick: bool) -> dict[str, Any]:
    method = "join_shortest_queue" if rule == JSQ else "br_0"
    plain = cluster.config_of("recurring-long", method, cells.WORKERS, False)
    bypass = rule not in (JSQ, POOL)
    return {
        "cell": _cell(pool, outputs, gbytes),
        "rule": rule,
        "pool": pool,
        "outputs": outputs,
        "size": 0.3 if quick else 1.0,
        "bandwidth_bytes_per_s": gbytes * 1e9,
        "policy": plain["policy"],
        "params": plain["params"] | ({"bypass": True} if bypass else {}),
        "cap": int(rule.rpartition(" ")[2]) if bypass else None,
    }


def run_one(config: Config, seed: int) -> Metrics:
    load = cells.load_of(config["pool"], config["outputs"], seed, config["size"])
    result = simulate(sim_config(config, load, seed), load.requests)
    return cells.measures(result, load.warmup_s + load.measure_s)


def sim_config(config: Config, load: cluster.Load, seed: int) -> SimConfig:
    """Returns the simulator's configuration of a run."""
    base = cells.sim_config(config, load, seed)
    engines = tuple(
        dataclasses.replace(
            spec,
            receive_ahead=AHEAD if spec.role is Role.DECODE else 0,
            profile=dataclasses.replace(
                spec.profile, transfer_bandwidth_bytes_per_s=config["bandwidth_bytes_per_s"]
            ),
        )
        for spec in base.engines
    )
    dispatch = base.dispatch
    if config["cap"] is not None:
        dispatch = dataclasses.replace(dispatch, overcommit="always", overcommit_slots=config["cap"])
    return dataclasses.replace(base, engines=engines, dispatch=dispatch)


def compare(results: Results) -> list[Row]:
    by_cell: dict[str, list[str]] = {}
    for config in results.variants.values():
        by_cell.setdefault(config["cell"], []).append(config["rule"])
    rows = []
    for cell, rules in by_cell.items():
        for rule in rules:
            name = f"{cell}, {rule}"
            for metric, what, unit in (
                (IMBALANCE, "imbalance", "tokens"),
                (TTFT, "mean TTFT", "s"),
                (P99, "p99 TTFT", "s"),
                (RUNNING, "slots that run", ""),
                (RATE, "throughput", "tok/s"),
            ):
                seen = results.spread(name, metric)
                rows.append(Row(f"{name}: {what}", None, seen.mean, unit, seen.half_width))
    for cell, rules in by_cell.items():
        full = cell.startswith("long ")
        for rule in rules:
            if rule not in (JSQ, POOL):
                rows += _against(results, cell, rule, full)
    return rows


def _against(results: Results, cell: str, rule: str, full: bool) -> list[Row]:
    """Returns the rows of a form of bypass against the pool and JSQ; `full` says that the cell's pool is full."""
    pool, jsq, ours = (f"{cell}, {one}" for one in (POOL, JSQ, rule))
    tight = rule == TIGHT
    less, half = results.reduction_percent(pool, ours, TTFT)
    sooner = Row(f"{ours}: mean TTFT below the pool's", None, less, "%", half)
    running = _running(results, f"{ours}: slots that run, of the pool's", ours, pool)
    more, half = results.ratio(ours, pool, IMBALANCE)
    cost = Row(f"{ours}: imbalance over the pool's", None, more, "x", half)
    over, half = results.ratio(jsq, ours, IMBALANCE)
    still = Row(f"{ours}: imbalance of JSQ over it", None, over, "x", half)
    if not tight:
        return [sooner, running, cost, still]
    widest = _running(results, f"{ours}: slots that run, of those of the widest", ours, f"{cell}, {WIDEST}")
    if full:
        widest = aimed(widest, f">= {LEAST_RUNNING:g}", least=LEAST_RUNNING)
        still = aimed(still, "> 1", above=1.0)
    else:
        sooner = aimed(sooner, "> 0", above=0.0)
    return [sooner, running, widest, cost, still]


def _running(results: Results, name: str, ours: str, other: str) -> Row:
    """Returns a row with the mean number of slots that run, in per cent of another variant's."""
    share, half = results.ratio(ours, other, RUNNING)
    return Row(name, None, 100.0 * share, "%", None if half is None else 100.0 * half)


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    by_cell: dict[str, list[str]] = {}
    for config in results.variants.values():
        by_cell.setdefault(config["cell"], []).append(config["rule"])
    made, axes = look.figure(columns=2, rows=len(by_cell), width=4.6, height=2.2)
    for i, (cell, rules) in enumerate(by_cell.items()):
        for panel, metric, label in (
            (axes[2 * i], IMBALANCE, "mean of max - min, KV tokens"),
            (axes[2 * i + 1], TTFT, "mean TTFT, s"),
        ):
            seen = {rule: results.spread(f"{cell}, {rule}", metric) for rule in rules}
            look.bars(panel, {rule: (s.mean, s.half_width) for rule, s in seen.items()}, label, cell)
    return {"balance_route_bypass": made}
