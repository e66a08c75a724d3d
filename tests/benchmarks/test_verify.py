"""A sample of stored runs that is computed again."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import __main__ as program
from benchmarks import results_io, runner
from benchmarks.experiments import registry
from benchmarks.experiments.base import Results
from benchmarks.verify import sample
from tests.benchmarks import toy_experiment

TOY = "tests.benchmarks.toy_experiment"
RUNS = 4


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(registry.EXPERIMENTS, "toy", TOY)
    return toy_experiment


@pytest.fixture
def stored(toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results file of which the code has changed since it was made."""
    assert program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    monkeypatch.setattr(runner, "code_paths", lambda *of: ["benchmarks/seeds.py"])
    monkeypatch.setattr("benchmarks.verify.code_paths", lambda *of: ["benchmarks/seeds.py"])
    return tmp_path / "toy.json"


def verified(stored: Path, *options: str) -> int:
    return program.main(["verify", "toy", "--jobs", "1", "--results", str(stored.parent), *options])


def test_equal_runs_are_noted_and_all_else_stays(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads(stored.read_text())
    assert verified(stored) == 0
    whole = json.loads(stored.read_text())
    noted = whole.pop("verified")
    assert whole == before
    # Each of the two variants is a combination of its own.
    assert (noted["runs"], noted["different"], noted["of"]) == (2, 0, RUNS)
    assert "toy: all 2 equal (of 4) with " in capsys.readouterr().out
    assert verified(stored) == 0
    assert "all 2 equal (of 4)" in capsys.readouterr().out
    assert json.loads(stored.read_text())["verified"] == noted


def test_a_run_that_differs_is_named_with_both_values(
    stored: Path, toy: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_one = toy.run_one

    def changed(config: dict, seed: int) -> dict:
        found = run_one(config, seed)
        return {**found, "wait": found["wait"] * (1.0 + 1e-5)} if config["rho"] == 0.5 else found

    monkeypatch.setattr(toy, "run_one", changed)
    assert verified(stored, "--share", "1") == 1
    printed = capsys.readouterr().out
    assert "toy: 2 of 4 differ (of 4) with " in printed
    assert len(re.findall(r"rho 0\.5, seed [01]: wait is [\d.]+, was [\d.]+", printed)) == 2
    assert results_io.load(stored).verified.different == 2


def test_the_last_digits_of_another_processor_are_no_difference(
    stored: Path, toy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_one = toy.run_one
    monkeypatch.setattr(
        toy, "run_one", lambda config, seed: {"wait": run_one(config, seed)["wait"] * (1.0 + 1e-10)}
    )
    assert verified(stored, "--share", "1") == 0


@pytest.mark.parametrize(("timed", "status"), [("wait", 0), ("other", 1)])
def test_cpu_times_are_not_compared_and_all_else_is(
    stored: Path, toy: ModuleType, monkeypatch: pytest.MonkeyPatch, timed: str, status: int
) -> None:
    run_one = toy.run_one
    monkeypatch.setattr(toy, "run_one", lambda config, seed: {"wait": run_one(config, seed)["wait"] * 2.0})
    monkeypatch.setattr(toy, "CPU_TIMES", frozenset({timed}), raising=False)
    assert verified(stored) == status


def test_a_measure_that_only_one_of_both_has_is_a_difference(
    stored: Path, toy: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toy, "run_one", lambda config, seed: {"other": 1.0})
    assert verified(stored) == 1
    assert "wait is missing, was " in capsys.readouterr().out


def test_a_variant_that_the_code_lacks_differs(
    stored: Path, toy: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [first, _] = toy.variants(True)
    monkeypatch.setattr(toy, "variants", lambda quick: [first])
    assert verified(stored) == 1
    assert "the code has no such variant any more" in capsys.readouterr().out


def test_results_of_the_present_code_and_missing_ones_need_nothing(
    toy: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verified(tmp_path / "toy.json") == 0
    assert "toy: has no results" in capsys.readouterr().out
    program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path)])
    assert verified(tmp_path / "toy.json") == 0
    assert "toy: was made by the present code" in capsys.readouterr().out
    assert "verified" not in json.loads((tmp_path / "toy.json").read_text())


@pytest.mark.parametrize("share", ["0", "-1", "1.5", "nan"])
def test_a_share_is_a_part(stored: Path, share: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(stored, "--share", share) == 2
    assert "above 0 and at most 1" in capsys.readouterr().err


def results(variants: int, seeds: int, combinations: int) -> Results:
    names = [f"v{i}" for i in range(variants)]
    return Results(
        "many",
        False,
        {name: {"i": i} for i, name in enumerate(names)},
        {name: {seed: {} for seed in range(seeds)} for name in names},
        resolved={name: {"decode": i % combinations} for i, name in enumerate(names)},
    )


def test_a_sample_has_every_combination_and_the_share_and_depends_on_the_code_alone() -> None:
    many = results(40, 10, 7)
    drawn = sample(many, "v2:aa", share=0.05)
    assert len(drawn) == len(set(drawn)) == 20
    assert {int(name[1:]) % 7 for name, _ in drawn} == set(range(7))
    assert drawn == sample(many, "v2:aa", share=0.05) != sample(many, "v2:bb", share=0.05)
    assert len(sample(many, "v2:aa", share=0.0001)) == 7
    assert len(sample(many, "v2:aa", share=1.0)) == 400
    # Where no policy is known, each config is a combination of its own.
    assert len({name for name, _ in sample(replace(many, resolved={}), "v2:aa", 0.001)}) == 40
