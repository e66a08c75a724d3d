"""The run: the order of its parts, what is kept, the capacity of a closed loop, and the simulator beside."""

from pathlib import Path

import pytest

from benchmarks.live.kept import Parts
from benchmarks.live.machine import facts
from benchmarks.overload import __main__ as command
from benchmarks.overload.figures import figures
from benchmarks.overload.load import Times, works
from benchmarks.overload.measure import rate_per_s
from benchmarks.overload.sides import CAPACITY_PER_S, MIXES, SIMULATOR
from benchmarks.overload.simulated import simulated

SHORT = Times(ramp_s=2.0, window_s=4.0, after_s=1.0, patience_s=2.0)


def silent(_text: str) -> None:
    """Progress that nobody reads."""


def test_every_side_has_every_load_and_none_is_always_the_first() -> None:
    setup = command.Setup("sim", (1.0, 2.0, 5.0), ("a", "b", "c"), SHORT, rounds=2)
    parts = list(command.turned(setup))
    assert len(set(parts)) == len(parts) == 2 * 3 * 3
    assert [(number, load) for number, load, _ in parts[::3]] == [
        (number, load) for number in range(2) for load in (1.0, 2.0, 5.0)
    ]
    assert {side for _, _, side in parts[::3]} == {"a", "b", "c"}


def test_a_rate_counts_what_ended_in_its_interval() -> None:
    # of 1, 2, 3 and 4 s, those from 2 s on and before 4 s: two in 2 s
    assert rate_per_s([4.0, 1.0, 3.0, 2.0], 2.0, 4.0) == 1.0


def test_the_simulator_serves_the_same_requests_and_refuses_what_is_too_much() -> None:
    load = works(MIXES["sim"], 5.0, CAPACITY_PER_S, SHORT.sending_s, 3)
    found = simulated(load, SHORT, 3)
    assert [one.work for one in found] == load
    ends = {one.end for one in found}
    assert {"whole", "refused"} <= ends <= {"whole", "refused", "cut"}
    for one in found:
        assert one.end != "whole" or (one.first_s is not None and one.work.at_s < one.first_s < one.ended_s)
        assert one.end != "refused" or one.reason in ("ttft_objective", "late", "queue_full")
    assert found == simulated(load, SHORT, 3)
    measured = figures(found, SHORT)
    # the slots end 400 tokens a second at most; the first answers of a window may have begun before it
    assert 0 < measured["goodput_tokens_per_s"] < 700


def test_a_finished_part_is_kept_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = command.Setup("sim", (0.8,), (SIMULATOR,), SHORT)
    kept = Parts("overload-sim", facts(command.MODULE, command.CODE), {}, tmp_path)
    first = command.Run(setup, command.Peers(), kept, silent).parts()
    monkeypatch.setattr(command, "simulated", None)
    assert command.Run(setup, command.Peers(), kept, silent).parts() == first
    assert (first[0]["side"], first[0]["load"], first[0]["round"]) == (SIMULATOR, 0.8, 0)


def test_a_side_of_another_setup_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--setup", "vllm", "--sides", "router"]) == 2
    assert "engine-unbounded" in capsys.readouterr().err


def test_the_command_writes_result_page_and_plot(tmp_path: Path) -> None:
    arguments = ["--sides", SIMULATOR, "--loads", "0.8", "2", "--seconds", "2", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sim.json", "sim.md", "sim.png"]
    assert "| 2 | Sluice, simulated |" in (tmp_path / "sim.md").read_text()
