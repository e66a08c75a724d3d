"""The command `sluice simulate CONFIG.yaml`, which simulates a base and its variants and shows them side by side.

The entry point group `sluice.commands` loads `command`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
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
  sluice simulate --from-live http://127.0.0.1:8000 --write mine/    describe what runs, and simulate that
  sluice simulate mine/base.yaml      after adding `what_if` to it; what was measured stands beside the base
"""


class SimulateCommand:
    """The subcommand `simulate`. It imports heavy modules only when it runs."""

    name = "simulate"
    help = "simulate a cluster, and what changes of it would do, side by side"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the subcommand's arguments to `parser`."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _EPILOG
        parser.add_argument(
            "config", metavar="CONFIG", nargs="?", help="a YAML file, or the name of a shipped example"
        )
        parser.add_argument("--seeds", type=int, metavar="N", help="instead of the file's `run.seeds`")
        parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
        parser.add_argument(
            "--traces", type=Path, metavar="DIR", help="folder of the traces (default: SLUICE_TRACES)"
        )
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="write everything measured, with the configs"
        )
        parser.add_argument("--html", type=Path, metavar="FILE", help="write the table as a page")
        parser.add_argument(
            "--progress-json", action="store_true", help="print progress as JSON lines, and no table"
        )
        parser.add_argument(
            "--changes",
            type=Path,
            metavar="FILE",
            help="further `what_if` variants: JSON, a list of name and set",
        )
        parser.add_argument(
            "--files-here",
            action="store_true",
            help="refuse profiles and traces outside the configuration's folder",
        )
        live = parser.add_argument_group("a running application as the base")
        live.add_argument(
            "--from-live",
            metavar="URL",
            nargs="?",
            const="",
            help="its public port (default: SLUICE_BASE_URL)",
        )
        live.add_argument(
            "--write", type=Path, metavar="DIR", help="folder for its description (default: from-live)"
        )
        live.add_argument(
            "--only-write", action="store_true", help="describe it, print facts as JSON, and end"
        )
        live.add_argument("--watch", type=float, metavar="S", help="seconds to watch it (default 10)")
        live.add_argument("--minutes", type=float, metavar="M", help="minutes of its journal (default 5)")
        live.add_argument(
            "--key", help="an admin key (default: SLUICE_ADMIN_KEY, or this machine's key file)"
        )

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
        from benchmarks.whatif.live.errors import FromLiveError
        from sluice import SluiceError

        try:
            if (args.config is None) == (args.from_live is None):
                raise ValueError("give either CONFIG or --from-live")
            if args.from_live is not None and not _describe(args):
                return 0
            _simulate(args)
        except (FromLiveError, SluiceError) as error:
            hint = getattr(error, "hint", None)
            print(f"simulate: {error}" + (f"; {hint}" if hint else ""), file=sys.stderr)
            return 2
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


def _describe(args: argparse.Namespace) -> bool:
    """Describes the running application and makes the description what is simulated; returns whether to go on."""
    from benchmarks.whatif.live import ask
    from benchmarks.whatif.live.describe import described

    def say(share: float, what: str) -> None:
        _say(args, progress=0.5 * share, phase=what)

    watch_s = ask.WATCH_S if args.watch is None else args.watch
    minutes = ask.MINUTES if args.minutes is None else args.minutes
    if not (0 <= watch_s <= 600 and 0 < minutes <= 60):
        raise ValueError("--watch takes 0 to 600 seconds, and --minutes above 0 to 60")
    made = described(ask.collect(args.from_live or None, args.key, watch_s, minutes, say))
    args.config = str(made.write(Path("from-live") if args.write is None else args.write))
    if args.only_write:
        print(json.dumps(made.as_json(), allow_nan=False))
        return False
    print("\n".join([f"{k}: {v}" for k, v in made.facts.items()] + made.problems), file=sys.stderr)
    return True


def _changed(question: Any, file: Path) -> Any:
    """Returns the question with the variants of a JSON file added. Raises WhatIfError."""
    from benchmarks.whatif.config import Question, WhatIfError, validated

    try:
        further = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WhatIfError(f"{file}: {error}") from error
    if not isinstance(further, list):
        raise WhatIfError(f"{file}: must be a list of variants")
    whole = question.model_dump()
    return validated(Question, {**whole, "what_if": [*whole["what_if"], *further]}, "changes")


def _say(args: argparse.Namespace, **content: Any) -> None:
    """Prints one line of progress for a program, if one reads along."""
    if args.progress_json:
        print(json.dumps({"event": "progress", **content}), flush=True)


def _measured(config: Path) -> dict[str, float | None]:
    """Returns what was measured of the application that the configuration describes.

    It is {} for a configuration that `--from-live` has not made, and for one of which more than variants and seeds was
    changed since: neither was measured.
    """
    from benchmarks.whatif.config import WhatIfError
    from benchmarks.whatif.live.describe import MEASURED, WORKLOAD, fingerprint

    file, workload = config.parent / MEASURED, config.parent / WORKLOAD
    if not file.exists() or not workload.exists():
        return {}
    try:
        told = json.loads(file.read_text("utf-8"))
        if told.get("of") != fingerprint(config.read_text("utf-8"), workload.read_bytes()):
            print(
                f"{file} is of another base: nothing that was measured stands beside this one",
                file=sys.stderr,
            )
            return {}
        found = told["measured"]
        return {str(name): None if value is None else float(value) for name, value in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WhatIfError(f"{file}: not what `--from-live` writes ({error!r}): remove it") from error


def _simulate(args: argparse.Namespace) -> None:
    from benchmarks.whatif.build import sim_config, workload
    from benchmarks.whatif.changes import variants_of
    from benchmarks.whatif.config import WhatIfError, read

    question = read(example(args.config), args.files_here)
    if args.changes is not None:
        question = _changed(question, args.changes)
    found = _measured(example(args.config))
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
    total, ended = len(bases) * seeds, [0]

    def step(name: str) -> None:
        ended[0] += 1
        _say(
            args,
            progress=0.5 + 0.5 * ended[0] / total if args.from_live is not None else ended[0] / total,
            phase=name,
        )

    runs = _run({name: base.model_dump(mode="json") for name, base in bases.items()}, seeds, args.jobs, step)
    _answer(args, question, bases, runs, found)


def _count(sizes: dict[str, int]) -> str:
    counts = sorted(set(sizes.values()))
    spread = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"{len(sizes)} variants of {spread} requests"


def _run(
    configs: dict[str, Any], seeds: int, jobs: int, step: Callable[[str], None]
) -> dict[str, dict[int, dict[str, float | None]]]:
    from benchmarks import runner
    from benchmarks.experiments.base import Variant
    from benchmarks.whatif import build

    runs: dict[str, dict[int, dict[str, float | None]]] = {name: {} for name in configs}
    todo = [(Variant(name, config), seed) for seed in range(seeds) for name, config in configs.items()]

    def finish(job: runner.Job, outcome: runner.Outcome) -> None:
        runs[job[0].name][job[1]], _ = outcome
        step(job[0].name)

    runner.run_all("simulate", build, todo, jobs, finish)
    return runs


def _answer(
    args: argparse.Namespace,
    question: Any,
    bases: dict[str, Any],
    runs: dict[str, Any],
    found: dict[str, float | None],
) -> None:
    from benchmarks import report
    from benchmarks.checkout import commit
    from benchmarks.results_io import write_text
    from benchmarks.whatif import table
    from benchmarks.whatif.compared import committed
    from benchmarks.whatif.live.trust import trust

    header, lines = ["", *runs], table.rows(runs)
    judged = None
    if found:
        header, lines = ["", "measured", *runs], table.with_measured(lines, found)
        judged = trust(found, table.means(runs), {line.metric: line.label for line in table.LINES})
    said = committed() if judged is None else judged["text"]
    if not args.progress_json:
        print(table.text_table(header, lines))
        print(said)
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
            "figures": {line.metric: f"{line.label}, {line.unit}".rstrip(", ") for line in table.LINES},
            "means": {name: table.means({name: by_seed}) for name, by_seed in runs.items()},
            **({} if judged is None else {"measured": found, "trust": judged}),
            "variants": {n: {"config": b.model_dump(mode="json"), "runs": runs[n]} for n, b in bases.items()},
        }
        write_text(args.json, json.dumps(whole, indent=1, allow_nan=False) + "\n")
    if args.html is not None:
        note = f"{said}. " + ", ".join(f"{key} {value}" for key, value in origin.items())
        text = (
            f"{report.html_table(header, lines)}<p class=origin>{report.escaped(note)}. In brackets: the difference "
            "from the base, seed by seed, in per cent of it (shares: in points); ? marks those whose 95 % interval "
            "holds 0.</p>"
        )
        write_text(args.html, report.page(f"What if: {Path(args.config).stem}", [text]))
