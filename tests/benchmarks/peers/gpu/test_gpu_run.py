"""Rounds, time and report of the comparison on one GPU, from samples by hand."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.base import Row
from benchmarks.live.measure import MeasureError, Measurement
from benchmarks.live.servers import Command
from benchmarks.peers.gpu import __main__ as program
from benchmarks.peers.gpu.__main__ import Setup, deadlines, failures, gpus, ran, rounds_of, seed_of
from benchmarks.peers.gpu.report import markdown, rows
from benchmarks.peers.gpu.sides import CASES, ONE, PD, ROUTER, SLUICE_ONE, SLUICE_PD, VLLM

FIRST, *_, LAST = list(CASES)


def part(number: int, side: str, rate: float, ttft_ms: float) -> dict[str, Any]:
    """One side of one round, whose rows all have the same figures."""
    row = {
        "requests": 40,
        "requests_per_s": rate,
        "cpu_ms_per_token": 0.5,
        "cpu_ms": {"ingress": 0.5},
        "failures": {},
        "ttft_p50_ms": ttft_ms,
        "ttft_p99_ms": 2 * ttft_ms,
        "tpot_p50_ms": 8.0,
    }
    return {
        "round": number,
        "side": side,
        "started_s": 90.0,
        "rows": [{"row": name, **row} for name in CASES],
    }


def result() -> dict[str, Any]:
    """Two rounds of `one`, in which Sluice has 99 % of vLLM's requests/s, and one round of `pd`."""
    parts = [
        part(0, SLUICE_ONE, 9.9, 105.0),
        part(0, VLLM, 10.0, 100.0),
        part(1, VLLM, 20.0, 100.0),
        part(1, SLUICE_ONE, 19.8, 105.0),
        part(0, SLUICE_PD, 6.0, 50.0),
        part(0, ROUTER, 5.0, 60.0),
    ]
    return {
        "config": {"rounds": 4, "comparisons": [ONE, PD]},
        "machine": {
            "gpus": ["NVIDIA H200, 143771 MiB, 580.1"],
            "cores": 16,
            "cpu": "c",
            "commit": "abc",
            "commit_from": "told on the command line",
            "code": "v2:1",
        },
        "rounds": ran(parts),
        "ended_early": "",
        "parts": parts,
    }


def row_of(name: str) -> Row:
    [found] = [row for row in rows(result()) if row.name == name]
    return found


def test_ratios_are_compared_with_their_aims() -> None:
    rate = row_of(f"{FIRST}: requests/s, Sluice / vLLM's own server")
    assert (rate.ours, rate.aim, rate.met) == (pytest.approx(0.99), "at least 0.98", True)
    ttft = row_of(f"{LAST}: TTFT p50, Sluice / vLLM's own server")
    assert (ttft.ours, ttft.aim, ttft.met) == (pytest.approx(1.05), "at most 1.1", True)
    # one round of the other comparison gives no interval
    assert not any("vllm-router" in row.name for row in rows(result()))


def test_the_report_says_what_ran_and_what_texts_mean() -> None:
    text = markdown(result())
    assert "what it says means nothing" in text
    assert (
        "2 of 4 rounds ran.\n" in text and "1 of 4 rounds ran. Fewer than 2 rounds give no interval." in text
    )
    assert (
        "NVIDIA H200, 143771 MiB, 580.1; 16 cores of c. Commit abc (told on the command line), code v2:1."
        in text
    )
    assert f"| {FIRST} | vllm-router, two vLLM servers | 5 | 60 | 120 | 8 | 0.5 |" in text
    early = markdown({**result(), "ended_early": "vLLM's own server ended with 1:\nlog"})
    assert "**The run ended early.** vLLM's own server ended with 1:\n" in early


def test_finished_rounds_are_counted_by_comparison() -> None:
    assert ran(result()["parts"]) == {ONE: 2, PD: 1}


def test_failures_name_the_side_and_the_row() -> None:
    whole = result()
    whole["parts"][1]["rows"][0]["failures"] = {"status 500": 2}
    assert failures(whole) == {f"vLLM's own server, {FIRST}: status 500": 2}


def test_no_two_loads_have_the_seed_of_another_or_of_its_warm_up() -> None:
    seeds = [seed_of(7, number, row) for number in range(8) for row in range(len(CASES))]
    assert len({*seeds, *(seed + 1 for seed in seeds)}) == 2 * len(seeds)


def test_comparisons_divide_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([110.0, 250.0])
    monkeypatch.setattr(program.time, "monotonic", lambda: next(now))
    # begun at 100 with 480 s: 470 s are left at 110, half of them for the first; 330 s at 250, all for the second
    assert list(deadlines(100.0, 480.0, 2)) == [345.0, 580.0]


def test_no_round_starts_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row takes a second of a clock by hand, so a round of two sides takes eight."""
    clock, order = [0.0], []

    class Found:
        requests_per_s, ttft_ms = 1.0, None

    def with_python(server: str, *_: object) -> Found:
        clock[0] += 1.0
        order.append(server)
        return Found()

    class Named:
        def __init__(self, name: str) -> None:
            self.name, self.started_s = name, 0.0

    monkeypatch.setattr(program.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(program.measure, "with_python", lambda server, *rest: with_python(server.name, *rest))
    monkeypatch.setattr(program, "sample_of", lambda _found, row: {"row": row})
    said: list[str] = []
    servers: Any = {name: Named(name) for name in ("a", "b")}
    found = list(rounds_of(Setup(4, (ONE,), 480.0), ONE, servers, 15.0, said.append))
    assert [[one["side"] for one in parts] for parts in found] == [["a", "b"]] * 2
    assert order == ["a", "b"] * len(CASES) + ["b", "a"] * len(CASES)
    assert said[-1] == "one: the time is over after 2 of 4 rounds"


def test_a_machine_without_nvidia_smi_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus() == []


def test_a_program_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "vllm-router")
    assert program.main(["--only", PD, "--program", missing, "--out", str(tmp_path)]) == 1
    assert f"--program {missing}: there is no such file" in capsys.readouterr().err


class Up:
    """A server that is said to run."""

    def __init__(self, command: Command) -> None:
        self.command, self.started_s = command, 60.0

    def tail(self) -> str:
        return f"end of {self.command.name}"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Arguments of a run on servers that are not there; the last measurement but one of the second round fails."""
    counted, fails_at = [0], 2 * 2 * len(CASES) - 1

    @contextmanager
    def running_together(commands: Sequence[Command], _say: object) -> Iterator[list[Up]]:
        yield [Up(command) for command in commands]

    def with_python(server: Up, _model: str, plan: Any, _seed: int) -> Measurement:
        counted[0] += 1
        if counted[0] == fails_at:
            raise MeasureError("no request was served")
        return Measurement(
            server.command.name, "python", plan.path, plan.concurrency, plan.tokens, plan.requests, 1.0, 9.0, 9.0,
            {"p50": 9.0, "p99": 9.0}, {"p50": 5.0, "p99": 6.0}, {"p50": 1.0, "p99": 1.0}, {}, {"ingress": 0.1}, 0.0, {},
            0.0,
        )  # fmt: skip

    monkeypatch.setattr(program, "running_together", running_together)
    monkeypatch.setattr(program.measure, "first_answer", lambda *_: ({}, None))
    monkeypatch.setattr(program.measure, "with_python", with_python)
    monkeypatch.setattr(program, "SETTLE_S", 0.0)
    monkeypatch.setattr(program, "save", lambda file, whole, levels: bool(file.write_text(json.dumps(whole))))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tokenizer / name).write_text("{}")
    return ["--only", ONE, "--tokenizer", str(tokenizer), "--commit", "abc", "--out", str(tmp_path)]


def test_what_is_finished_is_kept_when_a_side_fails(
    served: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([*served, "--rounds", "4"]) == 1
    whole = json.loads((tmp_path / "gpu.json").read_text())
    assert whole["rounds"] == {ONE: 1} and len(whole["parts"]) == 2
    assert whole["ended_early"].startswith(
        "no request was served\nthe log of Sluice, vLLM colocated ends:\nend of"
    )
    assert "end of vLLM's own server" in capsys.readouterr().err
    assert "1 of 4 rounds ran. Fewer than 2" in (tmp_path / "gpu.md").read_text()


def test_a_run_within_its_budget(served: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "CASES", dict(list(CASES.items())[:1]))
    assert program.main([*served, "--quick"]) == 0
    whole = json.loads((tmp_path / "gpu.json").read_text())
    assert whole["rounds"] == {ONE: 2} and whole["ended_early"] == ""
    assert whole["config"]["engines"][ONE]["engine_args"]["load_format"] == "dummy"
    assert whole["command"] == "python -m benchmarks.peers.gpu --only one --commit abc --quick"
    # no time is left at the start
    assert program.main([*served, "--budget", "-1"]) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["rounds"] == {}
