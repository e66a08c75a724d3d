"""The report of Sluice beside vllm-router: ratios paired by round with their aims, CPU by process, and a plot."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from benchmarks.experiments.base import JUDGED, Row, aimed
from benchmarks.live.versus import ratio_of
from benchmarks.peers.rows import (
    CASES,
    HOT_CPU,
    HOT_CPU_TOKEN,
    PYTHON,
    RATE,
    SHORT_WORDS,
    STEP_S,
    TTFT_P50,
    TTFT_P99,
    WRK,
    Aim,
    Case,
    own_aim,
    ratio_aim,
)
from benchmarks.peers.sides import BARE, LEAN, ROUTER, SIDES, SLUICE
from benchmarks.plots import Series, figure, lines, save
from benchmarks.seeds import spread

Sample = Mapping[str, Any]

COMPARED: Mapping[str, Sequence[str]] = {
    ROUTER: (RATE, TTFT_P50, TTFT_P99, HOT_CPU),
    LEAN: (RATE, TTFT_P50, TTFT_P99, HOT_CPU),
    BARE: (RATE, HOT_CPU),
}
"""The measures of which the ratio to each side is reported."""

WORDS: Mapping[str, str] = {
    RATE: "requests/s",
    TTFT_P50: "TTFT p50",
    TTFT_P99: "TTFT p99",
    HOT_CPU: "CPU a request between clients and engines",
    HOT_CPU_TOKEN: "CPU a token between clients and engines",
}
SHOWN = 0.01
"""The least share of a side's CPU time in a row with which a process is listed."""


def samples_of(whole: Mapping[str, Any]) -> list[Sample]:
    """Returns all samples of a result."""
    return [one for part in whole["rounds"] for one in part["samples"]]


def paired_values(
    samples: Sequence[Sample], row: str, measure: str, peer: str
) -> tuple[list[float], list[float]]:
    """Returns the values of a measure in a row of the peer and of Sluice, for each round that has both above 0."""
    found: dict[str, dict[int, float]] = {peer: {}, SLUICE: {}}
    for one in samples:
        if one["row"] == row and one["side"] in found and (one.get(measure) or 0.0) > 0.0:
            found[one["side"]][one["round"]] = one[measure]
    both = sorted(found[peer].keys() & found[SLUICE].keys())
    return [found[peer][number] for number in both], [found[SLUICE][number] for number in both]


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a result: ratios by row and peer, the CPU time of Sluice, then tokenising."""
    samples = samples_of(whole)
    measured = {one["row"] for one in samples}
    for name, case in CASES.items():
        if name in measured:
            yield from _ratios(samples, case)
            yield from _own(samples, case)
    yield from _tokenising(whole["tokenising"])


def _ratios(samples: Sequence[Sample], case: Case) -> Iterator[Row]:
    for peer, measures in COMPARED.items():
        for measure in measures:
            base, ours = paired_values(samples, case.name, measure, peer)
            if len(base) < 2:
                continue
            one, aim = ratio_of(case.name, measure, base, ours), ratio_aim(case, measure, peer)
            yield row_of(
                f"{case.name}: {WORDS[measure]}, Sluice / {SIDES[peer]}",
                one.ratio,
                (one.low, one.high),
                aim,
                note=f"{rounded(one.ours)} / {rounded(one.base)}",
            )


def _own(samples: Sequence[Sample], case: Case) -> Iterator[Row]:
    """Yields the CPU time of Sluice's ingress and router in a row: of a request, and of a token of a long answer."""
    for measure in (HOT_CPU, HOT_CPU_TOKEN) if case.tokens >= 100 else (HOT_CPU,):
        own = [one[measure] for one in samples if one["row"] == case.name and one["side"] == SLUICE]
        if len(own) < 2:
            continue
        found = spread(own)
        assert found.low is not None
        assert found.high is not None
        what = "a token" if measure == HOT_CPU_TOKEN else "a request"
        name = f"{case.name}: CPU of ingress and router {what}"
        yield row_of(name, found.mean, (found.low, found.high), own_aim(case, measure), unit="ms")


def _tokenising(whole: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for one in whole:
        name = f"tokenising a prompt of {one['words']:,} words, {one['tokenizer']}: CPU of the ingress"
        yield Row(name, None, one["cpu_ms"], "ms", note=f"{one['tokens']:,} tokens")


def row_of(
    name: str,
    value: float,
    interval: tuple[float, float],
    aim: Aim | None,
    unit: str = "",
    note: str = "",
) -> Row:
    """Returns a figure with its 95 % interval, and whether that meets the aim (None: it holds the aim)."""
    low, high = interval
    half_width = (high - low) / 2
    if aim is None:
        return Row(name, None, value, unit, half_width, note=note)
    row = Row(name, None, value, unit, half_width, note=note)
    return aimed(row, aim.text, least=aim.least, most=aim.most)


def rounded(value: float) -> str:
    """Returns a value with three digits, or without a fraction from 1,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# --------------------------------------------------------------------------------------------------------------- tables


def markdown(whole: Mapping[str, Any]) -> str:
    """Returns the whole report: the figures of every side, their ratios, and the CPU time of every process."""
    samples = samples_of(whole)
    return "\n\n".join(
        [
            f"# Sluice beside vllm-router {whole['peer'].get('vllm-router', '')}, "
            f"{len(whole['rounds'])} rounds in turn",
            *whole["notes"],
            "## Medians of every side\n\n" + _medians(samples),
            "## Ratios, 95 % intervals, and aims\n\n" + ratio_table(list(rows(whole))),
            "## CPU time of every process, medians in ms\n\n" + _processes(samples),
        ]
    )


def _medians(samples: Sequence[Sample]) -> str:
    lines_ = [
        "| row | side | requests/s | TTFT p50, ms | TTFT p99, ms | whole p50, ms |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for (row, side), own in _grouped(samples).items():
        cells = [_median(own, name) for name in (RATE, TTFT_P50, TTFT_P99, "e2e_p50_ms")]
        lines_.append(f"| {row} | {SIDES[side]} | {' | '.join(cells)} |")
    return "\n".join(lines_)


def ratio_table(found: Sequence[Row]) -> str:
    """Returns ratios with their intervals, aims and verdicts as a table."""
    lines_ = ["| figure | 95 % | aim | |", "|---|--:|---|---|"]
    for row in found:
        half = "" if row.half_width is None else f" ± {row.half_width:.3g}"
        note = f" ({row.note})" if row.note else ""
        verdict = JUDGED[row.met] if row.aim else ""
        lines_.append(f"| {row.name}{note} | {row.ours:.4g}{half} {row.unit} | {row.aim} | {verdict} |")
    return "\n".join(lines_)


def _processes(samples: Sequence[Sample]) -> str:
    lines_ = ["| row | side | process | a request | a token |", "|---|---|---|--:|--:|"]
    for (row, side), own in _grouped(samples).items():
        names = dict.fromkeys(name for one in own for name in one["cpu_ms"])
        spent = {name: median(one["cpu_ms"].get(name, 0.0) for one in own) for name in names}
        spent["load client"] = median(one["client_cpu_ms"] for one in own)
        least = SHOWN * sum(spent.values())
        for name, value in sorted(spent.items(), key=lambda item: -item[1]):
            if value >= least:
                token = value / CASES[row].tokens
                lines_.append(f"| {row} | {SIDES[side]} | {name} | {value:.4f} | {token:.5f} |")
    return "\n".join(lines_)


def _grouped(samples: Sequence[Sample]) -> dict[tuple[str, str], list[Sample]]:
    """Returns the samples by row and side, in the order of both."""
    found: dict[tuple[str, str], list[Sample]] = {(row, side): [] for row in CASES for side in SIDES}
    for one in samples:
        found[one["row"], one["side"]].append(one)
    return {key: own for key, own in found.items() if own}


def _median(own: Sequence[Sample], measure: str) -> str:
    values = [one[measure] for one in own if one.get(measure) is not None]
    return rounded(median(values)) if values else ""


# ----------------------------------------------------------------------------------------------------------------- plot


def draw(whole: Mapping[str, Any], folder: Path, name: str) -> None:
    """Writes a plot over the number of clients: ratios of requests/s and of TTFT, and CPU time on the way.

    A panel without two points on any line stays away.
    """
    samples = samples_of(whole)
    made, axes = figure(columns=2, rows=2)
    over = "Sluice / the other"
    for one, client, tokens, measure, title in (
        (axes[0], WRK, 16, RATE, "Requests/s, answers of 16 tokens (wrk)"),
        (axes[1], WRK, 1, RATE, "Requests/s, answers of 1 token (wrk)"),
        (axes[2], PYTHON, 16, TTFT_P50, "TTFT p50, answers of 16 tokens (Python client)"),
    ):
        cases = _plain(client, tokens)
        _panel(
            one, {SIDES[peer]: _ratio_line(samples, cases, measure, peer) for peer in COMPARED}, over, title
        )
    cpu = {SIDES[side]: _line(samples, _plain(PYTHON, 16), HOT_CPU, side) for side in SIDES}
    _panel(axes[3], cpu, "ms", "CPU a request on the way (Python client)")
    save(folder, name, made)


def _plain(client: str, tokens: int) -> list[Case]:
    return [
        case
        for case in CASES.values()
        if (case.client, case.tokens, case.words, case.step_s) == (client, tokens, SHORT_WORDS, STEP_S)
    ]


def _ratio_line(samples: Sequence[Sample], cases: Sequence[Case], measure: str, peer: str) -> Series:
    found = {}
    for case in cases:
        base, ours = paired_values(samples, case.name, measure, peer)
        if len(base) > 1:
            found[case.clients] = ratio_of(case.name, measure, base, ours)
    halves = [(one.high - one.low) / 2 for one in found.values()]
    return Series(list(found), [one.ratio for one in found.values()], halves)


def _line(samples: Sequence[Sample], cases: Sequence[Case], measure: str, side: str) -> Series:
    found = {}
    for case in cases:
        own = [one[measure] for one in samples if one["row"] == case.name and one["side"] == side]
        if own:
            found[case.clients] = spread(own)
    return Series(
        list(found), [one.mean for one in found.values()], [one.half_width for one in found.values()]
    )


def _panel(axes: Axes, drawn: Mapping[str, Series], y: str, title: str) -> None:
    """Draws the lines that have two points or more, or hides a panel that has none."""
    found = {name: series for name, series in drawn.items() if len(series.x) > 1}
    if found:
        lines(axes, found, "clients", y, title, log_x=True)
    else:
        axes.set_visible(False)
