"""Presents results to people: as a table for the terminal, and as one HTML page of all experiments.

The page contains its style and plots, so it needs no other files.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import provenance
from benchmarks.aims.whose import Whose, counted, whose
from benchmarks.experiments.base import JUDGED, Results, Row
from benchmarks.results_io import Stored, load_all, write_text
from benchmarks.workloads.catalog import stand_in

HEADER = ("figure", "paper", "ours", "difference", "aim")
OWNER = {Whose.FORM: ", by a form of ours", Whose.NOBODY: ", not counted"}
"""Words behind an aim that is not what its row lets a reader expect."""


def number(value: float | None, unit: str = "") -> str:
    """Returns the number as text with four significant digits and separated thousands, or `–` for None."""
    if value is None:
        return "–"
    size = abs(value)
    digits = 0 if size >= 1_000 else 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4
    text = f"{value:,.{digits}f}" if size >= 1e-3 or size == 0 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def cells(row: Row, experiment: str = "") -> tuple[str, ...]:
    """Returns the row's cells as text, in the order of HEADER. A row without an aim has "" there. With the name of its
    experiment, the aim says where a form of ours is held against a paper's figure, and where it is not counted.
    """
    ours = number(row.ours)
    if row.half_width is not None:
        ours += f" ± {number(row.half_width)}"
    difference = "–" if row.difference is None else f"{row.difference:+.1f} {row.difference_unit}"
    owner = whose(experiment, row)
    aim = f"{row.aim}: {JUDGED[row.met]}{OWNER.get(owner, '')}" if owner is not None else ""
    return (row.name, number(row.paper, row.unit), f"{ours} {row.unit}".strip(), difference, aim)


def aims(rows: Iterable[Row], experiment: str) -> str:
    """Returns in one sentence how many aims are met, missed and open, those of a paper apart from our own; "" without
    any.
    """
    return "; ".join(f"{owner.value}: {said}" for owner, said in counted(experiment, rows).items() if said)


def text_table(rows: Sequence[Row], experiment: str = "") -> str:
    """Returns the rows as a table of paper | ours | difference | aim, for a terminal."""
    lines = [HEADER, *(cells(row, experiment) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    shown = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    notes = [f"  {row.name}: {row.note}" for row in rows if row.note]
    return "\n".join([*shown, *notes])


def stand_ins(results: Results) -> list[str]:
    """Returns a line for each workload of the results that is not a whole published trace: excerpts and generators."""
    names = {str(c.get("trace", c.get("workload", ""))) for c in results.variants.values()} - {""}
    told = {name: stand_in(name) for name in sorted(names)}
    return [f"on {name}: {what}" for name, what in told.items() if what is not None]


def write_html(folder: Path, target: Path) -> tuple[int, list[Path]]:
    """Writes the page of all results in and below `folder` to `target`.

    Returns (number of results files, other JSON files found there). Raises ExperimentError where there are no results.
    """
    found, others = load_all(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    sections = [_section(one, path.parent) for path, one in found.items()]
    write_text(target, page("Sluice: the papers' figures re-run", sections, [*found.values()]))
    return len(found), others


def page(title: str, sections: Iterable[str], contents: Sequence[Stored] = ()) -> str:
    """Returns a whole HTML page, with links to the sections of `contents` at its top."""
    links = "".join(f'<li><a href="#{_id(s)}">{_id(s)}</a> {escaped(s.summary)}</li>' for s in contents)
    body = "\n".join(sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<style>{_STYLE}</style></head>\n<body><h1 id="top">{escaped(title)}</h1>\n'
        + (f"<nav><ul>{links}</ul></nav>\n{_LEGEND}\n" if links else "")
        + f"{body}\n</body></html>\n"
    )


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns an HTML table whose cells are plain text."""
    head = "".join(f"<th>{escaped(h)}</th>" for h in header)
    lines = ["<tr>" + "".join(f"<td>{escaped(c)}</td>" for c in row) + "</tr>" for row in rows]
    return (
        f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _section(stored: Stored, folder: Path) -> str:
    results = stored.results
    notes = "".join(f"<li>{escaped(row.name)}: {escaped(row.note)}</li>" for row in stored.rows if row.note)
    made_by = provenance.shown(provenance.of_experiment(stored)) or f"commit {stored.commit}"
    size = "reduced size" if results.quick else "full size"
    parts = [
        f'<section id="{_id(stored)}"><h2>{escaped(results.experiment)} <a href="#top">contents</a></h2>'
        f"<p>{escaped('. '.join([stored.summary, *stand_ins(results)]))}</p>",
        *(_plot(folder / results.experiment / name) for name in stored.plots),
        html_table(HEADER, (cells(row, results.experiment) for row in stored.rows)),
        f"<p>{escaped(told)}</p>" if (told := aims(stored.rows, results.experiment)) else "",
        f"<ul class=notes>{notes}</ul>" if notes else "",
        f"<p class=origin>{size}, {len(results.variants)} variants, seeds {_seeds(results.seeds)}; "
        f"{escaped(made_by)}, {escaped(stored.date)}; <code>{escaped(stored.command)}</code></p>",
        _runs(stored),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _runs(stored: Stored) -> str:
    """Returns the HTML of a folded table with the means over the seeds of all stored measures."""
    results = stored.results
    metrics: dict[str, None] = {}
    for by_seed in results.runs.values():
        for run in by_seed.values():
            metrics.update(dict.fromkeys(run))
    rows = []
    for metric in metrics:
        row = [metric]
        for by_seed in results.runs.values():
            seen = [v for run in by_seed.values() if (v := run.get(metric)) is not None]
            row.append(number(sum(seen) / len(seen)) if seen else "–")
        rows.append(row)
    table = html_table(("mean over seeds", *results.variants), rows)
    return f"<details><summary>all metrics of all variants</summary>{table}</details>"


def _plot(path: Path) -> str:
    """Returns the HTML that embeds the plot, or that names it where its file is missing."""
    if not path.exists():
        return f"<p class=missed>{escaped(path.name)} is missing beside the results</p>"
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img src="data:image/png;base64,{content}" alt="{escaped(path.stem)}"></figure>'


def _seeds(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) if len(seeds) <= 6 else f"{seeds[0]}–{seeds[-1]}"


def _id(stored: Stored) -> str:
    return escaped(stored.results.experiment)


def escaped(text: str) -> str:
    """Returns the text with its special characters escaped for HTML."""
    return html.escape(text)


_LEGEND = (
    "<p class=origin>paper: as printed there, – where it has no such figure; ours: mean over the seeds, ± half of its "
    "95 % interval (wide where the seeds are few); difference: ours against the paper's.</p>"
)

_STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.6rem;font-weight:600}h2{font-size:1.2rem;font-weight:600;margin-top:3rem}
ul{padding-left:1.2rem}a{color:#0060a0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:1rem 0}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid #e6e6e6;vertical-align:top}
th{font-weight:600;color:#555;font-size:.85rem}
td:not(:first-child),th:not(:first-child){white-space:nowrap}
td:first-child,th:first-child{min-width:11rem}
p.missed{color:#b04000;font-weight:600}
h2 a{font-size:.8rem;font-weight:400;margin-left:.5rem}
figure{margin:1rem 0;overflow-x:auto}figure img{max-width:100%;min-width:34rem;height:auto}
.origin,.notes,details{font-size:.85rem;color:#555}code{font-size:.85em}
"""
