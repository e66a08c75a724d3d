"""Figures from requests with times made up by hand."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.mfs import report
from benchmarks.mfs.drive import Ask, Promise
from benchmarks.mfs.workload import Arrival, Kind

PROMISES: dict[Kind, Promise] = {"tight": Promise(1.0, 0.1), "loose": Promise(5.0, 0.1)}


def ask(kind: Kind, sent_s: float, reading_s: float, admitted_s: float, first_s: float, size: int) -> Ask:
    arrival = Arrival(sent_s, kind, 0, 0)
    found = Ask(
        arrival, f"{kind}-{sent_s}", sent_s, reading_s=reading_s, admitted_s=admitted_s, first_s=first_s
    )
    found.bytes, found.cached_tokens = size, 240
    return found


def test_a_cell_counts_time_with_reads_once_and_failures_as_late() -> None:
    asks = [
        ask("tight", 0.0, 0.1, 0.3, 0.4, 10_000_000),
        # overlaps the first read by 0.1 s
        ask("loose", 0.0, 0.2, 2.3, 2.5, 90_000_000),
        # late: 1.5 s after it was sent
        ask("tight", 3.0, 4.0, 4.4, 4.5, 10_000_000),
    ]
    lost = Ask(Arrival(4.0, "loose", 0, 0), "loose-9", 4.0, failed="kv_load")
    cell = report.cell([*asks, lost], PROMISES, 111_000_000)
    # from 0.1 to 2.3 and from 4.0 to 4.4
    assert cell["busy_s"] == 2.6
    assert cell["bytes_per_s"] == round(110e6 / 2.6)
    assert cell["failures"] == {"kv_load": 1}
    assert cell["tight"] == {
        "requests": 2,
        "ttft_ms": [400.0, 1500.0],
        "transfer_ms": [200.0, 400.0],
        "held_ms": [0.0, 0.0],
        "in_time": 1,
        "read_mb": 20.0,
        "least_cached_tokens": 240,
    }
    assert (cell["loose"]["requests"], cell["loose"]["in_time"]) == (2, 1)


@pytest.mark.parametrize(
    ("spans", "length_s"),
    [([], 0.0), ([(0, 2), (1, 3)], 3.0), ([(0, 9), (1, 3)], 9.0), ([(5, 6), (0, 1)], 2.0)],
)
def test_overlapping_times_count_once(spans: list[tuple[float, float]], length_s: float) -> None:
    assert report.covered_s(spans) == length_s


def cell(policy: str, load: float, tight_ms: float, in_time: int = 10, busy_s: float = 1.0) -> dict[str, Any]:
    def kind(ms: float) -> dict[str, Any]:
        return {"requests": 10, "ttft_ms": [2 * ms] * 10, "transfer_ms": [ms] * 10, "read_mb": 20.0} | {
            "in_time": in_time
        }

    found = {
        "tight": kind(tight_ms),
        "loose": kind(2_000.0),
        "busy_s": busy_s,
        "failures": {},
        "requests": 20,
    }
    return {"policy": policy, "load": load, **found}


def test_aims_compare_the_rows_as_they_say() -> None:
    cells = [
        cell("unscheduled", 0.8, 1_000.0),
        cell("edf", 0.8, 250.0),
        cell("mfs", 0.8, 200.0, busy_s=1.01),
        cell("unscheduled", 1.1, 3_000.0, in_time=2),
        cell("edf", 1.1, 2_000.0, in_time=5),
        cell("mfs", 1.1, 1_000.0, in_time=7),
    ]
    found = report.aims(report.rows(cells))
    # 1,000 / 200; TTFT is twice that in both; 40 / 1.01 against 40 MB/s; 200 / 250; 14 of 20 against 10 of 20
    assert [round(aim.found, 3) for aim in found] == [5.0, 5.0, 0.99, 0.8, 20.0]
    assert all(aim.met for aim in found)
    worse = [one | {"busy_s": 2.0} if one["policy"] == "mfs" else one for one in cells]
    assert [aim.met for aim in report.aims(report.rows(worse))] == [True, True, False, True, True]


def test_rows_join_the_runs_of_a_policy_at_a_load() -> None:
    (row,) = report.rows([cell("mfs", 0.8, 100.0, in_time=4), cell("mfs", 0.8, 300.0, in_time=8)])
    assert (row.runs, row.requests, row.attainment) == (2, 40, 0.6)
    # half of the values are 100, half 300
    assert (row.tight_transfer_p50, row.tight_transfer_p99, row.mb_per_s) == (200.0, 300.0, 40.0)


def test_a_row_without_an_answer_in_a_class_is_left_out_and_no_aim_is_judged() -> None:
    empty = cell("mfs", 0.8, 100.0)
    empty["loose"] |= {"ttft_ms": [], "transfer_ms": []}
    assert report.rows([empty]) == []
    assert report.aims([]) == []


def test_table_and_plot_show_every_policy(tmp_path: Path) -> None:
    cells = [cell("unscheduled", 0.8, 1_000.0), cell("mfs", 0.8, 200.0)]
    found = report.rows(cells)
    text = report.table(found, report.aims(found))
    assert "| 80 % | mfs | 200, 200 |" in text
    assert "| tight P99 of transfers, unscheduled / mfs | at least 4 | 5.00 | yes |" in text
    assert (tmp_path / report.plot(cells, tmp_path, "link")).stat().st_size > 1_000
