"""The command: all parts, or those whose number is not 0. It ends with 1 if there is a finding. It writes what it saw,
with the facts about machine and code, as JSON into `--out`, which is benchmarks/results/fuzz by default.
"""

import argparse
import json
import logging
import math
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.checkout import PRODUCT, ROOT
from benchmarks.live.machine import command, facts, save
from tests.fuzz import agent, board, files, frames, keyed, requests
from tests.fuzz.watch import Watch

MODULE = "tests.fuzz.__main__"
CODE = (*PRODUCT, "tests/fuzz", "tests/app/ingress")
"""The folders that decide what is found: the application, the fuzzer, and the fleet in which it runs."""


OUT = ROOT / "benchmarks" / "results" / "fuzz"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts and writes their result. Returns 1 if there is a finding, or no result."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    for name, count in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="longest time of each part that goes over sockets"
    )
    parser.add_argument("--show", type=int, default=10, help="findings of each part to print")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for counts, outcomes, memory and findings"
    )
    args = vars(parser.parse_args(argv))
    logging.getLogger().setLevel(logging.ERROR)
    failed = False
    machine = facts(MODULE, CODE)
    seen: dict[str, Any] = {}
    for name in PARTS:
        if args[name]:
            watch = uvloop.run(part(name, args["seed"], args[name], 60 * args["minutes"]))
            report = watch.report()
            seen[name] = report | {"findings": watch.findings}
            print(json.dumps({name: report}), flush=True)
            for finding in watch.findings[: args["show"]]:
                print(f"--- {finding}", flush=True)
            failed |= bool(watch.findings)
    whole = {"command": command(MODULE, argv), "seed": args["seed"], "machine": machine, "parts": seen}
    failed |= not save(args["out"] / "fuzz.json", whole)
    return int(failed)


PARTS = {
    "requests": 1_000_000, "keyed": 200_000, "board": 200_000, "frames": 1_000_000, "agent": 50_000,
    "events": 1_000_000, "configs": 20_000, "keys": 20_000,
}  # fmt: skip
"""The parts, with the number of their cases; those of `agent` are connections."""


async def part(name: str, seed: int, count: int, most_s: float = math.inf) -> Watch:
    """Runs one part, and returns what was seen."""
    targets: dict[str, Callable[..., Any]] = {
        "requests": requests.run, "keyed": keyed.run, "board": board.run, "frames": frames.run, "agent": agent.run,
        "events": files.events, "configs": files.configs, "keys": files.keys,
    }  # fmt: skip
    with Watch(most_s) as watch, tempfile.TemporaryDirectory() as folder:
        made = targets[name](
            watch, seed, count, *([] if name in ("events", "configs", "keys") else [Path(folder)])
        )
        if isinstance(made, Awaitable):
            await made
    return watch


if __name__ == "__main__":
    sys.exit(main())
