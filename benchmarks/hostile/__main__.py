"""`python -m benchmarks.hostile`: what hostile clients do to the streams of others, live on sim engines without Ray.

    python -m benchmarks.hostile     # all: a quarter of an hour; the result is in benchmarks/results/hostile
    python -m benchmarks.hostile --slow-readers 20 --half-open 20 --idle 20 --large 20 --seconds 5 --alone 3 --out DIR

Six clients read streams of 50 ms a step, one after another, first alone and then beside hostile clients of one kind
(`benchmarks.hostile.clients`): 1,000 slow readers, 1,000 half-open senders, 10,000 idle connections, or 200 requests of
4 MB of text at once. The application (`benchmarks.chaos.bare`) has one ingress, and the tokenizer of SmolLM2 because
one of words would keep Python's interpreter lock for the whole text. The hostile clients come from one address that
nobody else has. They meet the limits twice: `shipped` are the defaults, of which 4,096 connections of one address and
256 MiB of requests under way refuse most of what is too much; `raised` lets all of them in (`setups.RAISED`), but has
as many prompts under way as `shipped`, which are 1 GiB.

Aims, written before the first run: the longest gap between two events of a well-behaved stream is at most 100 ms more
with them than alone; none of the well-behaved requests fails; the RSS of the ingress grows by no more than its
configured budgets (`setups.budget_bytes`); and afterwards no request, lease or connection is left. The hostile clients
and the application share this machine's cores, although the former have a low priority. How late the timer of the
well-behaved clients was, without any server, stands beside the gaps.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hostile.clients import KINDS, SPARE_FILES, FilesError, allow_files
from benchmarks.hostile.report import rows
from benchmarks.hostile.run import Plan, measure
from benchmarks.hostile.setups import SETUPS, application, shown_limits
from benchmarks.live.machine import LIVE_CODE, command, facts, save
from benchmarks.live.servers import ROOT, ServerError, running
from benchmarks.live.targets import MODEL
from benchmarks.progress import teller

MODULE = "benchmarks.hostile.__main__"
CODE = (*LIVE_CODE, "benchmarks/hostile")
OUT = ROOT / "benchmarks" / "results" / "hostile"
COUNTS = {"slow_readers": 1_000, "half_open": 1_000, "idle": 10_000, "large": 200}
"""Hostile clients of each kind."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the figures and aims, and writes them. Returns 1 without a result."""
    plan = Plan()
    parser = argparse.ArgumentParser(prog="benchmarks.hostile", description=__doc__)
    for kind, count in COUNTS.items():
        option = f"--{kind.replace('_', '-')}"
        parser.add_argument(option, type=int, default=count, help=f"clients; 0: none (default {count})")
    parser.add_argument("--setups", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument(
        "--streams", type=int, default=plan.streams, help="well-behaved (default %(default)s)"
    )
    parser.add_argument("--alone", type=float, default=plan.alone_s, help="seconds (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=plan.seconds, help="of each kind (default %(default)s)"
    )
    parser.add_argument(
        "--model", default=MODEL, help='whose tokenizer is used; "sim" has words (default %(default)s)'
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result")
    args = parser.parse_args(argv)
    plan = Plan(args.alone, args.seconds, args.streams)
    counts = {kind: getattr(args, kind) for kind in KINDS}
    machine, say = facts(MODULE, CODE), teller()
    runs: list[dict[str, Any]] = []
    try:
        # the ingress leaves a quarter of its files to engines and router
        allow_files(max(counts.values()) * 4 // 3 + SPARE_FILES)
        for setup in args.setups:
            for kind in KINDS:
                if not counts[kind]:
                    continue
                with (
                    tempfile.TemporaryDirectory(prefix="sluice-hostile-") as folder,
                    running(application(setup, args.model, Path(folder) / setup), say) as server,
                ):
                    runs.append(measure(server, setup, kind, counts[kind], plan, say))
    except (FilesError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    for row in rows({"runs": runs}):
        judged = "" if row.met is None else f"  aim {row.aim}: {'met' if row.met else 'NOT met'}"
        print(f"{row.name:80} {row.ours:12,.1f} {row.unit:3}{judged}")
    whole = {
        "command": command(MODULE, argv),
        "machine": machine,
        "limits": {setup: shown_limits(setup) for setup in args.setups},
        "plan": {"alone_s": plan.alone_s, "seconds": plan.seconds, "streams": plan.streams},
        "runs": runs,
    }
    return 0 if save(args.out / "hostile.json", whole) else 1


if __name__ == "__main__":
    sys.exit(main())
