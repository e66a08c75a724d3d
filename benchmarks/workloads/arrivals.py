"""Arrival processes say when requests come; their rate is constant or varies.

Each process has `rate_per_s`, its long-run mean, and `times(rng)`, an endless stream of times in seconds from 0. The
times are drawn from the exact distribution, and equal generators give equal times. The processes of a constant mean
rate start in their stationary state: the expected number of arrivals in [0, t) is rate * t for every t, not only in the
limit. For this, the first gap of a Gamma process is a residual gap (a uniform share of a length-biased gap), and a
Markov-modulated process draws its first state in proportion to the time that it spends in each.
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
    """The interface of an arrival process."""

    @property
    def rate_per_s(self) -> float:
        """The long-run mean number of arrivals in a second."""

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Yields arrival times in seconds from 0, without end and never falling."""


def until(times: Iterator[float], end_s: float) -> Iterator[float]:
    """Yields the `times` (rising, in seconds) that lie before `end_s`."""
    return takewhile(lambda t: t < end_s, times)


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise WorkloadError(f"{name} is {value}: give a finite number above 0")


@dataclass(frozen=True, slots=True)
class Poisson:
    """A Poisson process: the gaps between arrivals are independent and exponential."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        return Gamma(self.rate_per_s, 1.0).times(rng)


@dataclass(frozen=True, slots=True)
class Gamma:
    """A process whose gaps are independent and Gamma distributed, with mean 1/rate and coefficient of variation `cv`.

    A `cv` above 1 makes bursts, 1 is a Poisson process, and below 1 the arrivals are more even.
    """

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
    """Poisson arrivals whose rate depends on a hidden state that changes at random.

    State i has the rate `rates_per_s[i]` and lasts an exponential time of mean `dwell_s[i]`. Each of the other states
    is equally likely to follow. Two states with different rates make bursts.
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
        # Every state is entered equally often, so the share of time spent in a state is proportional to its dwell time.
        state = int(rng.choice(states, p=np.array(self.dwell_s) / sum(self.dwell_s)))
        start_s = 0.0
        while True:
            end_s = start_s + float(rng.exponential(self.dwell_s[state]))
            # Once their number is known, Poisson arrivals are uniform over the time spent in the state.
            count = int(rng.poisson(self.rates_per_s[state] * (end_s - start_s)))
            yield from np.sort(rng.uniform(start_s, end_s, count)).tolist()
            start_s = end_s
            state = (state + int(rng.integers(1, states))) % states


@dataclass(frozen=True, slots=True)
class Diurnal:
    """Arrivals whose rate is constant over steps of `step_s` seconds and repeats after the last step.

    `cv` is the coefficient of variation of the gaps as in `Gamma` (1 is a Poisson process). A Gamma process of rate 1
    runs in operational time, which is the integral of the rate, and its times are mapped back to seconds. This is
    exact: no arrival is drawn and then rejected.
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
        """Returns a rate that follows a sine of period `period_s`, approximated by `steps` constant rates.

        The sine has the mean `rate_per_s` and the relative `amplitude` (0..1); it starts at its mean and rises.
        """
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
        # `turn` is the number of arrivals expected in one period.
        turn = float(edges[-1])
        for operational in Gamma(1.0, self.cv).times(rng):
            periods, rest = divmod(operational, turn)
            step = min(int(np.searchsorted(edges, rest, side="right")) - 1, steps - 1)
            within_s = (rest - float(edges[step])) / self.rates_per_s[step]
            yield (periods * steps + step) * self.step_s + within_s
