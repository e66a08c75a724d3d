"""The command `python -m benchmarks`, which runs, lists and reports experiments, and describes workloads.

python -m benchmarks list
python -m benchmarks run netkv_load --quick
python -m benchmarks run all --out benchmarks/results/experiments
python -m benchmarks report --results benchmarks/results/experiments
python -m benchmarks remake
python -m benchmarks verify all --traces DIR
python -m benchmarks document
python -m benchmarks check
python -m benchmarks traces
python -m benchmarks workload mooncake-conversation --traces DIR
python -m benchmarks trace FILE
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from benchmarks import provenance, report, results_io, runner
from benchmarks.aims import stated
from benchmarks.checkout import ROOT, is_clean
from benchmarks.experiments import registry
from benchmarks.experiments.base import Experiment, ExperimentError, Results
from benchmarks.results_io import Stored
from benchmarks.runner import Options
from benchmarks.verify import SHARE, verify
from benchmarks.workloads.record import WorkloadError
from predictors.protocol import PredictorError

COMMITTED = ROOT / "benchmarks/results"
"""The folder of the committed results."""
RESULTS = Path("benchmarks/results/experiments")
"""The folder of the committed results of experiments, relative to the checkout."""


class _Terminated(KeyboardInterrupt):
    """The exception that SIGTERM raises; it ends the command as Ctrl-C does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    The code is 0 if all went well, 1 if runs failed, and 2 for arguments or files that cannot be used. It is 130 after
    an interrupt and 143 after a termination, as in shells.
    """
    args = _arguments().parse_args(argv)
    if getattr(args, "traces", None) is not None:
        # The processes that run variants inherit the variable.
        os.environ["SLUICE_TRACES"] = str(args.traces)
    try:
        with _terminated_like_interrupted():
            return int(args.command(args))
    except runner.RunsFailedError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except (ExperimentError, WorkloadError, PredictorError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        how, code = ("terminated", 143) if isinstance(error, _Terminated) else ("interrupted", 130)
        print(f"\nbenchmarks: {how}; finished runs are kept, the same command goes on", file=sys.stderr)
        return code


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Within this context the first SIGTERM raises `_Terminated` in the main thread; a second one kills the process."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("list", help="name all experiments and workloads").set_defaults(command=_list)

    run = commands.add_parser("run", help="run experiments and print paper | ours | difference")
    run.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help="names from `list`, or `all`")
    run.add_argument("--quick", action="store_true", help="reduced size")
    run.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="N seeds from the experiment's first on (default: its own number)",
    )
    run.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    run.add_argument("--out", type=Path, default=Options().out, metavar="DIR", help="default %(default)s")
    run.add_argument(
        "--only", metavar="TEXT", help="variants with TEXT in their name; prints metrics, no comparison"
    )
    run.add_argument(
        "--keep-stale", action="store_true", help="take finished runs even if the code has changed since"
    )
    _traces(run)
    run.set_defaults(command=_run)

    page = commands.add_parser("report", help="one HTML page of all results")
    page.add_argument(
        "--results", type=Path, default=Options().out, metavar="DIR", help="default %(default)s"
    )
    page.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the results' folder")
    page.set_defaults(command=_report)

    remake = commands.add_parser(
        "remake",
        help="make rows and plots of stored results anew, and leave out measures that none of them reads",
    )
    remake.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default %(default)s")
    remake.set_defaults(command=_remake)

    again = commands.add_parser(
        "verify",
        help="compute a sample of the committed runs again with the present code, and note whether they are equal",
    )
    again.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help="names from `list`, or `all`")
    again.add_argument(
        "--share", type=float, default=SHARE, metavar="X", help="least part of all runs (default %(default)s)"
    )
    again.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    again.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default %(default)s")
    _traces(again)
    again.set_defaults(command=_verify)

    commands.add_parser(
        "document",
        help="write docs/results.md, docs/not_reproduced.md and the predictors' page from the committed results",
    ).set_defaults(command=_document)
    commands.add_parser(
        "check",
        help="whether all documents show the figures of the committed results, and which code made these",
    ).set_defaults(command=_check)

    traces = commands.add_parser("traces", help="the published traces: which are here, and what to put where")
    _traces(traces)
    traces.set_defaults(command=_show_traces)

    workload = commands.add_parser("workload", help="what a workload looks like")
    workload.add_argument("name")
    workload.add_argument("--requests", type=int, metavar="N")
    workload.add_argument("--seed", type=int, default=0)
    _traces(workload)
    workload.set_defaults(command=_workload)

    own = commands.add_parser("trace", help="decode policies compared on a request trace of your own")
    own.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="rows of Mooncake, Azure or BurstGPT, plain or .xz; an archive of ServeGen",
    )
    own.add_argument("--requests", type=int, metavar="N", help="requests of each window (default: up to 300)")
    own.add_argument("--seeds", type=int, default=5, metavar="N", help="windows (default %(default)s)")
    own.add_argument(
        "--load",
        type=float,
        default=0.7,
        metavar="X",
        help="rate, as a share of what the cluster carries (default %(default)s)",
    )
    own.add_argument("--ttft-slo", type=float, default=5.0, metavar="S", help="seconds (default %(default)s)")
    own.add_argument("--tpot-slo", type=float, default=0.1, metavar="S", help="seconds (default %(default)s)")
    own.add_argument(
        "--skip-unusable",
        action="store_true",
        help="leave out rows without tokens, or too long for an engine",
    )
    own.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    own.set_defaults(command=_trace)
    return parser


def _traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="folder of the published traces (default: SLUICE_TRACES)"
    )


def _list(args: argparse.Namespace) -> int:
    from benchmarks.workloads.catalog import WORKLOADS, available

    print("experiments")
    for name in registry.EXPERIMENTS:
        print(f"  {name:36s} {registry.load(name).SUMMARY}")
    print("workloads")
    for name, source in WORKLOADS.items():
        missing = "" if available(name) else "  [its file is not in SLUICE_TRACES]"
        print(f"  {name:36s} {source.summary}{missing}")
    return 0


def _run(args: argparse.Namespace) -> int:
    names = list(registry.EXPERIMENTS) if args.experiments == ["all"] else args.experiments
    # Every name is looked up before the first experiment runs, which may take hours.
    experiments = [(name, registry.load(name)) for name in names]
    if not experiments:
        raise ExperimentError("benchmarks/experiments/registry.py names no experiment yet")
    options = Options(args.quick, args.seeds, _jobs(args.jobs), args.out, args.only, args.keep_stale)
    for name, experiment in experiments:
        _require_traceable(experiment, options)
        _require_traces(name, experiment, options)
    failed, start_s, first_cpu_s = [], time.monotonic(), _cpu_s()
    # The aims are read before the first run. A file that is broken ends the command before it has cost anything.
    aims = {name: stated.digest(name) for name, _ in experiments}
    for name, experiment in experiments:
        before_s = _cpu_s()
        try:
            results = runner.run(name, experiment, options)
        except runner.RunsFailedError as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            failed.append(name)
            continue
        if options.only is not None:
            _print_metrics(results)
        elif not _compared(name, experiment, results, options, args, aims[name]):
            failed.append(name)
        print(f"{name} took {_cpu_s() - before_s:.1f} s of CPU", flush=True)
    if len(experiments) > 1:
        cpu_min, wall_min = (_cpu_s() - first_cpu_s) / 60, (time.monotonic() - start_s) / 60
        print(f"\nall {len(experiments)} took {cpu_min:.1f} min of CPU in {wall_min:.1f} min")
    return 1 if failed else 0


def _require_traceable(experiment: Experiment, options: Options) -> None:
    """Raises ExperimentError for runs whose code nobody could find again, if their results are to be committed."""
    if not _is_committed(options.out):
        return
    if options.keep_stale:
        raise ExperimentError(
            f"--keep-stale takes runs of other code: not into {COMMITTED}; leave it or --out out"
        )
    if not is_clean(runner.code_paths(experiment)):
        raise ExperimentError(
            f"{experiment.__name__} depends on files that differ from the commit: commit the code first, or leave --out"
            " out"
        )


def _require_traces(name: str, experiment: Experiment, options: Options) -> None:
    """Says on the error output which published traces of an experiment are not here, so that it has fewer cases or
    stand-ins. Raises ExperimentError if its results are to be committed.
    """
    missing = _missing_traces(experiment)
    if not missing:
        return
    said = f"{name} WITHOUT {', '.join(missing)}: it has fewer cases, or stand-ins; give --traces DIR"
    if _is_committed(options.out):
        raise ExperimentError(f"{said}, without which nothing goes into {COMMITTED}")
    print(f"{'*' * 100}\nWARNING: {said}\n{'*' * 100}", file=sys.stderr, flush=True)


def _missing_traces(experiment: Experiment) -> list[str]:
    """Returns the published traces that an experiment names and that are not here."""
    from benchmarks.workloads.catalog import missing_traces, traces_of

    paths = runner.code_paths(experiment)
    return sorted(missing_traces(paths, traces_of(paths)))


def _is_committed(folder: Path) -> bool:
    """Returns whether results in a folder are, or will be, in the repository."""
    return folder.resolve().is_relative_to(COMMITTED.resolve())


def _cpu_s() -> float:
    """Returns the CPU seconds of this process and of all processes that it has waited for."""
    return sum(os.times()[:4])


def _jobs(jobs: int) -> int:
    if jobs < 1:
        raise ExperimentError(f"--jobs {jobs}: give at least 1")
    return jobs


def _compared(
    name: str,
    experiment: Experiment,
    results: Results,
    options: Options,
    args: argparse.Namespace,
    aims: str,
) -> bool:
    """Finishes an experiment, and returns whether its results could be compared.

    If they could not, this prints why, and the other experiments go on.
    """
    try:
        _finish(name, experiment, results, options, args, aims)
    except ExperimentError as error:
        print(f"benchmarks: {name} cannot be compared, its runs are kept: {error}", file=sys.stderr)
        return False
    return True


def _finish(
    name: str,
    experiment: Experiment,
    results: Results,
    options: Options,
    args: argparse.Namespace,
    aims: str,
) -> None:
    """Compares the results with the paper's, draws the plots, writes the results file and prints the comparison.

    `aims` is the digest of the aims that were stated before the first run. Rows with other aims are named on the error
    output.
    """
    results = results_io.as_stored(results)
    rows = list(experiment.compare(results))
    folder = (options.out / registry.place(name)).parent
    files = _drawn(experiment, results, folder)
    code = runner.code_of(experiment)
    stored = Stored.now(results, experiment.SUMMARY, rows, files, code, _command(name, args), aims)
    path = results_io.save(folder, stored, _also_stored(experiment))
    shown = "".join(f"\n{line}" for line in report.stand_ins(results))
    parts = [f"\n{name}: {experiment.SUMMARY}{shown}", report.text_table(rows, name), report.aims(rows, name)]
    print("\n\n".join([*filter(None, parts), f"written to {path}"]), flush=True)
    for difference in stated.differences(name, rows, results.quick):
        print(f"benchmarks: {difference}", file=sys.stderr)


def _drawn(experiment: Experiment, results: Results, folder: Path) -> list[str]:
    """Writes the experiment's plots into `folder`/EXPERIMENT and returns their file names."""
    figures = experiment.plots(results)
    if not figures:
        return []
    from benchmarks import plots

    return [plots.save(folder / results.experiment, plot, made) for plot, made in figures.items()]


def _also_stored(experiment: Experiment) -> Sequence[str]:
    return tuple(getattr(experiment, "ALSO_STORED", ()))


def _command(name: str, args: argparse.Namespace) -> str:
    """Returns the command that makes the same numbers on any machine, so without folders and number of processes."""
    parts = ["python -m benchmarks run", name]
    parts += ["--quick"] if args.quick else []
    parts += [f"--seeds {args.seeds}"] if args.seeds is not None else []
    parts += ["--keep-stale"] if args.keep_stale else []
    return " ".join(parts)


def _print_metrics(results: Results) -> None:
    for name, by_seed in results.runs.items():
        for seed, metrics in sorted(by_seed.items()):
            shown = ", ".join(f"{metric} {report.number(value)}" for metric, value in metrics.items())
            print(f"{name}, seed {seed}: {shown}")


def _report(args: argparse.Namespace) -> int:
    target = args.out or args.results / "report.html"
    experiments, others = report.write_html(args.results, target)
    print(f"{experiments} experiments written to {target}")
    for path in others:
        print(f"left out: {path}, which `python -m benchmarks run` did not write", file=sys.stderr)
    return 0


def _remake(args: argparse.Namespace) -> int:
    for path, stored in results_io.load_all(args.results)[0].items():
        name = stored.results.experiment
        try:
            experiment = registry.load(name)
            rows = list(experiment.compare(stored.results))
            files = _drawn(experiment, stored.results, path.parent)
        except ExperimentError as error:
            # The experiment's code has changed since its results were made.
            print(f"{name} stays as it is: {error}", file=sys.stderr)
            continue
        results_io.save(
            path.parent, results_io.remade(stored, experiment.SUMMARY, rows, files), _also_stored(experiment)
        )
        print(f"{path}: {len(rows)} rows, {len(files)} plots")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Verifies the stored results of experiments whose code has changed, and notes the outcome in their files."""
    names = list(registry.EXPERIMENTS) if args.experiments == ["all"] else args.experiments
    if not 0.0 < args.share <= 1.0:
        raise ExperimentError(f"--share {args.share:g}: give a part of all runs, above 0 and at most 1")
    failed = False
    for name, experiment in [(name, registry.load(name)) for name in names]:
        path = args.results / registry.place(name)
        if not path.exists():
            print(f"{name}: has no results")
            continue
        stored = results_io.load(path)
        code = runner.code_of(experiment)
        if (
            provenance.since(f"experiments/{registry.place(name)}", provenance.of_experiment(stored), code)
            == "same"
        ):
            print(f"{name}: was made by the present code")
            continue
        if stored.verified is not None and stored.verified.origin.code == code:
            print(f"{name}: {stored.verified.shown}, which is the present code")
            continue
        _require_verifiable(name, experiment, args.results)
        verified, different = verify(name, experiment, stored.results, args.share, _jobs(args.jobs))
        results_io.note_verified(path, verified)
        print("\n  ".join([f"{name}: {verified.shown}", *different[:10]]), flush=True)
        failed = failed or bool(different)
    return 1 if failed else 0


def _require_verifiable(name: str, experiment: Experiment, folder: Path) -> None:
    """Raises ExperimentError where the outcome could not be traced, or where published traces are missing."""
    missing = _missing_traces(experiment)
    if missing:
        raise ExperimentError(f"{name} needs {', '.join(missing)}: give --traces DIR")
    if _is_committed(folder) and not is_clean(runner.code_paths(experiment)):
        raise ExperimentError(
            f"{experiment.__name__} depends on files that differ from the commit: commit the code first, or copy"
            " the results and give --results"
        )


def _document(args: argparse.Namespace) -> int:
    from benchmarks import document
    from benchmarks.aims import page as not_reproduced
    from benchmarks.predictors.page import markdown

    results_io.write_text(document.DOCUMENT, document.document())
    results_io.write_text(not_reproduced.PAGE, not_reproduced.page())
    page = document.RESULTS / "predictors/README.md"
    results_io.write_text(page, markdown(json.loads((page.parent / "results.json").read_text("utf-8"))))
    print(f"written to {document.DOCUMENT}, {not_reproduced.PAGE} and {page}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from benchmarks import check

    checked = check.check()
    print("\n".join([*checked.notes, *checked.problems]))
    print(checked.summary)
    return 1 if checked.problems else 0


def _show_traces(args: argparse.Namespace) -> int:
    from benchmarks.workloads import catalog

    folder = catalog.traces_dir()
    print(f"folder: {folder or 'none: make one and give it as --traces DIR or SLUICE_TRACES=DIR'}")
    published = {s.file: s for s in catalog.WORKLOADS.values() if isinstance(s, catalog.TraceSource)}
    for file, source in published.items():
        try:
            where = str(catalog.file_of(source))
        except WorkloadError:
            where = f"missing: put it there as {file} (or {file}.xz)"
        print(
            f"\n{file}\n  {source.summary}\n  {where}"
            + (f"\n  from {source.origin}" if source.origin else "")
        )
    return 0


def _workload(args: argparse.Namespace) -> int:
    from benchmarks.workloads.catalog import WorkloadSpec, build, describe

    requests = build(WorkloadSpec(name=args.name, requests=args.requests), args.seed)
    for label, value in describe(requests).items():
        print(f"{label:28s} {report.number(value)}")
    return 0


def _trace(args: argparse.Namespace) -> int:
    from benchmarks import own_trace

    options = own_trace.Options(
        args.requests, args.seeds, args.load, args.ttft_slo, args.tpot_slo, args.skip_unusable
    )
    jobs = _jobs(args.jobs)
    planned = own_trace.plan(args.file, options)
    print("\n".join(planned.head), flush=True)
    print(own_trace.table(own_trace.run(planned, jobs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
