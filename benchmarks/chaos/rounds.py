"""The command of a benchmark that harms reads of KV between two hosts, in rounds: arguments, kept rounds, result."""

import argparse
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.experiments.base import Row
from benchmarks.live.kept import Parts
from benchmarks.live.load import run_fast
from benchmarks.live.machine import LIVE_CODE, command, facts, save
from benchmarks.live.servers import ROOT
from benchmarks.mfs import link
from benchmarks.progress import teller

CODE = (*LIVE_CODE, "benchmarks/hosts", "benchmarks/mfs", "benchmarks/chaos")
OUT = ROOT / "benchmarks" / "results" / "reads"
BITS_PER_S = 400_000_000
"""Rate of the link between the two hosts."""

Say = Callable[[str], None]
Faults = list[dict[str, Any]]


def parser_of(module: str, about: str | None, rounds: int) -> argparse.ArgumentParser:
    """Returns the parser of such a command, with the arguments that all of them have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of order and prompts")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result")
    return parser


def carry_out(
    module: str,
    argv: Sequence[str] | None,
    args: argparse.Namespace,
    config: Mapping[str, Any],
    measured: Callable[[int, Say], Coroutine[Any, Any, Faults]],
    rows: Callable[[Mapping[str, Any]], Iterator[Row]],
    missed: Callable[[Mapping[str, Any]], bool],
) -> int:
    """Makes the rounds by `measured(number, say)`, keeps each until the result is written, and prints its rows. The
    result is named by the module's last part. Returns 0, 1 if a fault `missed` an aim or nothing could be written, or 2
    where hosts cannot be made.
    """
    if (reason := link.why_not()) is not None:
        print(f"{module}: {reason}: nothing is measured here", file=sys.stderr)
        return 2
    name = module.rpartition(".")[2]
    machine, say = facts(module, CODE), teller()
    parts = Parts(name, machine, dict(config))

    def one(number: int) -> dict[str, Any]:
        return {"faults": run_fast(measured(number, say))}

    rounds = [parts.once(f"round {n + 1}", partial(one, n), say) for n in range(args.rounds)]
    faults = [fault for found in rounds for fault in found["faults"]]
    result = {
        "command": command(module, argv),
        "config": {"rounds": args.rounds, **config},
        "machine": machine,
        "rounds": parts.ends(),
        "faults": faults,
    }
    for row in rows(result):
        print(f"{row.name}: {row.ours:.4g} {row.unit}")
    if not save(args.out / f"{name}.json", result, levels=2):
        return 1
    parts.forget()
    return int(any(map(missed, faults)))
