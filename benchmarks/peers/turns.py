"""The parts that all comparisons share: sides in turn, the arguments of a command, and the failures of a run."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.live.servers import ROOT

OUT = ROOT / "benchmarks" / "results" / "peers"
QUICK_ROUNDS = 2


def order(sides: Sequence[str], number: int) -> list[str]:
    """Returns the sides as a round has them: the next one begins in every round, and odd rounds go backwards."""
    first = number % len(sides)
    turned = [*sides[first:], *sides[:first]]
    return turned[:1] + turned[:0:-1] if number % 2 else turned


def failures(
    names: Mapping[str, str], samples: Iterable[tuple[str, str, Mapping[str, int]]]
) -> dict[str, int]:
    """Returns how many requests failed, by the side's name, row and reason. A sample is its side, its row and its
    failures.
    """
    found: dict[str, int] = {}
    for side, row, failed in samples:
        for reason, count in failed.items():
            name = f"{names[side]}, {row}: {reason}"
            found[name] = found.get(name, 0) + count
    return found


def leave(number: int, _frame: Any) -> None:
    """Ends the command at a signal, so that its servers are ended, too."""
    raise SystemExit(128 + number)


def parser(
    module: str,
    described: str | None,
    names: Mapping[str, str],
    rounds: int,
    *,
    chosen_by: str = "--sides",
    quick: str = "short rows, whose figures say nothing",
) -> argparse.ArgumentParser:
    """Returns the arguments that all commands have. Those of `names` that are measured are chosen by the option
    `chosen_by`, and `quick` says what a quick run is.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=described,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--rounds", type=int, help=f"alternations (default: {rounds}; with --quick {QUICK_ROUNDS})"
    )
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument(
        chosen_by,
        nargs="+",
        choices=tuple(names),
        default=list(names),
        help="what is measured (default: all)",
    )
    made.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    made.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    return made
