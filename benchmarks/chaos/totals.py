"""The sums over many runs, and the figures of their faults by kind."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

VLLM_STALL_S = 6.0
"""The `stall_s` of the vLLM engines that are harmed."""

AIM_S = {"kill": 2.0, "stop": 6.0, "partition": 6.0, "stall": 7.0, "stop core": VLLM_STALL_S + 2.0}
"""Longest stall of a stream in seconds that a single fault should cause, by what is done: a process dies, a process
falls silent (to one other in a partition), the steps of an engine stand still (2 s more than the engines' `stall_s`).
Set before the first run.
"""

MOST_FROZEN = 0.05
"""Share of a run for which the clients' clock may stand still. Stalls of a run beyond it are no wall time, and are not
compared with the aims."""


OUTCOME = 10
"""The place in a fault's row of what it did, where that is not certain."""


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
        "orders": orders_of([order for run in runs for order in run.get("orders", ())]),
    }
    total["frozen"] = {str(run["seed"]): frozen_share(run) for run in runs}
    for name in ("failed", "wrong", "apart", "notes", "forms"):
        total[name] = dict(sum((Counter(run[name]) for run in runs), Counter()))
    # Runs of before counted the counters of a process again with each new connection to it, and do not have them.
    counted = all("increases" in run for run in runs)
    total["counters"] = dict(sum((Counter(run["increases"]) for run in runs), Counter())) if counted else None
    lent = [run["loans"] for run in runs if "loans" in run]
    total["loans"] = {name: sum(run[name] for run in lent) for name in lent[0]} if lent else None
    total["leaks"] = [{"seed": run["seed"], **run["leaks"]} for run in runs if run["leaks"]]
    rows = [
        (row, frozen_share(run) <= MOST_FROZEN and _is_alone(row, run["faults"]))
        for run in runs
        for row in run["faults"]
    ]
    total["kinds"] = {
        kind: _of_kind(kind, [(row, alone) for row, alone in rows if row[1] == kind])
        for kind in sorted({row[1] for row, _ in rows})
    }
    total["outcomes"] = outcomes = dict[str, Counter[str]]()
    for row, _ in rows:
        # rows of before have no outcome
        if len(row) > OUTCOME and row[OUTCOME]:
            outcomes.setdefault(row[1], Counter())[row[OUTCOME]] += 1
    return total


def orders_of(rows: Sequence[Sequence[Any]]) -> dict[str, Any] | None:
    """Returns the figures of an administrator's orders (`scaling.row`), None without any: the longest times from an
    order to its acknowledgement, and from there until the fleet was as ordered. The next order may come before.
    """
    if not rows:
        return None
    waits = [
        acknowledged_s - given_s for _, given_s, acknowledged_s, *_ in rows if acknowledged_s is not None
    ]
    whole = [reached_s - at_s for _, _, at_s, reached_s, _ in rows if reached_s is not None]
    return {
        "number": len(rows),
        "acknowledged": len(waits),
        "acknowledged_longest_s": round(max(waits, default=0.0), 1),
        "reached": len(whole),
        "reached_median_s": round(statistics.median(whole), 1) if whole else None,
        "reached_longest_s": round(max(whole, default=0.0), 1),
    }


def frozen_share(run: Mapping[str, Any]) -> float:
    """Returns the share of a run for which its clients' clock stood still."""
    share: float = run.get("frozen_share", run["frozen_s"] / (60 * run["minutes"]))
    return share


def _is_alone(row: Sequence[Any], rows: Sequence[Sequence[Any]]) -> bool:
    """Returns whether all was whole when a fault began, and no other one began before its longest stall had ended."""
    begin_s, end_s = row[0], row[0] + row[4]
    return not any(
        other is not row
        and other[0] <= end_s
        and other[0] + (math.inf if other[7] is None else other[7]) > begin_s
        for other in rows
    )


def _of_kind(kind: str, faults: Sequence[tuple[Sequence[Any], bool]]) -> dict[str, Any]:
    """Returns the figures of the faults of one kind: number, stalls, and times to recover. Each fault is a row and
    whether it was alone; only those are compared with the aim.
    """
    rows, single = [row for row, _ in faults], [row[4] for row, alone in faults if alone]
    aim_s = AIM_S.get(kind, AIM_S.get(kind.partition(" ")[0]))
    stalls = sorted(row[4] for row in rows)
    whole = [row[7] - row[3] for row in rows if row[7] is not None]
    return {
        "number": len(rows),
        "alone": len(single),
        "stall_alone_longest_s": max(single, default=None),
        "aim_s": aim_s,
        "alone_beyond_aim": None if aim_s is None else sum(stall_s > aim_s for stall_s in single),
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
