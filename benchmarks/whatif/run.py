"""One simulated run of one variant, in the form that `benchmarks.runner` wants."""

from __future__ import annotations

from benchmarks.experiments.base import Config, Metrics
from benchmarks.sim.cluster import simulate
from benchmarks.sim.metrics import summarise
from benchmarks.whatif.build import sim_config, workload
from benchmarks.whatif.config import Base, validated


def run_one(config: Config, seed: int) -> Metrics:
    """The metrics of the variant whose checked configuration is `config`."""
    base: Base = validated(Base, config, "variant")
    return summarise(simulate(sim_config(base, seed), workload(base, seed)))
