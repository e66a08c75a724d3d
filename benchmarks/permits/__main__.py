"""`python -m benchmarks.permits`: median and p99 of the flow arbiter's events among many flows, and of permits from
agents in processes of their own.

A row shows the wall clock and the CPU time of the process; on a busy machine compare the CPU time. The aim: the end of
a chunk and the permit that follows take at most 0.1 ms among 1,000 flows (p50), on an idle core; a read is permitted
after 1 ms (p50) and 5 ms (p99) at most, and one that is alone takes at most 1 % longer by permits than without.

At the end it sweeps how long an agent may be silent, and shows the share of reads that then go without permits although
the agent lives.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.decisions.measure import HEADER, Timing
from benchmarks.live.machine import LIVE_CODE, command, facts, save
from benchmarks.permits import agents, silence
from benchmarks.permits.grants import rows

CODE = (*LIVE_CODE, "benchmarks/permits")
"""The folders whose code is timed, beside the files that this module imports."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; with --out also writes it as JSON. Returns 1 if the code changed meanwhile, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.permits", description=__doc__)
    parser.add_argument("--flows", type=int, default=1000, help="flows that wait at once (default 1000)")
    parser.add_argument("--calls", type=int, default=5000, help="calls per row (default 5000)")
    parser.add_argument("--reads", type=int, default=1000, help="reads per row of agents (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    machine = facts("benchmarks.permits.__main__", CODE)
    shown = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min_before']:.1f}"
    print(f"Python {machine['python']}, {shown}, seed {args.seed}\n{HEADER}")
    timings: list[Timing] = []
    for row in itertools.chain(rows(args.flows, args.calls, args.seed), agents.rows(args.reads)):
        timings.append(row)
        print(row.line(), flush=True)
    silences: list[silence.Silence] = []
    print(f"\n{silence.HEADER}")
    for swept in silence.rows():
        silences.append(swept)
        print(swept.line(), flush=True)
    if args.out is not None:
        result = {
            "command": command("benchmarks.permits", argv),
            "seed": args.seed,
            "calls": args.calls,
            "flows": args.flows,
            "reads": args.reads,
            "machine": machine,
        }
        result |= {
            "rows": [dataclasses.asdict(row) for row in timings],
            "silences": [dataclasses.asdict(swept) for swept in silences],
        }
        if not save(args.out, result, levels=2):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
