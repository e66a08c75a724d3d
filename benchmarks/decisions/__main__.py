"""`python -m benchmarks.decisions`: median and p99 of every decision, tick, event and lookup.

A row shows the wall clock and the CPU time of the process; on a busy machine compare the CPU time, under `nice`. A row
ends after 15 s, and all of them take some minutes. The compiled code is loaded before the first row
(`registry.prepare`).

Aims on an idle core: NetKV over 256 candidates p50 <= 100 us; BR-0 and BR-H at G = 64, pool 256 p50 <= 1 ms,
p99 <= 5 ms, the composition p50 <= 2 ms, p99 <= 5 ms; an event costs microseconds; a lookup of 100,000 tokens stays
well under a millisecond; a request of 64 engines costs at most 10 % more than one of 2.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.decisions import dispatching, journal, state, ticks
from benchmarks.decisions.measure import HEADER, Timing
from benchmarks.live.machine import command, facts, save
from policies.routing.registry import prepare

CODE = ("policies", "predictors", "benchmarks/decisions")
"""The folders whose code is timed, beside the files that this module imports."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; with --out also writes it as JSON. Returns 1 if the code changed meanwhile, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.decisions", description=__doc__)
    parser.add_argument("--calls", type=int, default=200, help="calls per row (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one size of cluster and pool, a smaller index")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    machine = facts("benchmarks.decisions.__main__", CODE)
    shown = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min_before']:.1f}"
    print(f"Python {machine['python']}, {shown}, seed {args.seed}\n{HEADER}")
    prepare()
    rows: list[Timing] = []
    batch = ticks.all_policies()
    for part in (
        partial(ticks.netkv, 5 * args.calls, args.seed),
        *(partial(ticks.ticks, policy, args.calls, args.seed, args.quick) for policy in batch),
        partial(ticks.windows, args.calls, args.seed),
        *(partial(ticks.single_admissions, policy, args.calls, args.seed) for policy in batch),
        partial(ticks.feasibility, args.calls, args.seed),
        partial(state.events_and_snapshots, 5 * args.calls, args.seed),
        partial(dispatching.long_pools, args.calls, args.seed),
        partial(dispatching.requests, 10 * args.calls, args.seed),
        partial(dispatching.fleets, 10 * args.calls, args.seed, args.quick),
        partial(state.prefix_index, args.calls, args.seed, args.quick),
        partial(journal.journal, 5 * args.calls, args.seed),
    ):
        for row in part():
            rows.append(row)
            print(row.line(), flush=True)
    if not args.quick:
        print("\n" + "\n".join("\n".join(ticks.growth(policy, rows)) for policy in batch))
    if args.out is not None:
        result = {
            "command": command("benchmarks.decisions", argv),
            "seed": args.seed,
            "calls": args.calls,
            "machine": machine,
        }
        if not save(args.out, {**result, "rows": [dataclasses.asdict(r) for r in rows]}, levels=2):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
