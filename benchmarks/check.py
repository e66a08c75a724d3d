"""Checks every figure that a document shows against the committed results, and where these come from.

- Every results file that there should be is there, in its own place (`document.expected`, `provenance.MISSING`).
- The rows of every experiment, with their notes, units and aims, are computed again from the stored measures, and so
  are docs/results.md, docs/not_reproduced.md, the predictors' page and the pages of faults. The rows of the other files
  are made from what was measured, so there is nothing that could differ. Their plots are there and whole.
- An experiment's results are of its full size, of seeds from 0, and of the variants that its code has now, if that code
  is the present one. Their runs had all published traces that their code names.
- Each number in README.md, CHANGELOG.md, docs and the READMEs that cites a results file is compared with it, rounded to
  the decimals that are shown, with its sign.
- A figure that cites no file and is not marked as given is a problem (`benchmarks.figures`).
- A results file whose runs are of several states of the code, of code in no commit, of other code than that of the
  commit that they name, or of a commit that a fresh clone lacks and that is not known as lost, is a problem
  (`benchmarks.provenance`). That the code has changed since is none; such files are listed, here and in
  docs/results.md. So are live results of a machine that was overloaded before they were measured.
- No row that has an aim and an interval is judged otherwise than by the interval (`benchmarks.experiments.base.aimed`):
  met or missed where all of it says so, else open.
- Where aims were stated before a run (`benchmarks.aims.stated`), they are those of the rows, and their digest is that
  of the file in the commit of the runs. Aims that were changed since are noted.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import figures, provenance
from benchmarks.aims import page as not_reproduced
from benchmarks.aims import stated
from benchmarks.chaos.report import page_of
from benchmarks.checkout import PRODUCT, ROOT, Origin, code_at, code_digest, imported, no_history
from benchmarks.document import OTHERS, document, expected, section
from benchmarks.experiments import registry
from benchmarks.experiments.base import JUDGED, ExperimentError, Row
from benchmarks.live.machine import overload
from benchmarks.predictors.page import markdown
from benchmarks.results_io import RUNS, Stored, load, row_as_json
from benchmarks.runner import code_of
from benchmarks.workloads.catalog import as_if_present, missing_traces

# The tolerance, relative and absolute; stored measures have nine digits.
TOLERANCE = 1e-6

PREDICTORS = "predictors/results.json"
GENERATED = (
    "docs/results.md",
    "docs/not_reproduced.md",
    "benchmarks/results/predictors/README.md",
    "docs/metrics.md",
    "docs/policies.md",
)
"""Documents whose numbers are not marked: three are made from results, two from the code of metrics and policies."""
WITHOUT_APPLICATION = (
    "benchmarks.decisions.__main__",
    "benchmarks.predictors.__main__",
    "benchmarks.transfer.__main__",
)
"""Modules that measure parts of the application, which they import, and serve none."""
WITH_BLOCKS = ("docs/api.md",)
"""Documents in which a script writes blocks from code, whose numbers are not marked."""


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
    _complete(results, checked)
    stored = _experiments(results, checked)
    _others(results, checked)
    _made_again(root, results, checked)
    _documents(root, results, checked)
    _say_origins(root, results, stored, checked)
    return checked


def _complete(results: Path, checked: Checked) -> None:
    """Checks that the results files that there should be are there, as far as they have been measured."""
    for file in expected():
        there = (results / file).exists()
        if not there and file not in provenance.MISSING:
            how = OTHERS[file].command if file in OTHERS else f"python -m benchmarks run {Path(file).stem}"
            checked.problems.append(f"{file} is not there: {how}")
        elif there and file in provenance.MISSING:
            checked.problems.append(f"{file} is there: take it off MISSING (benchmarks/provenance.py)")


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
            rows = [*_misplaced(file, stored), *_other_size(file, stored), *_wrong_rows(file, stored)]
            rows += _other_aims(file, stored, checked)
            rows += _judged_otherwise(file, stored.rows)
        except ExperimentError as error:
            checked.problems.append(str(error))
            continue
        checked.rows += len(stored.rows)
        checked.problems += rows
        plots = [path.parent / stored.results.experiment / plot for plot in stored.plots]
        checked.problems += _broken_plots(results, plots)
        checked.problems += provenance.problems(file, provenance.of_experiment(stored), stored.command)
    return found


def _misplaced(file: str, stored: Stored) -> Iterator[str]:
    place = f"experiments/{registry.place(stored.results.experiment)}"
    if file != place:
        yield f"{file} has results of {stored.results.experiment}, whose place is {place}"


def _other_size(file: str, stored: Stored) -> Iterator[str]:
    """Yields a sentence if the results are of a reduced size, of chosen seeds, or of variants that the code lacks.

    Variants are compared where the code is the present one. Older code may have had others.
    """
    results = stored.results
    if results.quick:
        yield f"{file} is of the reduced size (--quick): run it without"
    first = int(getattr(registry.load(results.experiment), "SEEDS_FROM", 0))
    if results.seeds != tuple(range(first, first + len(results.seeds))):
        yield f"{file} has the seeds {results.seeds}, not all from {first} on"
    experiment = registry.load(results.experiment)
    if {origin.code for origin in provenance.of_experiment(stored)} != {code_of(experiment)}:
        return
    with as_if_present():
        now = {variant.name: json.loads(json.dumps(variant.config)) for variant in experiment.variants(False)}
    for name in sorted(now.keys() | results.variants.keys()):
        if now.get(name) != results.variants.get(name):
            yield f"{file}: the variant {name!r} is not the one that the same code has: run it again"


def _wrong_rows(file: str, stored: Stored) -> Iterator[str]:
    """Yields a sentence for each row that the experiment does not make from the stored measures."""
    experiment = registry.load(stored.results.experiment)
    if stored.summary != experiment.SUMMARY:
        yield f"{file}: its summary is not the experiment's: python -m benchmarks remake"
    rows = experiment.compare(stored.results)
    if [row.name for row in rows] != [row.name for row in stored.rows]:
        yield f"{file}: its rows have other names than the experiment gives now: python -m benchmarks remake"
        return
    for new, old in zip(map(row_as_json, rows), map(row_as_json, stored.rows), strict=True):
        for part in sorted(new.keys() | old.keys()):
            if not _same(new.get(part), old.get(part)):
                yield (
                    f"{file}: {old['name']!r}: {part} is {old.get(part)!r} in the file, {new.get(part)!r} from its"
                    " measures"
                )


def _judged_otherwise(file: str, rows: Iterable[Row]) -> Iterator[str]:
    """Yields a sentence for each row with an aim and an interval whose verdict is not that of the one rule
    (`benchmarks.experiments.base.aimed`), and for each that does not say what its aim asks for.
    """
    for row in rows:
        if not row.aim or row.half_width is None:
            continue
        if not row.bounded:
            yield f"{file}: {row.name!r} has an aim and an interval and no bounds: judge it with `aimed`"
        elif row.met != row.verdict:
            yield (
                f"{file}: {row.name!r} is {JUDGED[row.met]}, and {JUDGED[row.verdict]} by its interval: judge it with"
                " `aimed`"
            )


def _other_aims(file: str, stored: Stored, checked: Checked) -> Iterator[str]:
    """Yields a sentence for each row whose aim is not the one that was stated before the run. Notes aims that were
    changed after it.
    """
    name = stored.results.experiment
    if not stored.aims:
        return
    if stated.digest(name) != stored.aims:
        checked.notes.append(f"{file}: its aims were changed after its runs ({stated.FOLDER}/{name}.json)")
        return
    yield from (f"{file}: {difference}" for difference in stated.differences(name, stored.rows))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(a) is type(b) and a == b


def _broken_plots(results: Path, plots: list[Path]) -> Iterator[str]:
    """Yields a sentence for each plot that is missing or not a whole PNG file."""
    for path in plots:
        if not path.exists():
            yield f"{path.relative_to(results)} is missing"
        elif not _is_png(path.read_bytes()):
            yield f"{path.relative_to(results)} is no whole PNG file"


def _is_png(data: bytes) -> bool:
    """Returns whether the data begins with the header of a picture that has pixels, and ends as a PNG file does."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or data[12:16] != b"IHDR" or data[-8:-4] != b"IEND":
        return False
    width, height = struct.unpack(">II", data[16:24])
    return b"IDAT" in data and width > 0 and height > 0


def _others(results: Path, checked: Checked) -> None:
    """Checks the origins of the files that `python -m benchmarks run` did not write, and that all of them are known."""
    for path in sorted(results.rglob("*.json")):
        file = path.relative_to(results).as_posix()
        if file in OTHERS:
            checked.files += 1
            whole = _read(path)
            of_known = provenance.paths_of_other(whole) is not None
            commands = provenance.commands(whole)
            checked.problems += provenance.problems(
                file, provenance.of_other(whole), "; ".join(commands), of_known
            )
            checked.problems += _other_command(file, commands)
            checked.problems += _judged_otherwise(file, OTHERS[file].read(whole))
            load = overload(whole)
            if load is not None:
                checked.notes.append(f"{file} is of an overloaded machine: {load}")
            if OTHERS[file].drawn:
                checked.problems += _broken_plots(results, [path.with_suffix(".png")])
        elif not file.startswith("experiments/"):
            checked.problems.append(
                f"{file} has no reader (benchmarks/document.py), so no document can show it"
            )


def _other_command(file: str, commands: list[str]) -> Iterator[str]:
    """Yields a sentence for each command of a file that is not the one that makes it, or of a reduced size."""
    module, *options = OTHERS[file].command.removeprefix("python -m ").replace(" --traces DIR", "").split()
    for command in commands:
        ran, *given = command.removeprefix("python -m ").split()
        if ran != module or not set(options) <= set(given) or "--quick" in set(given) - set(options):
            yield f"{file} was made by `{command}`, and is to be made by `{OTHERS[file].command}`"


def _read(path: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return whole


def _made_again(root: Path, results: Path, checked: Checked) -> None:
    """Checks that the pages that are made from results are what the results say."""
    pages = {
        root / "docs/results.md": document(results),
        root / "docs/not_reproduced.md": not_reproduced.page(results),
    }
    if (results / PREDICTORS).exists():
        whole = _read(results / PREDICTORS)
        pages[results / "predictors/README.md"] = markdown(whole)
        plots = [results / "predictors" / f"{name}.png" for name in whole["traces"]]
        checked.problems += _broken_plots(results, plots)
    for file in OTHERS:
        if file.startswith("chaos/") and (results / file).exists():
            path = results / file
            pages[path.with_suffix(".md")] = page_of(_read(path)["runs"], f"{path.stem}.png")
    for path, made in pages.items():
        if not path.exists() or path.read_text("utf-8") != made:
            checked.problems.append(
                f"{path.relative_to(root)} is not what the results say: python -m benchmarks document"
            )


def _documents(root: Path, results: Path, checked: Checked) -> None:
    paths = [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]
    for folder in ("benchmarks", "deploy", "examples", "predictors"):
        paths += sorted((root / folder).rglob("README.md"))
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
        checked.problems += [
            f"{name}:{line}: what begins here has no end, so nothing after it would be looked at"
            for line in figures.unclosed(text)
        ]
        if "<!-- generated:" in text and name not in WITH_BLOCKS:
            checked.problems.append(f"{name} has a generated block, but no script writes any (WITH_BLOCKS)")
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
    elif not figures.shows(one.shown, -value if one.turned else value):
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
    untraced = [
        file for file, (origins, digest) in made.items() if not provenance.traced(origins) or digest is None
    ]
    changed = [
        file
        for file, (origins, digest) in made.items()
        if file not in untraced
        and digest is not None
        and {origin.code for origin in origins} != {digest(ROOT)}
    ]
    verified = {
        file: one.verified for file, one in stored.items() if file in changed and one.verified is not None
    }
    equal = sorted(file for file, one in verified.items() if not one.different)
    if equal:
        checked.notes.append(
            "runs of other code than the present one, a sample of which was equal when later code computed it again:"
            f" {', '.join(equal)}"
        )
    for file, one in sorted(verified.items()):
        if one.different:
            checked.notes.append(f"{file} is to be run again: {one.shown}")
    rest = sorted(set(changed) - verified.keys())
    if rest:
        checked.notes.append(f"runs of other code than the present one: {', '.join(rest)}")
    if untraced:
        checked.notes.append(f"written before runs kept their origin: {', '.join(sorted(untraced))}")
    absent = sorted(file for file in provenance.MISSING if not (results / file).exists())
    if absent:
        checked.notes.append(f"not measured yet: {', '.join(absent)}")
    lost = sorted(file for file in provenance.LOST if (results / file).exists())
    if lost:
        checked.notes.append(
            f"of a commit that is in no history any more, to be measured again: {', '.join(lost)}"
        )
    why = no_history(root)
    if why is None:
        _compare_with_commits(root, results, made, stored, checked)
        _compare_verified(root, stored, checked)
    else:
        checked.notes.append(
            f"NOTHING IS KNOWN OF THE CODE THAT MADE THE RESULTS: {why}, so no commit could be looked up"
        )


def _compare_with_commits(
    root: Path,
    results: Path,
    made: dict[str, tuple[list[Origin], Digest | None]],
    stored: dict[str, Stored],
    checked: Checked,
) -> None:
    """Finds runs whose commit is not in the history of the checkout at `root`, or whose digest is not the commit's, and
    aims that were stated in no such commit.
    """
    of_commit: dict[str, list[str]] = {}
    for file, (origins, digest) in made.items():
        if digest is None or not provenance.traced(origins):
            continue
        for commit in {origin.commit for origin in origins if origin.clean}:
            of_commit.setdefault(commit, []).append(file)
    for commit, files in sorted(of_commit.items()):
        with code_at(commit, root) as then:
            if then is None:
                if unknown := [file for file in files if file not in provenance.LOST]:
                    checked.problems.append(
                        f"{', '.join(unknown)}: the commit {commit} is not in the history of this checkout, so nobody"
                        " can find the code again"
                    )
                continue
            if found := [file for file in files if file in provenance.LOST]:
                checked.problems.append(
                    f"{', '.join(found)}: the commit {commit} is in the history: take it off LOST"
                    " (benchmarks/provenance.py)"
                )
            for file in files:
                origins, digest = made[file]
                here = {origin.code for origin in origins if origin.clean and origin.commit == commit}
                if digest is not None and here != {digest(then)}:
                    checked.problems.append(f"{file} names commit {commit}, whose code is another one")
                if file in OTHERS:
                    paths = provenance.paths_of_other(_read(results / file)) or []
                    checked.problems += _left_out(file, paths, then)
                else:
                    checked.problems += _without_traces(file, origins, then)
                    checked.problems += _stated_late(file, commit, stored[file], then)


def _compare_verified(root: Path, stored: dict[str, Stored], checked: Checked) -> None:
    """Finds files whose runs were computed again with code that nobody can find again."""
    of_commit: dict[str, list[tuple[str, Origin]]] = {}
    for file, one in stored.items():
        if one.verified is None:
            continue
        if one.verified.origin.clean:
            of_commit.setdefault(one.verified.origin.commit, []).append((file, one.verified.origin))
        else:
            checked.problems.append(f"{file} was verified with code that was in no commit: verify it again")
    for commit, found in sorted(of_commit.items()):
        with code_at(commit, root) as then:
            for file, origin in found:
                experiment = registry.load(stored[file].results.experiment)
                if then is None or code_of(experiment, then) != origin.code:
                    checked.problems.append(
                        f"{file} was verified with the commit {commit}, whose code is not found here: verify it again"
                    )


def _stated_late(file: str, commit: str, stored: Stored, then: Path) -> Iterator[str]:
    """Yields a sentence if the aims of a file are not those that its runs' commit, checked out at `then`, states."""
    if stored.aims and stated.digest(stored.results.experiment, then) != stored.aims:
        yield f"{file}: its aims are not those that commit {commit} states, with whose code it ran"


def _without_traces(file: str, origins: list[Origin], then: Path) -> Iterator[str]:
    """Yields a sentence if the runs of an experiment had not all published traces that the checkout `then` names.

    Without a trace an experiment has fewer cases, or runs on a stand-in.
    """
    module = registry.EXPERIMENTS[Path(file).stem]
    files = imported(module, then)
    missing = {one for origin in origins for one in missing_traces(files, origin.traces, then)}
    if missing:
        yield f"{file} was made without {', '.join(sorted(missing))}: run it again with --traces DIR"


def _left_out(file: str, paths: list[str], then: Path) -> Iterator[str]:
    """Yields a sentence if the digests of a file are not of all code of the checkout `then` on which its runs depend.

    These are the files that the measuring module imports, and the application if the module serves it.
    """
    module = OTHERS[file].command.split()[2]
    if (then / module.replace(".", "/")).is_dir():
        module = f"{module}.__main__"
    needed = [*imported(module, then), *(() if module in WITHOUT_APPLICATION else PRODUCT)]
    missing = [
        one for one in needed if one not in paths and not one.startswith(tuple(f"{p}/" for p in paths))
    ]
    if missing:
        yield f"{file}: its digest leaves out {', '.join(missing[:3])}, on which its runs depend: measure it again"
