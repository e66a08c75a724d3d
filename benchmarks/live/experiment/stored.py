"""Reads runs back from their folders: trials with requests and samples, actions, and the columns of a comparison."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.dashboard.store import ACTIONS, REQUESTS, SAMPLES, SHOWN, RunError, RunStore
from benchmarks.live.experiment.client import Sent
from benchmarks.live.experiment.figures import Column, Trialled, compare, mean_series, series
from benchmarks.live.experiment.plan import Trial

MOST_COLUMNS = 8
_FIELDS = frozenset(f.name for f in dataclasses.fields(Sent))


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its folder keeps it. `whole` is the content of its own file."""

    whole: dict[str, Any]
    text: str
    trials: list[Trialled]
    actions: list[dict[str, Any]]

    @property
    def shown(self) -> dict[str, Any]:
        """The run as lists show it."""
        return {key: self.whole.get(key) for key in SHOWN}

    def columns(self) -> list[Column]:
        """Returns the run's arms, or the run as a whole if it has none; an arm without a trial is left out."""
        arms = list(dict.fromkeys(one.trial.arm for one in self.trials))
        name = f"{self.whole['name']} {str(self.whole['id'])[9:15]}"
        return [
            Column(f"{name} / {arm}" if arm else name, [one for one in self.trials if one.trial.arm == arm])
            for arm in arms
        ]


def load(store: RunStore, run_id: str) -> Run:
    """Returns a run. Raises RunError for one that is not there, or whose files are damaged."""
    folder, whole = store.path(run_id), store.read(run_id)
    made = whole.get("trials") or []
    load_s = float((whole.get("plan") or {}).get("duration_s") or 0.0)
    rows = list(_lines(folder / REQUESTS))
    samples = list(_lines(folder / SAMPLES))
    try:
        # a run that runs, or was killed, has noted no trials: they follow from what it has written
        if not made and (rows or samples):
            labels = (whole.get("plan") or {}).get("trials") or [""]
            phases = (whole.get("plan") or {}).get("phases") or []
            load_s = max((phase["to_s"] for phase in phases), default=load_s)
            made = _guessed(labels, rows, samples, load_s)
        trials = [
            Trialled(Trial(one["arm"], one["repeat"]), one["began_s"], one["load_s"] or 1.0) for one in made
        ]
        for row in rows:
            trials[row["trial"]].requests.append(Sent(**{k: v for k, v in row.items() if k in _FIELDS}))
        for row in samples:
            trials[row["trial"]].samples.append(row)
    except (KeyError, TypeError, IndexError) as error:
        raise RunError(409, f"the files of run {run_id} are damaged: {error!r}") from error
    for trial in trials:
        trial.requests.sort(key=lambda one: one.number)
    return Run(whole, store.text(run_id), trials, list(_lines(folder / ACTIONS)))


def _guessed(
    labels: Sequence[str], rows: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]], load_s: float
) -> list[dict[str, Any]]:
    """Returns the trials of which there are requests or samples, and those before them, as a run notes them.

    A trial began at the time of its first sample less the sample's age in the trial; one that was not sampled, when the
    load before it had ended.
    """
    began_s: dict[int, float] = {}
    for sample in samples:
        began_s.setdefault(sample["trial"], sample["t"] - sample["at_s"])
    found: list[dict[str, Any]] = []
    for number in range(max(row["trial"] for row in (*rows, *samples)) + 1):
        arm, _, repeat = (labels[number] if number < len(labels) else "").rpartition(" ")
        found.append(
            {
                "arm": arm,
                "repeat": int(repeat) - 1 if repeat.isdigit() else 0,
                "began_s": began_s.get(number, found[-1]["began_s"] + load_s if found else 0.0),
                "load_s": load_s,
            }
        )
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file; a last one that was cut off is left out."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    yield found
    except OSError:
        return


def detail(store: RunStore, run_id: str) -> dict[str, Any]:
    """Returns a run with its file, versions, series since its start, and actions."""
    run = load(store, run_id)
    samples: dict[str, list[float | None]] = {"t": []}
    for one in run.trials:
        found = series(one)
        names = {*samples, *found} - {"t"}
        before, now = len(samples["t"]), len(found["t"])
        for name in names:
            values = samples.setdefault(name, [None] * before)
            values += found.get(name, [None] * now)
        samples["t"] = [*samples["t"], *(round(one.began_s + (t or 0.0), 3) for t in found["t"])]
    return {
        "run": run.shown,
        "text": run.text,
        "versions": run.whole.get("versions") or {},
        "plan": run.whole.get("plan"),
        "samples": samples,
        "actions": run.actions,
        "requests": {"n": sum(len(one.requests) for one in run.trials), **(run.whole.get("summary") or {})},
    }


def compared(store: RunStore, run_ids: Sequence[str]) -> dict[str, Any]:
    """Returns runs side by side: the table of figures, and the series of each column by time since its start.

    Raises RunError for runs without a request, or for too many columns.
    """
    runs = [load(store, run_id) for run_id in run_ids]
    columns = [column for run in runs for column in run.columns()]
    if not columns:
        raise RunError(409, "these runs have sent no request: there is nothing to compare")
    if len(columns) > MOST_COLUMNS:
        raise RunError(400, f"{len(columns)} columns are more than {MOST_COLUMNS}: compare fewer runs")
    names = _distinct([column.name for column in columns])
    columns = [Column(name, column.trials) for name, column in zip(names, columns, strict=True)]
    # a run of one column goes by its id, as lists of runs do
    ids = [str(run.whole["id"]) if len(run.columns()) == 1 else "" for run in runs for _ in run.columns()]
    keys = [run_id or name for run_id, name in zip(ids, names, strict=True)]
    return {
        "runs": [run.shown for run in runs],
        "columns": names,
        "keys": keys,
        "table": [line.as_json() for line in compare(columns)],
        "samples": {key: mean_series(column.trials) for key, column in zip(keys, columns, strict=True)},
    }


def _distinct(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
