"""Writes and reads results as JSON files, and stores finished runs, so that an interrupted sweep can go on.

A results file has everything that is needed to make the results again: the experiment, its configs, the policies that
its runs built with all of their parameters, seeds, command and date, and for every run the code that made it (`Origin`:
its digest, the commit, whether the code was that of the commit, the machine, the traces). It has the rows of paper |
ours, and for each variant the measures that rows and plots have read, with one value for each seed. It has no paths and
no wall time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkout import Origin, head
from benchmarks.experiments.base import Config, ExperimentError, Metrics, Results, Row

FORMAT = 3
# The numbers of older formats. The first has every measure of every run by seed; `remake` reduces such a file. Files of
# both have one digest, of the code that made the rows, and none of the runs.
WITH_ALL_MEASURES = 1
WITHOUT_ORIGINS = 2
# The number of significant digits of a stored measure.
DIGITS = 9
RUNS = "runs"
"""The name of the folder of finished runs, which lies beside the results."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The last time that a sample of a file's runs was computed again, with the code of `origin`: how many of all `of`
    runs it had, and how many of them differed (`benchmarks.verify`).
    """

    origin: Origin
    runs: int
    different: int
    of: int
    date: str

    @property
    def shown(self) -> str:
        """The outcome as text."""
        outcome = f"{self.different} of {self.runs} differ" if self.different else f"all {self.runs} equal"
        return f"{outcome} (of {self.of}) with {self.origin.commit}"


@dataclass(frozen=True, slots=True)
class Stored:
    """The content of a results file: the measures, their comparison with the paper, and their origin.

    `code` and `commit` are those of the comparison; the runs have their own (`Results.origins`). `plots` are the file
    names of the plots. `verified` is of runs that were computed again later, if any were. `aims` is the digest of the
    aims that a file stated before the runs (`benchmarks.aims.stated`), or "" where none did.
    """

    results: Results
    summary: str
    rows: tuple[Row, ...]
    plots: tuple[str, ...]
    code: str
    command: str
    commit: str
    date: str
    verified: Verified | None = None
    aims: str = ""

    @staticmethod
    def now(
        results: Results,
        summary: str,
        rows: Sequence[Row],
        plots: Sequence[str],
        code: str,
        command: str,
        aims: str = "",
    ) -> Stored:
        """Returns the content for a run that has just ended, with the present commit and time."""
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
        return Stored(results, summary, tuple(rows), tuple(plots), code, command, head(), date, aims=aims)


def config_key(experiment: str, config: Config, seed: int) -> str:
    """Returns a name of a run, made from all that decides its outcome except the code.

    Raises ExperimentError for a config that is not JSON.
    """
    try:
        text = json.dumps([experiment, config, seed], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{experiment}: a config must be plain JSON values: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns the metrics as floats or None. Raises ExperimentError for values that are not finite numbers or None."""
    found: dict[str, float | None] = {}
    for name, value in metrics.items():
        if value is not None and (
            isinstance(value, bool) or not hasattr(value, "__float__") or not math.isfinite(value)
        ):
            raise ExperimentError(
                f"metric {name!r} is {value!r}: give a finite number, or None for not measured"
            )
        found[name] = None if value is None else float(value)
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run. `resolved` are the policies that it built, each with all of its parameters."""

    metrics: dict[str, float | None]
    origin: Origin
    resolved: Mapping[str, Any]


class RunCache:
    """The store of finished runs of one experiment in `folder`, one file for each.

    Runs made with other code than that of the origin `here`, or with other traces, are ignored, unless `keep_stale` is
    set. Runs that were stored before runs kept their origin are always ignored.
    """

    def __init__(self, folder: Path, experiment: str, here: Origin, keep_stale: bool = False) -> None:
        self._folder = folder / experiment
        self._experiment = experiment
        self._here = here
        self._keep_stale = keep_stale

    def get(self, config: Config, seed: int) -> Run | None:
        """Returns the run, or None if it is not stored or was made with other code or other traces.

        A run of code that was in no commit counts as of the present commit if the same code is in it now. Raises
        ExperimentError if the run's file is damaged.
        """
        path = self._path(config, seed)
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text("utf-8"))
            if "origin" not in found:
                return None
            origin = Origin.of(found["origin"])
            same = (origin.code, origin.traces) == (self._here.code, self._here.traces)
            if not same and not self._keep_stale:
                return None
            if same and self._here.clean and not origin.clean:
                origin = replace(origin, commit=self._here.commit, clean=True)
            return Run(checked_metrics(found["metrics"]), origin, found.get("resolved", {}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ExperimentError(
                f"{path}: not a finished run: {error!r}; delete it to run it again"
            ) from error

    def put(self, config: Config, seed: int, metrics: Metrics, resolved: Mapping[str, Any]) -> None:
        """Stores a run. An interrupted write leaves no file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        whole = {"config": config, "seed": seed, "origin": self._here.as_json(), "metrics": metrics}
        whole["resolved"] = resolved
        write_text(self._path(config, seed), json.dumps(whole, indent=1, allow_nan=False) + "\n")

    def _path(self, config: Config, seed: int) -> Path:
        return self._folder / f"{config_key(self._experiment, config, seed)}.json"


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically: readers see either its old or its new content."""
    half = path.with_name(path.name + ".part")
    half.write_text(text, "utf-8")
    os.replace(half, path)


def save(folder: Path, stored: Stored, also: Iterable[str] = ()) -> Path:
    """Writes `folder`/EXPERIMENT.json and returns its path.

    For each variant the file has the measures that were read (`Results.read`) and those named in `also`. A measure that
    no seed has is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = stored.results
    origins = _distinct(results)
    whole = {
        "format": FORMAT,
        "experiment": results.experiment,
        "summary": stored.summary,
        "quick": results.quick,
        "seeds": list(results.seeds),
        "commit": stored.commit,
        "code": stored.code,
        "command": stored.command,
        "date": stored.date,
        "origins": [origin.as_json() for origin in origins],
        "plots": list(stored.plots),
        "rows": [row_as_json(row) for row in stored.rows],
        "variants": {name: _variant(results, name, also, origins) for name in results.variants},
    }
    if stored.verified is not None:
        whole["verified"] = asdict(stored.verified)
    if stored.aims:
        whole["aims"] = stored.aims
    path = folder / f"{results.experiment}.json"
    write_text(path, json_lines(whole, 2))
    return path


def note_verified(path: Path, verified: Verified) -> None:
    """Notes in a results file that a sample of its runs was computed again; all else stays as it is."""
    whole = json.loads(path.read_text("utf-8"))
    write_text(path, json_lines({**whole, "verified": asdict(verified)}, 2))


def json_lines(value: Any, levels: int) -> str:
    """Returns JSON with a line for each entry of the outer `levels` levels; each deeper value is on one line."""
    return _nested(value, levels, "\n") + "\n"


def _nested(value: Any, levels: int, newline: str) -> str:
    if levels == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    deeper = newline + " "
    if isinstance(value, list):
        return "[" + ",".join(deeper + _nested(v, levels - 1, deeper) for v in value) + newline + "]"
    entries = (f"{json.dumps(str(k))}: {_nested(v, levels - 1, deeper)}" for k, v in value.items())
    return "{" + ",".join(deeper + entry for entry in entries) + newline + "}"


def _distinct(results: Results) -> list[Origin]:
    """Returns the different origins of the stored runs, in the order of variants and seeds. An empty list means that
    the origins are not known.
    """
    found = (results.origins[name][seed] for name in results.origins for seed in results.seeds)
    return list(dict.fromkeys(found))


def _variant(results: Results, name: str, also: Iterable[str], origins: Sequence[Origin]) -> dict[str, Any]:
    """Returns a variant's config and its stored measures, with one value (or None) for each of the file's seeds.

    Where the runs of the file are of several origins, `origin` has the index of each run's.
    """
    runs = results.runs[name]
    measures = {
        metric: [rounded(runs[seed].get(metric), DIGITS) for seed in results.seeds]
        for metric in sorted({m for variant, m in results.read if variant == name} | set(also))
    }
    seen = {metric: values for metric, values in measures.items() if any(v is not None for v in values)}
    whole: dict[str, Any] = {"config": results.variants[name], "measures": seen}
    if results.resolved.get(name):
        whole["resolved"] = results.resolved[name]
    if len(origins) > 1:
        whole["origin"] = [origins.index(results.origins[name][seed]) for seed in results.seeds]
    return whole


def as_stored(results: Results) -> Results:
    """Returns the results with their measures as a file keeps them. Rows and plots are made of these, so that they can
    be made again from the file also where measures nearly cancel.
    """
    return replace(results, runs=rounded(results.runs, DIGITS))


def rounded(value: Any, digits: int) -> Any:
    """Returns JSON data with its floats rounded to `digits` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(entry, digits) for key, entry in value.items()}
    return [rounded(entry, digits) for entry in value] if isinstance(value, list | tuple) else value


_FLOATS = ("paper", "ours", "half_width", "difference", "least", "most", "above")


def row_as_json(row: Row) -> dict[str, Any]:
    """Returns a row as a results file keeps it: without its empty fields, with numbers of `DIGITS` digits.

    The row's numbers and booleans may be numpy's.
    """
    figures = {name: getattr(row, name) for name in _FLOATS}
    floats = {name: None if value is None else float(value) for name, value in figures.items()}
    whole = {**asdict(row), **floats, "met": None if row.met is None else bool(row.met)}
    found = {
        name: value for name, value in whole.items() if name in ("paper", "ours") or value not in (None, "")
    }
    return {name: rounded(value, DIGITS) for name, value in found.items()}


def load(path: Path) -> Stored:
    """Reads a results file. Raises an ExperimentError that names the file if it is damaged or has another format."""
    try:
        whole = json.loads(path.read_text("utf-8"))
        if whole["format"] not in (FORMAT, WITHOUT_ORIGINS, WITH_ALL_MEASURES):
            raise ValueError(f"format {whole['format']} is not {FORMAT}")
        rows = tuple(Row(**{k: v for k, v in row.items() if k != "difference"}) for row in whole["rows"])
        results = Results(
            experiment=whole["experiment"],
            quick=whole["quick"],
            variants={name: v["config"] for name, v in whole["variants"].items()},
            runs={name: _runs(v, whole["seeds"]) for name, v in whole["variants"].items()},
            origins=_origins(whole),
            resolved={name: v["resolved"] for name, v in whole["variants"].items() if "resolved" in v},
        )
        again = whole.get("verified")
        verified = None if again is None else Verified(**{**again, "origin": Origin.of(again["origin"])})
        about = {name: whole[name] for name in ("summary", "code", "command", "commit", "date")}
        aims = whole.get("aims", "")
        return Stored(results, rows=rows, plots=tuple(whole["plots"]), verified=verified, aims=aims, **about)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExperimentError(f"{path}: not a results file: {error!r}; run the experiment again") from error


def _runs(variant: Mapping[str, Any], seeds: Sequence[int]) -> dict[int, dict[str, float | None]]:
    """Returns a variant's metrics by seed."""
    # The key exists only in the format WITH_ALL_MEASURES.
    if "runs" in variant:
        return {int(seed): checked_metrics(metrics) for seed, metrics in variant["runs"].items()}
    found: dict[int, dict[str, float | None]] = {seed: {} for seed in seeds}
    for metric, values in variant["measures"].items():
        for seed, value in zip(seeds, values, strict=True):
            found[seed].update(checked_metrics({metric: value}))
    return found


def _origins(whole: Mapping[str, Any]) -> dict[str, dict[int, Origin]]:
    """Returns the origins of a file's runs, or none where the file does not know them."""
    known = [Origin.of(origin) for origin in whole.get("origins", ())]
    if not known:
        return {}
    seeds = whole["seeds"]
    return {
        name: {seed: known[i] for seed, i in zip(seeds, variant.get("origin", [0] * len(seeds)), strict=True)}
        for name, variant in whole["variants"].items()
    }


def remade(stored: Stored, summary: str, rows: Sequence[Row], plots: Sequence[str]) -> Stored:
    """Returns the stored measurement with a new summary, new rows and new plots, as its experiment makes them now."""
    return replace(stored, summary=summary, rows=tuple(rows), plots=tuple(plots))


def load_all(folder: Path) -> tuple[dict[Path, Stored], list[Path]]:
    """Reads all results files in and below `folder`.

    Returns (their contents by path, ordered by name; the other JSON files found there). Raises ExperimentError where
    there are no results files, and for a damaged one.
    """
    found: dict[Path, Stored] = {}
    others: list[Path] = []
    for path in sorted(folder.rglob("*.json"), key=lambda path: path.name):
        if path.relative_to(folder).parts[0] == RUNS:
            continue
        if _is_results_file(path):
            found[path] = load(path)
        else:
            others.append(path)
    if not found:
        raise ExperimentError(f"{folder} holds no results; make some: python -m benchmarks run EXPERIMENT")
    return found, others


def _is_results_file(path: Path) -> bool:
    """Returns whether `python -m benchmarks run` wrote the JSON file.

    A file that is not JSON counts as a results file, so that it is reported as damaged and not passed over.
    """
    try:
        whole = json.loads(path.read_text("utf-8"))
    except ValueError:
        return True
    return isinstance(whole, dict) and "format" in whole
