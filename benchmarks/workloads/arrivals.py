"""When requests come: stationary and varying arrival processes, exact and the same for the same generator.

Each process has `rate_per_s`, its long-run mean, and `times(rng)`, an endless stream of times in seconds from 0. All
start in their stationary state, so that the expected number in [0, t) is rate * t for every t, not only in the limit:
the first gap of a Gamma process is a residual gap (a uniform share of a length-biased one), and a Markov-modulated
process starts in a state drawn by the time it spends there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np

from benchmarks.workloads.record import WorkloadError

_CHUNK = 1_024


class Arrivals(Protocol):
    """A process of arrivals."""

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals a second."""

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Endless, increasing times in seconds."""


def until(times: Iterator[float], end_s: float) -> Iterator[float]:
    """The times before `end_s`."""
    return takewhile(lambda t: t < end_s, times)


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise WorkloadError(f"{name} is {value}: give a finite number above 0")


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        return Gamma(self.rate_per_s, 1.0).times(rng)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent Gamma gaps of mean 1/rate and coefficient of variation `cv`: above 1 bursty, below 1 even."""

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)
        _positive("cv", self.cv)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        shape = self.cv**-2
        scale_s = 1.0 / (shape * self.rate_per_s)
        at_s = float(rng.random() * rng.gamma(shape + 1.0) * scale_s)
        while True:
            for gap_s in rng.gamma(shape, scale_s, _CHUNK).tolist():
                yield at_s
                at_s += gap_s


@dataclass(frozen=True, slots=True)
class MarkovModulated:
    """Poisson arrivals whose rate is that of the present state; a state lasts an exponential time, and any other
    state may follow, each as likely. Two states of unlike rates make bursts.
    """

    rates_per_s: tuple[float, ...]
    dwell_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rates_per_s) != len(self.dwell_s) or len(self.dwell_s) < 2:
            raise WorkloadError("give two or more states, each with a rate and a mean dwell time")
        for dwell_s in self.dwell_s:
            _positive("dwell_s", dwell_s)
        if min(self.rates_per_s) < 0 or not math.isfinite(sum(self.rates_per_s)):
            raise WorkloadError(f"rates_per_s {self.rates_per_s}: give finite rates of 0 or more")
        _positive("the highest rate", max(self.rates_per_s))

    @property
    def rate_per_s(self) -> float:
        arrivals = sum(r * d for r, d in zip(self.rates_per_s, self.dwell_s, strict=True))
        return arrivals / sum(self.dwell_s)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        states = len(self.dwell_s)
        # Every state is entered equally often, so the time spent in one is as its dwell time.
        state = int(rng.choice(states, p=np.array(self.dwell_s) / sum(self.dwell_s)))
        start_s = 0.0
        while True:
            end_s = start_s + float(rng.exponential(self.dwell_s[state]))
            # Given their number, Poisson arrivals are uniform over the stay.
            count = int(rng.poisson(self.rates_per_s[state] * (end_s - start_s)))
            yield from np.sort(rng.uniform(start_s, end_s, count)).tolist()
            start_s = end_s
            state = (state + int(rng.integers(1, states))) % states


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A rate that is constant over steps of `step_s` and repeats after the last; `cv` as in Gamma (1: Poisson).

    Made by running a unit-rate process in operational time, the integral of the rate: exact, nothing is thinned.
    """

    rates_per_s: tuple[float, ...]
    step_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _positive("step_s", self.step_s)
        _positive("cv", self.cv)
        if not self.rates_per_s or min(self.rates_per_s) < 0:
            raise WorkloadError(f"rates_per_s {self.rates_per_s}: give at least one, each of 0 or more")
        _positive("the mean rate", self.rate_per_s)

    @classmethod
    def sinusoid(
        cls, rate_per_s: float, amplitude: float, period_s: float, steps: int = 96, cv: float = 1.0
    ) -> Diurnal:
        """A sine of mean `rate_per_s` and relative `amplitude` (0..1) that starts at its mean, rising, in steps."""
        if not 0.0 <= amplitude <= 1.0 or steps < 2:
            raise WorkloadError(f"amplitude {amplitude} must lie in 0..1, and steps ({steps}) be 2 or more")
        phases = (np.arange(steps) + 0.5) * (2.0 * math.pi / steps)
        rates = rate_per_s * (1.0 + amplitude * np.sin(phases))
        return cls(tuple(rates.tolist()), period_s / steps, cv)

    @property
    def rate_per_s(self) -> float:
        return sum(self.rates_per_s) / len(self.rates_per_s)

    @property
    def period_s(self) -> float:
        return len(self.rates_per_s) * self.step_s

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        steps = len(self.rates_per_s)
        edges = np.concatenate(([0.0], np.cumsum(self.rates_per_s))) * self.step_s
        turn = float(edges[-1])  # arrivals expected in one period
        for operational in Gamma(1.0, self.cv).times(rng):
            periods, rest = divmod(operational, turn)
            step = min(int(np.searchsorted(edges, rest, side="right")) - 1, steps - 1)
            within_s = (rest - float(edges[step])) / self.rates_per_s[step]
            yield (periods * steps + step) * self.step_s + within_s
