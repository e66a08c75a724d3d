"""The report of a run: one HTML page that needs no server and no script, the same as JSON, and its plots as PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report as page
from benchmarks.live.experiment.figures import Column, Line, compare, mean_series
from benchmarks.live.experiment.stored import Run

PANELS: tuple[tuple[str, str, float, str], ...] = (
    ("requests_per_s", "answers", 1.0, "req/s"),
    ("ttft_p95_s", "TTFT p95", 1e3, "ms"),
    ("tpot_p95_s", "TPOT p95", 1e3, "ms"),
    ("attainment", "SLO attainment", 100.0, "%"),
    ("in_flight", "in flight", 1.0, "prompts"),
    ("queued", "queue", 1.0, "prompts"),
    ("kv_usage_max", "fullest KV", 100.0, "%"),
    ("engines_active", "engines that serve", 1.0, "engines"),
)
"""The panels that are drawn: the name of a series (for series by class, its beginning), title, scale, unit."""


def as_json(run: Run) -> dict[str, Any]:
    """Returns the report's content as data."""
    columns = run.columns()
    return {
        "run": run.shown,
        "text": run.text,
        "versions": run.whole.get("versions") or {},
        "plan": run.whole.get("plan"),
        "trials": run.whole.get("trials") or [],
        "actions": run.actions,
        "columns": [column.name for column in columns],
        "table": [line.as_json() for line in compare(columns)] if columns else [],
        "samples": {column.name: mean_series(column.trials) for column in columns},
    }


def as_png(run: Run) -> bytes:
    """Returns the plots of the run as one PNG; actions are vertical lines."""
    from matplotlib import pyplot as plt

    from benchmarks import plots

    columns = run.columns()
    drawn, axes = plots.figure(columns=2, rows=(len(PANELS) + 1) // 2, width=5.4, height=2.5)
    all_series = {column.name: mean_series(column.trials) for column in columns}
    short = _short([column.name for column in columns])
    times = [a["trial_s"] for a in run.actions if a.get("trial_s") is not None]
    for (name, title, scale, unit), axis in zip(PANELS, axes, strict=False):
        lines = {}
        for column in columns:
            for series, label in _of(all_series[column.name], name):
                points = [
                    (t, v * scale)
                    for t, v in zip(all_series[column.name]["t"], series, strict=True)
                    if v is not None and t is not None
                ]
                if points:
                    text = " ".join(part for part in (short[column.name], label) if part)
                    lines[text] = plots.Series([t for t, _ in points], [v for _, v in points])
        if lines:
            highest = max(v for one in lines.values() for v in one.y)
            axis.set_ylim(0.0, 1.08 * highest if highest > 0 else 1.0)
            plots.lines(axis, lines, "s since the start", unit, title)
            for line in axis.lines:
                line.set_marker("")
        else:
            axis.set_title(f"{title}: not measured", loc="left")
        for at_s in sorted(set(times)):
            axis.axvline(at_s, color=plots.QUIET, linewidth=0.8, linestyle="--")
    for axis in axes[len(PANELS) :]:
        axis.set_visible(False)
    drawn.tight_layout()
    buffer = io.BytesIO()
    drawn.savefig(buffer, dpi=plots.DPI, metadata={"Software": None})
    plt.close(drawn)
    return buffer.getvalue()


def _of(found: Mapping[str, Sequence[float | None]], name: str) -> list[tuple[Sequence[float | None], str]]:
    """Returns the series called `name`, or those of all classes, each with its class."""
    if name in found:
        return [(found[name], "")]
    return [(values, key.partition("/")[2]) for key, values in found.items() if key.startswith(f"{name}/")]


def _short(names: Sequence[str]) -> dict[str, str]:
    """Returns what tells the columns apart: the arm, or nothing where there is one column."""
    if len(names) == 1:
        return {names[0]: ""}
    return {name: name.partition(" / ")[2] or name for name in names}


def as_html(run: Run) -> str:
    """Returns the whole report as one page."""
    whole, columns = run.whole, run.columns()
    parts = [_heading(whole)]
    if columns:
        lines = compare(columns)
        image = base64.b64encode(as_png(run)).decode()
        parts += [
            page.html_table(*table(columns, lines)),
            _basis(lines),
            f'<figure><img alt="series by time" src="data:image/png;base64,{image}"></figure>',
        ]
    else:
        parts.append("<p class=missed>no request was sent</p>")
    if run.actions:
        rows = [
            (f"{action['at_s']:.1f}", _seconds(action.get("trial_s")), str(action["what"]))
            for action in run.actions
        ]
        header = ("s since the run began", "s since its load began", "what was done")
        parts += ["<h2>Actions</h2>", page.html_table(header, rows)]
    problems = (whole.get("summary") or {}).get("problems") or {}
    if problems:
        rows_of = [(why, str(n)) for why, n in problems.items()]
        parts += ["<h2>Failed requests</h2>", page.html_table(("why", "requests"), rows_of)]
    parts += [
        "<h2>The file</h2>",
        f"<pre>{page.escaped(run.text)}</pre>",
        "<h2>Versions</h2>",
        page.html_table(("of", "version"), [(k, str(v)) for k, v in (whole.get("versions") or {}).items()]),
    ]
    return page.page(f"Experiment {whole['name']}", parts)


def _heading(whole: Mapping[str, Any]) -> str:
    plan = whole.get("plan") or {}
    message = f": {whole['message']}" if whole.get("message") else ""
    lines = [
        str(plan.get("summary") or ""),
        f"{whole['id']}: {whole['state']}{message}",
        f"{len(plan.get('trials') or [1])} trials of {plan.get('requests', 0)} requests in all,"
        f" {whole.get('took_s') or 0:.0f} s",
    ]
    return "".join(f"<p>{page.escaped(line)}</p>" for line in lines if line)


def _basis(lines: Sequence[Line]) -> str:
    found = sorted({d.basis for line in lines for d in line.differences if d is not None and d.basis})
    if not found:
        return "<p class=origin>Each figure is the mean over the trials.</p>"
    return (
        "<p class=origin>Each figure is the mean over the trials. In brackets: the difference from the first column and"
        f" its 95 % interval, made from {page.escaped(' and '.join(found))}; an interval that holds 0 shows no"
        " difference.</p>"
    )


def table(columns: Sequence[Column], lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of a comparison as text."""
    header = ["", *(column.name for column in columns)]
    rows = []
    for line in lines:
        unit = line.figure.unit
        row = [f"{line.figure.label}, {unit}"]
        for value, difference in zip(line.values, line.differences, strict=True):
            text = page.number(value)
            if value is not None and difference is not None:
                text += f" ({difference.difference:+.3g}"
                if difference.interval is not None:
                    text += f", {difference.interval[0]:+.3g} to {difference.interval[1]:+.3g}"
                text += ")"
            row.append(text)
        rows.append(row)
    return header, rows


def _seconds(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, int | float) else ""
