"""Figures from requests with times made up by hand."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from actors.wire.messages import FlowRecord
from benchmarks.document import OTHERS
from benchmarks.mfs import report
from benchmarks.mfs.drive import Ask, Promise
from benchmarks.mfs.workload import Arrival, Kind
from policies.flow.base import Stage

BYTES_PER_S = 50e6
PROMISES: dict[Kind, Promise] = {"tight": Promise(1.0, 0.1), "loose": Promise(5.0, 0.1)}


def ask(kind: Kind, sent_s: float, reading_s: float, admitted_s: float, first_s: float, size: int) -> Ask:
    arrival = Arrival(sent_s, kind, 0, 0)
    found = Ask(
        arrival, f"{kind}-{sent_s}", sent_s, reading_s=reading_s, admitted_s=admitted_s, first_s=first_s
    )
    found.bytes, found.cached_tokens = size, 240
    found.prefilled_s = sent_s + 0.05
    return found


def flow(stage: Stage, size: int = 10_000_000, chunks: int = 5, unscheduled: str = "") -> FlowRecord:
    return FlowRecord(
        "f", "r", stage, "a", "z", size, 8, 1, None, None, chunks, 0.25, 0.2, unscheduled=unscheduled
    )


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
    # from the first read's beginning at 0.1 to the last one's end at 4.4
    assert cell["spell_s"] == 4.3
    assert cell["bytes_per_s"] == round(110e6 / 2.6)
    assert cell["failures"] == {"kv_load": 1}
    assert cell["tight"] == {
        "requests": 2,
        "ttft_ms": [400.0, 1500.0],
        "prefill_ms": [50.0, 50.0],
        "transfer_ms": [200.0, 400.0],
        "held_ms": [0.0, 0.0],
        "in_time": 1,
        "read_mb": 20.0,
        "least_cached_tokens": 240,
    }
    assert (cell["loose"]["requests"], cell["loose"]["in_time"]) == (2, 1)


READS = [ask("tight", float(n), n + 0.1, n + 0.3, n + 0.4, 10_000_000) for n in range(4)]


def test_flows_without_a_permit_are_counted_by_reason_and_stage() -> None:
    flows = [
        flow(Stage.P2D),
        flow(Stage.P2D, unscheduled="silent"),
        flow(Stage.P2D, chunks=1, unscheduled="silent"),
        flow(Stage.REUSE, 1_000_000, 1, "bound"),
        flow(Stage.REUSE, 1_000_000, 1),
    ]
    found = report.cell(READS, PROMISES, 0, flows, lost=1)
    # The agent knows three of four reads, and lost one flow with its worker.
    assert found["unscheduled"] == {"silent": 2, "bound": 1, "agent_lost": 1, "no_agent": 1}
    assert found["flows"] == 7
    assert found["stages"] == {
        "reuse": {"flows": 2, "chunks": 2, "mb": 2.0, "held_s": 0.5},
        "p2d": {"flows": 3, "chunks": 11, "mb": 30.0, "held_s": 0.75},
    }
    assert report.invalid(found) == (
        "71.4 % of 7 flows moved without a permit (agent_lost 1, bound 1, no_agent 1, silent 2)"
    )
    # without an agent nothing is to be permitted
    assert "unscheduled" not in report.cell(READS, PROMISES)
    assert report.invalid(report.cell(READS, PROMISES)) == ""


@pytest.mark.parametrize(("unscheduled", "valid"), [(1, True), (2, False)])
def test_a_cell_with_more_than_one_in_a_hundred_flows_without_a_permit_is_invalid(
    unscheduled: int, valid: bool
) -> None:
    one = cell("mfs", 0.8, 200.0) | {"flows": 100, "unscheduled": {"silent": unscheduled}}
    assert (report.invalid(one) == "") == valid
    cells = [cell("unscheduled", 0.8, 1_000.0), one]
    found = report.rows(cells, BYTES_PER_S)
    text = report.table(found, report.aims(found))
    assert ("**invalid**: 2.0 % of 100 flows moved without a permit (silent 2)" in text) != valid
    # no aim is judged by it
    assert len(report.aims(found)) == (3 if valid else 0)
    # the other run of the policy does not hide it
    both = report.rows([one, cell("mfs", 0.8, 200.0) | {"flows": 900, "unscheduled": {}}], BYTES_PER_S)
    assert (both[0].invalid == "") == valid
    assert both[0].unscheduled == unscheduled / 1_000


@pytest.mark.parametrize(
    ("spans", "length_s"),
    [([], 0.0), ([(0, 2), (1, 3)], 3.0), ([(0, 9), (1, 3)], 9.0), ([(5, 6), (0, 1)], 2.0)],
)
def test_overlapping_times_count_once(spans: list[tuple[float, float]], length_s: float) -> None:
    assert report.covered_s(spans) == length_s


def cell(
    policy: str, load: float, tight_ms: float, in_time: int = 10, busy_s: float = 1.0, lends: bool = True
) -> dict[str, Any]:
    def kind(ms: float) -> dict[str, Any]:
        return {"requests": 10, "ttft_ms": [2 * ms] * 10, "transfer_ms": [ms] * 10, "read_mb": 20.0} | {
            "in_time": in_time,
            "prefill_ms": [100.0] * 9 + [200.0],
        }

    found = {
        "tight": kind(tight_ms),
        "loose": kind(2_000.0),
        "busy_s": busy_s,
        "spell_s": 2.0,
        "wire_mb": 50.0,
        "failures": {},
        "requests": 20,
    }
    return {"policy": policy, "lends": lends, "load": load, **found}


def test_aims_compare_the_rows_as_they_say() -> None:
    cells = [
        cell("unscheduled", 0.8, 1_000.0),
        cell("edf", 0.8, 250.0),
        cell("mfs", 0.8, 200.0, busy_s=1.01),
        cell("unscheduled", 1.1, 3_000.0, in_time=2),
        cell("edf", 1.1, 2_000.0, in_time=5),
        cell("mfs", 1.1, 1_000.0, in_time=7),
    ]
    found = report.aims(report.rows(cells, BYTES_PER_S))
    # 1,000 / 200; TTFT is twice that in both; 40 / 1.01 against 40 MB/s; 200 / 250; 14 of 20 against 10 of 20;
    # 40 MB of the 100 that the link carries in 2 s
    assert [round(aim.found, 3) for aim in found] == [5.0, 5.0, 0.99, 0.8, 20.0, 0.4]
    assert [aim.met for aim in found] == [True] * 5 + [False]
    # several links have no share
    assert len(report.aims(report.rows(cells, None))) == 5
    worse = [one | {"busy_s": 2.0} if one["policy"] == "mfs" else one for one in cells]
    assert [aim.met for aim in report.aims(report.rows(worse, BYTES_PER_S))][:5] == [
        True,
        True,
        False,
        True,
        True,
    ]


def test_rows_join_the_runs_of_a_policy_at_a_load() -> None:
    (row,) = report.rows(
        [cell("mfs", 0.8, 100.0, in_time=4), cell("mfs", 0.8, 300.0, in_time=8)], BYTES_PER_S
    )
    assert (row.runs, row.requests, row.attainment) == (2, 40, 0.6)
    # half of the values are 100, half 300
    assert (row.tight_transfer_p50, row.tight_transfer_p99, row.mb_per_s) == (200.0, 300.0, 40.0)
    # a tenth of the prefills take 200 ms; two runs of 40 MB in 2 s, where 100 MB could have been read
    assert (row.prefill_p50, row.prefill_p99, row.link_share) == (100.0, 200.0, 0.4)
    assert (row.unscheduled, row.invalid) == (None, "")


def test_rows_without_lent_prefixes_stand_apart_and_decide_on_no_aim() -> None:
    cells = [cell("unscheduled", 0.8, 1_000.0), cell("mfs", 0.8, 200.0), cell("mfs", 0.8, 500.0, lends=False)]
    found = report.rows(cells, BYTES_PER_S)
    assert [row.name for row in found] == ["unscheduled", "mfs", "mfs, stage 1 off"]
    # 1,000 / 200
    assert report.aims(found)[0].found == 5.0
    assert report.aims(report.rows(cells[1:], BYTES_PER_S)) == []


def test_a_row_without_an_answer_in_a_class_is_left_out_and_no_aim_is_judged() -> None:
    empty = cell("mfs", 0.8, 100.0)
    empty["loose"] |= {"ttft_ms": [], "transfer_ms": []}
    assert report.rows([empty], BYTES_PER_S) == []
    assert report.aims([]) == []


def test_table_and_plot_show_every_policy(tmp_path: Path) -> None:
    cells = [cell("unscheduled", 0.8, 1_000.0), cell("mfs", 0.8, 200.0)]
    found = report.rows(cells, BYTES_PER_S)
    text = report.table(found, report.aims(found))
    assert "| 80 % | mfs | 200, 200 |" in text
    assert "| tight P99 of transfers, unscheduled / mfs | at least 4 | 5.00 | yes |" in text
    assert (tmp_path / report.plot(cells, tmp_path, "link")).stat().st_size > 1_000


@pytest.mark.parametrize("file", ["mfs/link.json", "mfs/sim.json"])
def test_the_document_shows_the_rows_and_says_which_are_invalid(file: str) -> None:
    spoilt = cell("edf", 0.8, 250.0) | {"flows": 10, "unscheduled": {"silent": 1}}
    cells = [cell("mfs", 0.8, 200.0) | {"flows": 100, "unscheduled": {}}, spoilt]
    cells.append(cell("mfs", 0.8, 500.0, lends=False))
    found = report.rows(cells, BYTES_PER_S)
    whole = {
        "rows": [asdict(row) for row in found],
        "aims": [asdict(aim) for aim in report.aims(found)],
    }
    rows = {row.name: row for row in OTHERS[file].read(json.loads(json.dumps(whole)))}
    assert rows["mfs, 80 % of the link: tight transfers, P99"].ours == 200.0
    assert rows["mfs, stage 1 off, 80 % of the link: tight transfers, P99"].ours == 500.0
    assert rows["mfs, 80 % of the link: flows without permits"].ours == 0.0
    assert rows["edf, 80 % of the link: flows without permits"].ours == 10.0
    assert [rows[f"{name}, 80 % of the link: requests in time"].note for name in ("mfs", "edf")] == [
        "",
        "invalid",
    ]
