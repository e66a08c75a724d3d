"""The results of a run as JSON: counts, faults with stalls and recoveries, leaks, memory; and the file of all runs."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.chaos.clients import Gap
from benchmarks.chaos.harm import Harm
from benchmarks.chaos.loans import ends_of
from benchmarks.chaos.processes import Track, slope_per_hour
from benchmarks.chaos.run import TWO_FAULTS, Run
from benchmarks.chaos.scaling import row
from benchmarks.chaos.setups import Setup
from benchmarks.checkout import code_digest, depends_on
from benchmarks.live.machine import LIVE_CODE, facts
from benchmarks.results_io import json_lines, rounded, write_text

CODE = (*LIVE_CODE, "benchmarks/chaos")
"""The folders that decide what a run finds, beside the files that `MODULE` imports."""
MODULE = "benchmarks.chaos.__main__"

WARM_S = 600.0
"""Seconds of a process's life that its slope leaves out, while caches, indexes and rings fill up. ASSUMPTION: they are
full by then under a soak's load and KV (`setups.SOAK_KV_BLOCKS`).
"""

LONG_MINUTES = 10
"""Minutes from which the memory of a process is kept minute by minute."""

GAPS = 30
"""Gaps that a result describes one by one."""

BEFORE_S = 0.5
"""Seconds by which a gap may seem to begin after the fault that caused it, or the fault before its own record."""


def blame(gaps: Iterable[Gap], harms: Sequence[Harm]) -> dict[int, list[Gap]]:
    """Returns the gaps by the number of the fault that is blamed for them, -1 for none.

    A gap is blamed on the first fault that began within it; otherwise on the last one that had begun and was not whole
    again when the gap began.
    """
    blamed: dict[int, list[Gap]] = defaultdict(list)
    for gap in gaps:
        within = [i for i, h in enumerate(harms) if gap.start_s - BEFORE_S <= h.at_s <= gap.end_s]
        before = [
            i
            for i, h in enumerate(harms)
            if h.at_s <= gap.start_s and (h.whole_s is None or gap.start_s <= h.at_s + h.whole_s + BEFORE_S)
        ]
        blamed[within[0] if within else before[-1] if before else -1].append(gap)
    return dict(blamed)


def result_of(run: Run, setup: Setup, seed: int, command: str, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything that a run found, as JSON data."""
    tally = run.clients.tally
    blamed = blame((gap for gap in tally.gaps if not gap.apart), run.harms)
    orders = (
        {} if run.administrator is None else {"orders": [row(order) for order in run.administrator.orders]}
    )
    loans = {"loans": ends_of(run.survey.watch.totals)} if setup.lends else {}
    return {
        "engines": setup.engines,
        "seed": seed,
        "minutes": round(run.minutes, 2),
        "config": {
            "parts": dict(setup.parts),
            "clients": setup.clients,
            "long_share": setup.long_share,
            "every_s": setup.every_s,
            "bound_s": setup.bound_s,
            "kinds": [list(asdict(kind).values()) for kind in setup.kinds],
            "args": dict(setup.args),
        },
        "command": command,
        **{part: machine[part] for part in ("commit", "clean", "code", "code_of")},
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": dict(machine),
        "requests": tally.requests,
        "right": tally.right,
        "forms": dict(tally.by_form),
        "failed": dict(tally.failed),
        "wrong": dict(tally.wrong),
        "near_ties": tally.near_ties,
        "apart": dict(tally.apart),
        "notes": dict(tally.notes),
        "unended": run.open_at_end,
        "increases": dict(sorted(run.survey.watch.totals.items())),
        "leaks": run.leaks,
        **orders,
        **loans,
        "details": [list(detail) for detail in tally.details],
        "frozen_s": round(run.clients.clock.frozen_s, 1),
        "frozen_share": round(run.clients.clock.frozen_share(), 4),
        "faults": [_fault(harm, blamed.get(i, [])) for i, harm in enumerate(run.harms)],
        "longest_gaps": _longest(blamed, run.harms),
        "gaps_without_fault": sorted((round(g.seconds, 2) for g in blamed.get(-1, [])), reverse=True)[:10],
        "processes": [process_facts(track) for track in run.tracks.values()],
        "timeline": {
            "at_s": run.timeline.at_s,
            "ended": run.timeline.ended,
            "waiting_s": run.timeline.waiting_s,
        },
    }


def _longest(blamed: Mapping[int, Sequence[Gap]], harms: Sequence[Harm]) -> list[list[Any]]:
    """Returns the longest gaps: seconds, beginning, form of the request, and the fault that is blamed."""
    names = {-1: "none"} | {i: f"{i + 1} {harm.fault.kind.name}" for i, harm in enumerate(harms)}
    rows = [
        [round(g.seconds, 2), round(g.start_s, 1), g.form, names[i]]
        for i, gaps in blamed.items()
        for g in gaps
    ]
    return sorted(rows, reverse=True)[:GAPS]


def _fault(harm: Harm, gaps: Sequence[Gap]) -> list[Any]:
    """Returns a fault's row: seconds, kind, victim, its length, longest stall of a stream, streams that stalled, until
    served, until whole, whether the next one did not wait, the seconds by which a whole answer was late at most, and
    what it did where that is not certain.
    """
    stalls = [gap.seconds for gap in gaps if not gap.whole]
    late = [gap.seconds for gap in gaps if gap.whole]
    whole_s = None if harm.whole_s is None else round(harm.whole_s, 1)
    return [
        round(harm.at_s, 1), harm.fault.kind.name, harm.victim, round(harm.over_s or 0.0, 1),
        round(max(stalls, default=0.0), 2), len(stalls), round(harm.service_s, 1), whole_s, harm.bounded,
        round(max(late, default=0.0), 2), harm.outcome,
    ]  # fmt: skip


def process_facts(track: Track) -> dict[str, Any]:
    """Returns the growth of a process's memory and open files over its life."""
    samples = track.samples
    warm = [s for s in samples if s.t_s >= samples[0].t_s + WARM_S]
    rss = slope_per_hour([(s.t_s, s.rss_bytes / 2**20) for s in warm])
    fds = slope_per_hour([(s.t_s, s.fds) for s in warm])
    by_minute = {int((s.t_s - samples[0].t_s) / 60.0): s.rss_bytes for s in samples}
    return {
        "name": track.name,
        "lived_s": round(samples[-1].t_s - samples[0].t_s),
        "rss_mib": [round(samples[0].rss_bytes / 2**20, 1), round(samples[-1].rss_bytes / 2**20, 1)],
        "fds": [samples[0].fds, samples[-1].fds],
        "rss_mib_per_h": None if rss is None else round(rss, 2),
        "fds_per_h": None if fds is None else round(fds, 2),
    } | (
        {"rss_mib_by_minute": [round(rss_bytes / 2**20) for rss_bytes in by_minute.values()]}
        if len(by_minute) > LONG_MINUTES
        else {}
    )


MOST_MET_TWO = 0.001
"""Largest share of requests that count apart as `TWO_FAULTS`; one is always allowed. ASSUMPTION: four times what was
seen, once in 4,491 requests (`policies.request.troubles`). More say that engines are taken for dead that are not.
"""


def is_bad(result: Mapping[str, Any]) -> bool:
    """Returns whether a run failed, got a wrong text, or left something behind, or refused more requests than chance
    explains because two faults had taken their engines. A run of engines that lend is bad if no loan was of use, since
    it has tried nothing then.
    """
    met_two = sum(n for cause, n in result["apart"].items() if cause.startswith(TWO_FAULTS))
    too_many = met_two > max(1, MOST_MET_TWO * result["requests"])
    idle = "loans" in result and not result["loans"]["used"]
    lost = result["failed"] or result["wrong"] or result["leaks"] or result["unended"]
    return bool(lost or too_many or idle)


class Kept:
    """The runs that are kept in one file, which grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []
        if path.exists():
            self.runs = json.loads(path.read_text("utf-8"))["runs"]

    def has(self, seed: int, minutes: float) -> bool:
        """Returns whether a whole run of this seed and length, by the present code, is kept."""
        code = code_digest(depends_on(MODULE, CODE))
        return any(
            run["seed"] == seed and run["code"] == code and run["minutes"] >= 0.98 * minutes
            for run in self.runs
        )

    def add(self, result: dict[str, Any]) -> None:
        """Keeps one more run. The timeline of only the last one is kept."""
        for run in self.runs:
            run.pop("timeline", None)
        self.runs.append(rounded(result, 6))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json_lines({"machine": result["machine"], "runs": self.runs}, 4))


def machine_facts() -> dict[str, Any]:
    """Returns the facts about the machine, before the run."""
    return facts(MODULE, CODE)
