"""The command: all parts, or those whose number is not 0. It ends with 1 if there is a finding."""

import argparse
import json
import logging
import math
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from tests.fuzz import files, frames, requests
from tests.fuzz.watch import Watch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    for name, count in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="longest time of requests and of frames"
    )
    parser.add_argument("--show", type=int, default=10, help="findings of each part to print")
    args = vars(parser.parse_args())
    logging.getLogger().setLevel(logging.ERROR)
    failed = False
    for name in PARTS:
        if args[name]:
            watch = uvloop.run(part(name, args["seed"], args[name], 60 * args["minutes"]))
            print(json.dumps({name: watch.report()}), flush=True)
            for finding in watch.findings[: args["show"]]:
                print(f"--- {finding}", flush=True)
            failed |= bool(watch.findings)
    return int(failed)


PARTS = {"requests": 1_000_000, "frames": 1_000_000, "events": 1_000_000, "configs": 20_000, "keys": 20_000}
"""The parts, with the number of their cases."""


async def part(name: str, seed: int, count: int, most_s: float = math.inf) -> Watch:
    """Runs one part, and returns what was seen."""
    targets: dict[str, Callable[..., Any]] = {
        "requests": requests.run, "frames": frames.run,
        "events": files.events, "configs": files.configs, "keys": files.keys,
    }  # fmt: skip
    with Watch(most_s) as watch, tempfile.TemporaryDirectory() as folder:
        made = targets[name](watch, seed, count, *([Path(folder)] if name in ("requests", "frames") else []))
        if isinstance(made, Awaitable):
            await made
    return watch


if __name__ == "__main__":
    sys.exit(main())
