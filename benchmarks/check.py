"""Checks every figure that a document shows against the committed results, and where these come from.

- The rows of every experiment are computed again from the stored measures, and docs/results.md and the predictors' page
  are made again.
- Each number in README.md, docs and the READMEs of the benchmarks that cites a results file is compared with it,
  rounded to the decimals that are shown. A text may leave out the sign ("18.6 % shorter" for -18.6).
- A figure that cites no file and is not marked as given is a problem (`benchmarks.figures`).
- A results file whose runs are of several states of the code, of code in no commit, or of other code than that of the
  commit that they name, is a problem (`benchmarks.provenance`). That the code has changed since is none; such files are
  listed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import figures, provenance
from benchmarks.checkout import ROOT, Origin, code_at, code_digest
from benchmarks.document import OTHERS, document, section
from benchmarks.experiments import registry
from benchmarks.experiments.base import ExperimentError
from benchmarks.predictors.page import markdown
from benchmarks.results_io import RUNS, Stored, load
from benchmarks.runner import code_of

# The tolerance, relative and absolute; stored measures have nine digits.
TOLERANCE = 1e-6

PREDICTORS = "predictors/results.json"
GENERATED = (
    "docs/results.md",
    "benchmarks/results/predictors/README.md",
    "docs/metrics.md",
    "docs/policies.md",
)
"""Documents whose numbers are not marked: two are made from results here, two from the code of metrics and policies."""


@dataclass(slots=True)
class Checked:
    """The findings of a check, and how much it checked. Each problem is a sentence; notes need no action."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    rows: int = 0
    documents: int = 0
    cited: int = 0

    @property
    def summary(self) -> str:
        """One line that says how much was checked."""
        found = f"{len(self.problems)} problems" if self.problems else "no problem"
        return (
            f"{self.files} results files, {self.rows} rows of experiments computed again, {self.cited} figures cited"
            f" in {self.documents} documents: {found}"
        )


def check(root: Path = ROOT) -> Checked:
    """Checks the results and documents of the checkout at `root`."""
    checked, results = Checked(), root / "benchmarks/results"
    stored = _experiments(results, checked)
    _others(results, checked)
    _made_again(root, results, checked)
    _documents(root, results, checked)
    _say_origins(root, results, stored, checked)
    return checked


def _experiments(results: Path, checked: Checked) -> dict[str, Stored]:
    """Checks the files of experiments and returns their contents by name below `results`."""
    found: dict[str, Stored] = {}
    for path in sorted((results / "experiments").rglob("*.json")):
        file = path.relative_to(results).as_posix()
        if file in OTHERS or RUNS in path.relative_to(results).parts:
            continue
        checked.files += 1
        try:
            stored = found[file] = load(path)
            rows = list(_wrong_rows(file, stored))
        except ExperimentError as error:
            checked.problems.append(str(error))
            continue
        checked.rows += len(stored.rows)
        checked.problems += rows
        checked.problems += provenance.problems(file, provenance.of_experiment(stored), stored.command)
    return found


def _wrong_rows(file: str, stored: Stored) -> Iterator[str]:
    """Yields a sentence for each row that the experiment does not make from the stored measures."""
    rows = registry.load(stored.results.experiment).compare(stored.results)
    if [row.name for row in rows] != [row.name for row in stored.rows]:
        yield f"{file}: its rows have other names than the experiment gives now: python -m benchmarks remake"
        return
    for new, old in zip(rows, stored.rows, strict=True):
        if not all(_same(getattr(new, part), getattr(old, part)) for part in ("paper", "ours", "half_width")):
            yield f"{file}: {old.name!r} is {old.ours} in the file, {new.ours} from its measures"


def _same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _others(results: Path, checked: Checked) -> None:
    """Checks the origins of the files that `python -m benchmarks run` did not write, and that all of them are known."""
    for path in sorted(results.rglob("*.json")):
        file = path.relative_to(results).as_posix()
        if file in OTHERS:
            checked.files += 1
            whole = _read(path)
            checked.problems += provenance.problems(
                file, provenance.of_other(whole), str(whole.get("command", ""))
            )
        elif not file.startswith("experiments/"):
            checked.problems.append(
                f"{file} has no reader (benchmarks/document.py), so no document can show it"
            )


def _read(path: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return whole


def _made_again(root: Path, results: Path, checked: Checked) -> None:
    """Checks that the pages that are made from results are what the results say."""
    pages = {root / "docs/results.md": document(results)}
    if (results / PREDICTORS).exists():
        pages[results / "predictors/README.md"] = markdown(_read(results / PREDICTORS))
    for path, made in pages.items():
        if not path.exists() or path.read_text("utf-8") != made:
            checked.problems.append(
                f"{path.relative_to(root)} is not what the results say: python -m benchmarks document"
            )


def _documents(root: Path, results: Path, checked: Checked) -> None:
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    paths += sorted((root / "benchmarks").rglob("README.md"))
    for path in paths:
        name = path.relative_to(root).as_posix()
        if name in GENERATED:
            continue
        text = path.read_text("utf-8")
        checked.documents += 1
        checked.problems += [
            f"{name}:{line}: a mark has no number before it, or is not `<!-- ours: FILE | NAME -->`"
            for line in figures.malformed(text)
        ]
        checked.problems += [
            f"{name}:{line}: {figure!r} cites no results file: add `<!-- ours: FILE | NAME -->` behind it, or"
            f" `<!-- given: {figure} -->` to its line if nobody measured it (benchmarks/figures.py)"
            for line, figure in figures.unmarked(text)
        ]
        for one in figures.cited(text):
            checked.cited += 1
            checked.problems += [f"{name}:{one.line}: {problem}" for problem in _wrong_figure(one, results)]


def _wrong_figure(one: figures.Cited, results: Path) -> Iterator[str]:
    try:
        row = next((row for row in section(results, one.file).rows if row.name == one.name), None)
    except ExperimentError as error:
        yield str(error)
        return
    value = None if row is None else getattr(row, one.part)
    if value is None:
        yield f"{one.file} has no figure {one.name!r} ({one.part})"
    elif not figures.shows(one.shown, value):
        yield f"{one.shown} stands for {value:.6g} ({one.file}, {one.name!r}, {one.part})"


Digest = Callable[[Path], str]
"""A function from the root of a checkout to the digest of the code on which the runs of a results file depend."""


def _say_origins(root: Path, results: Path, stored: dict[str, Stored], checked: Checked) -> None:
    """Compares the digests of the runs with their commits and with the present code. Notes which files have runs of
    other code than the present one, and which do not know.
    """
    made: dict[str, tuple[list[Origin], Digest | None]] = {
        file: (provenance.of_experiment(one), partial(code_of, registry.load(one.results.experiment)))
        for file, one in stored.items()
    }
    for file in OTHERS:
        if (results / file).exists():
            whole = _read(results / file)
            paths = provenance.paths_of_other(whole)
            made[file] = (provenance.of_other(whole), None if paths is None else partial(code_digest, paths))
    untraced = [file for file, (origins, _) in made.items() if not origins]
    changed = [
        file
        for file, (origins, digest) in made.items()
        if origins and digest is not None and {origin.code for origin in origins} != {digest(ROOT)}
    ]
    if changed:
        checked.notes.append(f"runs of other code than the present one: {', '.join(sorted(changed))}")
    if untraced:
        checked.notes.append(f"written before runs kept their origin: {', '.join(sorted(untraced))}")
    _compare_with_commits(root, made, checked)


def _compare_with_commits(
    root: Path, made: dict[str, tuple[list[Origin], Digest | None]], checked: Checked
) -> None:
    """Finds runs whose digest is not that of their commit. Notes the commits that the checkout at `root` lacks."""
    commits = sorted({origin.commit for origins, _ in made.values() for origin in origins if origin.clean})
    missing = []
    for commit in commits:
        with code_at(commit, root) as then:
            if then is None:
                missing.append(commit)
                continue
            for file, (origins, digest) in made.items():
                here = {origin.code for origin in origins if origin.clean and origin.commit == commit}
                if here and digest is not None and here != {digest(then)}:
                    checked.problems.append(f"{file} names commit {commit}, whose code is another one")
    if missing:
        checked.notes.append(f"commits that are not in this checkout: {', '.join(missing)}")
