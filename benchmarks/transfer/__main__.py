"""`python -m benchmarks.transfer`: descriptors, prefix hits and posting cost of KV reads, as two pools grow old.

Four variants, each with a prefix cache and without: `stock` (vLLM's free queue and order), `sorted` (its queue, index
pairs sorted), `segments` (Sluice's: runs among the oldest free blocks, sorted), `flowkv` (FlowKV's: runs whatever their
age, sorted). The pieces of all reads are counted; some late reads of each variant are made by NIXL between two
processes over TCP, which counts its descriptors itself.

Aims: descriptors -93 % at a cost of at most one point of prefix hits, -97 % without a prefix cache, CPU time to post
-90 %. The seconds of a read hardly move on a CPU, where UCX copies a scattered read as fast as one piece; they are
reported. FlowKV (4.4): 23,469 calls become 1.
"""

import argparse
import dataclasses
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from actors.engine.vllm.connector.pairs import aligned, pieces
from benchmarks.live.kept import Parts
from benchmarks.live.machine import command, facts, save
from benchmarks.transfer.pools import Load, Read, reads
from benchmarks.transfer.report import comparison
from benchmarks.transfer.wire import Cost, Shape, Wire

CODE = ("actors/engine/vllm", "benchmarks/transfer")
"""The folders whose code is measured, beside the files that this module imports."""

VARIANTS = {
    "stock": ("stock", False),
    "sorted": ("stock", True),
    "segments": ("segments", True),
    "flowkv": ("flowkv", True),
}
"""Allocator, and whether index pairs are sorted, by the variant's name."""

AGES = (0.0, 1.0, 4.0, 16.0)
"""Lower bounds of the ages that are shown apart, in pools that had been allocated before a read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; with --out also writes it as JSON. Returns 1 if the code changed meanwhile, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.transfer", description=__doc__)
    load = Load()
    parser.add_argument(
        "--requests", type=int, default=load.requests, help=f"a variant (default {load.requests})"
    )
    parser.add_argument("--pool-blocks", type=int, default=load.pool_blocks)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument(
        "--block-bytes", type=int, default=8192, help="bytes of a block in one layer (default 8192)"
    )
    parser.add_argument(
        "--reads", type=int, default=100, help="reads of a variant made by NIXL (default 100)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    machine = facts("benchmarks.transfer.__main__", CODE)
    print(
        f"Python {machine['python']}, {machine['cpu']}, {machine['cores']} cores, seed {args.seed}\n{HEADER}"
    )
    rows: list[dict[str, Any]] = []
    shape = Shape(args.layers, args.pool_blocks, args.block_bytes)
    options = ("requests", "pool_blocks", "layers", "block_bytes", "reads", "seed")
    kept = Parts("transfer", machine, {name: getattr(args, name) for name in options})
    with Wire(shape) as wire:
        for caching in (True, False):
            load = Load(requests=args.requests, pool_blocks=args.pool_blocks, caching=caching)
            part = f"prefix cache {'on' if caching else 'off'}"
            found = kept.once(part, partial(rows_of, load, args.seed, args.reads, wire), print)["rows"]
            print("\n".join(map(line, found)), flush=True)
            rows += found
    print("\n" + "\n".join(comparison(rows)))
    if args.out is None:
        kept.forget()
        return 0
    result = {
        "command": command("benchmarks.transfer", argv),
        "seed": args.seed,
        "shape": dataclasses.asdict(shape),
        "load": dataclasses.asdict(load),
        "machine": machine,
    }
    if not save(args.out, {**result, "parts": kept.ends(), "rows": rows}, levels=2):
        return 1
    kept.forget()
    return 0


def rows_of(load: Load, seed: int, keep: int, wire: Wire) -> dict[str, Any]:
    """Returns the rows of all variants under one load, which are a part of the measurement."""
    old = {name: aged(name, load, seed, keep) for name in VARIANTS}
    costs = made({name: last for name, (_, last) in old.items()}, wire)
    return {"rows": [row | {"made": costs[name]} for name, (row, _) in old.items()]}


def aged(name: str, load: Load, seed: int, keep: int) -> tuple[dict[str, Any], list[Read]]:
    """Returns a variant's row, without reads made by NIXL, and its last `keep` reads."""
    allocator, sort = VARIANTS[name]
    by_age: dict[float, list[tuple[int, int]]] = {age: [] for age in AGES}
    last: deque[Read] = deque(maxlen=keep)
    share = 0.0
    for read, prefill, _ in reads(allocator, load, seed):
        share = prefill.hits / prefill.asked
        age = max(age for age in AGES if age <= read.turnovers)
        by_age[age].append((len(read.local), counted(read, sort)))
        last.append(read)
    row = {
        "variant": name,
        "prefix_cache": load.caching,
        "prefix_hits": round(share, 4),
        "ages": [
            {
                "pools_before": age,
                "reads": len(seen),
                "blocks": round(statistics.fmean(blocks for blocks, _ in seen), 2),
                "pieces": round(statistics.fmean(count for _, count in seen), 2),
            }
            for age, seen in by_age.items()
            if seen
        ],
    }
    return row, [read for read in last if read.local]


def made(lasts: Mapping[str, Sequence[Read]], wire: Wire) -> dict[str, dict[str, Any]]:
    """Returns what the reads of each variant cost when NIXL makes them. The variants take turns, so that what else the
    machine does meets all of them alike.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in lasts}
    for turn in range(max(map(len, lasts.values()))):
        for name, last in lasts.items():
            if turn < len(last):
                costs[name].append(wire.read(last[turn].local, last[turn].remote, VARIANTS[name][1]))
    return {name: _summary(lasts[name], costs[name], VARIANTS[name][1]) for name in lasts}


def _summary(last: Sequence[Read], costs: Sequence[Cost], sort: bool) -> dict[str, Any]:
    return {
        "reads": len(costs),
        "pieces": statistics.fmean(counted(read, sort) for read in last),
        "descriptors": statistics.fmean(cost.descriptors for cost in costs),
        "bytes": statistics.fmean(cost.bytes for cost in costs),
        "post_cpu_ms": 1e3 * statistics.median(cost.post_cpu_s for cost in costs),
        "sort_cpu_ms": 1e3 * statistics.median(cost.sort_cpu_s for cost in costs),
        "ms": 1e3 * statistics.median(cost.seconds for cost in costs),
    }


def counted(read: Read, sort: bool) -> int:
    """Returns the pieces of a read in one layer."""
    if not sort:
        return pieces(read.local, read.remote)
    ours, theirs = aligned(read.local, read.remote)
    return pieces(ours.tolist(), theirs.tolist())


HEADER = (
    f"{'variant':<9} {'cache':>5} {'hits %':>7} {'blocks':>7} {'pieces a layer by age':>30} "
    f"{'descriptors':>11} {'post ms':>8} {'read ms':>8}"
)


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line under `HEADER`."""
    ages = " ".join(f"{age['pieces']:.1f}" for age in row["ages"])
    shown = (
        f"{row['variant']:<9} {'on' if row['prefix_cache'] else 'off':>5} {100 * row['prefix_hits']:7.1f} "
    )
    shown += f"{row['ages'][-1]['blocks']:7.1f} {ages:>30} "
    costs = row["made"]
    return shown + f"{costs['descriptors']:11.0f} {costs['post_cpu_ms']:8.3f} {costs['ms']:8.2f}"


if __name__ == "__main__":
    sys.exit(main())
