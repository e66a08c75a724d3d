"""Compares the times of the same requests in a live system and in the simulator, to judge the simulator.

The error of a quantile is simulated / live - 1, where both quantiles are over the same requests. These functions have
no side effects, except that `figure` draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = (0.5, 0.95)
MEASURES = ("ttft", "tpot", "jct")
JUDGED = ("ttft", "tpot")
AIMS_PERCENT: dict[str, dict[str, float]] = {
    "sim": {"ttft": 10.0, "tpot": 3.0, "goodput": 3.0},
    "vllm": {"ttft": 15.0, "tpot": 15.0, "goodput": 15.0},
}
"""Largest errors (per cent) by kind of engine and measure. Sim engines are modelled exactly, so theirs are narrower."""


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one request in seconds: to the first token, per later token, and to the last token.

    `tpot_s` is None for an answer of one token.
    """

    ttft_s: float
    tpot_s: float | None
    jct_s: float


@dataclass(frozen=True, slots=True)
class Line:
    """One quantile of one measure in milliseconds, live and simulated.

    `low_ms` and `high_ms` are the least and the greatest over the simulation's seeds, which draw ties differently.
    """

    measure: str
    quantile: float
    live_ms: float
    simulated_ms: float
    low_ms: float
    high_ms: float

    @property
    def error_percent(self) -> float:
        return 100.0 * (self.simulated_ms / self.live_ms - 1.0)

    def met(self, kind: str) -> bool | None:
        """Returns whether the error is within the aim for this kind of engine; None for a measure that is not
        judged.
        """
        return abs(self.error_percent) <= AIMS_PERCENT[kind][self.measure] if self.measure in JUDGED else None


@dataclass(frozen=True, slots=True)
class Stream:
    """The decode phase of one answer: the seconds of its first and last token on a common clock, and its lengths."""

    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int


def compare(live: Sequence[Times], simulated: Sequence[Sequence[Times]]) -> list[Line]:
    """Returns a line for each measure and quantile.

    `simulated` has one sequence of times for each seed; the simulated quantile is over the requests of all seeds.
    """
    if not live or not simulated or not all(simulated):
        raise ValueError("nothing to compare: a side has no finished request")
    lines = []
    for measure in MEASURES:
        seen = values(live, measure)
        runs = [values(run, measure) for run in simulated]
        for quantile in QUANTILES:
            by_seed = [float(np.quantile(run, quantile)) for run in runs]
            lines.append(
                Line(
                    measure,
                    quantile,
                    1e3 * float(np.quantile(seen, quantile)),
                    1e3 * float(np.quantile(np.concatenate(runs), quantile)),
                    1e3 * min(by_seed),
                    1e3 * max(by_seed),
                )
            )
    return lines


def as_json(times: Sequence[Times]) -> list[list[float | None]]:
    """Returns the times as results keep them: a list [ttft, tpot, jct] for each request, in seconds with six digits."""
    found = [(one.ttft_s, one.tpot_s, one.jct_s) for one in times]
    return [[None if s is None else float(f"{s:.6g}") for s in one] for one in found]


def lines_of(case: Mapping[str, Any]) -> list[Line]:
    """Returns the lines of a stored case, computed again from its requests' times.

    Files that were written before these were kept have the quantiles only.
    """
    if "live" not in case:
        return [Line(**{name: line[name] for name in Line.__dataclass_fields__}) for line in case["lines"]]
    return compare(times_of(case["live"]), [times_of(run) for run in case["simulated"]])


def times_of(stored: Sequence[Sequence[float | None]]) -> list[Times]:
    """Returns the times that `as_json` gave."""
    return [Times(ttft_s or 0.0, tpot_s, jct_s or 0.0) for ttft_s, tpot_s, jct_s in stored]


def values(times: Sequence[Times], measure: str) -> np.ndarray:
    """Returns one measure, sorted, in seconds, of all requests that have it."""
    found = [getattr(one, f"{measure}_s") for one in times]
    return np.sort(np.array([value for value in found if value is not None], dtype=np.float64))


def table(lines: Sequence[Line], kind: str) -> str:
    """Returns the comparison as a text table, judged by the aims for this kind of engine."""
    rows = [f"{'':12}{'live':>10}{'simulated':>12}{'error':>10}   over seeds of the ties"]
    for one in lines:
        name = f"{one.measure.upper()} p{100 * one.quantile:.0f}"
        missed = one.met(kind) is False
        flag = f"   above {AIMS_PERCENT[kind][one.measure]:.0f} %" if missed else ""
        rows.append(
            f"{name:12}{one.live_ms:8,.1f} ms{one.simulated_ms:9,.1f} ms{one.error_percent:+8.1f} %"
            f"   {one.low_ms:,.1f} .. {one.high_ms:,.1f} ms{flag}"
        )
    return "\n".join(rows)


def figure(cases: dict[str, tuple[Sequence[Times], Sequence[Sequence[Times]]]]) -> Figure:
    """Draws the distributions, with a row of panels for each case.

    The live one is a broad line, on which each simulated seed is a thin line.
    """
    made, axes = plots.figure(columns=len(MEASURES), rows=len(cases), width=3.4, height=2.7)
    panels = iter(axes)
    for name, (live, simulated) in cases.items():
        for measure in MEASURES:
            panel = next(panels)
            _cdf(panel, values(live, measure), plots.COLOURS[4], 3.5)
            for run in simulated:
                _cdf(panel, values(run, measure), plots.COLOURS[1], 0.6)
            panel.set(xlabel=f"{measure.upper()}, ms", ylabel="share of requests", ylim=(0, 1))
            panel.set_title(name if measure == MEASURES[0] else "", loc="left", fontsize="medium")
            panel.text(0.97, 0.16, "live", color=plots.COLOURS[4], ha="right", transform=panel.transAxes)
            panel.text(0.97, 0.06, "simulated", color=plots.COLOURS[1], ha="right", transform=panel.transAxes)
    return made


def _cdf(panel: Axes, seconds: np.ndarray, colour: str, width: float) -> None:
    panel.plot(1e3 * seconds, np.arange(1, len(seconds) + 1) / len(seconds), color=colour, linewidth=width)


def decode_load(streams: Sequence[Stream]) -> list[tuple[float, float, float]]:
    """Returns (sequences, KV tokens, seconds per step) for each answer that streamed.

    The first two are means over the answer's decode phase, and include the answer itself. Answers that began or ended
    during that phase count for the part of it in which they ran.
    """
    found = []
    for one in streams:
        length_s = one.last_s - one.first_s
        if one.output_tokens < 2 or length_s <= 0:
            continue
        sequences = kv_tokens = 0.0
        for other in streams:
            low, high = max(one.first_s, other.first_s), min(one.last_s, other.last_s)
            if high > low:
                share = (high - low) / length_s
                sequences += share
                kv_tokens += share * (other.prompt_tokens + _grown(other, (low + high) / 2))
        found.append((sequences, kv_tokens, length_s / (one.output_tokens - 1)))
    return found


def _grown(stream: Stream, at_s: float) -> float:
    """Returns the output tokens that a request has at time `at_s` within its decode phase."""
    return 1 + (stream.output_tokens - 1) * (at_s - stream.first_s) / (stream.last_s - stream.first_s)
