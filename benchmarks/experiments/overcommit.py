"""The number of sequences that a decode worker may get beyond its slots (`DispatchConfig.overcommit_slots`), chosen.

NetKV may send an entry to a near worker whose slots are all taken instead of a far one with a free slot; the entry then
queues in the near engine (NetKV IV-C). The paper counts one iteration for each blocked predecessor. In the cluster of
`composition_cluster` a worker has 8 slots and outputs have 1,200 tokens in the mean, so a slot frees every 150 steps,
and the paper's T_queue is far too short. "NetKV, usual outputs" is told these lengths (`usual_output_tokens`); the
composition learns them from its forecasts. The larger `overcommit_slots` is, the more entries a policy may bind to an
engine in which they wait, while in the pool they could take whatever slot frees first. With 0 nothing queues.

The rows compare each number with 0, seed by seed. The default is the largest number at which no policy that knows the
wait for a slot has a mean TTFT over all loads that is longer than with 0 by more than `LIMIT_PERCENT`. Seeds are those
of 100 and above, on which no other experiment measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import composition_cluster as cluster
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant
from benchmarks.experiments.composition import OWN
from benchmarks.seeds import spread
from benchmarks.sim.cluster import simulate
from benchmarks.sim.metrics import summarise
from policies.dispatch.config import DispatchConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "sequences beyond a decode worker's slots: what a queue inside the engine costs NetKV and the composition"
)
SEEDS = (4, 1)
FIRST_SEED = 100
TOLD = {**cluster.STEP, "usual_output_tokens": cluster.OUTPUT_TOKENS}
POLICIES: Mapping[str, tuple[str, Mapping[str, Any], str | None]] = {
    "NetKV": ("netkv", cluster.STEP, None),
    "NetKV, usual outputs": ("netkv", TOLD, None),
    "composition": ("composition", OWN, "client"),
}
KNOW_THE_WAIT = ("NetKV, usual outputs", "composition")
NUMBERS = (0, 1, 2, 4, 8)
LOADS = (0.6, 0.9, 1.1)
LIMIT_PERCENT = 1.0
TTFT, P95, WAIT = "ttft_mean_s", "ttft_p95_s", "pool_mean_s"
KEPT = (TTFT, P95, WAIT, "throughput_tok_s", "transfer_mean_s", "tier_share/2", "requests", "unfinished")
DEFAULT = DispatchConfig().overcommit_slots


def variants(quick: bool) -> list[Variant]:
    return [
        Variant(
            _name(label, load, number),
            {
                "gpus": 64,
                "context_tokens": 9_000,
                "oversubscription": 4.0,
                "tail": "heavy",
                "barrier": False,
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
        for load in ((0.9,) if quick else LOADS)
        for label, (policy, params, forecasts) in POLICIES.items()
        for number in ((0, DEFAULT) if quick else NUMBERS)
    ]


def _name(label: str, load: float, number: int) -> str:
    return f"{label} load {load:g} overcommit {number}"


def run_one(config: Config, seed: int) -> Metrics:
    seed += FIRST_SEED
    found = summarise(simulate(cluster.sim_config(config, seed), cluster.workload(config, seed)))
    return {name: found.get(name) for name in KEPT}


def compare(results: Results) -> list[Row]:
    loads = sorted({config["load"] for config in results.variants.values()})
    numbers = sorted({config["overcommit_slots"] for config in results.variants.values()} - {0})
    rows = []
    for label in POLICIES:
        for number in numbers:
            changes = {load: _changes(results, label, load, number, TTFT) for load in loads}
            mean = spread([sum(of_seed) / len(of_seed) for of_seed in zip(*changes.values(), strict=True)])
            judged = number == DEFAULT and label in KNOW_THE_WAIT
            met = mean.mean <= LIMIT_PERCENT if judged else None
            aim = f"<= +{LIMIT_PERCENT:g} %" if judged else ""
            note = ", ".join(f"load {load:g}: {spread(some).mean:+.1f} %" for load, some in changes.items())
            what = f"{label}, {number} beyond the slots, all loads: mean TTFT against 0"
            rows.append(Row(what, None, mean.mean, "%", mean.half_width, aim, met, note))
    for label in POLICIES:
        for load in loads:
            for number in (0, *numbers):
                rows.append(_values(results, label, load, number))
    return rows


def _changes(results: Results, label: str, load: float, number: int, metric: str) -> list[float]:
    """Returns the change against 0 beyond the slots, in per cent, for each seed."""
    base, ours = _name(label, load, 0), _name(label, load, number)
    pairs = zip(results.values(base, metric), results.values(ours, metric), strict=True)
    return [100.0 * (b / a - 1.0) for a, b in pairs]


def _values(results: Results, label: str, load: float, number: int) -> Row:
    name = _name(label, load, number)
    ttft, tail = results.spread(name, TTFT), results.mean(name, P95)
    wait, moved = results.mean(name, WAIT), results.mean(name, "transfer_mean_s")
    note = f"p95 {tail:.2f} s, in the pool {wait:.2f} s, transfer {moved:.2f} s"
    return Row(f"{name}: mean TTFT", None, ttft.mean, "s", ttft.half_width, note=note)


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    numbers: Sequence[int] = sorted({config["overcommit_slots"] for config in results.variants.values()})
    loads = sorted({config["load"] for config in results.variants.values()})
    made, axes = look.figure(columns=len(POLICIES))
    for axis, label in zip(axes, POLICIES, strict=True):
        series = {
            f"load {load:g}": look.Series(
                list(numbers),
                [spread(_changes(results, label, load, n, TTFT)).mean if n else 0.0 for n in numbers],
            )
            for load in loads
        }
        look.lines(axis, series, "sequences beyond the slots", "mean TTFT against 0, %", label)
    return {"overcommit": made}
