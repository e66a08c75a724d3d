"""Makes `docs/not_reproduced.md`: the papers' figures that were not reached, with their causes, from the results.

`benchmarks.check` compares the page with what this module makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks import provenance, report
from benchmarks.aims import stated
from benchmarks.aims.causes import ABSENT, SAID, Cause, Said, cause_of
from benchmarks.aims.whose import NOT_COUNTED, Whose, tally, whose
from benchmarks.checkout import ROOT
from benchmarks.document import RESULTS, Section, sections
from benchmarks.experiments import registry
from benchmarks.experiments.base import JUDGED, Row

PAGE = ROOT / "docs/not_reproduced.md"
PAPERS = {
    "BalanceRoute": ("balance_route_", "forecast_value"),
    "NetKV": ("netkv_",),
    "DeepFlow": ("deepflow_", "scaling_fork"),
    "FlowKV": ("flowkv_",),
    "MFS": ("mfs_",),
}
"""The papers, each with the beginnings of the names of the experiments that compare with it."""

HEADER = ("figure", "form", "paper", "ours", "difference", "aim")
FORMS = {Whose.PAPER: "the paper's", Whose.FORM: "ours"}
NO_CAUSE = "Cause not found."
OPEN = "Open: the interval holds a bound of the aim, so these seeds decide neither way."


def page(results: Path = RESULTS) -> str:
    """Returns the text of docs/not_reproduced.md."""
    by_paper: dict[str, list[Section]] = {paper: [] for paper in PAPERS}
    for section in sections(results):
        paper = paper_of(section.experiment)
        if paper is not None:
            by_paper[paper].append(section)
    parts = [_HEAD, _summary(by_paper)]
    for paper, shown in by_paper.items():
        parts.append(f"## {paper}")
        for section in shown:
            parts += _missed(section)
        parts += _contradicted(paper, shown)
        parts += _absent(paper)
    return "\n\n".join([*parts, *_not_counted()]) + "\n"


def paper_of(experiment: str) -> str | None:
    """Returns the paper that an experiment compares with; None for experiments and measurements of our own."""
    found = (paper for paper, starts in PAPERS.items() if experiment and experiment.startswith(starts))
    return next(found, None)


def not_reached(section: Section) -> list[Row]:
    """Returns the rows of a section in which a paper's aim is missed or open, in the section's order."""
    return [row for row in section.rows if whose(section.experiment, row) in FORMS and row.met is not True]


def _summary(by_paper: dict[str, list[Section]]) -> str:
    lines = [
        f"| paper | {Whose.PAPER.value} | {Whose.FORM.value} | figures without an aim | without an experiment |",
        "|---|---|---|--:|--:|",
    ]
    for paper, shown in by_paper.items():
        rows = [(section.experiment, row) for section in shown for row in section.rows]
        cells = [_told(rows, owner) for owner in (Whose.PAPER, Whose.FORM)]
        without = sum(row.paper is not None and not row.aim for _, row in rows)
        lines.append(
            f"| [{paper}](#{paper.lower()}) | {' | '.join(cells)} | {without} | {len(ABSENT[paper])} |"
        )
    return "\n".join(lines)


def _told(rows: Sequence[tuple[str, Row]], owner: Whose) -> str:
    """Returns how many aims of an owner are met, missed and open, and how many of them a paper states in words only."""
    found = [row for name, row in rows if whose(name, row) is owner]
    in_words = sum(row.paper is None for row in found)
    return (tally(found) or "–") + (f"; {in_words} of them in words" if in_words else "")


def _missed(section: Section) -> Iterator[str]:
    """Yields a section's part of the page: its rows by cause, in the order of the first row of each cause."""
    by_cause: dict[Cause | str | None, list[Row]] = {}
    for row in not_reached(section):
        cause = cause_of(section.experiment, row.name)
        key = OPEN if cause is None and _is_open(row) else cause
        by_cause.setdefault(key, []).append(row)
    if not by_cause:
        return
    yield f"### {section.title}\n\nFrom [results.md](results.md#{section.anchor})."
    for said, rows in by_cause.items():
        yield _why(said)
        yield _table(section.experiment, rows)


def _is_open(row: Row) -> bool:
    """Returns whether the row's interval holds its aim's bound."""
    return row.met is None and row.ours is not None and row.half_width is not None


def _why(cause: Cause | str | None) -> str:
    if isinstance(cause, str):
        return cause
    return NO_CAUSE if cause is None else f"Cause: {cause.text} (`{cause.said_in}`)"


def _table(experiment: str, rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|---|---|--:|--:|--:|---|"]
    for row in rows:
        name, paper, ours, difference, _ = report.cells(row)
        owner = whose(experiment, row)
        assert owner is not None, row.name
        shown = f"{name} ({row.note})" if row.note else name
        cells = (shown, FORMS[owner], paper, ours, difference, f"{row.aim}: {JUDGED[row.met]}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _contradicted(paper: str, shown: Sequence[Section]) -> Iterator[str]:
    """Yields the part of the page on words of a paper that rows without an aim contradict."""
    found = [(said, rows) for section in shown for said in SAID if (rows := contradicting(said, section))]
    if found:
        yield f"### {paper}: said in words"
    for said, rows in found:
        yield f"The paper: {said.words} {_why(said.cause)}"
        lines = [f"| {name} | {ours} |" for name, _, ours, *_ in map(report.cells, rows)]
        yield "\n".join(["| figure | ours |", "|---|--:|", *lines])


def contradicting(said: Said, section: Section) -> list[Row]:
    """Returns the rows of the section for which the words do not hold, as `Said` defines it."""
    if section.experiment != said.experiment:
        return []
    named = [row for row in section.rows if fnmatchcase(row.name, said.rows)]
    return [row for row in named if row.ours is not None and row.ours + (row.half_width or 0.0) < said.least]


def _absent(paper: str) -> Iterator[str]:
    yield f"### {paper}: without an experiment"
    yield "\n".join(f"- {one.what}. {one.why}" for one in ABSENT[paper])
    waiting = [name for name in registry.EXPERIMENTS if paper_of(name) == paper and _is_waiting(name)]
    if waiting:
        yield f"### {paper}: without a result yet"
        yield "\n".join(f"- `{name}`: {_waiting(name)}" for name in waiting)


def _is_waiting(name: str) -> bool:
    return f"experiments/{registry.place(name)}" in provenance.MISSING


def _waiting(name: str) -> str:
    """Returns what is known of an experiment that has no committed result."""
    aims = " and its aims, which a file states" if stated.stated(name) is not None else ""
    return f"{registry.load(name).SUMMARY}. It has its code{aims}, and no committed result yet."


def _not_counted() -> Iterator[str]:
    yield "## Aims that are not counted"
    yield "\n".join(
        f"- `{name}`, rows {' and '.join(f'`{pattern}`' for pattern in one.patterns)}. {one.why}"
        for name, found in NOT_COUNTED.items()
        for one in found
    )


_HEAD = """# What could not be reproduced

`python -m benchmarks document` writes this page from the files in `benchmarks/results` and from the causes in
`benchmarks/aims/causes.py`; `python -m benchmarks check` compares it. It has every row in which a figure of a paper, or
what a paper says in words, was aimed at and is *missed* (the whole interval says so) or *open* (the interval holds a
bound of the aim, or it could not be judged). [results.md](results.md) has the others, and those that are not counted.
*form* says whether the row runs what its experiment calls the paper's own form, of which one reading counts where the
paper leaves several open, or a form of ours that is held against the same figure. Of ours, ± is half of the 95 %
interval; a figure without it is of one run, or has none. A cause is one that somebody has found and written down; the
file that has it at length is named behind it. *Figures without an aim* stand beside ours in results.md, where nobody
has said how near they must be."""
