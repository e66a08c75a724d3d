"""The measurements of watching in their short forms, on live applications of sim engines."""

from pathlib import Path

import pytest

from benchmarks.live.measure import Plan
from benchmarks.watching import traced
from benchmarks.watching.cost import Rounds, Setup
from benchmarks.watching.cost_report import BOARD, NOBODY, PAGES
from benchmarks.watching.traced_report import rows

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.nightly]


def silent(_text: str) -> None:
    """Progress that nobody reads."""


def test_the_dashboard_comes_and_goes_on_a_running_application(tmp_path: Path) -> None:
    """`switch` refuses to go on if anything but the dashboard has started or ended."""
    plans = {1: Plan(1, 10, 16, 10.0), 4: Plan(4, 40, 16, 10.0)}
    samples = list(Rounds(Setup(plans=plans), tmp_path, silent).untraced(0))
    assert [(one["row"], one["state"]) for one in samples] == [
        (row, state) for state in (NOBODY, BOARD, PAGES) for row in ("c=1", "c=4")
    ]
    assert all(one["failures"] == {} and one["requests_per_s"] > 0 for one in samples)
    # only the states with a dashboard spend CPU time on one
    assert ["replica Dashboard" in one["cpu_ms"] for one in samples] == [False] * 2 + [True] * 4


def test_traces_while_engines_are_killed_are_those_of_the_tasks() -> None:
    found = traced.measured(traced.Setup(requests=120, kill_every_s=1.5, bare=True), silent)
    assert sum(found["killed"].values()) >= 1
    assert found["traced"] == 120
    assert found["going_on"] >= 1
    assert (found["differences"], found["orphans"], found["failed"]) == ([], {}, {})
    assert found["spans"] == found["tasks"]
    # times that a trace leaves out are the benchmark's to judge, on a quiet machine (docs/operations.md, "Traces")
    assert [row.name for row in rows(found) if row.met is False and not row.unit] == []
