"""Experiments, and the questions that their results answer.

An experiment is a module with

- `SUMMARY`: one line: which figure of which paper, on what.
- `variants(quick)`: the named configurations to run. A config is a JSON object with everything that decides the outcome
  (policy, rate, workload, sizes): it is stored with the result, and is the key under which a finished run is found
  again. `quick` asks for a reduced size. It is cheap, and called once before the runs, so what depends on the machine
  (which traces there are) is decided there and written into the config.
- `run_one(config, seed)`: one run, in a process of its own or in this one; returns numbers by name (None: not
  measured). The same arguments give the same numbers. `benchmarks.sim.metrics.summarise` makes most of them. Processes
  are kept, so `functools.lru_cache` on what runs share (a fitted predictor, a workload) is worth it.
- `compare(results)`: rows of paper | ours. May be called with few seeds, never with a variant missing.
- `plots(results)`: matplotlib figures by file name; `benchmarks.plots` has the style.
- optionally `SEEDS = (full, quick)`: how many seeds by default, else (5, 2).
- optionally `SEEDS_FROM`: the first seed, else 0; for an experiment that was set up while earlier ones were seen.
- optionally `ALSO_STORED`: names of measures that the results file keeps although no row and no plot reads them.

A results file keeps, seed by seed, what `compare` and `plots` have read, and nothing else: every row and plot can be
made again from it (`python -m benchmarks check` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from benchmarks.checkout import Origin
from benchmarks.seeds import Paired, Spread, paired, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Config: TypeAlias = Mapping[str, Any]
Metrics: TypeAlias = Mapping[str, float | None]

DEFAULT_SEEDS = (5, 2)
_IN_POINTS = ("%", "pp", "points")


class ExperimentError(Exception):
    """The error of an experiment that cannot be run, or of results that cannot be read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration under a name that is unique in its experiment."""

    name: str
    config: Config


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the paper's value, ours with half of its 95 % interval, and whether the aim is met.

    `paper` is None where the paper has no such figure. The difference is in percentage points where the unit is a
    percentage, else in per cent of the paper's value.
    """

    name: str
    paper: float | None
    ours: float | None
    unit: str = ""
    half_width: float | None = None
    aim: str = ""
    met: bool | None = None
    note: str = ""

    @property
    def difference(self) -> float | None:
        if self.paper is None or self.ours is None:
            return None
        if self.unit in _IN_POINTS:
            return self.ours - self.paper
        return 100.0 * (self.ours - self.paper) / abs(self.paper) if self.paper else None

    @property
    def difference_unit(self) -> str:
        return "points" if self.unit in _IN_POINTS else "%"


@dataclass(frozen=True, slots=True)
class Results:
    """All finished runs of an experiment: `runs[variant][seed]` are its metrics, and `origins[variant][seed]` says
    which code made them, as far as that is known.

    `resolved[variant]` are the policies that its first run built, by task, with all of their parameters; it is missing
    where the run built none in the simulator. `read` collects the (variant, metric) pairs that rows and plots have
    asked for.
    """

    experiment: str
    quick: bool
    variants: Mapping[str, Config]
    runs: Mapping[str, Mapping[int, Metrics]] = field(repr=False)
    origins: Mapping[str, Mapping[int, Origin]] = field(default_factory=dict, repr=False)
    resolved: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    read: set[tuple[str, str]] = field(default_factory=set, repr=False, compare=False)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that every variant has, in order."""
        if not self.runs:
            return ()
        shared = set.intersection(*(set(by_seed) for by_seed in self.runs.values()))
        return tuple(sorted(shared))

    def values(self, variant: str, metric: str, missing: float | None = None) -> list[float]:
        """Returns one value for each seed, in the order of `seeds`.

        `missing` replaces a value that a run did not measure; without it such a run raises ExperimentError.
        """
        if variant not in self.runs:
            raise ExperimentError(
                f"{self.experiment} has no variant {variant!r}; there are {', '.join(self.runs)}"
            )
        self.read.add((variant, metric))
        found = []
        for seed in self.seeds:
            value = self.runs[variant][seed].get(metric)
            value = missing if value is None else value
            if value is None:
                raise ExperimentError(f"{self.experiment}: {variant}, seed {seed} did not measure {metric!r}")
            found.append(value)
        if not found:
            raise ExperimentError(f"{self.experiment}: no seed has finished for every variant")
        return found

    def measured(self, variant: str, metric: str) -> bool:
        """Returns whether every seed has measured `metric`."""
        self.read.add((variant, metric))
        return all(self.runs[variant][seed].get(metric) is not None for seed in self.seeds)

    def mean(self, variant: str, metric: str) -> float:
        """Returns the mean over the seeds."""
        return self.spread(variant, metric).mean

    def spread(self, variant: str, metric: str) -> Spread:
        """Returns the mean over the seeds with its deviation and interval."""
        return spread(self.values(variant, metric))

    def paired(self, base: str, ours: str, metric: str) -> Paired:
        """Compares `ours` with `base`, seed by seed."""
        return paired(self.values(base, metric), self.values(ours, metric))

    def reduction_percent(self, base: str, ours: str, metric: str) -> tuple[float, float | None]:
        """Returns (per cent by which `ours` is below `base`, half of its 95 % interval).

        The percentage is of the means, as in the papers; the interval is of the percentages of the single seeds.
        """
        pairs = zip(self.values(base, metric), self.values(ours, metric), strict=True)
        found = spread([100.0 * (a - b) / a for a, b in pairs])
        return found.mean, found.half_width

    def where(self, **wanted: Any) -> list[str]:
        """Returns the names of the variants whose config has all the values `wanted`."""
        return [n for n, c in self.variants.items() if all(c.get(k) == v for k, v in wanted.items())]


class Experiment(Protocol):
    """The interface of an experiment's module, which the docstring of this module describes."""

    SUMMARY: str
    __name__: str

    def variants(self, quick: bool) -> Sequence[Variant]: ...

    def run_one(self, config: Config, seed: int) -> Metrics: ...

    def compare(self, results: Results) -> Sequence[Row]: ...

    def plots(self, results: Results) -> Mapping[str, Figure]: ...
