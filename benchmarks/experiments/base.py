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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from benchmarks.checkout import Origin
from benchmarks.seeds import Paired, Spread, all_met, met, paired, ratio, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Config: TypeAlias = Mapping[str, Any]
Metrics: TypeAlias = Mapping[str, float | None]

DEFAULT_SEEDS = (5, 2)
_IN_POINTS = ("%", "pp", "points")
JUDGED = {True: "met", False: "missed", None: "open"}
"""Words for `Row.met`. An aim is open where the interval holds its bound, or where it was not judged."""


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

    `least`, `most` and `above` are the aim's bounds on ours (`benchmarks.seeds.met`). `beside` is the verdict on
    figures that the aim asks for and that stand in the note, a word of `JUDGED`, or "" where there are none. `aimed`
    sets all four and `met`; the check refuses a row with an aim and an interval whose `met` is not its `verdict`.
    """

    name: str
    paper: float | None
    ours: float | None
    unit: str = ""
    half_width: float | None = None
    aim: str = ""
    met: bool | None = None
    note: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    beside: str = ""

    @property
    def bounded(self) -> bool:
        """Whether the row says what its aim asks for, so that it has a verdict."""
        return bool(self.beside) or any(bound is not None for bound in (self.least, self.most, self.above))

    @property
    def verdict(self) -> bool | None:
        """Whether the aim is met by its bounds: surely met, surely missed, or None where the interval holds a bound.

        Without an interval the figure itself decides. None also for a row without a figure or without bounds.
        """
        parts: list[bool | None] = [word for word, text in JUDGED.items() if text == self.beside]
        if any(bound is not None for bound in (self.least, self.most, self.above)):
            if self.ours is None:
                return None
            half = self.half_width or 0.0
            parts.append(met(self.ours - half, self.ours + half, self.least, self.most, self.above))
        return all_met(parts) if parts else None

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


def aimed(
    row: Row,
    aim: str,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    also: Sequence[bool | None] = (),
) -> Row:
    """Returns the row with an aim, judged by the one rule: met or missed where the whole interval says so, else open.

    `also` has the verdicts on other figures for which the aim asks (`benchmarks.seeds.met`).
    """
    beside = JUDGED[all_met(also)] if also else ""
    judged = replace(row, aim=aim, least=least, most=most, above=above, beside=beside)
    return replace(judged, met=judged.verdict)


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

        Both are of the percentages of the single seeds, whose mean is not exactly the percentage of the means.
        """
        pairs = zip(self.values(base, metric), self.values(ours, metric), strict=True)
        found = spread([100.0 * (a - b) / a for a, b in pairs])
        return found.mean, found.half_width

    def ratio(self, over: str, under: str, metric: str) -> tuple[float, float | None]:
        """Returns (the mean of `over` by that of `under`, half of the ratio's 95 % interval), paired by seed."""
        return ratio(self.values(over, metric), self.values(under, metric))

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
