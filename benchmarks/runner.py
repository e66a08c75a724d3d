"""Runs an experiment: every variant with every seed, in several processes.

Each finished run is stored, and is not run again while the code that it depends on is the same. So an interrupted sweep
goes on where it stopped. A run that fails does not stop the others; the sweep then ends with RunsFailedError.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from benchmarks.checkout import ROOT, Origin, code_digest, imported, origin_of
from benchmarks.experiments.base import (
    DEFAULT_SEEDS,
    Config,
    Experiment,
    ExperimentError,
    Metrics,
    Results,
    Variant,
)
from benchmarks.progress import Progress
from benchmarks.results_io import RUNS, RunCache, checked_metrics
from benchmarks.sim.built import BUILT
from benchmarks.workloads.catalog import traces_of

# Policies are found by name, and profiles and excerpts of traces are read as files, so imports do not show them all.
_NOT_IMPORTED = ("policies", "benchmarks/sim/profiles", "benchmarks/workloads/excerpts")

Job = tuple[Variant, int]
Outcome: TypeAlias = tuple[dict[str, float | None], dict[str, Any]]
"""The metrics of a run, and the policies that it built (`benchmarks.sim.built`)."""
Finish = Callable[[Job, Outcome], None]


class Runs(Protocol):
    """The interface of a module with `run_one`; the worker processes import it by its name."""

    __name__: str

    def run_one(self, config: Config, seed: int) -> Metrics: ...


class RunsFailedError(ExperimentError):
    """The error of a sweep in which some runs ended in an exception; the message names them."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `run`.

    `seeds` is the number of seeds; None takes the experiment's own. `only` selects variants whose name contains the
    text.
    `keep_stale` uses stored runs that were made with other code.
    """

    quick: bool = False
    seeds: int | None = None
    jobs: int = 2
    out: Path = Path("build/experiments")
    only: str | None = None
    keep_stale: bool = False


def code_paths(experiment: Experiment, root: Path = ROOT) -> list[str]:
    """Returns the files and folders on which a run depends: all that the experiment's module imports in the checkout at
    `root`, the policies, and the data files of the simulator and the workloads.
    """
    return [*imported(experiment.__name__, root), *_NOT_IMPORTED]


def code_of(experiment: Experiment, root: Path = ROOT) -> str:
    """Returns a digest of the code on which a run depends (`code_paths`)."""
    return code_digest(code_paths(experiment, root), root)


def run(name: str, experiment: Experiment, options: Options) -> Results:
    """Runs or reads all runs of the experiment and returns their results, each with the origin of its code.

    Raises ExperimentError for options that cannot be used, and as soon as a run ends whose code has changed since the
    start, because it may have run with either. Raises RunsFailedError once all runs have ended.
    """
    variants = _variants(name, experiment, options)
    seeds = _seeds(experiment, options)
    paths = code_paths(experiment)
    here = origin_of(paths, traces_of(paths))
    cache = RunCache(options.out / RUNS, name, here, options.keep_stale)
    runs: dict[str, dict[int, dict[str, float | None]]] = {v.name: {} for v in variants}
    origins: dict[str, dict[int, Origin]] = {v.name: {} for v in variants}
    resolved: dict[str, Mapping[str, Any]] = {}
    todo: list[Job] = []
    # The order is seed by seed, so that an interrupted sweep has whole seeds.
    for seed in seeds:
        for variant in variants:
            found = cache.get(variant.config, seed)
            if found is None:
                todo.append((variant, seed))
            else:
                runs[variant.name][seed], origins[variant.name][seed] = found.metrics, found.origin
                resolved.setdefault(variant.name, found.resolved)

    def finish(job: Job, outcome: Outcome) -> None:
        variant, seed = job
        metrics, built = outcome
        if code_digest(paths) != here.code:
            raise ExperimentError(
                f"{name}: the code has changed since the start; what had finished before is kept, and the same command"
                " runs everything with the present code"
            )
        cache.put(variant.config, seed, metrics, built)
        resolved.setdefault(variant.name, built)
        runs[variant.name][seed], origins[variant.name][seed] = metrics, here

    if todo:
        run_all(name, experiment, todo, options.jobs, finish)
    return Results(name, options.quick, {v.name: v.config for v in variants}, runs, origins, resolved)


def _variants(name: str, experiment: Experiment, options: Options) -> list[Variant]:
    made = [v for v in experiment.variants(options.quick) if options.only is None or options.only in v.name]
    names = [v.name for v in made]
    if not made:
        raise ExperimentError(f"{name} has no variant with {options.only!r} in its name")
    if len(set(names)) != len(names):
        raise ExperimentError(
            f"{name} names two variants alike: {sorted(n for n in names if names.count(n) > 1)}"
        )
    return made


def _seeds(experiment: Experiment, options: Options) -> range:
    full, quick = getattr(experiment, "SEEDS", DEFAULT_SEEDS)
    seeds = options.seeds if options.seeds is not None else (quick if options.quick else full)
    if seeds < 1:
        raise ExperimentError(f"{seeds} seeds: give at least 1")
    first = int(getattr(experiment, "SEEDS_FROM", 0))
    return range(first, first + int(seeds))


def run_all(name: str, experiment: Runs, todo: Sequence[Job], jobs: int, finish: Finish) -> None:
    """Runs the jobs `todo` in `jobs` processes and calls `finish` for each that succeeds.

    Raises RunsFailedError when all have ended and some have failed.
    """
    failures: list[str] = []
    with Progress(name, len(todo)) as progress:
        for job, outcome in _outcomes(experiment, todo, jobs):
            variant, seed = job
            if isinstance(outcome, BaseException):
                failures.append(f"{variant.name}, seed {seed}: {type(outcome).__name__}: {outcome}")
            else:
                finish(job, outcome)
            progress.step(variant.name)
    if failures:
        shown = "\n  ".join(failures[:10])
        more = f"\n  and {len(failures) - 10} more" if len(failures) > 10 else ""
        raise RunsFailedError(
            f"{name}: {len(failures)} of {len(todo)} runs failed (the others are kept):\n  {shown}{more}"
        )


def _outcomes(experiment: Runs, todo: Sequence[Job], jobs: int) -> Iterator[tuple[Job, Outcome | Exception]]:
    """Yields each job with its outcome or its exception, in the order in which they end."""
    if jobs == 1 or len(todo) == 1:
        for variant, seed in todo:
            try:
                yield (variant, seed), _outcome(experiment, variant.config, seed)
            except Exception as error:
                # A failed run must not end the sweep; it is reported when the sweep ends.
                yield (variant, seed), error
        return
    with _pool(jobs) as pool:
        futures: dict[Future[Outcome], Job] = {
            pool.submit(_one, experiment.__name__, variant.config, seed): (variant, seed)
            for variant, seed in todo
        }
        for future in as_completed(futures):
            failure = future.exception()
            if isinstance(failure, BrokenProcessPool):
                raise ExperimentError(
                    "a worker process died (out of memory?): what had finished is kept; try --jobs 1"
                ) from failure
            yield futures[future], failure if isinstance(failure, Exception) else future.result()


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of new worker processes that use one core each (`spawn`, so they inherit no threads or state).

    The workers end with an interrupt, and also when this process ends in any way.
    """
    # The workers inherit the variable, so that LightGBM and BLAS do not compete for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_follow_parent
    )
    try:
        yield pool
    except BaseException:
        # There is no public way to end a running job.
        for process in list((pool._processes or {}).values()):
            process.terminate()
        # The shutdown comes last, because after it the pool no longer knows its processes.
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _follow_parent() -> None:
    """Makes a worker end as soon as its parent has ended.

    The worker ignores Ctrl-C, which a terminal sends to all processes, because the parent handles it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker follows"
    parent.join()
    # Without this, the worker's main thread would finish its job and then wait for work without end.
    os._exit(1)


def _one(module: str, config: Config, seed: int) -> Outcome:
    return _outcome(importlib.import_module(module), config, seed)


def _outcome(experiment: Runs, config: Config, seed: int) -> Outcome:
    BUILT.clear()
    return checked_metrics(experiment.run_one(config, seed)), dict(BUILT)
