"""`python -m benchmarks.capacity`: requests/s of one router by ingress processes and engines (`make bench-capacity`).

    python -m benchmarks.capacity                    2 policies, 1 to 4 ingresses, 2 to 256 engines (20 minutes)
    python -m benchmarks.capacity --quick            2 policies, 1 and 2 ingresses, 2 and 16 engines (2 minutes)
    python -m benchmarks.capacity --policies composition --ingresses 1 --engines 2 64

Each cell is an application of its own without Ray (`benchmarks.capacity.application`): one router, some ingresses on
one port, and sim engines, many in one process, that speak the wire. Closed loops of more and more clients load it until
requests/s no longer grow; answers have two tokens. The load is wrk's where that is installed, else that of the Python
client, which in any case measures the TTFT afterwards, with the number of clients that had the most requests/s.

Clients, ingresses, router and engines share the cores of one machine. Where these are full before the router is, the
rate of a full router is extrapolated from its CPU time a request, and the result says so. Finished cells are kept in
`build/live`, so that the same command goes on after an interruption. The exit status is 1 when requests failed, or a
server did not start or stop; no figure makes it 1.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.capacity.application import PER_PROCESS
from benchmarks.capacity.measure import POLICIES, TOKENS, Cell, Ladder, measure_cell
from benchmarks.capacity.report import draw, rows
from benchmarks.hostile.clients import SPARE_FILES, FilesError, allow_files
from benchmarks.live import wrk
from benchmarks.live.kept import Parts
from benchmarks.live.machine import LIVE_CODE, command, facts, save
from benchmarks.live.measure import MeasureError
from benchmarks.live.servers import ROOT, ServerError
from benchmarks.progress import teller

MODULE = "benchmarks.capacity.__main__"
CODE = (*LIVE_CODE, "benchmarks/capacity", "benchmarks/chaos", "benchmarks/hostile")
INGRESSES, ENGINES = (1, 2, 4), (2, 16, 64, 256)
QUICK_INGRESSES, QUICK_ENGINES = (1, 2), (2, 16)
OUT = "benchmarks/results/capacity"
QUICK = Ladder(rungs=(16, 64), seconds=1, common=64, repeats=1, ttft_requests=500)


def cells_of(policies: Sequence[str], ingresses: Sequence[int], engines: Sequence[int]) -> list[Cell]:
    """Returns all cells. Numbers of engines come one after the other, because they are compared with one another."""
    return [Cell(*one) for one in product(policies, ingresses, engines)]


def files_needed(cells: Sequence[Cell], clients: int) -> int:
    """Returns how many open files the busiest process of any cell may need: an engine's may have a connection with each
    ingress and each engine of the other role for every engine in it, and one ingress may get all clients.
    """
    engines = max(cell.engines for cell in cells)
    ingresses = max(cell.ingresses for cell in cells)
    half = -(-engines // 2)
    return max(min(half, PER_PROCESS) * (half + ingresses + 2), engines + clients) + SPARE_FILES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 when requests failed or nothing could be measured."""
    args = _arguments(argv)
    ladder = QUICK if args.quick else Ladder()
    cells = cells_of(args.policies, args.ingresses, args.engines)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda received, _: sys.exit(128 + received))
    machine, say, client = facts(MODULE, CODE), teller(), wrk.find(args.wrk)
    if client is None:
        say(
            "wrk is not installed (Debian: apt install wrk): the Python client takes a larger part of the cores"
        )
    config = {"ladder": asdict(ladder), "tokens": TOKENS, "seed": args.seed, "wrk": client is not None}
    kept = Parts("capacity", machine, config)
    found: list[dict[str, Any]] = []
    try:
        allow_files(files_needed(cells, ladder.rungs[-1]))
        with tempfile.TemporaryDirectory(prefix="sluice-capacity-") as folder:
            for number, cell in enumerate(cells):
                place = Path(folder) / str(number)
                measured = partial(measure_cell, cell, ladder, place, client, args.seed, say)
                found.append(kept.once(cell.name, measured, say))
    except (FilesError, ServerError, MeasureError, wrk.WrkError) as error:
        print(f"{error}\nfinished cells are kept: the same command goes on", file=sys.stderr)
        return 1
    whole = {
        "command": command(MODULE, argv),
        "machine": machine,
        "config": config,
        "cells": found,
        "parts": {cell.name: kept.ends()[cell.name] for cell in cells},
    }
    failed = False
    for row in rows(whole):
        judged = "" if row.met is None else f"  aim {row.aim}: {'met' if row.met else 'NOT met'}"
        print(f"{row.name:100} {row.ours:12,.1f} {row.unit:3}{judged} {row.note}")
        failed |= row.name.endswith("requests that failed") and not row.met
    if args.out is not None:
        if not save(args.out / "capacity.json", whole, 4):
            return 1
        draw(found, args.out / "capacity.png")
        kept.forget()
    return 1 if failed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policies", nargs="+", choices=tuple(POLICIES), default=tuple(POLICIES))
    parser.add_argument("--ingresses", type=int, nargs="+", help="instead of 1 2 4")
    parser.add_argument("--engines", type=int, nargs="+", help="instead of 2 16 64 256; half of them prefill")
    parser.add_argument("--quick", action="store_true", help="few cells, each for a second a load")
    parser.add_argument("--wrk", help="path of wrk, where it is not on PATH")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, help=f"folder of the result (default: {OUT}; with --quick: none)")
    args = parser.parse_args(argv)
    if args.out is None and not args.quick:
        args.out = ROOT / OUT
    args.ingresses = args.ingresses or (QUICK_INGRESSES if args.quick else INGRESSES)
    args.engines = args.engines or (QUICK_ENGINES if args.quick else ENGINES)
    if min(args.ingresses) < 1 or min(args.engines) < 2:
        parser.error("an application needs one ingress, and one engine to prefill and one to decode")
    return args


if __name__ == "__main__":
    sys.exit(main())
