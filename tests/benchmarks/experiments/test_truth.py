"""The judgement of the simulator by load and policy, by hand; the live half at its short size is marked live."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.experiments import truth
from benchmarks.experiments.agreement import Times
from benchmarks.experiments.truth import Plan, capacity_per_s, figures, jackknife, judged, plan, rows
from benchmarks.experiments.twin import sim_setup, simulated_outcomes
from benchmarks.live import kept
from benchmarks.sim.config import ControlPlane

PAIR = ("join_shortest_queue", "join_shortest_queue")


def block(live: list, *runs: list, seconds: float = 10.0) -> dict:
    return {"seconds": seconds, "live": live, "simulated": list(runs)}


def cell(*blocks: dict) -> dict:
    return {"policies": list(PAIR), "load": 0.9, "blocks": list(blocks)}


def test_the_fleet_carries_what_its_slower_tier_carries() -> None:
    # decode: a step with 4 of 288 + 48 tokens is 20 + 4 + 2.688 ms; 16 slots / (96 tokens * 26.688 ms) = 6.245 /s
    setup = sim_setup((PAIR,), 0.0)
    assert capacity_per_s(setup, setup.profile) == pytest.approx(16 / (96 * 0.026688))


def test_all_loads_have_enough_requests_for_a_p99_and_overload_has_more() -> None:
    made, setup = plan("sim", quick=False), sim_setup((PAIR,), 0.0)
    assert made.loads == (0.3, 0.6, 0.9, 1.1, 1.5) and len(made.policies) == 3
    assert made.blocks * made.requests >= truth.LEAST_FOR_P99
    for load, count in ((0.3, 300), (1.5, 450)):
        work = made.work(setup, 6.0 * load, load, 1)
        late = [one for one in work if one.at_s >= made.warm_s]
        assert len(late) == pytest.approx(count, abs=6 * count**0.5)
        assert all((one.ttft_slo_s, one.tpot_slo_s) == (1.5, 0.05) for one in work)


def test_overload_is_refused_in_the_simulator_as_admission_is_shipped() -> None:
    setup = sim_setup((PAIR,), 0.0)
    made = Plan((PAIR,), (3.0,), 1, 30, 1.0, 1.5, 0.05, 1)
    work = made.work(setup, 3.0 * capacity_per_s(setup, setup.profile), 3.0, 1)
    found = simulated_outcomes(setup.simulated(setup.profile, ControlPlane(), PAIR, 0), work)
    assert len(found) == len(work) and 0 < found.count(None) < len(work)


def test_the_warm_up_is_not_judged_and_outcomes_are_kept_as_they_were() -> None:
    work = plan("sim", quick=True).work(sim_setup((PAIR,), 0.0), 4.0, 0.6, 1)
    outcomes = [None if i % 2 else Times(0.1, 0.02, 1.0) for i in range(len(work))]
    late = judged(work, outcomes, 1.0)
    assert len(late) == sum(one.at_s >= 1.0 for one in work) < len(work)
    stored = json.loads(json.dumps(truth.as_json(outcomes)))
    assert truth.outcomes_of(stored) == outcomes


def test_errors_are_over_all_blocks_and_refused_requests_count_for_goodput_only() -> None:
    fast, slow = [0.2, 0.02, 1.0], [2.0, 0.02, 3.0]
    found = {
        one.name: one
        for one in figures(
            cell(block([fast, fast, None], [fast, slow, None]), block([fast, slow], [fast, fast])), 1.5, 0.05
        )
    }
    # live: 3 of 5 requests within 1.5 s in 20 s; simulated: the same
    assert found["goodput"].live == pytest.approx(3 / 20) and found["goodput"].error_percent == 0
    # without block 0 the error is 2 / 1 - 1 = 100 %, without block 1 it is 1 / 2 - 1 = -50 %: pseudo-values -100, 50;
    # their deviation is 150 / sqrt(2), and t(1) is 12.706
    assert found["goodput"].half_width == pytest.approx(12.7062 * 150 / 2**0.5 / 2**0.5, rel=1e-4)
    assert found["TTFT p50"].live == pytest.approx(200.0) and found["TTFT p50"].answered == 4
    assert found["TPOT p50"].error_percent == pytest.approx(0.0)


def test_one_block_has_no_interval() -> None:
    assert jackknife(lambda chosen: (1.0, 1.1), 1) is None
    assert jackknife(lambda chosen: (1.0, 1.1), 3) == pytest.approx(0.0)


@pytest.mark.parametrize(("answers", "judges"), [(999, False), (1000, True)])
def test_a_p99_of_few_answers_is_not_judged(answers: int, judges: bool) -> None:
    one = block([[0.1, 0.02, 1.0]] * answers, [[0.112, 0.02, 1.0]] * answers)
    whole = {"setup": {"kind": "sim"}, "plan": asdict(plan("sim", False)), "cells": [cell(one)]}
    found = {row.name.rpartition("load 0.9: ")[2]: row for row in rows(whole)}
    p99 = found["TTFT p99, simulated against live"]
    assert (p99.aim == "within 10 %") is judges and (p99.met is False) is judges
    assert found["TTFT p50, simulated against live"].met is False
    assert found["goodput, simulated against live"].met is True


def test_a_short_form_does_not_replace_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        truth.main(["--quick"])
    assert "--out" in capsys.readouterr().err


@pytest.mark.live
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_the_short_form_against_a_live_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    # how near they are on a busy machine is no test
    assert truth.main(["--quick", "--out", str(tmp_path)]) in (0, 1)
    whole = json.loads((tmp_path / "sim.json").read_text())
    assert [(tuple(one["policies"]), one["load"]) for one in whole["cells"]] == [
        (pair, load) for pair in truth.POLICIES for load in (0.6, 1.5)
    ]
    for one in whole["cells"]:
        for part in one["blocks"]:
            assert all(len(run) == len(part["live"]) for run in part["simulated"])
    assert list(rows(whole))
