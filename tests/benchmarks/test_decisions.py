"""The decision benchmark runs, and its cases are what they claim to be."""

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks.decisions import dispatching, measure, ticks
from benchmarks.decisions.__main__ import main
from benchmarks.decisions.inputs import BETA_MAX, round_input
from benchmarks.decisions.measure import Timing, timed
from benchmarks.document import OTHERS
from policies.routing.balance.balance_route_0 import BalanceRoute0


@pytest.mark.parametrize("workers", [8, 64, 144])
def test_a_tick_has_at_least_8_free_slots_on_at_least_8_workers_and_only_those_are_feasible(
    workers: int,
) -> None:
    given = round_input(workers, 16, random.Random(0))
    open_workers = [w for w in given.snapshot.workers.values() if w.id.startswith("d") and w.free_slots]
    assert len(open_workers) >= 8
    assert all(w.free_slots >= 8 and w.slots == BETA_MAX for w in open_workers)
    assert {w.id for w in given.feasible[0][1]} == {w.id for w in open_workers}


def test_every_call_is_made_once_and_divided_by_what_it_does() -> None:
    made: list[int] = []
    row = timed("x", ((lambda i=i: made.append(i)) for i in range(7)), per_call=10)  # type: ignore[misc]
    assert made == list(range(7))
    assert row.n == 7
    assert 0 <= row.p50_us <= row.p99_us
    assert 0 <= row.cpu_p50_us <= row.cpu_p99_us


def test_a_row_ends_in_time_but_not_before_some_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROW_S", 0.0)
    assert timed("x", ((lambda: None) for _ in range(1000))).n == measure.LEAST


def test_growth_shows_every_size_once() -> None:
    policy = BalanceRoute0()
    sizes = [(g, p) for g in ticks.WORKERS for p in ticks.POOLS]
    rows = [
        Timing(ticks.tick_name(policy, g, p), 1, 0.0, 0.0, 1000.0 * i, 0.0) for i, (g, p) in enumerate(sizes)
    ]
    shown = [cell for line in ticks.growth(policy, rows)[1:] for cell in line.split()[3:]]
    assert shown == [f"{i:.2f}" for i in range(len(sizes))]


def test_it_prints_every_row_and_writes_them_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "decisions.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks.decisions", "--quick", "--calls", "2", "--out", str(out)])
    main()
    rows = json.loads(out.read_text())["rows"]
    printed = capsys.readouterr().out
    assert all(row["name"] in printed for row in rows)
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    assert {f"balance_route_{rule}, G = 64, pool 256, W {w}" for rule in "0h" for w in (8, 12)} <= set(names)
    for name in (
        "netkv, 256",
        "request, 16 engines",
        "balance_route_0, G = 64, pool 256",
        "balance_route_h",
        "composition",
        "event",
        "prefix",
        "journal",
    ):
        assert any(row["name"].startswith(name) for row in rows)


def test_a_fleet_has_load_for_its_decode_engines_and_its_requests_are_timed_in_turns() -> None:
    """Two engines are one of each role; 16 have four for prefill and twelve for decode."""
    few, many = (dispatching.Loop("round_robin", "round_robin", 0, engines) for engines in (2, 16))
    assert (few.live, many.live) == (27, 12 * 27)
    assert many.names[3:5] == ["p003", "d000"]
    wall_us, cpu_us = few.until(30)
    assert few.closed >= 30 and wall_us > 0 and cpu_us > 0
    assert few.dispatcher.state.in_flight <= 27


@pytest.mark.parametrize(("cpu_us", "dearer", "met"), [(109.0, 9.0, True), (127.0, 27.0, False)])
def test_a_request_of_many_engines_is_judged_against_one_of_two(
    cpu_us: float, dearer: float, met: bool
) -> None:
    pair = dispatching.FLEET_PAIRS[0]
    rows = [
        {
            "name": dispatching.fleet_name(*pair, engines),
            "p50_us": 1.0,
            "p99_us": 2.0,
            "cpu_p50_us": us,
            "note": "",
        }
        for engines, us in ((2, 100.0), (64, cpu_us))
    ]
    (judged,) = [row for row in OTHERS["decisions/decisions.json"].read({"rows": rows}) if row.aim]
    assert judged.ours == pytest.approx(dearer)
    assert judged.met is met
