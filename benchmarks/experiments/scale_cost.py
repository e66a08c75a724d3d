"""What a decision costs as the cluster grows: CPU time of the dispatcher in shorter runs of `scale`.

    python -m benchmarks.experiments.scale_cost --out benchmarks/results/experiments

Not an experiment of the registry: times depend on the machine, and results there do not. Every call of
`Dispatcher.handle` that assigns a prefill or a decode worker is timed (thread CPU time: other processes do not count);
it holds the event's own bookkeeping and all decisions that it led to.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkout import commit
from benchmarks.experiments import composition_cluster, scale
from benchmarks.results_io import write_text
from benchmarks.sim.cluster import Cluster
from policies.dispatch.dispatcher import Action, Dispatcher, RouteDecode, RoutePrefill
from policies.state import events as ev


class _Timed:
    """A dispatcher whose calls are timed, by what they decided."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._handle = dispatcher.handle
        self.decode_s: list[float] = []
        self.prefill_s: list[float] = []
        self.total_s = 0.0
        self.events = 0

    def handle(self, event: ev.Event) -> list[Action]:
        start_s = time.thread_time()
        actions = self._handle(event)
        took_s = time.thread_time() - start_s
        self.total_s += took_s
        self.events += 1
        decodes = sum(isinstance(action, RouteDecode) for action in actions)
        prefills = sum(isinstance(action, RoutePrefill) for action in actions)
        if decodes and not prefills:
            self.decode_s += [took_s / decodes] * decodes
        elif prefills and not decodes:
            self.prefill_s += [took_s / prefills] * prefills
        return actions


def measure(policy: str, gpus: int, quick: bool) -> dict[str, float]:
    """Microseconds of CPU a decision, and of all events together per request."""
    config = {
        **scale.config(policy, gpus, quick),
        "warmup_s": 15.0,
        "measure_s": 1.0 if quick else 5.0,
        "drain": False,
    }
    work = composition_cluster.workload(config, 0)
    cluster = Cluster(composition_cluster.sim_config(config, 0), iter(work), None, None)
    timed = _Timed(cluster.dispatcher)
    cluster.dispatcher.handle = timed.handle  # type: ignore[method-assign]
    cluster.run()
    found = {"requests": float(len(work)), "router_us_per_request": 1e6 * timed.total_s / len(work)}
    for name, values in (("decode", timed.decode_s), ("prefill", timed.prefill_s)):
        p50, p99 = (1e6 * np.percentile(values, (50, 99))).tolist()
        found |= {f"{name}_p50_us": p50, f"{name}_p99_us": p99}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="64 and 256 GPUs, shorter")
    parser.add_argument("--out", type=Path, default=Path("build/experiments"), metavar="DIR")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for gpus in scale.SIZES[:3:2] if args.quick else scale.SIZES:
        for policy in scale.SHOWN:
            found = measure(policy, gpus, args.quick)
            rows.append({"policy": policy, "gpus": gpus, **{k: round(v, 1) for k, v in found.items()}})
            print(rows[-1], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    whole = {"commit": commit(), "machine": platform.processor() or platform.machine(), "rows": rows}
    write_text(args.out / "scale_cost.json", json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
