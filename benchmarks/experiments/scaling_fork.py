"""Weights from a serving engine to 1 to 64 new ones, as a tree and as a star (DeepFlow, Figure 10).

Engines of Llama-3.1-8B on L20 hang on one switch with ports of 100 Gbit/s; weights are 16 GB, in chunks of 0.5 GB. The
source prefills or decodes sequences of 1,000 tokens meanwhile (2.5 requests/s, one prefill and one decode engine). The
fork's flows run behind KV transfers (level 1), as scavengers of the flow scheduler do; one variant runs them beside
(level 0). TTFT is the mean over the requests of the first `WINDOW_S` seconds of the fork, beside the same requests
without a fork.

Aims, written before the first run: a tree of 64 takes at most three times a tree of 1; serving TTFT grows by 3 % at
most. Figure 10 has no numbers in the text; it says that "contention is limited". Not claimed: the time to make tensors
of what has arrived, and contention for memory and PCIe.
"""

from __future__ import annotations

import dataclasses
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.scaling_common import Mix, engines, requests
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.config import SimConfig
from benchmarks.sim.fork import Fork
from benchmarks.sim.metrics import ttft_s
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.network.topology import Topology, TopologyConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "weights from a serving engine to 1 to 64 new ones, as a tree and as a star (DeepFlow, Figure 10)"
SEEDS = (2, 1)
SIZES = (1, 16, 64)
WEIGHTS_BYTES, CHUNK_BYTES = 16_000_000_000, 500_000_000
RATE_PER_S, BEGINS_S, LASTS_S, WINDOW_S = 2.5, 20.0, 110.0, 10.0
MIX = Mix(1_000.0, 100.0)
SHAPES, SOURCES = ("tree", "star"), ("prefill", "decode")


def _name(source: str, shape: str, n: int, level: int = 1) -> str:
    return f"{shape} of {n}, source {'prefills' if source == 'prefill' else 'decodes'}" + (
        "" if level else ", level 0"
    )


def variants(quick: bool) -> list[Variant]:
    sizes = (SIZES[0], SIZES[-1]) if quick else SIZES
    cells = [(source, shape, n, 1) for source in SOURCES for shape in SHAPES for n in sizes]
    cells.append(("prefill", "tree", SIZES[-1], 0))
    found = [Variant("no fork", {"shape": "", "source": "prefill", "engines": 0, "level": 1})]
    return found + [
        Variant(_name(*cell), dict(zip(("source", "shape", "engines", "level"), cell, strict=True)))
        for cell in cells
    ]


def topology() -> Topology:
    return Topology.build(
        TopologyConfig(
            pods=1,
            racks_per_pod=1,
            nodes_per_rack=2 + SIZES[-1],
            nvlink_gbyte_per_s=450,
            nic_gbit_per_s=100,
            rack_oversubscription=1.0,
            pod_oversubscription=1.0,
        )
    )


def run_one(config: Config, seed: int) -> Metrics:
    made = topology()
    prefill, decode, *others = made.nodes
    specs = [
        dataclasses.replace(spec, nodes=(node,))
        for spec, node in zip(engines(1, 1), (prefill, decode), strict=True)
    ]
    sim = SimConfig(
        tuple(specs), network=Fabric(made), seed=seed, warmup_s=BEGINS_S, measure_s=LASTS_S - BEGINS_S
    )
    cluster = Cluster(sim, iter(requests(MIX, [RATE_PER_S], LASTS_S, seed)), None, None)
    forks: list[Fork] = []
    n = config["engines"]
    if n:
        source = prefill if config["source"] == "prefill" else decode

        def begin() -> None:
            nodes = [source, *others[:n]]
            forks.append(
                Fork(
                    cluster.kernel, cluster.network, nodes, WEIGHTS_BYTES, CHUNK_BYTES, config["shape"],
                    priority=config["level"],
                )
            )  # fmt: skip

        cluster.kernel.at(BEGINS_S, begin)
    result = cluster.run()
    meanwhile = [r for r in result.requests if BEGINS_S <= r.arrived_s < BEGINS_S + WINDOW_S]
    return {
        "fork_s": forks[0].seconds if forks else None,
        "ttft_mean_s": fmean(t for r in meanwhile if (t := ttft_s(r)) is not None),
        "requests": float(len(meanwhile)),
    }


def compare(results: Results) -> list[Row]:
    sizes = sorted({c["engines"] for c in results.variants.values() if c["engines"]})
    rows: list[Row] = []
    for source in SOURCES:
        one, most = (_name(source, "tree", n) for n in (sizes[0], sizes[-1]))
        times = results.mean(most, "fork_s") / results.mean(one, "fork_s")
        what = f"source {source}s: tree of {sizes[-1]} over tree of {sizes[0]}"
        rows.append(Row(what, None, times, "times", None, "<= 3", times <= 3.0))
    for name, config in results.variants.items():
        if not config["engines"]:
            continue
        less, half = results.reduction_percent("no fork", name, "ttft_mean_s")
        row = Row(f"{name}: serving TTFT", None, -less, "%", half)
        rows.append(Row(f"{name}: seconds", None, results.mean(name, "fork_s"), "s"))
        judged = config["shape"] == "tree" and config["level"]
        rows.append(aimed(row, "<= 3 %", most=3.0) if judged else row)
    return rows


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure()
    sizes = sorted({c["engines"] for c in results.variants.values() if c["engines"]})
    series = {
        f"{shape}, source {source}s": look.Series(
            sizes, [results.mean(_name(source, shape, n), "fork_s") for n in sizes]
        )
        for source in SOURCES
        for shape in SHAPES
    }
    look.lines(axes[0], series, "new engines", "seconds until all have the weights", log_x=True)
    return {"fork": made}
