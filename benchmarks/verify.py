"""Computes a sample of an experiment's stored runs again with the present code, and says whether they are the same.

The code on which an experiment depends changes more often than its results do: a comment, a new parameter whose default
is the old rule, or a policy that the experiment does not run changes the digest as well. A sample of a few per cent of
the runs tells these changes from those after which the experiment must be run again.

The sample has one run of each different combination of policies and parameters (`Results.resolved`), and further ones
up to a share of all runs. A digest of the code draws it, so nobody chooses it, and another state of the code has
another sample. A run is the same if each stored measure is within `TOLERANCE` of what it was; two types of CPU may
differ in the last digits of a sum. CPU times (`CPU_TIMES` of the experiment's module) are left out, because no two runs
agree on them. A run whose variant the code no longer has is different.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime

from benchmarks.checkout import origin_of
from benchmarks.experiments.base import Config, Experiment, Metrics, Results, Variant
from benchmarks.results_io import Verified
from benchmarks.runner import Job, Outcome, code_paths, run_all
from benchmarks.workloads.catalog import traces_of

TOLERANCE = 1e-7
"""The relative difference up to which a measure is the same; stored measures have nine digits."""
SHARE = 0.03


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
    drawn, todo = sample(results, here.code, share), []
    different: list[str] = []
    timed: frozenset[str] = getattr(experiment, "CPU_TIMES", frozenset())
    for variant, seed in drawn:
        if now.get(variant) == results.variants[variant]:
            todo.append((Variant(variant, results.variants[variant]), seed))
        else:
            different.append(f"{variant}, seed {seed}: the code has no such variant any more")

    def finish(job: Job, outcome: Outcome) -> None:
        variant, seed = job
        found = differences(results.runs[variant.name][seed], outcome[0], timed)
        if found:
            more = f" and {len(found) - 2} more" if len(found) > 2 else ""
            different.append(f"{variant.name}, seed {seed}: {', '.join(found[:2])}{more}")

    if todo:
        run_all(name, experiment, todo, jobs, finish)
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    of = len(results.variants) * len(results.seeds)
    return Verified(here, len(drawn), len(different), of, date), different


def differences(stored: Metrics, now: Metrics, timed: frozenset[str] = frozenset()) -> list[str]:
    """Returns in words how the measures of a run differ from those that were stored. A run may lack a measure.

    The measures in `timed` are not compared.
    """
    found = []
    for name, before in stored.items():
        if name in timed:
            continue
        after = now.get(name)
        if before is None or after is None:
            same = before is after
        else:
            same = math.isclose(before, after, rel_tol=TOLERANCE)
        if not same:
            found.append(f"{name} is {_shown(after)}, was {_shown(before)}")
    return found


def _shown(value: float | None) -> str:
    return "missing" if value is None else f"{value:.9g}"
