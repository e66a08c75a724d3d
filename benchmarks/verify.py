"""Computes a sample of an experiment's stored runs again with the present code, and says whether they are the same.

The code on which an experiment depends changes more often than its results do: a comment, a new parameter whose default
is the old rule, or a policy that the experiment does not run changes the digest as well. A sample of a few per cent of
the runs tells these changes from those after which the experiment must be run again.

The sample has one run of each different combination of policies and parameters (`Results.resolved`), and further ones
up to a share of all runs. A digest of the code draws it, so nobody chooses it, and another state of the code has
another sample. A run is the same if each stored measure is within `TOLERANCE` of what it was; two types of CPU may
differ in the last digits of a sum. A run whose variant the code no longer has is different.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from benchmarks.checkout import origin_of
from benchmarks.experiments.base import Config, Experiment, Metrics, Results, Variant
from benchmarks.results_io import Verified
from benchmarks.runner import Job, Outcome, code_paths, run_all
from benchmarks.workloads.catalog import traces_of

TOLERANCE = 1e-7
"""The relative difference up to which a measure is the same; stored measures have nine digits."""
SHARE = 0.03


@dataclass(slots=True)
class Comparison:
    """The outcome of a sample: how many runs it had, and those that differ, as sentences."""

    runs: int = 0
    different: list[str] = field(default_factory=list)

    def add(self, job: Job, stored: Metrics, now: Metrics) -> None:
        """Compares the stored measures of a run with those that it has now."""
        self.runs += 1
        found = [text for name, value in stored.items() if (text := _difference(name, value, now.get(name)))]
        if found:
            variant, seed = job
            more = f" and {len(found) - 2} more" if len(found) > 2 else ""
            self.different.append(f"{variant.name}, seed {seed}: {', '.join(found[:2])}{more}")


def _difference(name: str, stored: float | None, now: float | None) -> str:
    """Returns how a measure differs as text, which is empty if it does not. A run may lack a measure."""
    if stored is None or now is None:
        same = stored is now
    else:
        same = math.isclose(stored, now, rel_tol=TOLERANCE)
    if same:
        return ""
    return f"{name} is {_shown(now)}, was {_shown(stored)}"


def _shown(value: float | None) -> str:
    return "missing" if value is None else f"{value:.9g}"


def sample(results: Results, code: str, share: float = SHARE) -> list[tuple[str, int]]:
    """Returns the (variant, seed) pairs that are to be computed again, in the order of the results.

    `code` is the digest of the present code, by which they are drawn; `share` is the least part of all runs.
    """
    draw = random.Random(f"{results.experiment} {code}")
    combinations: dict[str, list[str]] = {}
    for name in results.variants:
        combinations.setdefault(
            json.dumps(results.resolved.get(name, results.variants[name]), sort_keys=True), []
        ).append(name)
    chosen = {(draw.choice(names), draw.choice(results.seeds)) for names in combinations.values()}
    runs = [(name, seed) for name in results.variants for seed in results.seeds]
    others = [run for run in runs if run not in chosen]
    draw.shuffle(others)
    chosen.update(others[: max(0, math.ceil(share * len(runs)) - len(chosen))])
    return [run for run in runs if run in chosen]


def verify(
    name: str, experiment: Experiment, results: Results, share: float = SHARE, jobs: int = 2
) -> tuple[Verified, Sequence[str]]:
    """Computes a sample of stored runs again. Returns its outcome and a sentence for each run that differs.

    Raises RunsFailedError if runs fail.
    """
    paths = code_paths(experiment)
    here = origin_of(paths, traces_of(paths))
    now: dict[str, Config] = {
        variant.name: json.loads(json.dumps(variant.config)) for variant in experiment.variants(results.quick)
    }
    compared, todo = Comparison(), []
    for variant, seed in sample(results, here.code, share):
        if now.get(variant) == results.variants[variant]:
            todo.append((Variant(variant, results.variants[variant]), seed))
        else:
            compared.runs += 1
            compared.different.append(f"{variant}, seed {seed}: the code has no such variant any more")

    def finish(job: Job, outcome: Outcome) -> None:
        compared.add(job, results.runs[job[0].name][job[1]], outcome[0])

    if todo:
        run_all(name, experiment, todo, jobs, finish)
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    of = len(results.variants) * len(results.seeds)
    return Verified(here, compared.runs, len(compared.different), of, date), compared.different
