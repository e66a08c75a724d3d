"""The composition against each of its parts with a pool that serves the shortest expected output first.

Most of what the composition gains where slots are scarce comes from the order of the pool, which is by forecast length
(`slot_rent`), and its parts serve by age or size. So a reader asks whether a plain part with that order does as well.
Here every part has it (`shortest_first`): the pool decides who is admitted, the part decides where. The cells are the
three of `composition` in which forecasts are compared, and the forecasts are the same on both sides of each comparison:
lengths learnt for each client, which a deployment can have, or the oracle's.

The parts have the parameters that `composition_tuning` chose for them with their own pools, and NetKV stands with its
learnt contention, too (`netkv_shared`). The composition has its tuned point, and a second one without any ageing, since
the rivals' pool has none: without it a long request may wait without end, and the mean of TTFT is shorter.

Aims, in a file before the first run: with lengths by client the composition's mean TTFT is at most 1 % above that of
the best part with this pool in each cell, and over the cells it is below it. The best part is chosen on the other half
of the seeds, as in `composition`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import composition, shortest_first
from benchmarks.experiments import composition_cluster as cluster
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.seeds import spread
from benchmarks.sim.cluster import simulate
from benchmarks.sim.metrics import summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = (
    "the composition against its parts, each with a pool that serves the shortest expected output first; synthetic"
    " requests of 20 clients"
)
SEEDS = (8, 1)
FIRST_SEED = 400
"""Neither `composition` nor `composition_tuning` has these seeds."""
OURS, UNAGED = "composition", "composition without ageing"
PARTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "JSQ": ("join_shortest_queue", {}),
    "NetKV": ("netkv", {**cluster.STEP, **composition.TUNED["NetKV"]}),
    "NetKV, shared contention": ("netkv", {**cluster.STEP, "contention": "shared"}),
    "BR-0": ("balance_route_0", composition.TUNED["BR-0"]),
    "BR-H": ("balance_route_h", composition.TUNED["BR-H"]),
    "CLA": ("cache_load_aware", composition.TUNED["CLA"]),
}
CLIENT, ORACLE = "client", "oracle"
TTFT, P95, RATE = composition.TTFT, composition.P95, composition.RATE
CELL_AIM, ALL_AIM = "at most +1 %", "below 0 %"


def variants(quick: bool) -> list[Variant]:
    chosen = {name: c for name, c in composition.cells(quick).items() if name.startswith(composition.BOUNDED)}
    ours = {
        OURS: composition.TUNED["composition"],
        UNAGED: {**composition.TUNED["composition"], "ageing_s": None},
    }
    made = []
    for cell, config in chosen.items():
        for forecasts in (CLIENT, ORACLE):
            policies = {name: ("composition", {**composition.OWN, **point}) for name, point in ours.items()}
            policies |= {
                part: (shortest_first.NAME, {"inside": inside, "params": dict(params)})
                for part, (inside, params) in PARTS.items()
            }
            made += [
                Variant(
                    f"{cell} {forecasts} {label}",
                    {
                        **config,
                        "label": label,
                        "policy": name,
                        "params": dict(params),
                        "forecasts": forecasts,
                    },
                )
                for label, (name, params) in policies.items()
            ]
    return made


def run_one(config: Config, seed: int) -> Metrics:
    learns = "contention" in config["params"].get("params", {})
    with shortest_first.known():
        setup = replace(cluster.sim_config(config, FIRST_SEED + seed), learn_contention=learns)
        found = summarise(simulate(setup, cluster.workload(config, FIRST_SEED + seed)))
    return {name: found.get(name) for name in composition.KEPT}


def compare(results: Results) -> list[Row]:
    cells = list(dict.fromkeys(config["cell"] for config in results.variants.values()))
    rows = []
    for forecasts in (CLIENT, ORACLE):
        for ours in (OURS, UNAGED):
            is_aimed = forecasts == CLIENT and ours == OURS
            by_cell = [_against_best(results, cell, forecasts, ours) for cell in cells]
            for cell, (worse, best) in zip(cells, by_cell, strict=True):
                found = spread(worse)
                name = f"{forecasts}, {cell}: TTFT of {ours} against the best part"
                row = Row(name, None, found.mean, "%", found.half_width, note=f"best: {best}")
                rows.append(aimed(row, CELL_AIM, most=1.0) if is_aimed else row)
            found = spread([sum(of) / len(of) for of in zip(*(worse for worse, _ in by_cell), strict=True)])
            name = f"{forecasts}, all cells: TTFT of {ours} against the best part"
            row = Row(name, None, found.mean, "%", found.half_width)
            rows.append(aimed(row, ALL_AIM, most=0.0) if is_aimed else row)
        rows += [_against(results, cell, forecasts, part) for cell in cells for part in PARTS]
    return rows


def _values(results: Results, cell: str, forecasts: str, label: str, metric: str) -> list[float]:
    return list(results.values(f"{cell} {forecasts} {label}", metric))


def _against_best(results: Results, cell: str, forecasts: str, ours: str) -> tuple[list[float], str]:
    """Returns by how many per cent the TTFT of `ours` is above the best part's on each seed, in the order of the seeds,
    and the parts that were best. Each half of the seeds is compared with the part that is best on the other half.
    """
    values = {part: _values(results, cell, forecasts, part, TTFT) for part in PARTS}
    mine = _values(results, cell, forecasts, ours, TTFT)
    worse, chosen = [0.0] * len(mine), []
    for half, other in ((0, 1), (1, 0)) if len(mine) > 1 else ((0, 0),):
        best = min(values, key=lambda part: sum(values[part][other::2]) / len(values[part][other::2]))
        chosen.append(best)
        for i in range(half, len(mine), 2):
            worse[i] = 100.0 * (mine[i] / values[best][i] - 1.0)
    return worse, " or ".join(dict.fromkeys(chosen))


def _against(results: Results, cell: str, forecasts: str, part: str) -> Row:
    """Returns a row with the composition's TTFT against one part's; the note has p95 and throughput."""

    def differences(metric: str) -> list[float]:
        pairs = zip(
            _values(results, cell, forecasts, part, metric),
            _values(results, cell, forecasts, OURS, metric),
            strict=True,
        )
        return [100.0 * (b / a - 1.0) for a, b in pairs]

    ttft, tail, rate = (spread(differences(metric)) for metric in (TTFT, P95, RATE))
    note = f"p95 {tail.mean:+.1f} %, throughput {rate.mean:+.2f} %"
    name = f"{forecasts}, {cell}: TTFT of {OURS} against {part}"
    return Row(name, None, ttft.mean, "%", ttft.half_width, note=note)


def plots(results: Results) -> dict[str, Figure]:
    """Draws the mean TTFT of each policy over load, for both kinds of forecasts."""
    from benchmarks import plots as look

    made, axes = look.figure(columns=2, rows=1, width=6.0)
    for axis, forecasts in zip(axes, (CLIENT, ORACLE), strict=True):
        configs = [c for c in results.variants.values() if c["forecasts"] == forecasts]
        loads: Sequence[float] = sorted({c["load"] for c in configs})
        cell_of = {c["load"]: c["cell"] for c in configs}
        shown = {
            label: look.Series(
                loads, [results.mean(f"{cell_of[load]} {forecasts} {label}", TTFT) for load in loads]
            )
            for label in (OURS, UNAGED, *PARTS)
        }
        look.lines(axis, shown, "load", "mean TTFT, s", f"lengths by {forecasts}")
    return {"composition_pool": made}
