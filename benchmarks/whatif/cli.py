"""The command `sluice simulate CONFIG.yaml`, which simulates a base and its variants and shows them side by side.

The entry point group `sluice.commands` loads `command`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"

_NAMES = ", ".join(sorted(path.stem for path in EXAMPLES.glob("*.yaml")))

_EPILOG = f"""CONFIG is a YAML file, or the name of a shipped example: {_NAMES}.

  cluster:   engine groups: role, count, timing profile, slots, KV blocks
  network:   a fat tree, background load, how often the router is told of it (optional)
  policies:  prefill and decode policy with parameters, dispatcher limits, length predictor
  scaling:   a scaling policy with its bounds, the start times of engines, warm ones (optional)
  workload:  a trace or a generator (`python -m benchmarks list`), rate, window, SLOs
  run:       seeds, warm-up, measured seconds
  what_if:   named changes of the above: set, add or scale values at dotted paths

In brackets: the difference from the base, seed by seed, in per cent of it (shares: in points); `?` marks those whose
95 % interval holds 0.

examples:
  sluice simulate small
  sluice simulate fat-tree --seeds 5 --html answer.html
  sluice simulate mine.yaml --traces traces/ --json answer.json
"""


class SimulateCommand:
    """The subcommand `simulate`. It imports heavy modules only when it runs."""

    name = "simulate"
    help = "simulate a cluster, and what changes of it would do, side by side"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the subcommand's arguments to `parser`."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _EPILOG
        parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a shipped example")
        parser.add_argument("--seeds", type=int, metavar="N", help="instead of the file's `run.seeds`")
        parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
        parser.add_argument(
            "--traces", type=Path, metavar="DIR", help="folder of the traces (default: SLUICE_TRACES)"
        )
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="write everything measured, with the configs"
        )
        parser.add_argument("--html", type=Path, metavar="FILE", help="write the table as a page")

    def run(self, args: argparse.Namespace) -> int:
        """Simulates and prints the comparison.

        Returns 0 if all runs ended, 1 if some failed, and 2 for a configuration or workload that cannot be used.
        """
        from benchmarks.experiments.base import ExperimentError
        from benchmarks.runner import RunsFailedError
        from benchmarks.workloads.record import WorkloadError
        from predictors.protocol import PredictorError

        if args.traces is not None:
            os.environ["SLUICE_TRACES"] = str(args.traces)
        try:
            _simulate(args)
        except RunsFailedError as error:
            print(f"simulate: {error}", file=sys.stderr)
            return 1
        except (ExperimentError, WorkloadError, PredictorError, ValueError, OSError) as error:
            print(f"simulate: {error}", file=sys.stderr)
            return 2
        return 0


command = SimulateCommand()


def example(name: str) -> Path:
    """Returns the path `name` if it exists, else the path of the shipped example of that name."""
    path = Path(name)
    shipped = EXAMPLES / f"{name}.yaml"
    return shipped if not path.exists() and shipped.exists() else path


def _simulate(args: argparse.Namespace) -> None:
    from benchmarks.whatif.build import sim_config, workload
    from benchmarks.whatif.changes import variants_of
    from benchmarks.whatif.config import WhatIfError, read

    question = read(example(args.config))
    bases = variants_of(question)
    seeds = question.run.seeds if args.seeds is None else args.seeds
    if seeds < 1 or args.jobs < 1:
        raise WhatIfError("--seeds and --jobs must be at least 1")
    # All configurations are built first, so that a variant that cannot be run is refused before the first run.
    for name, base in bases.items():
        try:
            sim_config(base, seed=0)
        except ValueError as error:
            raise WhatIfError(f"{name}: {error}") from error
    sizes = {name: len(workload(base, 0)) for name, base in bases.items()}
    print(f"{_count(sizes)}, {seeds} seed{'s' if seeds > 1 else ''}", file=sys.stderr)
    runs = _run({name: base.model_dump(mode="json") for name, base in bases.items()}, seeds, args.jobs)
    _answer(args, question, bases, runs)


def _count(sizes: dict[str, int]) -> str:
    counts = sorted(set(sizes.values()))
    spread = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"{len(sizes)} variants of {spread} requests"


def _run(configs: dict[str, Any], seeds: int, jobs: int) -> dict[str, dict[int, dict[str, float | None]]]:
    from benchmarks import runner
    from benchmarks.experiments.base import Variant
    from benchmarks.whatif import build

    runs: dict[str, dict[int, dict[str, float | None]]] = {name: {} for name in configs}
    todo = [(Variant(name, config), seed) for seed in range(seeds) for name, config in configs.items()]

    def finish(job: runner.Job, outcome: runner.Outcome) -> None:
        runs[job[0].name][job[1]], _ = outcome

    runner.run_all("simulate", build, todo, jobs, finish)
    return runs


def _answer(args: argparse.Namespace, question: Any, bases: dict[str, Any], runs: dict[str, Any]) -> None:
    from benchmarks import report
    from benchmarks.checkout import commit
    from benchmarks.results_io import write_text
    from benchmarks.whatif import table

    header, lines = ["", *runs], table.rows(runs)
    print(table.text_table(header, lines))
    origin = {
        "command": f"sluice simulate {Path(args.config).name} --seeds {len(next(iter(runs.values())))}",
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }
    if args.json is not None:
        compared = {m: {v: asdict(c) for v, c in row.items()} for m, row in table.compare(runs).items()}
        whole = {
            **origin,
            "what_if": [variant.model_dump() for variant in question.what_if],
            "comparison": compared,
            "variants": {n: {"config": b.model_dump(mode="json"), "runs": runs[n]} for n, b in bases.items()},
        }
        write_text(args.json, json.dumps(whole, indent=1, allow_nan=False) + "\n")
    if args.html is not None:
        note = ", ".join(f"{key} {value}" for key, value in origin.items())
        text = (
            f"{report.html_table(header, lines)}<p class=origin>{report.escaped(note)}. In brackets: the difference "
            "from the base, seed by seed, in per cent of it (shares: in points); ? marks those whose 95 % interval "
            "holds 0.</p>"
        )
        write_text(args.html, report.page(f"What if: {Path(args.config).stem}", [text]))
