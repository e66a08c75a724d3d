"""The figures of `benchmarks.watching.cost`, computed from the samples of its rounds and windows."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments.base import JUDGED, Row, aimed
from benchmarks.live.versus import ratio_of
from benchmarks.plots import bars, figure, save
from benchmarks.seeds import paired, spread

LEAST_RATE = 0.99
"""Aim: requests/s of the overhead benchmark with three pages open, or with 1 % of traces, over those without."""
MOST_TTFT_MS = 0.1
"""Aim: milliseconds that three open pages add to the TTFT of a request that is alone."""
MOST_SHARE_PERCENT = 3.0
"""Aim: CPU time of the dashboard's process with 64 engines and three pages open, in per cent of one core."""
MOST_RSS_MB = 200.0
"""Aim: memory (RSS) of the dashboard's process with 64 engines and three pages open, in 10^6 bytes."""

NOBODY, BOARD, PAGES, TRACED = "nobody", "dashboard", "pages", "traced"
STATES = {
    BOARD: "a dashboard, no page",
    PAGES: "a dashboard, three pages",
    TRACED: "1 % of traces, no dashboard",
}
"""The states that are compared with the one in which nobody watches, and their names in the report."""
AIMED = (PAGES, TRACED)
ALONE = "c=1"
"""The row of the load in which each request is alone, so that nothing of its TTFT is a queue."""

Sample = Mapping[str, Any]
"""One row in one state of one round: round, row, state, requests_per_s, ttft_mean_ms, ttft_p50_ms, hot_cpu_ms."""
Window = Mapping[str, Any]
"""The dashboard's process for some seconds at many engines: number of pages, CPU share of a core, RSS in bytes."""


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a result: ratios and differences paired by round, then the dashboard at many engines."""
    samples: Sequence[Sample] = [one for part in whole["rounds"] for one in part["samples"]]
    for name in dict.fromkeys(one["row"] for one in samples):
        for state in STATES:
            yield from _against_nobody(samples, name, state)
    yield from _many(whole)


def pairs(samples: Sequence[Sample], row: str, state: str, measure: str) -> tuple[list[float], list[float]]:
    """Returns the values of a measure without and with `state`, for each round that has both."""
    found: dict[str, dict[int, float]] = {NOBODY: {}, state: {}}
    for one in samples:
        if one["row"] == row and one["state"] in found:
            found[one["state"]][one["round"]] = one[measure]
    both = sorted(found[NOBODY].keys() & found[state].keys())
    return [found[NOBODY][number] for number in both], [found[state][number] for number in both]


def _against_nobody(samples: Sequence[Sample], row: str, state: str) -> Iterator[Row]:
    base, ours = pairs(samples, row, state, "requests_per_s")
    if len(base) < 2:
        return
    name = f"{row}, {STATES[state]}"
    rate = ratio_of(row, state, base, ours)
    asked = state in AIMED and row != ALONE
    over = Row(
        f"{name}: requests/s over those of nobody watching",
        None,
        rate.ratio,
        half_width=(rate.high - rate.low) / 2,
    )
    yield aimed(over, f"at least {LEAST_RATE:g}", least=LEAST_RATE) if asked else over
    for measure, what in (("ttft_mean_ms", "mean"), ("ttft_p50_ms", "p50")):
        added = paired(*pairs(samples, row, state, measure)).difference
        more = Row(f"{name}: added TTFT {what}", None, added.mean, "ms", added.half_width)
        asked = state == PAGES and row == ALONE
        yield aimed(more, f"at most {MOST_TTFT_MS:g}", most=MOST_TTFT_MS) if asked else more
    cpu = ratio_of(row, state, *pairs(samples, row, state, "hot_cpu_ms"))
    yield Row(
        f"{name}: CPU of ingress and router a request, over that of nobody watching",
        None,
        cpu.ratio,
        half_width=(cpu.high - cpu.low) / 2,
    )


def _many(whole: Mapping[str, Any]) -> Iterator[Row]:
    windows: Sequence[Window] = whole["many"]["windows"]
    engines = whole["many"]["engines"]
    for pages in sorted({one["pages"] for one in windows}):
        own = [one for one in windows if one["pages"] == pages]
        name = f"{engines} engines, {pages} pages"
        share = spread([100.0 * one["share"] for one in own])
        used = Row(f"{name}: CPU of the dashboard, of one core", None, share.mean, "%", share.half_width)
        yield aimed(used, f"at most {MOST_SHARE_PERCENT:g}", most=MOST_SHARE_PERCENT) if pages else used
        most = max(one["rss_bytes"] for one in own) / 1e6
        yield Row(
            f"{name}: memory of the dashboard (RSS), greatest",
            None,
            most,
            "MB",
            aim=f"at most {MOST_RSS_MB:g}" if pages else "",
            met=most <= MOST_RSS_MB if pages else None,
        )
        pss = statistics.median(one["pss_bytes"] for one in own) / 1e6
        yield Row(f"{name}: memory of the dashboard (PSS), median", None, pss, "MB")


def table(found: Sequence[Row]) -> str:
    """Returns the rows as Markdown."""
    lines = ["| figure | 95 % | aim | |", "|---|--:|---|---|"]
    for row in found:
        half = "" if row.half_width is None else f" ± {row.half_width:.3g}"
        verdict = JUDGED[row.met] if row.aim else ""
        lines.append(f"| {row.name} | {row.ours:.4g}{half} {row.unit} | {row.aim} | {verdict} |")
    return "\n".join(lines)


def draw(whole: Mapping[str, Any], folder: Path, name: str) -> None:
    """Writes a plot: requests/s lost and TTFT added by each state, and the dashboard's share of a core."""
    found = list(rows(whole))
    made, (rate, ttft, share) = figure(columns=3, width=5.6)
    lost = {
        row.name.partition(":")[0]: (100.0 * (1.0 - (row.ours or 0.0)), _percent(row))
        for row in found
        if row.name.endswith("requests/s over those of nobody watching")
    }
    bars(rate, lost, "% of requests/s", "Requests/s lost to watching")
    added = {
        row.name.partition(":")[0]: (row.ours or 0.0, row.half_width)
        for row in found
        if row.name.endswith("added TTFT mean") and row.name.startswith(f"{ALONE},")
    }
    bars(ttft, added, "ms", "TTFT added to a request that is alone, mean")
    cpu = {
        row.name.partition(":")[0]: (row.ours or 0.0, row.half_width)
        for row in found
        if row.name.endswith("of one core")
    }
    bars(share, cpu, "% of one core", "CPU of the dashboard")
    save(folder, name, made)


def _percent(row: Row) -> float | None:
    return None if row.half_width is None else 100.0 * row.half_width
