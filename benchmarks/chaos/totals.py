"""The sums over many runs, and the figures of their faults by kind."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def added_up(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums over runs, and the faults of all of them by kind."""
    total: dict[str, Any] = {
        "runs": len(runs),
        "minutes": round(sum(run["minutes"] for run in runs), 1),
        "seeds": [run["seed"] for run in runs],
        "commits": list(dict.fromkeys(run["commit"] for run in runs)),
        "faults": sum(len(run["faults"]) for run in runs),
        "requests": sum(run["requests"] for run in runs),
        "right": sum(run["right"] for run in runs),
        "near_ties": sum(run["near_ties"] for run in runs),
        "unended": sum(run["unended"] for run in runs),
    }
    for name in ("failed", "wrong", "apart", "notes", "counters", "forms"):
        total[name] = dict(sum((Counter(run[name]) for run in runs), Counter()))
    total["leaks"] = [{"seed": run["seed"], **run["leaks"]} for run in runs if run["leaks"]]
    rows = [row for run in runs for row in run["faults"]]
    total["kinds"] = {kind: _of_kind([row for row in rows if row[1] == kind]) for kind in _ordered(rows)}
    return total


def _ordered(rows: Sequence[Sequence[Any]]) -> list[str]:
    return sorted({row[1] for row in rows})


def _of_kind(rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Returns the figures of the faults of one kind: number, stalls, and times to recover."""
    stalls = sorted(row[4] for row in rows)
    whole = [row[7] - row[3] for row in rows if row[7] is not None]
    return {
        "number": len(rows),
        "stall_median_s": round(statistics.median(stalls), 2),
        "stall_longest_s": stalls[-1],
        "stalled_requests": sum(row[5] for row in rows),
        "served_longest_s": max(row[6] for row in rows),
        "whole_median_s": round(statistics.median(whole), 1) if whole else None,
        "whole_longest_s": round(max(whole), 1) if whole else None,
        "never_whole": sum(row[7] is None for row in rows),
        "not_waited_for": sum(bool(row[8]) for row in rows),
        "late_longest_s": max(row[9] for row in rows),
    }
