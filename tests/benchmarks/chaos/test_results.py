"""The results of runs: gaps are blamed on the fault that began within them, runs add up, a bad run is known as bad."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.clients import Gap
from benchmarks.chaos.harm import Harm
from benchmarks.chaos.processes import Sample, Track, slope_per_hour
from benchmarks.chaos.report import lines_of
from benchmarks.chaos.results import (
    CODE,
    LONG_MINUTES,
    MODULE,
    WARM_S,
    Kept,
    blame,
    is_bad,
    process_facts,
)
from benchmarks.chaos.run import TWO_FAULTS
from benchmarks.chaos.schedule import Fault, Kind
from benchmarks.chaos.totals import MOST_FROZEN, added_up, frozen_share
from benchmarks.checkout import code_digest, depends_on
from benchmarks.live.machine import command


def harm(at_s: float, whole_s: float | None) -> Harm:
    return Harm(Fault(Kind("kill", "decode"), 0.0, 0), "d", at_s, at_s, whole_s=whole_s)


@pytest.mark.parametrize(
    ("start_s", "end_s", "blamed"),
    [
        # begins with the first fault, or contains the second
        (10.0, 13.0, 0),
        (10.3, 13.0, 0),
        (25.0, 31.0, 1),
        # contains both: the first one
        (9.0, 31.0, 0),
        # begins while the first one is not whole (10 + 5), and later: nobody's
        (14.0, 16.0, 0),
        (20.0, 22.0, -1),
        # the second one was never whole
        (500.0, 501.0, 1),
        (1.0, 2.0, -1),
    ],
)
def test_a_gap_is_blamed_on_a_fault(start_s: float, end_s: float, blamed: int) -> None:
    harms = [harm(10.0, 5.0), harm(30.0, None)]
    gap = Gap(start_s, end_s, end_s - start_s, "short", False)
    assert blame([gap], harms) == {blamed: [gap]}


def result(seed: int, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "engines": "sim", "machine": {}, "seed": seed, "minutes": 2.0, "commit": "abc",
        "code": code_digest(depends_on(MODULE, CODE)),
        "requests": 10, "right": 9, "near_ties": 0, "unended": 0, "failed": {}, "wrong": {},
        "apart": {"kill ingress: cut": 1}, "notes": {}, "frozen_s": 1.2, "increases": {"sluice_retries_total": 3},
        "forms": {"short": 10}, "leaks": {},
        "faults": [
            [1.0, "kill decode", "d", 0.0, 1.5, 3, 1.2, 8.0, False, 0.0],
            [9.0, "stop decode", "d", 20.0, 5.0, 9, 4.0, 24.5, True, 7.5],
        ],
    }  # fmt: skip
    return found | more


def test_runs_add_up_and_are_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "sim.json")
    kept.add(result(1, timeline={"at_s": [1.0]}))
    kept.add(result(2, failed={"hang": 2}, timeline={"at_s": [1.0]}))
    again = Kept(tmp_path / "sim.json")
    assert again.runs == kept.runs
    assert ["timeline" in run for run in again.runs] == [False, True]
    assert (again.has(1, 2.0), again.has(3, 2.0), again.has(1, 60.0)) == (True, False, False)
    total = added_up(again.runs)
    assert (total["runs"], total["requests"], total["faults"]) == (2, 20, 4)
    assert total["failed"] == {"hang": 2}
    assert total["counters"] == {"sluice_retries_total": 6}
    # a run that counted the counters otherwise has none
    other = {key: value for key, value in again.runs[0].items() if key != "increases"}
    assert added_up([other, again.runs[1]])["counters"] is None
    assert not any("retries" in line for line in lines_of(added_up([other])))
    stopped = total["kinds"]["stop decode"]
    assert (stopped["number"], stopped["stall_longest_s"], stopped["not_waited_for"]) == (2, 5.0, 2)
    assert stopped["late_longest_s"] == 7.5
    # 24.5 s after the beginning of a stop of 20 s
    assert stopped["whole_longest_s"] == 4.5


def test_only_a_fault_that_was_alone_is_compared_with_the_aim() -> None:
    faults = [
        # whole after 8 s
        [1.0, "kill decode", "d", 0.0, 2.5, 3, 1.2, 8.0, False, 0.0],
        # another one begins during its stall of 7 s
        [20.0, "stop decode", "d", 20.0, 7.0, 9, 4.0, 24.5, True, 0.0],
        # begins while that one is stopped
        [26.0, "kill decode", "e", 0.0, 9.0, 9, 4.0, 1.0, True, 0.0],
        # never whole again, so no later fault is alone
        [60.0, "stop decode", "e", 5.0, 4.0, 9, 4.0, None, True, 0.0],
        [500.0, "kill decode", "e", 0.0, 1.0, 9, 4.0, 1.0, True, 0.0],
    ]
    kinds = added_up([result(1, faults=faults)])["kinds"]
    shown = ("number", "alone", "stall_alone_longest_s", "aim_s", "alone_beyond_aim")
    assert [kinds["kill decode"][name] for name in shown] == [3, 1, 2.5, 2.0, 1]
    assert [kinds["stop decode"][name] for name in shown] == [2, 1, 4.0, 6.0, 0]


def test_a_run_whose_clients_hardly_ran_is_not_compared_with_the_aims() -> None:
    """Of 2 minutes 6 s are 5 %."""
    faults = [[1.0, "kill decode", "d", 0.0, 2.5, 3, 1.2, 8.0, False, 0.0]]
    slow, well = result(2, faults=faults, frozen_s=6.1), result(1, faults=faults, frozen_s=6.0)
    assert (frozen_share(well), frozen_share(slow) > MOST_FROZEN) == (MOST_FROZEN, True)
    kind = added_up([slow, well])["kinds"]["kill decode"]
    assert (kind["number"], kind["alone"], kind["alone_beyond_aim"]) == (2, 1, 1)
    lines = lines_of(added_up([slow, well]))
    assert any("5.1 % of a run" in line for line in lines)
    assert any("NOT COUNTED" in line and line.endswith("seeds 2") for line in lines)
    assert not any("NOT COUNTED" in line for line in lines_of(added_up([well])))
    assert frozen_share(result(1, frozen_share=0.25)) == 0.25


def test_what_a_fault_did_is_told_where_it_is_not_certain() -> None:
    row = [1.0, "memory decode", "d", 0.0, 2.5, 3, 1.2, 8.0, False, 0.0]
    faults = [row, [*row, "died"], [*row, "died"], [*row, "got no memory"]]
    assert "  outcome: memory decode: died 2, got no memory 1" in lines_of(
        added_up([result(1, faults=faults)])
    )


@pytest.mark.parametrize(
    "more", [{"failed": {"hang": 1}}, {"wrong": {"short": 1}}, {"leaks": {"leases": 1}}, {"unended": 1}]
)
def test_a_bad_run_is_known(more: dict[str, Any]) -> None:
    assert is_bad(result(1, **more))
    assert not is_bad(result(1))


def test_a_run_in_which_no_loan_was_of_use_is_bad_and_loans_add_up() -> None:
    loans = {"begun": 5, "used": 3, "recomputed": 1, "failed": 1, "dropped": 0}
    idle = {"begun": 2, "used": 0, "recomputed": 1, "failed": 1, "dropped": 0}
    assert not is_bad(result(1, loans=loans))
    assert is_bad(result(1, loans=idle))
    total = added_up([result(1), result(2, loans=loans), result(3, loans=idle)])
    assert total["loans"] == {"begun": 7, "used": 3, "recomputed": 2, "failed": 2, "dropped": 0}
    assert "loans of prefixes 7: used 3, recomputed 2, failed 2, dropped 0" in lines_of(total)
    assert added_up([result(1)])["loans"] is None
    assert not any("loans" in line for line in lines_of(added_up([result(1)])))


def test_the_slope_of_a_line_is_exact() -> None:
    assert slope_per_hour([(0.0, 100.0), (60.0, 101.0), (120.0, 102.0)]) == pytest.approx(60.0)
    assert slope_per_hour([(0.0, 100.0), (60.0, 101.0)]) is None


def test_the_command_that_results_keep_names_no_folder_of_the_machine() -> None:
    words = [
        "--seeds",
        "1",
        "2",
        "--out",
        "/somewhere",
        "--bare",
        "--logs=/elsewhere",
        "--only",
        "kill decode",
    ]
    assert (
        command("benchmarks.chaos.__main__", words)
        == "python -m benchmarks.chaos --seeds 1 2 --bare --only 'kill decode'"
    )
    assert command("benchmarks.chaos", []) == "python -m benchmarks.chaos"


def test_the_memory_of_a_process_that_lives_long_is_kept_by_the_minute() -> None:
    def lived(minutes: int) -> Track:
        samples = [Sample(100.0 + 30.0 * n, (50 + n) * 2**20, 9) for n in range(2 * minutes)]
        return Track("router", samples)

    short, long = process_facts(lived(LONG_MINUTES)), process_facts(lived(LONG_MINUTES + 2))
    assert "rss_mib_by_minute" not in short
    # the last sample of each minute
    assert long["rss_mib_by_minute"] == [51 + 2 * n for n in range(LONG_MINUTES + 2)]
    assert long["rss_mib_per_h"] == 120.0


def test_a_slope_leaves_out_the_minutes_in_which_caches_fill_up() -> None:
    full_at = int(WARM_S / 30.0)
    samples = [Sample(30.0 * n, (50 + min(n, full_at)) * 2**20, 9) for n in range(3 * full_at)]
    assert process_facts(Track("router", samples))["rss_mib_per_h"] == 0.0


@pytest.mark.parametrize(
    ("requests", "met_two", "bad"), [(50, 1, False), (50, 2, True), (3_000, 3, False), (3_000, 4, True)]
)
def test_more_requests_that_met_two_faults_than_chance_explains_make_a_run_bad(
    requests: int, met_two: int, bad: bool
) -> None:
    apart = {
        f"{TWO_FAULTS}: 500 request_kills_engines": met_two,
        "bystander of poison: request_kills_engines": 9,
    }
    assert is_bad(result(1, requests=requests, apart=apart)) is bad
