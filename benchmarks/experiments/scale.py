"""The quality of each policy's decisions on 64 to 1,024 GPUs. `benchmarks.decisions` measures their CPU time.

The cluster and workload are the composition's (`composition_cluster`) at 0.9 of what the cluster carries, with
heavy-tailed outputs and one barrier for every two pods. The rate grows with the cluster, so a policy that scales keeps
its TTFT. NetKV's scale-up (VI-I, Table V) has the same sizes and another workload; `netkv_*` has its figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.experiments import composition
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "64 to 1,024 GPUs at one load a GPU: the quality of decisions as clusters grow; synthetic requests"
SEEDS = (2, 1)
SIZES = (64, 128, 256, 512, 1_024)
SHOWN = ("NetKV", "BR-H", "JSQ", "composition")


def variants(quick: bool) -> list[Variant]:
    return [
        Variant(f"{policy}, {gpus} GPUs", config(policy, gpus, quick))
        for gpus in (SIZES[:3:2] if quick else SIZES)
        for policy in SHOWN
    ]


def config(policy: str, gpus: int, quick: bool) -> Config:
    """Returns the config of one run of a policy from the composition's experiment."""
    return {
        **composition.policy_config(policy),
        "gpus": gpus,
        "context_tokens": 9_000,
        "oversubscription": 4.0,
        "tail": "heavy",
        "barrier": True,
        "load": 0.9,
        "warmup_s": 15.0 if quick else 25.0,
        "measure_s": 10.0 if quick else 15.0,
    }


def run_one(config: Config, seed: int) -> Metrics:
    return composition.run_one(config, seed)


def compare(results: Results) -> list[Row]:
    sizes = sorted({c["gpus"] for c in results.variants.values()})
    rows = []
    for gpus in sizes:
        names = {policy: f"{policy}, {gpus} GPUs" for policy in SHOWN}
        best = min(SHOWN[:-1], key=lambda p: results.mean(names[p], "ttft_mean_s"))
        gain, half = results.reduction_percent(names[best], names["composition"], "ttft_mean_s")
        ttft = results.mean(names["composition"], "ttft_mean_s")
        rows.append(
            aimed(
                Row(
                    f"{gpus} GPUs: TTFT",
                    None,
                    -gain,
                    "%",
                    half,
                    note=f"best: {best}; composition {ttft:.2f} s",
                ),
                "<= +1 % of the best part",
                most=1.0,
            )
        )
    grown = [results.mean(f"composition, {gpus} GPUs", "ttft_mean_s") for gpus in (sizes[0], sizes[-1])]
    change = 100.0 * (grown[1] / grown[0] - 1.0)
    note = f"{sizes[0]} to {sizes[-1]} GPUs, composition"
    return [
        *rows,
        Row("TTFT as the cluster grows", None, change, "%", None, "not above 0", change <= 0, note),
    ]


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure(2)
    sizes = sorted({c["gpus"] for c in results.variants.values()})
    for axis, metric, label, per_gpu in (
        (axes[0], "ttft_mean_s", "TTFT, s", False),
        (axes[1], "throughput_tok_s", "tokens/s a GPU", True),
    ):
        series = {}
        for policy in SHOWN:
            spreads = [(results.spread(f"{policy}, {gpus} GPUs", metric), gpus) for gpus in sizes]
            series[policy] = look.Series(sizes, [s.mean / (gpus if per_gpu else 1) for s, gpus in spreads])
        look.lines(axis, series, "GPUs", label, log_x=True)
    return {"scale": made}
