"""The number of sequences that a decode worker may get beyond its slots (`DispatchConfig.overcommit_slots`), chosen.

NetKV may send an entry to a near worker whose slots are all taken instead of a far one with a free slot; the entry then
queues in the near engine (NetKV IV-C). The paper counts one iteration for each blocked predecessor ("NetKV, the
paper's"). "NetKV" counts the steps until a slot frees (`queue`), by the output tokens for each sequence that ends; the
composition does so by its forecasts, or without them as NetKV does. With 0 nothing queues.

The cluster is that of `composition_cluster`. With "long" outputs a worker has 8 slots, one of which frees every 150
steps (some 4 s), so the paper's T_queue is far too short. With "short" outputs it has 3, one of which frees every 40
steps (about a second), which is what a transfer to a far worker takes longer than one to a near worker.

The rows compare each number with 0, seed by seed. With 0 the choice that NetKV leaves to the policy does not exist, so
the default is the number above 0 with the least mean TTFT over all policies, cells and loads. Seeds are those from
700 on, on which nothing was tuned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import composition_cluster as cluster
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.composition import OWN
from benchmarks.seeds import met, paired, spread
from benchmarks.sim.cluster import simulate
from benchmarks.sim.metrics import summarise
from policies.dispatch.config import DispatchConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "sequences beyond a decode worker's slots: what a queue inside the engine costs NetKV and the composition"
)
SEEDS = (4, 1)
FIRST_SEED = 700
PAPERS_OWN = {**cluster.STEP, "queue": "iterations"}
POLICIES: Mapping[str, tuple[str, Mapping[str, Any], str | None]] = {
    "NetKV, the paper's": ("netkv", PAPERS_OWN, None),
    "NetKV": ("netkv", cluster.STEP, None),
    "composition": ("composition", OWN, "client"),
    "composition, no forecasts": ("composition", OWN, None),
}
NUMBERS = (0, 1, 2, 4, 8)
LOADS = (0.6, 0.9, 1.1)
# slots of a worker and mean output tokens
CELLS = {"long": (8, cluster.OUTPUT_TOKENS), "short": (3, 120.0)}
TTFT, P95, WAIT = "ttft_mean_s", "ttft_p95_s", "pool_mean_s"
KEPT = (TTFT, P95, WAIT, "throughput_tok_s", "transfer_mean_s", "unfinished")
DEFAULT = DispatchConfig().overcommit_slots


def variants(quick: bool) -> list[Variant]:
    return [
        Variant(
            _name(label, cell, load, number),
            {
                "gpus": 64,
                "context_tokens": 9_000,
                "oversubscription": 4.0,
                "tail": "heavy",
                "barrier": False,
                "cell": cell,
                "slots": slots,
                "output_tokens": output_tokens,
                "load": load,
                "warmup_s": 20.0 if quick else 50.0,
                "measure_s": 20.0 if quick else 100.0,
                "label": label,
                "policy": policy,
                "params": dict(params),
                "forecasts": forecasts,
                "overcommit_slots": number,
            },
        )
        for cell, (slots, output_tokens) in CELLS.items()
        for load in ((0.9,) if quick else LOADS)
        for label, (policy, params, forecasts) in POLICIES.items()
        for number in ((0, DEFAULT) if quick else NUMBERS)
    ]


def _name(label: str, cell: str, load: float, number: int) -> str:
    return f"{label}, {cell}, load {load:g}, {number} beyond"


def run_one(config: Config, seed: int) -> Metrics:
    seed += FIRST_SEED
    found = summarise(simulate(cluster.sim_config(config, seed), cluster.workload(config, seed)))
    return {name: found.get(name) for name in KEPT}


def compare(results: Results) -> list[Row]:
    cells = _cells(results)
    numbers = _numbers(results)[1:]
    changes = {n: _mean_changes(results, list(POLICIES), cells, n) for n in numbers}
    means = {n: spread(values) for n, values in changes.items()}
    rows = []
    for number, mean in means.items():
        judged = number == DEFAULT
        what = f"all policies, {number} beyond the slots: mean TTFT against 0"
        row = Row(what, None, mean.mean, "%", mean.half_width)
        rows.append(aimed(row, "least of these", also=_least(changes, number)) if judged else row)
    rows += [_over_all(results, label, cells, number) for label in POLICIES for number in numbers]
    for label in POLICIES:
        for cell, load in cells:
            rows += [_values(results, label, cell, load, number) for number in (0, *numbers)]
    return rows


def _least(changes: Mapping[int, Sequence[float]], number: int) -> list[bool | None]:
    """Returns for each other number whether the change of `number` is not above that of the other, paired by seed."""
    others = (values for other, values in changes.items() if other != number)
    found = [paired(values, changes[number]).difference for values in others]
    return [met(d.mean - (d.half_width or 0.0), d.mean + (d.half_width or 0.0), most=0.0) for d in found]


def _cells(results: Results) -> list[tuple[str, float]]:
    """Returns the cells and loads that were run."""
    return list(dict.fromkeys((config["cell"], config["load"]) for config in results.variants.values()))


def _numbers(results: Results) -> list[int]:
    return sorted({config["overcommit_slots"] for config in results.variants.values()})


def _over_all(results: Results, label: str, cells: Sequence[tuple[str, float]], number: int) -> Row:
    """Returns the row of a policy and a number over all cells; its interval is over the seeds."""
    mean = spread(_mean_changes(results, [label], cells, number))
    each = {at: spread(_changes(results, label, *at, number)).mean for at in cells}
    note = ", ".join(f"{cell} {load:g}: {change:+.1f} %" for (cell, load), change in each.items())
    what = f"{label}, {number} beyond the slots: mean TTFT against 0"
    return Row(what, None, mean.mean, "%", mean.half_width, note=note)


def _mean_changes(
    results: Results, labels: Sequence[str], cells: Sequence[tuple[str, float]], number: int
) -> list[float]:
    """Returns for each seed the mean change against 0 over policies and cells, in per cent."""
    changes = [_changes(results, label, cell, load, number) for label in labels for cell, load in cells]
    return [sum(of_seed) / len(of_seed) for of_seed in zip(*changes, strict=True)]


def _changes(results: Results, label: str, cell: str, load: float, number: int) -> list[float]:
    """Returns the change of the mean TTFT against 0 beyond the slots, in per cent, for each seed."""
    base, ours = _name(label, cell, load, 0), _name(label, cell, load, number)
    pairs = zip(results.values(base, TTFT), results.values(ours, TTFT), strict=True)
    return [100.0 * (b / a - 1.0) for a, b in pairs]


def _values(results: Results, label: str, cell: str, load: float, number: int) -> Row:
    name = _name(label, cell, load, number)
    ttft, tail = results.spread(name, TTFT), results.mean(name, P95)
    wait, moved = results.mean(name, WAIT), results.mean(name, "transfer_mean_s")
    note = f"p95 {tail:.2f} s, in the pool {wait:.2f} s, transfer {moved:.2f} s"
    return Row(f"{name}: mean TTFT", None, ttft.mean, "s", ttft.half_width, note=note)


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    numbers = _numbers(results)
    made, axes = look.figure(columns=len(POLICIES))
    for axis, label in zip(axes, POLICIES, strict=True):
        series = {
            f"{cell} {load:g}": look.Series(
                list(numbers),
                [spread(_changes(results, label, cell, load, n)).mean if n else 0.0 for n in numbers],
            )
            for cell, load in _cells(results)
        }
        look.lines(axis, series, "sequences beyond the slots", "mean TTFT against 0, %", label)
    return {"overcommit": made}
