"""The command `sluice train` fits the predictors on a trace or an outcome log and reports how good they are.

The entry point group `sluice.commands` loads `command`. `python -m predictors.fit` runs the same program.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from predictors.protocol import PredictorError, WindowRange

_EXAMPLES = """examples:
  sluice train --source traces/mooncake_conversation_trace.jsonl --models models/
  sluice train --source /var/lib/sluice/outcomes --models models/ --report report/ --promote
"""


class TrainCommand:
    """The subcommand `train`. It imports heavy libraries only when it runs."""

    name = "train"
    help = "fit the length and termination predictors on a trace or an outcome log"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments to `parser`."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _EXAMPLES
        parser.add_argument(
            "--source",
            type=Path,
            required=True,
            help="a Mooncake, Azure or BurstGPT trace (plain or .xz), a ServeGen folder or .tar.xz, "
            "or the folder of an outcome log",
        )
        parser.add_argument("--models", type=Path, required=True, help="folder in which the model is stored")
        parser.add_argument("--report", type=Path, help="folder for report.md, report.json and report.png")
        parser.add_argument(
            "--windows", default="1:96", help="windows H to cover, LOW:HIGH tokens (default 1:96)"
        )
        parser.add_argument("--held-out", type=float, default=0.2, help="share held out, the last by time")
        parser.add_argument("--requests", type=int, default=20_000, help="requests to sample from ServeGen")
        parser.add_argument("--threads", type=int, default=2, help="threads for LightGBM (default 2)")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument(
            "--promote",
            action="store_true",
            help="make it the current model, without comparing it with the one in use",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Trains and stores a model. Returns 0, or 2 if the arguments or the data cannot be used."""
        try:
            _train(args)
        except (PredictorError, FileNotFoundError, ValueError) as error:
            print(f"train: {error}", file=sys.stderr)
            return 2
        return 0


command = TrainCommand()


def register(subparsers: Any) -> argparse.ArgumentParser:
    """Adds `train` to an argparse subparsers object, with `run` as the function to call. Returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(command.name, help=command.help)
    command.configure(parser)
    parser.set_defaults(run=command.run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the command with parsed arguments and returns its exit status."""
    return command.run(args)


def main(argv: list[str] | None = None) -> int:
    """Parses `argv`, trains, and returns the exit status of `python -m predictors.fit`."""
    parser = argparse.ArgumentParser(prog="python -m predictors.fit", description=command.help)
    command.configure(parser)
    return command.run(parser.parse_args(argv))


def parse_windows(text: str) -> WindowRange:
    """Parses a window range given as LOW:HIGH. Raises ValueError for any other text."""
    low, separator, high = text.partition(":")
    if not separator or not low.isdigit() or not high.isdigit():
        raise ValueError(f"--windows {text!r}: give LOW:HIGH in tokens, for example 1:96")
    return WindowRange(int(low), int(high))


def _train(args: argparse.Namespace) -> None:
    from predictors.lgbm_fit import LgbmConfig
    from predictors.store import SUFFIX, promote, save
    from predictors.train import load_source, metadata_of, train_and_judge

    config = replace(LgbmConfig(), windows=parse_windows(args.windows), threads=args.threads, seed=args.seed)
    outcomes = load_source(args.source, args.requests, args.seed)
    judged = train_and_judge(outcomes, config, args.held_out, progress=lambda line: print(f"  {line}"))
    metadata = metadata_of(
        judged.predictor.model,
        outcomes[: judged.first_held_out],
        args.source.name,
        config,
        list(judged.evaluations.values()),
    )
    path = args.models / f"{metadata.version}{SUFFIX}"
    if path.exists():
        print(f"the same fit is stored already: {path}")
    else:
        print(f"stored {save(args.models, judged.predictor.model, metadata)}")
    if args.promote:
        promote(args.models, metadata.version)
        print(f"promoted {metadata.version}")
    _report(args, judged, metadata.version)


def _report(args: argparse.Namespace, judged: Any, version: str) -> None:
    from predictors.report import by_age, by_window, plot, signal_line, table

    text = "\n\n".join(
        (
            f"# {version} on {args.source.name}",
            f"{judged.requests} requests, the last {judged.requests - judged.first_held_out} held out.",
            signal_line(judged.signal),
            table(judged.evaluations),
            by_window(judged.evaluations),
            by_age(judged.evaluations),
        )
    )
    print(text)
    if args.report is None:
        return
    args.report.mkdir(parents=True, exist_ok=True)
    (args.report / "report.md").write_text(text + "\n", "utf-8")
    whole = {name: e.as_json() for name, e in judged.evaluations.items()}
    (args.report / "report.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    plot(args.report / "report.png", f"{version} on {args.source.name}", judged.evaluations)
    print(f"report in {args.report}")
