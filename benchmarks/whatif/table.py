"""The table that compares the base with every variant.

Differences are in per cent of the base; those of shares are in percentage points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.experiments.base import Metrics
from benchmarks.seeds import paired, spread


@dataclass(frozen=True, slots=True)
class Line:
    """A metric and how the table shows it: the value times `scale`, in `unit`."""

    label: str
    metric: str
    scale: float = 1.0
    unit: str = ""


LINES = (
    Line("TTFT mean", "ttft_mean_s", 1e3, "ms"),
    Line("TTFT p50", "ttft_p50_s", 1e3, "ms"),
    Line("TTFT p95", "ttft_p95_s", 1e3, "ms"),
    Line("TTFT p99", "ttft_p99_s", 1e3, "ms"),
    Line("TPOT mean", "tpot_mean_s", 1e3, "ms"),
    Line("TPOT p95", "tpot_p95_s", 1e3, "ms"),
    Line("JCT mean", "jct_mean_s", 1.0, "s"),
    Line("JCT p99", "jct_p99_s", 1.0, "s"),
    Line("SLO attainment", "slo_share", 100.0, "%"),
    Line("goodput", "goodput_per_s", 1.0, "req/s"),
    Line("throughput", "throughput_tok_s", 1.0, "tok/s"),
    Line("prefill queue mean", "prefill_queue_mean_s", 1e3, "ms"),
    Line("pool mean", "pool_mean_s", 1e3, "ms"),
    Line("KV transfer mean", "transfer_mean_s", 1e3, "ms"),
    Line("KV moved", "transfer_gbytes", 1.0, "GB"),
    Line("core links in use", "link_use/core", 100.0, "%"),
    Line("rack links in use", "link_use/rack", 100.0, "%"),
    Line("NICs in use", "link_use/nic", 100.0, "%"),
    Line("prefill prefix hits", "prefill_hit_share", 100.0, "%"),
    Line("decode prefix hits", "decode_hit_share", 100.0, "%"),
    Line("imbalance", "imbalance_tokens", 1.0, "tokens"),
    Line("idle at barriers", "barrier_idle_share", 100.0, "%"),
    Line("colocated", "colocated_share", 100.0, "%"),
    Line("preemptions", "preemptions"),
    Line("engine time", "fleet/engine_s", 1.0 / 3600.0, "h"),
    Line("engines warm", "fleet/warm_s", 1.0 / 3600.0, "h"),
    Line("engine starts", "fleet/starts"),
    Line("role switches", "fleet/switches"),
    Line("rejected", "rejected"),
    Line("unfinished", "unfinished"),
)

Runs = Mapping[str, Mapping[int, Metrics]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One metric of one variant: its mean over the seeds, and how it differs from the base's mean.

    `percent` is the difference in per cent of the base's mean. `certain` says whether the paired 95 % interval of the
    difference excludes 0; it is None for a single seed.
    """

    value: float | None
    difference: float | None = None
    percent: float | None = None
    certain: bool | None = None


def compare(runs: Runs) -> dict[str, dict[str, Cell]]:
    """Returns cells by metric and variant; the first variant is the base.

    Metrics that no variant has are left out, and so are counts of rare events that are 0 everywhere.
    """
    base = next(iter(runs))
    found: dict[str, dict[str, Cell]] = {}
    for line in LINES:
        row = {name: _cell(runs, base, name, line.metric) for name in runs}
        if any(cell.value is not None for cell in row.values()) and not _only_zeros(line, row):
            found[line.metric] = row
    return found


def _only_zeros(line: Line, row: Mapping[str, Cell]) -> bool:
    """Returns whether the metric is not worth a line: it counts something rare (rejections, say), and is always 0."""
    quiet = ("colocated_share", "preemptions", "rejected", "unfinished", "barrier_idle_share")
    return line.metric in quiet and not any(cell.value for cell in row.values())


def _cell(runs: Runs, base: str, name: str, metric: str) -> Cell:
    ours = _values(runs[name], metric)
    if ours is None:
        return Cell(None)
    before = _values(runs[base], metric)
    if name == base or before is None or len(before) != len(ours):
        return Cell(spread(ours).mean)
    found = paired(before, ours)
    certain = found.significant if len(ours) > 1 else None
    return Cell(found.ours.mean, found.difference.mean, found.relative_percent, certain)


def _values(by_seed: Mapping[int, Metrics], metric: str) -> list[float] | None:
    values = [by_seed[seed].get(metric) for seed in sorted(by_seed)]
    found = [v for v in values if v is not None]
    return found if len(found) == len(values) and found else None


def rows(runs: Runs) -> list[list[str]]:
    """Returns the comparison as rows of text: label, base, variants."""
    shown = {line.metric: line for line in LINES}
    return [
        [
            f"{shown[metric].label}, {shown[metric].unit}".rstrip(", "),
            *(_text(c, shown[metric]) for c in row.values()),
        ]
        for metric, row in compare(runs).items()
    ]


def means(runs: Runs) -> dict[str, float | None]:
    """Returns the base's metrics, each as its mean over the seeds."""
    base = next(iter(runs))
    return {line.metric: _cell(runs, base, base, line.metric).value for line in LINES}


def with_measured(lines: Sequence[Sequence[str]], found: Mapping[str, float | None]) -> list[list[str]]:
    """Returns rows of `rows` with a column of what was measured behind the label; most metrics are not measured."""
    labels = {f"{line.label}, {line.unit}".rstrip(", "): line for line in LINES}
    made = []
    for label, *rest in lines:
        value = found.get(labels[label].metric)
        made.append([label, "–" if value is None else _figure(value * labels[label].scale), *rest])
    return made


def _figure(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{value:,.{digits}f}"


def _text(cell: Cell, line: Line) -> str:
    if cell.value is None:
        return "–"
    text = _figure(cell.value * line.scale)
    # Differences of shares are in percentage points.
    if line.unit == "%" and cell.difference is not None:
        change, unit = cell.difference * line.scale, "pts"
    elif cell.percent is not None:
        change, unit = cell.percent, "%"
    else:
        return text
    doubt = " ?" if cell.certain is False and round(change, 1) else ""
    return f"{text} ({change:+.1f} {unit}{doubt})"


def text_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns the table as text, with the first column aligned left and all others aligned right."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in (header, *lines)
    )
