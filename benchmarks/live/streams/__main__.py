"""`python -m benchmarks.live.streams`: 10,000 streams at once, and how many there may be at 20 ms a step.

    python -m benchmarks.live.streams --out benchmarks/results/streams          8 minutes
    python -m benchmarks.live.streams --streams 200 --window 5 --largest 400    a short form

The application has one ingress and five sim engines without Ray (`benchmarks.chaos.bare`). First it has `--streams`
streams at once of 0.5 s a step, of which one in a hundred is read slowly, a byte a second: memory of a stream in the
ingress (growth of its RSS), CPU of each process for a token, and how much longer than the step the gaps between events
are. Then an application of 20 ms a step is asked for more and for fewer streams, to find the most whose p99 gap stays
within 10 ms of the step. All ends after `--minutes`; a search that has no time left says so.

Clients and servers share this machine's cores. How late the clients' own timer was stands beside the gaps. Clients and
ingress need a file for each stream: the limit of this process is raised as far as it may be, and what it may not is
said.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.hostile.clients import SPARE_FILES, FilesError, allow_files
from benchmarks.live.machine import LIVE_CODE, command, facts, save
from benchmarks.live.servers import ServerError, running
from benchmarks.live.streams.measure import Plan, application, measure, search, warm
from benchmarks.live.streams.report import rows
from benchmarks.progress import teller

MODULE = "benchmarks.live.streams.__main__"
CODE = (*LIVE_CODE, "benchmarks/chaos", "benchmarks/hostile")
STREAMS, STEP_S, SMALL_STEP_S = 10_000, 0.5, 0.02
FIRST = 256
"""Streams with which the search begins."""
SMALL_SETTLE_S, SMALL_WINDOW_S = 1.0, 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the figures and aims, and with --out writes them. Returns 1 without a result."""
    begun_s = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="benchmarks.live.streams",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=STREAMS, help="at once (default %(default)s)")
    parser.add_argument("--window", type=float, default=30.0, help="seconds of it (default %(default)s)")
    parser.add_argument(
        "--largest", type=int, default=4096, help="most streams at the small step (default %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=2, help="of clients (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the result, as benchmarks/results/streams")
    args = parser.parse_args(argv)
    if not (args.streams >= args.processes >= 1 and args.largest >= args.processes):
        parser.error("each process of clients needs a stream")
    machine, say = facts(MODULE, CODE), teller()
    until_s = begun_s + 60.0 * args.minutes
    many = Plan(args.streams, STEP_S, window_s=args.window, processes=args.processes)
    small = Plan(
        FIRST, SMALL_STEP_S, settle_s=SMALL_SETTLE_S, window_s=SMALL_WINDOW_S, processes=args.processes
    )
    try:
        # the ingress leaves a quarter of its files to engines and router
        allow_files((max(args.streams, args.largest) + 256) * 4 // 3 + SPARE_FILES)
        with tempfile.TemporaryDirectory(prefix="sluice-streams-") as folder:
            with running(application(STEP_S, args.streams, Path(folder) / "many"), say) as server:
                warm(server, many)
                result = measure(server, many, say)
            with running(application(SMALL_STEP_S, args.largest, Path(folder) / "small"), say) as server:
                warm(server, small)
                found, tried = search(server, small, FIRST, args.largest, until_s, say)
    except (FilesError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    whole = {
        "command": command(MODULE, argv),
        "machine": machine,
        "many": result,
        "search": {"step_s": SMALL_STEP_S, **asdict(found), "tried": tried},
    }
    for row in rows(whole):
        judged = "" if row.met is None else f"  aim {row.aim}: {'met' if row.met else 'NOT met'}"
        print(f"{row.name:100} {row.ours:12,.1f} {row.unit:3}{judged} {row.note}")
    return 0 if args.out is None or save(args.out / "streams.json", whole) else 1


if __name__ == "__main__":
    sys.exit(main())
