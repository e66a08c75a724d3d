"""A thousand engines: the time of a decision, and of simulated time, with the autoscaler in the loop.

64 and 1,024 engines serve long requests (24,000 tokens in, 1,600 out) at a rate that they just carry, with waves of
15 %, so that the policy has something to decide at every wave. Times are CPU seconds of the one thread that does all
the work, since the machine is shared.

Aims, written before the first run: the 99th percentile of a step with 1,024 engines is 20 ms at most, and 30 simulated
minutes take 15 minutes of CPU at most.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant
from benchmarks.experiments.scaling_common import OURS, Mix, fewest, kept, policy, requests, run
from benchmarks.experiments.scaling_tuned import TUNED
from policies.scaling.base import Counts, Limits, ScalingPolicy, Step
from policies.scaling.observation import Observation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "64 and 1,024 engines: CPU time of a scaling decision, and of a simulated minute"
SEEDS = (1, 1)
SIZES = (64, 1_024)
MIX = Mix(24_000.0, 1_600.0)
WAVE_S, WAVE, STEP_S = 60.0, 0.15, 10.0
P99_S, SIMULATED_PER_CPU = 0.020, 2.0
CPU_TIMES = frozenset({"step_p99_s", "step_mean_s", "simulated_per_cpu"})
"""The measures that `python -m benchmarks verify` does not compare."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A policy that measures the CPU time of each step of another."""

    inner: ScalingPolicy
    took_s: list[float]
    name: ClassVar[str] = "timed"

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    def initial(self) -> Any:
        return self.inner.initial()

    def step(self, seen: Observation, state: Any) -> Step:
        before_s = time.process_time()
        step = self.inner.step(seen, state)
        self.took_s.append(time.process_time() - before_s)
        return step


def variants(quick: bool) -> list[Variant]:
    minutes = 1 if quick else 30
    return [
        Variant(f"{n} engines", {"policy": OURS, "params": TUNED[OURS], "engines": n, "minutes": minutes})
        for n in (SIZES[:1] if quick else SIZES)
    ]


def carried(engines: int) -> tuple[float, Counts]:
    """Returns the greatest rate that this many engines carry (to a hundredth), and their division."""
    low, high = 0.0, float(engines)
    while high - low > 0.01:
        middle = (low + high) / 2.0
        low, high = (middle, high) if fewest(MIX, middle).total <= engines else (low, middle)
    found = fewest(MIX, low)
    return low, found._replace(decode=engines - found.prefill)


def run_one(config: Config, seed: int) -> Metrics:
    n, whole_s = config["engines"], 60.0 * config["minutes"]
    rate, first = carried(n)
    steps = round(whole_s / STEP_S)
    rates = [rate * (1.0 - WAVE + WAVE * math.sin(2.0 * math.pi * i * STEP_S / WAVE_S)) for i in range(steps)]
    limits = Limits(prefill_max=n, decode_max=n, warm_max=n // 8, budget=n + n // 8)
    timed = Timed(policy(config["policy"], config["params"], limits), [])
    began_s = time.process_time()
    result = run(requests(MIX, rates, STEP_S, seed), first, timed, seed, 0.0, whole_s, period_s=2.0)
    cpu_s = time.process_time() - began_s
    assert result.fleet is not None
    took = sorted(timed.took_s)
    return kept(result) | {
        "step_p99_s": took[math.ceil(0.99 * len(took)) - 1],
        "step_mean_s": sum(took) / len(took),
        "simulated_per_cpu": len(took) / cpu_s,
        "engines_mean": result.fleet.total_s / whole_s,
    }


def compare(results: Results) -> list[Row]:
    rows = []
    for name, config in results.variants.items():
        p99, mean = results.mean(name, "step_p99_s"), results.mean(name, "step_mean_s")
        speed = results.mean(name, "simulated_per_cpu")
        exists = f"{results.mean(name, 'engines_mean'):.0f} engines exist in the mean"
        aim, met = ("<= 20", p99 <= P99_S) if config["engines"] == SIZES[-1] else ("", None)
        rows += [
            Row(f"{name}: step, p99 of CPU time", None, 1e3 * p99, "ms", None, aim, met, exists),
            Row(f"{name}: step, mean CPU time", None, 1e3 * mean, "ms"),
        ]
        aim, met = (">= 2", speed >= SIMULATED_PER_CPU) if aim else ("", None)
        rows.append(Row(f"{name}: simulated minutes in a minute of CPU", None, speed, "", None, aim, met))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    return {}
