"""The figures of trials: attainment, goodput, TTFT, TPOT, engine-hours; series by time; and comparisons of columns.

Engine time counts every engine that is held: what serves, stands by warm, drains, or is sick. It is what a fleet costs.
Engine time serving, beside it, counts the engines of active duty that are ready or quarantined.

A column is an arm of a run, or a run without arms. Its value is the mean over its trials. The difference from the first
column has a 95 % interval, made in one of two ways, which `basis` names:

    repeats       both columns have the same number of trials, two or more: Student's t of the paired differences, as
                  `sluice simulate` makes it for seeds (`benchmarks.seeds.paired`); repeat r has equal requests in both
    time blocks   else: the load's time is cut into BLOCKS equal blocks, which are resampled (a bootstrap), together in
                  both columns where their loads are equally long. Requests of one moment wait for one another, so that
                  resampling single requests would give an interval that is far too narrow.

Not claimed: blocks of a few seconds are independent of one another. A long queue joins them; more repeats are better.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.live.experiment.client import Sent
from benchmarks.live.experiment.plan import Trial
from benchmarks.live.stats import percentile
from benchmarks.seeds import paired
from predictors.protocol import FloatArray, IntArray

BLOCKS = 12
RESAMPLES = 400
QUANTILE_WINDOW_S = 5.0
"""Quantiles and attainment at a moment are over the requests that ended in this time before it."""
HOUR_S = 3600.0


@dataclass(slots=True)
class Trialled:
    """A trial that was made: when it began (seconds since the run did), the length of its load, and what was seen."""

    trial: Trial
    began_s: float
    load_s: float
    requests: list[Sent] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a trial, or all of it: the requests that were to be sent in it, its length, its share of the trial, and
    the mean numbers of engines that were held and that served, where they are known.
    """

    requests: Sequence[Sent]
    seconds: float
    held: float | None = None
    serving: float | None = None
    share: float = 1.0


Ratio = tuple[float, float]
"""A numerator and a denominator, both of which add up over the parts of a trial."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure by name, as people read it: a value times `scale`, in `unit`.

    The value is the `ratio` of sums over requests, or with `q` this quantile of the `times` of requests.
    """

    name: str
    label: str
    unit: str
    scale: float
    ratio: Callable[[Part], Ratio] | None = None
    times: Callable[[Sent], float | None] | None = None
    q: float = 0.0

    def of(self, part: Part) -> float | None:
        """Returns the value, before it is scaled; None where there was nothing to measure."""
        if self.times is not None:
            seen = self.seen(part)
            return percentile(seen, self.q) if seen else None
        assert self.ratio is not None
        above, below = self.ratio(part)
        return above / below if below > 0 else None

    def seen(self, part: Part) -> list[float]:
        """Returns the times of the requests that have one."""
        assert self.times is not None
        return [v for one in part.requests if (v := self.times(one)) is not None]


def _met(part: Part) -> Ratio:
    judged = [one.met for one in part.requests if one.met is not None]
    return float(sum(judged)), float(len(judged))


def _good(part: Part) -> Ratio:
    """Counts the requests that were answered whole and met the objectives that they had."""
    good = sum(one.problem is None and one.met is not False for one in part.requests)
    return float(good), part.seconds


def _tokens(part: Part) -> Ratio:
    return float(sum(one.output_tokens for one in part.requests if one.problem is None)), part.seconds


def _failed(part: Part) -> Ratio:
    return float(sum(one.problem is not None for one in part.requests)), float(len(part.requests))


def _hours(engines: Callable[[Part], float | None]) -> Callable[[Part], Ratio]:
    def ratio(part: Part) -> Ratio:
        mean = engines(part)
        return (0.0, 0.0) if mean is None else (mean * part.seconds / HOUR_S, part.share)

    return ratio


def _held(part: Part) -> float | None:
    return part.held


def _serving(part: Part) -> float | None:
    return part.serving


def _mean(times: Callable[[Sent], float | None]) -> Callable[[Part], Ratio]:
    def ratio(part: Part) -> Ratio:
        seen = [v for one in part.requests if (v := times(one)) is not None]
        return math.fsum(seen), float(len(seen))

    return ratio


def _ttft_s(one: Sent) -> float | None:
    return one.ttft_s


def _tpot_s(one: Sent) -> float | None:
    return one.tpot_s


def _e2e_s(one: Sent) -> float | None:
    return one.e2e_s


FIGURES = (
    Figure("attainment", "SLO attainment", "%", 100.0, _met),
    Figure("goodput_per_s", "goodput", "req/s", 1.0, _good),
    Figure("tokens_per_s", "output", "tokens/s", 1.0, _tokens),
    Figure("failed_share", "failed requests", "%", 100.0, _failed),
    Figure("ttft_mean_s", "TTFT mean", "ms", 1e3, _mean(_ttft_s)),
    Figure("ttft_p50_s", "TTFT p50", "ms", 1e3, None, _ttft_s, 0.5),
    Figure("ttft_p95_s", "TTFT p95", "ms", 1e3, None, _ttft_s, 0.95),
    Figure("tpot_mean_s", "TPOT mean", "ms", 1e3, _mean(_tpot_s)),
    Figure("tpot_p95_s", "TPOT p95", "ms", 1e3, None, _tpot_s, 0.95),
    Figure("e2e_p50_s", "e2e p50", "ms", 1e3, None, _e2e_s, 0.5),
    Figure("e2e_p95_s", "e2e p95", "ms", 1e3, None, _e2e_s, 0.95),
    Figure("engine_hours", "engine time", "engine-h", 1.0, _hours(_held)),
    Figure("serving_hours", "engine time serving", "engine-h", 1.0, _hours(_serving)),
)


def whole(trialled: Trialled) -> Part:
    """Returns a trial as one part."""
    return _part(trialled, trialled.requests, 0.0, trialled.load_s)


def blocks(trialled: Trialled) -> list[Part]:
    """Returns a trial in BLOCKS parts of equal length, by the times at which requests were to be sent."""
    length_s = trialled.load_s / BLOCKS
    found: list[list[Sent]] = [[] for _ in range(BLOCKS)]
    for one in trialled.requests:
        found[min(int(one.planned_s / length_s), BLOCKS - 1)].append(one)
    return [
        _part(trialled, requests, i * length_s, (i + 1) * length_s, 1.0 / BLOCKS)
        for i, requests in enumerate(found)
    ]


def _part(
    trialled: Trialled, requests: Sequence[Sent], start_s: float, end_s: float, share: float = 1.0
) -> Part:
    held, serving = (
        _mean_of(name, trialled.samples, start_s, end_s) for name in ("engines_held", "engines_active")
    )
    return Part(requests, end_s - start_s, held, serving, share)


def _mean_of(name: str, samples: Sequence[Mapping[str, Any]], start_s: float, end_s: float) -> float | None:
    """Returns the mean of a number in the samples of a time, or the one in the nearest sample if there is none."""
    seen = [(s["at_s"], s[name]) for s in samples if s.get(name) is not None]
    if not seen:
        return None
    inside = [n for at_s, n in seen if start_s <= at_s < end_s]
    if inside:
        return sum(inside) / len(inside)
    middle_s = (start_s + end_s) / 2
    return float(min(seen, key=lambda one: abs(one[0] - middle_s))[1])


def figures(trialled: Sequence[Trialled]) -> dict[str, float | None]:
    """Returns every figure: the mean over the trials in which there was something to measure."""
    found: dict[str, float | None] = {}
    for figure in FIGURES:
        values = [v for one in trialled if (v := figure.of(whole(one))) is not None]
        found[figure.name] = math.fsum(values) / len(values) if values else None
    return found


def summary_of(trialled: Sequence[Trialled]) -> dict[str, Any]:
    """Returns a run's figures in short, with how many requests it sent and how its failures were explained."""
    requests = [one for trial in trialled for one in trial.requests]
    problems: dict[str, int] = defaultdict(int)
    for one in requests:
        if one.problem is not None:
            problems[one.problem[:160]] += 1
    late = [one.sent_s - one.planned_s for one in requests if one.sent_s is not None]
    return {
        "requests": len(requests),
        "failed": sum(problems.values()),
        "problems": dict(sorted(problems.items(), key=lambda item: -item[1])[:10]),
        "client_late_p95_s": round(percentile(late, 0.95), 6) if late else None,
        **figures(trialled),
    }


# -------------------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a comparison: a name, and the trials whose mean it shows."""

    name: str
    trials: Sequence[Trialled]


@dataclass(frozen=True, slots=True)
class Difference:
    """A column's figure less the first column's, with its 95 % interval (None: it cannot be told) and its basis."""

    difference: float
    interval: tuple[float, float] | None
    basis: str | None


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of all columns, in its unit. `differences` has None for the first column and where one is missing."""

    figure: Figure
    values: tuple[float | None, ...]
    differences: tuple[Difference | None, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns the line as the page reads it."""
        second = self.differences[1] if len(self.differences) > 1 else None
        return {
            "figure": self.figure.label,
            "name": self.figure.name,
            "unit": self.figure.unit,
            "values": list(self.values),
            "difference": None if second is None else second.difference,
            "interval": None if second is None or second.interval is None else list(second.interval),
            "basis": None if second is None else second.basis,
            "differences": [
                None
                if one is None
                else {
                    "difference": one.difference,
                    "interval": None if one.interval is None else list(one.interval),
                    "basis": one.basis,
                }
                for one in self.differences
            ],
        }


def compare(columns: Sequence[Column]) -> list[Line]:
    """Returns a line for each figure that some column has; differences are from the first column."""
    found = []
    for figure in FIGURES:
        values = [_value(figure, column) for column in columns]
        if all(value is None for value in values):
            continue
        differences = [None, *(_difference(figure, columns[0], column) for column in columns[1:])]
        found.append(Line(figure, tuple(values), tuple(differences)))
    return found


def _value(figure: Figure, column: Column) -> float | None:
    values = [v for one in column.trials if (v := figure.of(whole(one))) is not None]
    return figure.scale * math.fsum(values) / len(values) if values else None


def _difference(figure: Figure, base: Column, other: Column) -> Difference | None:
    ours, theirs = _value(figure, other), _value(figure, base)
    if ours is None or theirs is None:
        return None
    if len(base.trials) == len(other.trials) > 1:
        before = [figure.of(whole(one)) for one in _by_repeat(base)]
        after = [figure.of(whole(one)) for one in _by_repeat(other)]
        if None not in before and None not in after:
            spread = paired(
                [v for v in before if v is not None], [v for v in after if v is not None]
            ).difference
            assert spread.low is not None
            assert spread.high is not None
            interval = (figure.scale * spread.low, figure.scale * spread.high)
            return Difference(figure.scale * spread.mean, interval, "repeats")
    interval_of_blocks = _resampled(figure, base, other)
    return Difference(
        ours - theirs, interval_of_blocks, None if interval_of_blocks is None else "time blocks"
    )


def _by_repeat(column: Column) -> list[Trialled]:
    return sorted(column.trials, key=lambda one: one.trial.repeat)


def _resampled(figure: Figure, base: Column, other: Column) -> tuple[float, float] | None:
    """Returns the 95 % interval of a difference by resampling time blocks; None where too few resamples have one."""
    same = all(math.isclose(one.load_s, base.trials[0].load_s) for one in (*base.trials, *other.trials))
    rng = np.random.default_rng(0)
    picks = rng.integers(0, BLOCKS, (RESAMPLES, BLOCKS))
    others = picks if same else rng.integers(0, BLOCKS, (RESAMPLES, BLOCKS))
    found = _means(figure, other, others) - _means(figure, base, picks)
    found = found[np.isfinite(found)]
    if len(found) < RESAMPLES / 2:
        return None
    low, high = np.percentile(found, (2.5, 97.5)).tolist()
    return figure.scale * low, figure.scale * high


def _means(figure: Figure, column: Column, picks: IntArray) -> FloatArray:
    """Returns the column's value for each row of picked blocks (rows, BLOCKS), as (rows,); NaN where it has none."""
    values = []
    for one in column.trials:
        parts = blocks(one)
        if figure.times is not None:
            seen = [np.array(figure.seen(part), dtype=np.float64) for part in parts]
            rows = [np.concatenate([seen[i] for i in row]) for row in picks]
            values.append([float(np.quantile(row, figure.q)) if row.size else math.nan for row in rows])
            continue
        assert figure.ratio is not None
        above, below = np.array([figure.ratio(part) for part in parts], dtype=np.float64)[picks].sum(axis=1).T
        values.append(np.divide(above, below, out=np.full(len(picks), math.nan), where=below > 0).tolist())
    return np.asarray(np.mean(values, axis=0), dtype=np.float64)


# ----------------------------------------------------------------------------------------------------------- series


def series(trialled: Trialled) -> dict[str, list[float | None]]:
    """Returns the series of a trial by second since its load began: the samples, and what the client saw.

    Rates count the requests that ended in the second before; errors are failed requests.
    """
    last_s = max((s["at_s"] for s in trialled.samples), default=trialled.load_s)
    times = [float(second) for second in range(math.ceil(last_s) + 1)]
    found: dict[str, list[float | None]] = {"t": list(times)}
    names = sorted({name for s in trialled.samples for name in s} - {"trial", "at_s", "t", "error"})
    for name in names:
        found[name] = _at(times, [(s["at_s"], s.get(name)) for s in trialled.samples])
    found |= _seen(times, trialled.requests)
    return found


def _at(times: Sequence[float], seen: Sequence[tuple[float, float | None]]) -> list[float | None]:
    """Returns the values at these times: each is the nearest one within a second, else None."""
    values: list[float | None] = []
    for at_s in times:
        near = min(seen, key=lambda one: abs(one[0] - at_s), default=None)
        values.append(None if near is None or abs(near[0] - at_s) > 1.0 else near[1])
    return values


def _seen(times: Sequence[float], requests: Sequence[Sent]) -> dict[str, list[float | None]]:
    ended = [((one.last_s if one.last_s is not None else one.planned_s), one) for one in requests]
    by_second: dict[int, list[Sent]] = defaultdict(list)
    for end_s, one in ended:
        by_second[math.ceil(end_s)].append(one)
    classes = sorted({one.request_class for one in requests})
    found: dict[str, list[float | None]] = defaultdict(list)
    for at_s in times:
        last = int(at_s)
        second = by_second.get(last, [])
        window = [
            one for at in range(last - int(QUANTILE_WINDOW_S) + 1, last + 1) for one in by_second.get(at, ())
        ]
        found["requests_per_s"].append(float(sum(one.problem is None for one in second)))
        found["errors_per_s"].append(float(sum(one.problem is not None for one in second)))
        found["tokens_per_s"].append(float(sum(one.output_tokens for one in second if one.problem is None)))
        for name in classes:
            part = Part([one for one in window if one.request_class == name], QUANTILE_WINDOW_S)
            found[f"attainment/{name}"].append(FIGURES[0].of(part))
            for label, of in (("ttft", _ttft_s), ("tpot", _tpot_s), ("e2e", _e2e_s)):
                for text, q in (("p50", 0.5), ("p95", 0.95)):
                    found[f"{label}_{text}_s/{name}"].append(Figure(label, "", "", 1.0, None, of, q).of(part))
    return dict(found)


def mean_series(trials: Sequence[Trialled]) -> dict[str, list[float | None]]:
    """Returns the mean of the trials' series, second by second, as far as the longest of them goes."""
    all_series = [series(one) for one in trials]
    longest = max(all_series, key=lambda one: len(one["t"]))
    found: dict[str, list[float | None]] = {"t": longest["t"]}
    for name in sorted({name for one in all_series for name in one} - {"t"}):
        values: list[float | None] = []
        for i in range(len(longest["t"])):
            seen = [v for one in all_series if i < len(one.get(name, ())) and (v := one[name][i]) is not None]
            values.append(math.fsum(seen) / len(seen) if seen else None)
        found[name] = values
    return found
