"""The predictors of a run by name, for `Forecasting.source`. Each call makes a fresh one: they learn while they run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sim.config import ForecastSource
from predictors.memorise import Memorised
from predictors.oracle import Oracle
from predictors.protocol import Predictor
from predictors.store import load
from predictors.survival import EmpiricalSurvival


def oracle(lengths: Mapping[str, int]) -> Predictor:
    """Knows the lengths that will be: the upper bound of any predictor."""
    return Oracle(lengths)


def survival(lengths: Mapping[str, int]) -> Predictor:
    """The curve of the lengths seen so far (BalanceRoute's Survival)."""
    return EmpiricalSurvival()


def exact_match(lengths: Mapping[str, int]) -> Predictor:
    """Lengths by prompt key, else survival (BalanceRoute's ExactMatch)."""
    return Memorised()


@dataclass(frozen=True, slots=True)
class Fitted:
    """The LightGBM model of a file, as `sluice train` writes it. Raises ModelRefused when the run begins."""

    path: Path

    def __call__(self, lengths: Mapping[str, int]) -> Predictor:
        return load(self.path)[0]


SOURCES: dict[str, ForecastSource] = {"oracle": oracle, "survival": survival, "exact_match": exact_match}


def source_of(name: str) -> ForecastSource:
    """By name, or a model file by its path. Raises ValueError that lists the names."""
    if name in SOURCES:
        return SOURCES[name]
    if Path(name).is_file():
        return Fitted(Path(name))
    raise ValueError(
        f"predictor {name!r}: choose one of {', '.join(SOURCES)}, or give the path of a fitted model's file"
    )
